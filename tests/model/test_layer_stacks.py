"""Trees with stacked layers are the same trees, and a model computes the same from them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t0repro.model.layer_stacks import (
    count_stacked_layers,
    drop_layers,
    stack_donating,
    stack_layers,
    unstack,
    unstack_donating,
)
from t0repro.model.t5 import T5, initial_parameters
from t0repro.training.t5_model import T5Model
from t0repro.training.train_state import TrainState
from t0repro.training.train_step import accumulate_grads_microbatched

from ..helpers import tiny_models as tiny

TOWERS = {"encoder": 2, "decoder": 3}
SCANNED = {"num_encoder_layers": 2, "num_decoder_layers": 3, "scan_layers": True}


def network(dtypes=tiny.FLOAT32, **changes):
    return T5(dataclasses.replace(tiny.MODEL, **SCANNED, **changes), dtypes)


def parameters():
    return initial_parameters(network(), jax.random.key(0))


def same(one, two):
    assert jax.tree.structure(one) == jax.tree.structure(two)
    return jax.tree.all(jax.tree.map(np.array_equal, one, two))


def test_stacking_and_splitting_are_inverse():
    params = parameters()
    whole = stack_layers(params, TOWERS)
    assert count_stacked_layers(params) == {} and count_stacked_layers(whole) == TOWERS
    assert whole["decoder"]["layers_*"]["mlp"]["wo"]["kernel"].shape[0] == 3
    assert same(unstack(whole, count_stacked_layers(whole)), params)


def test_joining_leaves_no_second_copy_nor_does_releasing():
    params, kept = parameters(), jax.device_get(parameters())
    whole = stack_layers(params, TOWERS, stack_donating)
    assert params["encoder"]["layers_1"]["mlp"]["wo"]["kernel"].is_deleted()
    assert not params["token_embedder"]["embedding"].is_deleted()
    single = unstack(whole, TOWERS, unstack_donating)
    assert whole["encoder"]["layers_*"]["mlp"]["wo"]["kernel"].is_deleted()
    assert same(single, kept)


def test_shapes_are_joined_like_arrays():
    shapes = stack_layers(jax.eval_shape(parameters), TOWERS, stack_donating)
    assert shapes == jax.eval_shape(lambda: stack_layers(parameters(), TOWERS))


def test_views_of_numpy_take_no_memory():
    whole = jax.device_get(stack_layers(parameters(), TOWERS))
    single = unstack(whole, TOWERS)
    kernels = (whole["encoder"]["layers_*"], single["encoder"]["layers_1"])
    assert np.shares_memory(*(layers["mlp"]["wo"]["kernel"] for layers in kernels))


def test_trees_of_a_users_model_have_no_stacks():
    for tree in ([jnp.zeros(2)], {"kernel": jnp.zeros(2)}, {"a": {"layers_0": 1}}):
        assert count_stacked_layers(tree) == {}
        assert unstack(tree, {}) is tree and drop_layers(tree, {}) is tree


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize(
    "dtypes", [tiny.FLOAT32, pytest.param(tiny.BFLOAT16, marks=pytest.mark.slow)], ids=str
)
def test_gradients_are_those_by_layer(microbatches, dtypes):
    model = T5Model(network(dtypes, dropout_rate=0.1), measured=False)
    params, (batch,) = parameters(), tiny.batches(1)

    def gradients(p):
        state = TrainState(step=jnp.int32(0), params=p, slots=None)
        key = jax.random.key(1)
        return accumulate_grads_microbatched(model, state, batch, key, microbatches)[:2]

    expected, loss = jax.jit(gradients)(params)
    found, same_loss = jax.jit(gradients)(stack_layers(params, TOWERS))
    assert count_stacked_layers(found) == TOWERS
    assert same_loss["loss"].total == loss["loss"].total
    assert same(unstack(found, TOWERS), expected)
