"""Adafactor's factor rules and MultiOptimizer, against T5X's own code.

`t5x_adafactor.json` holds parameters and slots after three updates by t5x.adafactor at cc342d4.
"""

import json
from pathlib import Path

import flax.linen.partitioning
import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tests.helpers.tiny_models as tiny
from t0repro.config.optimizer import AdafactorConfig, MultiOptimizerConfig, OptimizerPart
from t0repro.training.optimizers import make_optimizer
from t0repro.training.t5x_optimizers import (
    HEURISTIC_RULE,
    Adafactor,
    FactorDim,
    HParamMap,
    MultiOptimizer,
    factor_name_to_factordim,
    standard_logical_factor_rules,
)
from t0repro.training.train_state import TrainState, from_flat_tree, to_flat_tree

# flax would have users of its traversals change to optax.
pytestmark = pytest.mark.filterwarnings("ignore:.flax.traverse_util.Traversal:DeprecationWarning")

GOLDEN = json.loads((Path(__file__).parent / "t5x_adafactor.json").read_text())
ROW, COLUMN, BATCH, NONE = FactorDim.ROW, FactorDim.COLUMN, FactorDim.BATCH, FactorDim.NONE
# Path -> shape, and the logical names of its axes.
SHAPES = {
    "attention/kernel": ((4, 3, 2), ("embed", "heads", "kv")),
    "stack/kernel": ((2, 5, 3), ("layers", "embed", "mlp")),
    "stack/scale": ((2, 4), ("layers", "embed")),
    "mlp/kernel": ((6, 4), ("mlp", "embed")),
    "tall/kernel": ((4, 6), ("embed", "mlp")),
    "norm/scale": ((5,), ("embed",)),
    "bias/table": ((2, 3, 2), ("heads", "relpos_buckets", "layers")),
    "fused/kernel": ((3, 2, 2, 4), ("embed", "stack", "heads", "kv")),
}
RULES = [
    ("attention", (ROW, COLUMN, COLUMN)),
    ("stack/kernel", (BATCH, ROW, COLUMN)),
    ("stack/scale", (BATCH, NONE)),
    ("mlp", (COLUMN, ROW)),
    ("norm", None),
    ("bias", None),
    ("fused", (ROW, BATCH, COLUMN, COLUMN)),
    (".*", HEURISTIC_RULE),
]


def tree(flat):
    return flax.traverse_util.unflatten_dict(flat, sep="/")


def random(seed):
    generator = np.random.default_rng(seed)
    return tree(
        {
            path: jnp.float32(generator.normal(size=shape) * (1 + index))
            for index, (path, (shape, _)) in enumerate(SHAPES.items())
        }
    )


def ruled(**options):
    return Adafactor(min_dim_size_to_factor=2, factor_map=HParamMap(RULES), **options)


def having(part):
    return flax.traverse_util.ModelParamTraversal(lambda path, _: part in path)


def logical():
    return Adafactor(min_dim_size_to_factor=2, logical_factor_rules=standard_logical_factor_rules())


OPTIMIZERS = {
    "rules": ruled,
    "momentum": lambda: ruled(beta1=0.9),
    "options": lambda: ruled(
        weight_decay_rate=0.01,
        weight_decay_rate_lr_exponent=1.0,
        global_norm_clip_threshold=1.5,
        max_parameter_scale=2.0,
        clipping_threshold=0.7,
        step_offset=-3,
    ),
    "scale_map": lambda: ruled(
        multiply_by_parameter_scale=HParamMap([("kernel", False), (".*", True)])
    ),
    "multi": lambda: MultiOptimizer(
        [
            (having("/kernel"), ruled(global_norm_clip_threshold=1.0)),
            (having("/scale"), ruled(multiply_by_parameter_scale=False, beta1=0.5)),
        ]
    ),
    "logical": logical,
}


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_three_updates_are_t5xs(name):
    axes = {
        f"{path}_axes": flax.linen.partitioning.AxisMetadata(names)
        for path, (_, names) in SHAPES.items()
    }
    state = TrainState.create(OPTIMIZERS[name](), {"params": random(0), "params_axes": tree(axes)})
    update = jax.jit(TrainState.apply_gradient)
    for seed in (1, 2, 3):
        state = update(state, random(seed), 0.1 * seed)
    ours = to_flat_tree(state)
    for key, values in GOLDEN[name].items():
        kept = ours[key.replace("slots/", "state/param_states/")]
        np.testing.assert_allclose(kept.ravel(), values, rtol=2e-5, atol=2e-6, err_msg=key)
    # What a checkpoint holds is enough to continue.
    again = to_flat_tree(from_flat_tree(ours, like=state))
    assert ours.keys() == again.keys()
    assert all(np.array_equal(ours[key], again[key]) for key in ours)


def test_a_parameter_of_three_axes_needs_a_rule():
    params = {"a": jnp.ones((24, 4, 16))}
    for optimizer in (
        Adafactor(),
        Adafactor(factor_map=HParamMap([(".*", HEURISTIC_RULE)])),
        Adafactor(factor_map=HParamMap([("b", None)])),
        Adafactor(factor_map=HParamMap([("a", (ROW, COLUMN))])),
    ):
        with pytest.raises(ValueError, match="factor rule"):
            optimizer.init(params)
    # Mesh TensorFlow has a rule for any number of axes.
    assert make_optimizer(tiny.ADAFACTOR).init(params)["a"].v_row.shape == (4, 16)


def test_what_t5x_refuses_is_refused():
    with pytest.raises(ValueError, match="factored"):
        Adafactor(factored=False, factor_map=HParamMap(RULES))
    for wrong in ({"factor_map": RULES}, {"multiply_by_parameter_scale": 1}):
        with pytest.raises(TypeError):
            Adafactor(**wrong)
    with pytest.raises(ValueError, match="neither"):
        logical().set_param_axes({"a": ("embed", "mlp", "relpos_buckets")})
    with pytest.raises(KeyError):
        HParamMap([("a", 1)])["b"]
    with pytest.raises(KeyError):
        factor_name_to_factordim("diagonal")
    assert factor_name_to_factordim("Col") is COLUMN


def test_parameters_that_two_optimizers_share_are_refused():
    both = MultiOptimizer([(having("kernel"), ruled()), (having("stack"), ruled())])
    with pytest.raises(ValueError, match="stack/kernel"):
        both.init(random(0))
    of_optax = MultiOptimizer([(having("kernel"), optax.adam(0.1))])
    with pytest.raises(ValueError, match="multi_transform"):
        of_optax.init(random(0))


def test_a_configuration_of_several_optimizers_trains_what_it_names():
    paths = tuple(path for path in SHAPES if path != "norm/scale")
    rules = tuple((path, "unfactored") for path in paths)
    plain = AdafactorConfig(min_dim_size_to_factor=2, factor_map=rules)
    several = make_optimizer(MultiOptimizerConfig((OptimizerPart(paths, plain),)))
    params, options = random(0), {"step": jnp.int32(0), "learning_rate": jnp.float32(0.1)}
    changes, slots = several.update(random(1), several.init(params), params, **options)
    moved = {
        path: bool(change.any())
        for path, change in flax.traverse_util.flatten_dict(changes, sep="/").items()
    }
    assert moved == {path: path in paths for path in SHAPES}
    assert slots["norm"]["scale"].v is None and slots["mlp"]["kernel"].v.shape == (6, 4)
