"""Every parameter and slot has its logical axes, and the rules divide them as the table says."""

import jax
import pytest
from jax.sharding import PartitionSpec

from t0repro.model.t5 import T5, initial_parameters
from t0repro.partitioning.rules import parameter_axes, parameter_spec, slot_spec

from ..tiny_models import FLOAT32, T5_1_0, T5_1_1, UMT5, model_config

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
        ("decoder/relpos_bias/rel_embedding", ("model", None), ("model", None)),
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
