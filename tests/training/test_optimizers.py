"""Every optimizer and schedule against Mesh TensorFlow's own, number by number."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from t0repro.config.optimizer import (
    AdafactorConfig,
    AdamWeightDecayConfig,
    MomentumConfig,
    ScheduleConfig,
    SgdConfig,
)
from t0repro.parameters import naming
from t0repro.training import optimizers
from t0repro.training.formulas import Slots
from t0repro.training.optimizers import make_optimizer
from t0repro.training.schedules import make_schedule
from t0repro.training.train_state import TrainState, flat_slots, from_flat_tree, to_flat_tree

from ..helpers import tiny_models as tiny
from ..helpers.kept import COMPAT

SCRIPT = Path(__file__).with_name("run_mesh_optimizers.py")
STEPS = 4
SHAPES = {  # factored and square, factored and oblong, not factored, a vector
    "decoder/layers_0/self_attention/query/kernel": (128, 128),
    "decoder/layers_0/mlp/wi/kernel": (128, 160),
    "decoder/relpos_bias/rel_embedding": (4, 32),
    "decoder/layers_0/pre_mlp_layer_norm/scale": (128,),
}
NAMES = {path: naming.path_to_mtf(path) or "" for path in SHAPES}
NORM, KERNEL = list(SHAPES)[3], list(SHAPES)[0]
BASE = AdafactorConfig()


@dataclasses.dataclass(frozen=True)
class Case:
    """The same optimizer in both stacks."""

    name: str
    config: object
    cls: str = "AdafactorOptimizer"
    bindings: str = ""
    start_step: int = 10
    learning_rate: float | None = 0.02


def adafactor(name: str, bindings: str, start_step: int = 10, **changes) -> Case:
    config = dataclasses.replace(BASE, **changes)
    return Case(f"Adafactor, {name}", config, bindings=bindings, start_step=start_step)


CASES = [
    adafactor("as it comes", "", 1_100_000),
    adafactor("momentum", "AdafactorOptimizer.beta1 = 0.9", beta1=0.9),
    adafactor("not factored", "AdafactorOptimizer.factored = False", factored=False),
    adafactor(
        "factored from 4 on", "AdafactorOptimizer.min_dim_size_to_factor = 4",
        min_dim_size_to_factor=4,
    ),
    adafactor(
        "unscaled, not clipped",
        "AdafactorOptimizer.multiply_by_parameter_scale = False\n"
        "AdafactorOptimizer.clipping_threshold = None",
        multiply_by_parameter_scale=False, clipping_threshold=None,
    ),
    adafactor(
        "epsilons and a threshold",
        "AdafactorOptimizer.epsilon1 = 1e-5\nAdafactorOptimizer.epsilon2 = 0.5\n"
        "AdafactorOptimizer.clipping_threshold = 0.3",
        epsilon1=1e-5, epsilon2=0.5, clipping_threshold=0.3,
    ),
    adafactor(
        "exponent and offset",
        "adafactor_decay_rate_pow.exponent = 0.6\nadafactor_decay_rate_pow.offset = 100",
        start_step=100, decay_exponent=0.6, decay_offset=100,
    ),
    adafactor("a decay of its own", "AdafactorOptimizer.decay_rate = 0.999", decay_rate=0.999),
    adafactor(
        "some parameters unscaled",
        "AdafactorOptimizer.exclude_from_parameter_scale = ['rms_norm']",
        exclude_from_parameter_scale=(NORM,),
    ),
    Case(
        "Adam",
        AdamWeightDecayConfig(0.0, 0.9, 0.999, 1e-6),
        "AdamWeightDecayOptimizer",
    ),
    Case(
        "Adam with weight decay and exceptions",
        AdamWeightDecayConfig(0.1, 0.8, 0.95, 1e-4, exclude_from_weight_decay=(NORM,)),
        "AdamWeightDecayOptimizer",
        "AdamWeightDecayOptimizer.weight_decay_rate = 0.1\n"
        "AdamWeightDecayOptimizer.beta_1 = 0.8\nAdamWeightDecayOptimizer.beta_2 = 0.95\n"
        "AdamWeightDecayOptimizer.epsilon = 1e-4\n"
        "AdamWeightDecayOptimizer.exclude_from_weight_decay = ['norm/sc.le$']",
    ),
    Case("SGD", SgdConfig(), "SgdOptimizer"),
    Case("momentum", MomentumConfig(0.9), "MomentumOptimizer", "MomentumOptimizer.momentum = 0.9"),
]  # fmt: skip

SCHEDULE_STEPS = [0, 1, 99, 100, 101, 500, 950, 999, 1_100_001]
_RUN = "mesh_tensorflow.transformer.utils.run.learning_rate_schedule"
SCHEDULES = {
    "constant_learning_rate": {"learning_rate": 0.25},
    "constant": {"value": 0.5},
    "truncated_rsqrt": {"warmup_steps": 100},
    "linear_warmup": {"steps_or_fraction": 0.1},
    "linear_decay": {"steps_or_fraction": 300},
    "linear_decay_learning_rate": {"initial_lr": 0.1, "offset": 500},
    "learning_rate_schedule_noam": {
        "warmup_steps": 10, "linear_decay_fraction": 0.1, "multiplier": 2.0, "offset": 100,
    },
    "slanted_triangular": {
        "cut_fraction": 0.2, "ratio": 16, "max_learning_rate": 0.05, "start_step": 50,
    },
}  # fmt: skip
FACTORS = f"""
{_RUN} = [0.5, @learning_rate_schedules.truncated_rsqrt, @learning_rate_schedules.linear_decay]
truncated_rsqrt.warmup_steps = 100
linear_decay.steps_or_fraction = 0.9
"""
PRODUCT = f"""
{_RUN} = @learning_rate_schedules.product_learning_rate
learning_rate_schedules.product_learning_rate.factors = [
    @learning_rate_schedules.linear_warmup, 0.25]
learning_rate_schedules.product_learning_rate.offset = 50
linear_warmup.steps_or_fraction = 200
"""
PRODUCTS = {
    "a list of factors": (
        FACTORS,
        {
            "factors": (
                0.5,
                {"name": "truncated_rsqrt", "arguments": {"warmup_steps": 100}},
                {"name": "linear_decay", "arguments": {"steps_or_fraction": 0.9}},
            ),
            "offset": 0,
        },
    ),
    "a product with an offset": (
        PRODUCT,
        {
            "factors": ({"name": "linear_warmup", "arguments": {"steps_or_fraction": 200}}, 0.25),
            "offset": 50,
        },
    ),
}


def arrays() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    result = {}
    for path, shape in SHAPES.items():
        result[f"parameters/{path}"] = generator.normal(size=shape).astype(np.float32)
        for step in range(STEPS):
            scale = 10.0 ** generator.integers(-3, 2)
            gradient = (generator.normal(size=shape) * scale).astype(np.float32)
            result[f"{step}/{path}"] = gradient
    return result


@pytest.fixture(scope="module")
def mesh(once):
    """What Mesh TensorFlow computes for all cases, in one process."""
    folder = once("mesh_optimizers", run_mesh, Path(__file__), SCRIPT, COMPAT)
    with np.load(folder / "out.npz") as results:
        return dict(results)


def run_mesh(folder):
    renamed = {}
    for key, x in arrays().items():
        prefix, _, path = key.partition("/")
        renamed[f"{prefix}/{NAMES[path]}"] = x
    np.savez(folder / "in.npz", **renamed)
    optimizers = {
        case.name: {
            "cls": case.cls,
            "bindings": f"import mesh_tensorflow.optimize\n{case.bindings}",
            "learning_rate": case.learning_rate,
            "start_step": case.start_step,
        }
        for case in CASES
    }
    texts = {name: text for name, (text, _) in PRODUCTS.items()}
    for name, arguments in SCHEDULES.items():
        lines = [f"{_RUN} = @learning_rate_schedules.{name}"]
        lines += [f"learning_rate_schedules.{name}.{key} = {x}" for key, x in arguments.items()]
        texts[name] = "\n".join(lines)
    schedules = {
        name: {"binding": text, "total": 1000, "steps": SCHEDULE_STEPS}
        for name, text in texts.items()
    }
    job = {
        "in": str(folder / "in.npz"),
        "out": str(folder / "out.npz"),
        "optimizers": optimizers,
        "schedules": schedules,
    }
    done = subprocess.run(
        [sys.executable, str(SCRIPT), json.dumps(job)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]


def unflatten(tree):
    return flax.traverse_util.unflatten_dict(tree, sep="/")


def ours(case):
    """Parameters and slots after each step, by Mesh TensorFlow's names."""
    inputs, config = arrays(), case.config
    parameters = unflatten({path: jnp.asarray(inputs[f"parameters/{path}"]) for path in SHAPES})
    optimizer = make_optimizer(config)
    slots = optimizer.init(parameters)
    schedule = make_schedule(ScheduleConfig("constant", {"value": case.learning_rate}, 100))
    results = {}

    @jax.jit
    def update(parameters, slots, gradients, step):
        rate = schedule(step)
        updates, slots = optimizer.update(
            gradients, slots, parameters, step=step, learning_rate=rate
        )
        return optax.apply_updates(parameters, updates), slots

    for step in range(STEPS):
        gradients = unflatten({path: jnp.asarray(inputs[f"{step}/{path}"]) for path in SHAPES})
        count = jnp.int32(case.start_step + step)
        parameters, slots = update(parameters, slots, gradients, count)
        for path, x in flax.traverse_util.flatten_dict(parameters, sep="/").items():
            results[f"{step}/{NAMES[path]}"] = np.asarray(x)
        for path, slot in flat_slots(slots).items():
            for name in naming.SLOT_NAMES:
                if (x := getattr(slot, name)) is not None:
                    theirs = naming.slot_to_mtf(name, SHAPES[path])
                    results[f"{step}/{naming.join_mtf_slot(NAMES[path], theirs)}"] = np.asarray(x)
    return results


@pytest.mark.mtf
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_parameters_and_slots_of_every_step_agree_with_mesh_tensorflow(mesh, case):
    expected = {
        key.removeprefix(f"{case.name}/"): x
        for key, x in mesh.items()
        if key.startswith(f"{case.name}/")
    }
    results = ours(case)
    assert sorted(results) == sorted(expected)
    assert len(results) >= STEPS * len(SHAPES)
    for name, x in expected.items():
        if case.cls == "MomentumOptimizer" and not name.endswith(naming.MOMENTUM_SLOTS):
            continue  # the test below has it
        rms = np.sqrt(np.mean(np.square(x, dtype=np.float64)))
        difference = results[name].astype(np.float64) - x
        assert np.sqrt(np.mean(np.square(difference))) <= 2e-6 * rms, name


@pytest.mark.mtf
def test_momentum_moves_by_either_velocity_in_mesh_tensorflow_and_by_the_former_in_ours(mesh):
    """Mesh TensorFlow reads the velocity while it assigns it: on a CPU, chance decides which."""
    case = next(case for case in CASES if case.cls == "MomentumOptimizer")
    results, inputs = ours(case), arrays()
    for path, name in NAMES.items():
        theirs, before = inputs[f"parameters/{path}"], np.zeros(SHAPES[path], np.float32)
        mine = theirs
        for step in range(STEPS):
            after = mesh[f"{case.name}/{step}/{name}_momentum_v"]
            moved = theirs - mesh[f"{case.name}/{step}/{name}"]
            choices = [np.abs(moved - velocity).max() for velocity in (before, after)]
            assert min(choices) < 1e-6, (name, step)
            np.testing.assert_allclose(mine - results[f"{step}/{name}"], before, atol=1e-6)
            theirs, mine = mesh[f"{case.name}/{step}/{name}"], results[f"{step}/{name}"]
            before = after


@pytest.mark.mtf
@pytest.mark.parametrize("name", [*SCHEDULES, *PRODUCTS])
def test_learning_rates_agree_with_mesh_tensorflow(mesh, name):
    arguments = PRODUCTS[name][1] if name in PRODUCTS else SCHEDULES[name]
    function = "product_learning_rate" if name in PRODUCTS else name
    schedule = make_schedule(ScheduleConfig(function, arguments, 1000))
    rates = [float(schedule(jnp.int32(step))) for step in SCHEDULE_STEPS]
    np.testing.assert_allclose(rates, mesh[f"{name}/rates"], rtol=2e-6, atol=1e-12)


OTHERS = [
    AdamWeightDecayConfig(0.0, 0.9, 0.999, 1e-6),
    MomentumConfig(0.9),
    SgdConfig(),
    dataclasses.replace(BASE, beta1=0.5),
    dataclasses.replace(BASE, frozen=(KERNEL, NORM)),
    AdamWeightDecayConfig(0.0, 0.9, 0.999, 1e-6, frozen=(NORM,)),
]


def state_of(config, seed=0):
    generator = np.random.default_rng(seed)
    parameters = {
        path: jnp.asarray(generator.normal(size=shape), jnp.float32)
        for path, shape in SHAPES.items()
    }
    params = unflatten(parameters)
    slots = jax.tree.map(
        lambda x: jnp.asarray(generator.normal(size=x.shape), jnp.float32),
        make_optimizer(config).init(params),
    )
    return TrainState(step=jnp.int32(7), params=params, slots=slots)


@pytest.mark.parametrize("config", OTHERS, ids=str)
def test_slots_of_every_optimizer_come_back_from_a_checkpoint(config):
    state = state_of(config)
    tree = to_flat_tree(state)
    read = from_flat_tree(tree, jax.eval_shape(lambda: state))
    assert jax.tree.structure(read) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, read, state)


@pytest.mark.parametrize("config", OTHERS, ids=str)
def test_frozen_parameters_stay_and_have_no_slots(config):
    state = state_of(config)
    gradients = jax.tree.map(jnp.ones_like, state.params)
    updates, slots = make_optimizer(config).update(
        gradients, state.slots, state.params, step=state.step, learning_rate=jnp.float32(0.1)
    )
    params = optax.apply_updates(state.params, updates)
    before = flax.traverse_util.flatten_dict(state.params, sep="/")
    for path, after in flax.traverse_util.flatten_dict(params, sep="/").items():
        assert np.array_equal(after, before[path]) == (path in config.frozen), path
        if path in config.frozen:
            assert flat_slots(slots)[path] == Slots()


def test_a_model_trains_with_every_optimizer():
    from t0repro.training.train_state import new_train_state
    from t0repro.training.train_step import make_train_step

    for config in OTHERS[:3]:
        optimizer = make_optimizer(config)
        state = new_train_state(tiny.new_state().params, optimizer)
        step = jax.jit(make_train_step(tiny.model(), optimizer, tiny.schedule()))
        losses = []
        for _ in range(8):
            state, metrics = step(state, tiny.batches(1)[0])
            losses.append(float(metrics["loss"]))
        assert losses[-1] < losses[0], config


def test_a_formula_is_traced_once_for_all_parameters_of_a_shape(monkeypatch):
    formula, traced = optimizers._FORMULAS[AdafactorConfig], []

    def update(gradient, config):
        traced.append(gradient.parameter.shape)
        return formula(gradient, config)

    monkeypatch.setitem(optimizers._FORMULAS, AdafactorConfig, update)
    named = "b/kernel"
    config = dataclasses.replace(tiny.ADAFACTOR, exclude_from_parameter_scale=(named,))
    optimizer = make_optimizer(config)
    params = {
        layer: {"kernel": jnp.ones((4, 6)), "scale": jnp.ones(4)} for layer in ("a", "b", "c")
    }

    def step(params):
        slots = optimizer.init(params)
        return optimizer.update(params, slots, params, step=jnp.int32(0), learning_rate=0.1)

    together = jax.jit(step)(params)
    # The one that an option names has a trace of its own.
    assert traced == [(4, 6), (4,), (4, 6)]
    each = step(params)
    assert len(traced) == 3 + 6
    for one, other in zip(jax.tree.leaves(together), jax.tree.leaves(each), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
