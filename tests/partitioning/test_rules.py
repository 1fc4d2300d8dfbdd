"""Every parameter and slot has its logical axes, and the rules divide them as the table says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from t0repro.model.t5 import T5, initial_parameters
from t0repro.partitioning.devices import (
    constrain,
    count_shards,
    draw_for_group,
    parameter_axes,
    parameter_spec,
    slot_spec,
    sum_over_groups,
)

from ..helpers.tiny_models import FLOAT32, T5_1_0, T5_1_1, UMT5, model_config

LANGUAGE_MODEL = model_config(model_type="lm", num_encoder_layers=0)
SHARED = model_config(shared_towers=True)


@pytest.mark.parametrize("config", [T5_1_1, T5_1_0, UMT5, LANGUAGE_MODEL, SHARED])
def test_every_parameter_has_an_axis_for_each_of_its_dimensions(config):
    sizes = {
        "embed": config.d_model,
        "mlp": config.d_ff,
        "vocab": config.vocab_size,
        "buckets": config.relative_attention_num_buckets,
    }
    shapes = jax.eval_shape(lambda: initial_parameters(T5(config, FLOAT32), jax.random.key(0)))
    for path, leaf in jax.tree_util.tree_flatten_with_path(shapes)[0]:
        axes = parameter_axes(jax.tree_util.keystr(path, simple=True, separator="/"))
        assert len(axes) == len(leaf.shape), path
        for axis, size in zip(axes, leaf.shape, strict=True):
            heads = (config.num_heads, config.num_heads * config.d_kv)
            assert size == sizes[axis] if axis != "heads" else size in heads


@pytest.mark.parametrize(
    ("path", "divided", "fully"),
    [
        ("token_embedder/embedding", ("model", None), ("model", "data")),
        ("encoder/layers_3/attention/query/kernel", (None, "model"), ("data", "model")),
        ("encoder/layers_3/attention/out/kernel", ("model", None), ("model", "data")),
        ("decoder/layers_0/mlp/wo/kernel", ("model", None), ("model", "data")),
        ("decoder/layers_0/mlp/wi/kernel", (None, "model"), ("data", "model")),
        ("encoder/layers_0/mlp/wi_0/kernel", (None, "model"), ("data", "model")),
        ("decoder/relpos_bias/rel_embedding", ("model", None), ("model", None)),
        ("encoder/layers_3/relpos_bias/rel_embedding", ("model", None), ("model", None)),
        ("encoder/layers_3/pre_mlp_layer_norm/scale", (), ()),
        ("decoder/logits_dense/kernel", (None, "model"), ("data", "model")),
        ("decoder/decoder_norm/scale", (), ()),
        ("something/else", (), ()),
    ],
)
def test_a_parameter_is_divided_by_the_table(path, divided, fully):
    assert parameter_spec(path, fully_sharded=False) == PartitionSpec(*divided)
    assert parameter_spec(path, fully_sharded=True) == PartitionSpec(*fully)


@pytest.mark.parametrize(
    ("slot", "shape", "divided"),
    [
        ("v_row", (128, 256), (None,)),  # the longest axis, d_ff, is averaged away
        ("v_col", (128, 256), ("model",)),
        ("v_row", (256, 128), ("model",)),
        ("v", (128, 256), (None, "model")),
        ("adam_m", (128, 256), (None, "model")),
    ],
)
def test_a_slot_is_divided_like_its_parameter_less_the_axis_it_lacks(slot, shape, divided):
    assert slot_spec(PartitionSpec(None, "model"), slot, shape) == PartitionSpec(*divided)


# ---- Activations, and each part of a batch by itself --------------------------------------------

AXES = {"axis_names": ("data", "model"), "axis_types": (AxisType.Auto, AxisType.Auto)}


@pytest.fixture
def eight_devices():
    """A mesh of four by two: what is traced on it needs no devices."""
    with jax.sharding.use_abstract_mesh(AbstractMesh((4, 2), **AXES)):
        yield


@pytest.fixture
def one_device():
    """A mesh on which values are computed."""
    with jax.set_mesh(jax.make_mesh((1, 1), **AXES)):
        yield


def constraints(function, *arguments):
    """How a function's program divides what, in its order."""
    return [
        tuple(equation.params["sharding"].spec)
        for equation in jax.make_jaxpr(function)(*arguments).eqns
        if equation.primitive.name == "sharding_constraint"
    ]


@pytest.mark.parametrize(
    ("shape", "axes", "divided"),
    [
        ((8, 6, 4), ("batch", "mlp", None), ("data", "model", None)),
        ((4, 3, 2), ("batch", "heads", "vocab"), ("data", None, "model")),
        ((6, 5), ("batch", "embed"), (None, None)),
    ],
)
def test_an_activation_is_divided_where_its_sizes_allow(eight_devices, shape, axes, divided):
    assert constraints(lambda x: constrain(x, *axes), jnp.zeros(shape)) == [divided]
    with pytest.raises(ValueError, match="zip"):
        constrain(jnp.zeros(shape), *axes[:-1])


def test_an_activation_is_divided_among_the_devices_of_its_axes(eight_devices):
    assert count_shards("batch", "vocab") == 8
    assert (
        count_shards("batch"),
        count_shards("heads"),
        count_shards("embed"),
        count_shards(),
    ) == (4, 2, 1, 1)


def test_without_a_mesh_nothing_is_divided():
    x = jnp.zeros((8, 2))
    assert constrain(x, "batch", "mlp") is x
    assert count_shards("batch", "vocab") == 1


PARAMS = {"kernel": np.arange(6, dtype=np.float32).reshape(2, 3), "scale": np.float32([5, 7])}
SPECS = {"kernel": PartitionSpec(None, "model"), "scale": PartitionSpec()}
BATCH = np.random.default_rng(0).normal(size=(2, 8, 2)).astype(np.float32)


def products(params, microbatches):
    """Sums over the rows of all microbatches, and with what is drawn for each row."""

    def draw(shape):
        return jax.random.uniform(jax.random.key(0), shape)

    def of_rows(rows):
        rows = constrain(rows * params["scale"], "batch", "mlp")
        drawn = rows * draw_for_group(draw, rows.shape)
        return {"sum": rows.sum(0) @ params["kernel"], "drawn": drawn.sum(0)}

    return jax.tree.map(lambda x: x.sum(0), jax.vmap(of_rows)(microbatches))


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_sums_over_groups_are_those_of_the_whole_batch(one_device, groups):
    in_groups = jax.jit(lambda *data: sum_over_groups(products, *data, groups, SPECS))
    sums, whole = in_groups(PARAMS, BATCH), jax.jit(products)(PARAMS, BATCH)
    assert sums.keys() == whole.keys()
    for name in whole:
        np.testing.assert_allclose(sums[name], whole[name], rtol=1e-5)


def test_each_group_has_parameters_and_rows_of_its_own(eight_devices):
    def of_group(params, microbatches):
        assert microbatches.shape == (2, 2, 2) and count_shards("batch") == 1
        return constrain(microbatches[0], "batch", "mlp")

    def summed(params, batch):
        return sum_over_groups(of_group, params, batch, 4, SPECS)

    assert constraints(summed, PARAMS, BATCH) == [
        ("data", None, "model"),  # kernel
        ("data",),  # scale
        (None, "data"),  # microbatches; what follows is the rest
        ("data", None, "model"),
    ]
