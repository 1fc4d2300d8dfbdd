"""libtpu compiles the kernel for TPUs; its numbers are tested in test_pallas_attention.py."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from t0repro.config.model import Layout
from t0repro.model import attention as attending
from t0repro.model.attention import attention
from t0repro.model.attention_mask import AttentionMask
from t0repro.partitioning.devices import choose
from t0repro.partitioning.flops import count_flops
from t0repro.partitioning.topologies import devices_of

from ..helpers.tiny_models import model_config


@pytest.mark.tpu
@pytest.mark.parametrize("topology", ["v4-8", "v5e-4", "v5p-8", "v6e-4"])
@pytest.mark.parametrize("layout", [Layout(1, 1), Layout(2, 2)], ids=["one", "four"])
def test_libtpu_compiles_values_and_gradients(topology, layout):
    size = layout.data * layout.model
    devices = devices_of(topology)[0][:size]
    partitioning = choose(layout, model_config(num_heads=4), rows=4, devices=devices)

    def shape(dtype, *sizes):
        sharding = NamedSharding(partitioning.mesh, PartitionSpec())
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)

    def loss(query, key, value, bias, segments, order):
        query, key = query.astype(jnp.float32), key.astype(jnp.float32)
        y = attention(query, key, value, bias, AttentionMask(segments, segments, order, order))
        return jnp.sum(y.astype(jnp.float32))

    of_heads = shape(jnp.bfloat16, 4, 4, 1024, 64)
    given = (of_heads, of_heads, of_heads, shape(jnp.float32, 4, 2047))
    seen = shape(jnp.int32, 4, 1024)
    with partitioning.active():
        gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))
        traced = gradients.trace(*given, seen, seen)
        compiled = traced.lower().compile()
    assert count_flops(traced.jaxpr.jaxpr) == 6 * 2 * 4 * 4 * 1024 * 1024 * 64  # six matmuls
    assert "t0repro_attention_gradients" in compiled.as_text()


@pytest.mark.tpu
def test_a_v3_keeps_blocks():
    partitioning = choose(Layout(1, 1), model_config(), rows=8, devices=devices_of("v3-8")[0][:1])
    with partitioning.active():
        assert attending.choose_implementation(8, 16, 1024, 1024, float32=False) == "blocks"
