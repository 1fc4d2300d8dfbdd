"""The kernel for TPUs equals the reference, interpreted on a CPU, and libtpu compiles it."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from t0repro.config.run_config import Layout
from t0repro.model import attention as attending
from t0repro.model import tpu_attention
from t0repro.model.attention import Visibility, attention, full_matrix
from t0repro.partitioning.devices import choose
from t0repro.partitioning.program_costs import count_flops
from t0repro.partitioning.topologies import devices_of

from ..tiny_models import model_config
from .test_attention import arrays, values_and_gradients

interpreted = functools.partial(tpu_attention.attention, interpret=True)

# batch, heads, queries, keys, depth; the first two have blocks that are skipped
CASES = [
    ((1, 2, 600, 600, 64), "packed"),
    ((1, 1, 515, 515, 128), "causal"),
    ((1, 1, 130, 700, 64), "cross"),
    ((2, 1, 150, 150, 64), "prefix"),
    ((2, 1, 130, 600, 40), "blind"),
]


@pytest.mark.parametrize(("size", "kind"), CASES, ids=str)
def test_float32_values_and_gradients_are_those_of_the_full_matrix(size, kind):
    given = arrays(1, *size[:4], depth=size[4], kind=kind, biased=kind != "cross")
    found, expected = (values_and_gradients(way, *given) for way in (interpreted, full_matrix))
    jax.tree.map(functools.partial(assert_within, 2e-6), found, expected)


def assert_within(bound, found, expected):
    """The largest difference is this small against the largest entry."""
    assert found.dtype == expected.dtype and found.shape == expected.shape
    found, expected = (np.asarray(x, np.float32) for x in (found, expected))
    assert np.abs(found - expected).max() <= bound * np.abs(expected).max()


def test_large_logits_of_a_query_that_sees_nothing_weigh_as_in_the_full_matrix():
    """Beside -1e9, float32 rounds logits to multiples of 64, so some weights are not 1."""
    query, key, value, bias, visibility = arrays(2, 1, 1, 140, 300, depth=16, kind="blind")
    given = (query * 30, key, value, bias, visibility)
    found, expected = (values_and_gradients(way, *given) for way in (interpreted, full_matrix))
    jax.tree.map(functools.partial(assert_within, 2e-5), found, expected)


@pytest.mark.parametrize("kind", ["packed", "blind"])
def test_bfloat16_differs_from_float32_by_its_rounding(kind):
    *learned, visibility = arrays(3, 2, 2, 200, 200, depth=64, kind=kind)
    rounded = [x.astype(jnp.bfloat16) for x in learned]
    exact = values_and_gradients(full_matrix, *(x.astype(jnp.float32) for x in rounded), visibility)
    # The model casts queries and keys to float32 for the logits.
    query, key, value, bias = rounded
    given = (query.astype(jnp.float32), key.astype(jnp.float32), value, bias, visibility)
    found, expected = (values_and_gradients(way, *given) for way in (interpreted, full_matrix))

    def compare(found, expected, exact):
        assert found.dtype == expected.dtype
        errors = [np.abs(np.asarray(x, np.float32) - exact).max() for x in (found, expected)]
        # The kernel's matmuls take bfloat16, as XLA's do on a TPU. On a CPU, those of the full
        # matrix take float32 for the logits and their gradients.
        assert errors[0] <= max(2 * errors[1], 2**-7 * np.abs(exact).max())

    jax.tree.map(compare, found, expected, exact)


def test_only_blocks_that_some_query_needs_are_read():
    sizes = tpu_attention._Sizes(512, 512, 128, 128)
    needed = functools.partial(tpu_attention._needed, sizes=sizes)
    segments = jnp.repeat(jnp.array([[1, 2]]), 256, axis=1)[:, None]
    # Each half of a row sees itself.
    halves = np.kron(np.eye(2, dtype=bool), np.ones((2, 2), bool))
    np.testing.assert_array_equal(needed(segments, segments)[0], halves)
    ordered = jnp.concatenate([segments, jnp.arange(512)[None, None]], axis=1)
    np.testing.assert_array_equal(needed(ordered, ordered)[0], np.tril(halves))
    # One query that sees nothing weighs all keys.
    blind = segments.at[0, 0, 300].set(9)
    rows = needed(blind, segments)[0]
    assert rows[2].all() and not rows[3, :2].any()
    read = tpu_attention._blocks_to_read(jnp.array([[[False, True, False, True, False]]]))
    np.testing.assert_array_equal(read, [1, 1, 1, 3, 3])


@pytest.fixture
def by_interpreted_kernel(monkeypatch):
    """Makes `attention` choose the kernel on this CPU, interpreted."""
    monkeypatch.setattr(attending, "KERNEL_FROM", 0)
    monkeypatch.setattr(tpu_attention, "supports", lambda kind: True)
    monkeypatch.setattr(attending.cpu_attention, "available", lambda: False)
    monkeypatch.setattr(tpu_attention, "attention", interpreted)


@pytest.mark.usefixtures("by_interpreted_kernel")
def test_attention_drops_the_same_keys():
    given = arrays(4, 2, 2, 40, 40)
    mask = np.random.default_rng(0).integers(0, 2, (2, 2, 1, 40))
    dropped = lambda x: x * mask * 2  # noqa: E731
    ways = (functools.partial(way, dropped=dropped) for way in (attention, full_matrix))
    found, expected = (
        values_and_gradients(lambda *x, way=way: way(*x[:4], x[4]), *given) for way in ways
    )
    jax.tree.map(functools.partial(assert_within, 2e-6), found, expected)


def test_its_flops_count_as_the_full_matrixs_do():
    given = arrays(0, 2, 2, 128, 128, depth=16)

    def counted(way):
        gradients = lambda *x: values_and_gradients(way, *x)  # noqa: E731
        return count_flops(jax.make_jaxpr(gradients)(*given).jaxpr)

    expected = counted(full_matrix)
    assert counted(interpreted) == expected
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((2, 2), ("data", "model"))):
        assert counted(interpreted) == expected  # on each of four devices a quarter


@pytest.mark.slow
def test_a_model_trains_as_without_it_on_four_devices():
    """With rows and heads sharded, in scanned layers, also if groups of rows sum by themselves."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=4"
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("kernel_on_four_devices.py")],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["calls"] > 0
    np.testing.assert_allclose(found["within"], found["without"], rtol=0, atol=1e-5)


# ---- With libtpu's compiler ---------------------------------------------------------------------


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
        y = attention(query, key, value, bias, Visibility(segments, segments, order, order))
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
        assert attending.implementation(8, 16, 1024, 1024, float32=False) == "blocks"
