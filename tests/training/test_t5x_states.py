"""T5X's methods of train states and partitioners."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen.partitioning import AxisMetadata
from jax.sharding import PartitionSpec

from t0repro.config.model import Layout
from t0repro.errors import UserError
from t0repro.partitioning.devices import choose
from t0repro.training.partitioner import DataLayout, Partitioner
from t0repro.training.t5x_optimizers import Adafactor, standard_logical_factor_rules
from t0repro.training.train_state import TrainState

from ..helpers import tiny_models as tiny


@pytest.fixture(scope="module")
def state():
    return tiny.new_state().replace(flax_mutables={"running": {"gap": jnp.float32(0.5)}})


def equal(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_a_state_dictionary_has_the_names_of_a_checkpoint_and_restores(state):
    written = state.replace_step(jnp.int32(7)).state_dict()
    assert set(written) == {"target", "state", "flax_mutables"}
    assert set(written["state"]) == {"step", "param_states"} and written["state"]["step"] == 7
    slots = written["state"]["param_states"]["token_embedder"]["embedding"]
    assert set(slots) == {"v_row", "v_col", "v", "m"}
    other = state.replace_params(jax.tree.map(jnp.zeros_like, state.params))
    restored = other.restore_state(written)
    equal(restored, state.replace_step(jnp.int32(7)))
    del written["target"]["token_embedder"]
    with pytest.raises(UserError, match="token_embedder"):
        other.restore_state(written)


def test_parts_are_replaced_one_by_one(state):
    assert state.replace_step(3).step == 3 and state.param_states is state.slots
    assert state.replace_params({}).params == {} and state.replace_params({}).slots is state.slots
    assert state.replace_flax_mutables({}).flax_mutables is None


def test_logical_axes_stand_in_the_place_of_arrays(state):
    axes = Partitioner().get_logical_axes(state)
    kernel = axes.params["decoder"]["layers_0"]["mlp"]["wo"]["kernel"]
    assert kernel == PartitionSpec("mlp", "embed")
    slots = axes.param_states["decoder"]["layers_0"]["mlp"]["wo"]["kernel"]
    assert (slots.v_row, slots.v_col) == (PartitionSpec("embed"), PartitionSpec("mlp"))
    assert axes.step == PartitionSpec()
    assert jax.tree.structure(axes) == jax.tree.structure(state)


def test_a_partitioner_says_where_data_and_states_belong(state):
    layout = Layout(data=None, model=1, fully_sharded=False)
    for partitioner in (Partitioner(), Partitioner(choose(layout, tiny.MODEL, rows=8))):
        assert partitioner.mesh.shape == {"data": 1, "model": 1}
        assert partitioner.get_data_layout(8) == DataLayout(8, 0, 1, True)
        equal(partitioner.move_params_to_devices(jax.device_get(state)), state)


def test_a_model_with_axis_names_of_its_own_keeps_them():
    variables = {
        "params": {"dense": {"bias": jnp.zeros(4), "kernel": jnp.zeros((2, 4))}},
        "params_axes": {
            "dense": {
                "bias_axes": AxisMetadata(names=("embed",)),
                "kernel_axes": AxisMetadata(names=("vocab", "embed")),
            }
        },
        "running": {"mean": jnp.zeros(4)},
        "running_axes": {"mean_axes": AxisMetadata(names=("embed",))},
    }
    optimizer = Adafactor(logical_factor_rules=standard_logical_factor_rules())
    state = TrainState.create(optimizer, variables)
    assert optimizer.config.factor_map == (
        ("^dense/bias$", "none"),
        ("^dense/kernel$", "column row"),
    )
    assert state.params_axes == variables["params_axes"]
    assert list(state.flax_mutables) == ["running"]
    assert set(state.state_dict()["flax_mutables"]) == {"running"}
    axes = state.as_logical_axes()
    assert axes.params["dense"] == {
        "bias": PartitionSpec("embed"),
        "kernel": PartitionSpec("vocab", "embed"),
    }
    assert axes.param_states["dense"]["kernel"].v == PartitionSpec("vocab", "embed")
    assert axes.params_axes is None
    del variables["params_axes"]["dense"]["bias_axes"]
    with pytest.raises(ValueError, match="dense/bias"):
        TrainState.create(optimizer, variables)
