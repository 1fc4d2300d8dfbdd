"""A trainer that holds layers stacked trains, saves and measures what one by layer does."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from t0repro.config.optimizer import AdamWeightDecayConfig, MomentumConfig, SgdConfig
from t0repro.model.layer_stacks import count_stacked_layers, stack_layers, unstack_donating
from t0repro.model.t5 import T5, initial_parameters
from t0repro.training.optimizers import make_optimizer
from t0repro.training.partitioner import Partitioner
from t0repro.training.stopping import BaseAction, RunActions
from t0repro.training.t5_model import T5Model
from t0repro.training.train_state import TrainState, to_flat_tree, unstack_state
from t0repro.training.train_step import stack_builtin_state
from t0repro.training.trainer import Trainer
from t0repro.training.weight_metrics import WeightMetricsComputer

from ..helpers import tiny_models as tiny

DEEP = {"num_encoder_layers": 2, "num_decoder_layers": 3, "scan_layers": True}
TOWERS = {"encoder": 2, "decoder": 3}
FIRST = "encoder/layers_0/mlp/wo/kernel"


def network(**changes):
    return T5(dataclasses.replace(tiny.MODEL, **{**DEEP, **changes}), tiny.FLOAT32)


def made(optimizer=tiny.ADAFACTOR, *, kind=T5Model, **changes):
    """A model and its first state, by layer."""
    transformation = optimizer if isinstance(optimizer, tuple) else make_optimizer(optimizer)
    model = kind(network(**changes), transformation)
    return model, TrainState.create(transformation, model.get_initial_variables(jax.random.key(0)))


def trainer(model, state, kind=Trainer, computer=None, axes=None, partitioner=None):
    rate = lambda step: jnp.float32(0.01)  # noqa: E731
    key = jax.random.key(1)
    return kind(model, state, partitioner, ["eval"], None, axes, key, rate, 2, computer)


class ByLayer(Trainer):
    """A user's trainer, whose state is by layer."""


def trained(optimizer, kind, computer=None):
    """Metrics of three updates, and the state after them."""
    model, state = made(optimizer, dropout_rate=0.1)
    with trainer(model, state, kind, computer) as one:
        values = one.train(iter(tiny.batches(3)), 3).result()
        assert count_stacked_layers(one.stacked_state.params) == (TOWERS if kind is Trainer else {})
        tree = to_flat_tree(one.stacked_state)
    return {name: x for name, x in values.items() if "timing" not in name}, tree


def assert_same_metrics(values, expected):
    assert values.keys() == expected.keys()
    for name, value in values.items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-7, err_msg=name)


def assert_same_state(tree, expected):
    assert tree.keys() == expected.keys()
    for name in tree:
        np.testing.assert_allclose(tree[name], expected[name], rtol=1e-5, atol=1e-6, err_msg=name)


OPTIMIZERS = {
    "adafactor": tiny.ADAFACTOR,
    "factored, with momentum": dataclasses.replace(
        tiny.ADAFACTOR, beta1=0.9, min_dim_size_to_factor=2, global_norm_clip=0.1
    ),
    "exceptions": dataclasses.replace(tiny.ADAFACTOR, exclude_from_parameter_scale=(FIRST,)),
    "adam": AdamWeightDecayConfig(0.01, 0.9, 0.999, 1e-6, exclude_from_weight_decay=(FIRST,)),
    "momentum": MomentumConfig(0.9),
    "sgd": SgdConfig(),
}


def test_training_is_that_by_layer():
    optimizer = OPTIMIZERS["factored, with momentum"]
    values, tree = trained(optimizer, Trainer)
    expected, by_layer = trained(optimizer, ByLayer)
    assert_same_metrics(values, expected)
    assert_same_state(tree, by_layer)


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_updates_are_those_by_layer(optimizer):
    """With few parameters and given gradients, since the step above takes long to compile."""
    draws = np.random.default_rng(0)
    layer = {"mlp": {"wo": {"kernel": (12, 8)}}, "pre_mlp_layer_norm": {"scale": (8,)}}
    layers = {
        tower: {f"layers_{index}": layer for index in range(count)}
        for tower, count in TOWERS.items()
    }
    shapes = {**layers, "token_embedder": {"embedding": (128, 8)}}

    def drawn():
        is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
        return jax.tree.map(
            lambda shape: draws.normal(size=shape).astype(np.float32), shapes, is_leaf=is_shape
        )

    by_layer = TrainState.create(make_optimizer(optimizer), {"params": drawn()})
    held = by_layer.replace(
        params=stack_layers(by_layer.params, TOWERS), slots=stack_layers(by_layer.slots, TOWERS)
    )
    update = jax.jit(lambda state, gradients: state.apply_gradient(gradients, learning_rate=0.01))
    for gradients in (drawn(), drawn()):
        by_layer = update(by_layer, gradients)
        held = update(held, stack_layers(gradients, TOWERS))
    assert_same_state(to_flat_tree(held), to_flat_tree(by_layer))


def test_measurements_of_parameters_are_those_by_layer():
    values, _ = trained(SgdConfig(), Trainer, WeightMetricsComputer())
    assert "weight_rms/encoder/layers_1/mlp/wo/kernel" in values
    assert_same_metrics(values, trained(SgdConfig(), ByLayer, WeightMetricsComputer())[0])


def test_evaluations_are_those_by_layer():
    results = []
    for kind in (Trainer, ByLayer):
        with trainer(*made(), kind) as one:
            results.append(one.eval({"eval": tiny.batches(1)})["eval"])
    assert_same_metrics(*({n: x for n, x in each.items() if "timing" not in n} for each in results))


def test_a_state_read_by_name_is_a_copy_by_layer():
    model, state = made()
    kept = jax.device_get(state)
    with trainer(model, state) as one:
        assert state.params["encoder"]["layers_0"]["mlp"]["wo"]["kernel"].is_deleted()
        read = one.train_state
        assert jax.tree.structure(read) == jax.tree.structure(state)
        jax.tree.map(np.testing.assert_array_equal, read, kept)
        one.train_state = read.replace(step=jnp.int32(7))
        assert count_stacked_layers(one.stacked_state.params) == TOWERS
        last = one.release()
    jax.tree.map(np.testing.assert_array_equal, last.params, kept.params)
    assert int(last.step) == 7 and count_stacked_layers(last.params) == {}


class UsersAction(BaseAction):
    """Stops by the parameters of a layer, which it finds by their names."""

    def run(self, train_state, metrics_by_task):
        return bool((train_state.params["encoder"]["layers_0"]["mlp"]["wo"]["kernel"] > 0).all())


def test_a_users_action_reads_layers_by_name():
    with trainer(*made()) as one:
        assert count_stacked_layers(one.stacked_state.params) == TOWERS
        assert not RunActions([UsersAction()])(one.stacked_state, {})


class UsersModel(T5Model):
    """Reads what it likes of the parameters."""


class UsersNetwork(T5):
    """The same, inside this project's model."""


def slower_first_layers():
    """An optimizer around this project's that finds some layers by their names."""
    inner = make_optimizer(tiny.ADAFACTOR)

    def slower(path, gradient):
        return 0.1 * gradient if "layers_0" in jax.tree_util.keystr(path) else gradient

    def update(gradients, state, params=None, **options):
        changed = jax.tree_util.tree_map_with_path(slower, gradients)
        return inner.update(changed, state, params, **options)

    return inner._replace(update=update)


def network_of_users():
    model, state = made()
    model.module = UsersNetwork(network().config, tiny.FLOAT32)
    return model, state


# Models and states for which layers have to stay by themselves, with why.
NOT_STACKED = {
    "a model of the user's": lambda: made(kind=UsersModel),
    "a network of the user's": network_of_users,
    "an optimizer of optax's": lambda: made(optax.with_extra_args_support(optax.adam(1e-3))),
    "one whose state is a dictionary": lambda: made(
        optax.named_chain(("rate", optax.scale(-1e-3)))
    ),
    "an optimizer around this project's": lambda: made(slower_first_layers()),
    "a frozen layer": lambda: made(dataclasses.replace(tiny.ADAFACTOR, frozen=(FIRST,))),
    "layers that are not in a loop": lambda: made(scan_layers=False),
    "layers of both towers": lambda: made(shared_towers=True, num_decoder_layers=2),
}


@pytest.mark.parametrize("why", NOT_STACKED)
def test_layers_stay_by_themselves(why):
    model, state = NOT_STACKED[why]()
    assert stack_builtin_state(model, state) is state


def test_a_state_without_axes_for_stacks_stays_by_layer():
    model, state = made()
    for options in (
        {"kind": ByLayer},
        {"computer": type("Users", (WeightMetricsComputer,), {})()},
        {"axes": {}},
        {"partitioner": type("Users", (Partitioner,), {})()},
    ):
        with trainer(model, state, **options) as one:
            assert one.train_state is one.stacked_state is state


def test_frozen_layers_all_alike_are_stacked_and_stay():
    names = tuple(f"encoder/layers_{index}/mlp/wo/kernel" for index in range(2))
    model, state = made(dataclasses.replace(tiny.ADAFACTOR, frozen=names))
    before = to_flat_tree(state)
    with trainer(model, state) as one:
        assert count_stacked_layers(one.stacked_state.params) == TOWERS
        one.update(tiny.batches(1)[0]).result()
        after = to_flat_tree(one.stacked_state)
    changed = {name for name in after if not np.array_equal(after[name], before[name])}
    assert not changed & {f"target/{name}" for name in names}
    assert "target/encoder/layers_0/mlp/wi_0/kernel" in changed


def test_shapes_are_stacked_as_values_are():
    model, state = made()
    shapes = stack_builtin_state(model, jax.eval_shape(lambda: state))
    held = stack_builtin_state(model, state)
    assert jax.tree.map(jnp.shape, held) == jax.tree.map(lambda x: x.shape, shapes)
    assert unstack_state(state) is state
    assert count_stacked_layers(unstack_state(held, unstack_donating).params) == {}
    assert held.params["encoder"]["layers_*"]["mlp"]["wo"]["kernel"].is_deleted()


def test_new_parameters_do_not_depend_on_the_loop():
    unrolled = initial_parameters(network(scan_layers=False), jax.random.key(0))
    jax.tree.map(
        np.testing.assert_array_equal, initial_parameters(network(), jax.random.key(0)), unrolled
    )
