"""The Pallas kernels of attention equal the reference, interpreted on a CPU."""

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
from jax.sharding import AbstractMesh, AxisType

from t0repro.model import attention as attending
from t0repro.model import gpu_attention, tpu_attention
from t0repro.model.attention import attention
from t0repro.model.full_attention import full_matrix
from t0repro.model.pallas_attention import Sizes, find_needed_blocks
from t0repro.partitioning.flops import count_flops

from .test_attention import arrays, values_and_gradients

MODULES = {"tpu": tpu_attention, "gpu": gpu_attention}
INTERPRETED = {
    name: functools.partial(module.attention, interpret=True) for name, module in MODULES.items()
}
of_all_kernels = pytest.mark.parametrize("kernel", MODULES)

# batch, heads, queries, keys, depth; the first two have blocks that are skipped. A TPU's blocks are
# larger.
CASES = [
    ("tpu", (1, 2, 600, 600, 64), "packed"),
    ("tpu", (1, 1, 515, 515, 128), "causal"),
    ("tpu", (1, 1, 130, 700, 64), "cross"),
    ("tpu", (2, 1, 150, 150, 64), "prefix"),
    ("tpu", (2, 1, 130, 600, 40), "blind"),
    ("gpu", (2, 2, 200, 200, 64), "packed"),
    ("gpu", (3, 1, 115, 115, 128), "causal"),
    ("gpu", (1, 1, 70, 150, 64), "cross"),
    ("gpu", (2, 1, 128, 128, 64), "prefix"),
    ("gpu", (2, 1, 70, 130, 40), "blind"),
    ("gpu", (2, 2, 20, 7, 8), "packed"),  # a block is larger than all
]


@pytest.mark.parametrize(("kernel", "size", "kind"), CASES, ids=str)
def test_float32_values_and_gradients_are_those_of_the_full_matrix(kernel, size, kind):
    *learned, visibility = arrays(1, *size[:4], depth=size[4], kind=kind, biased=kind != "cross")
    found = values_and_gradients(INTERPRETED[kernel], *learned, visibility)
    # In float32, the reference's own rounding reaches 1.4e-6 in the bias's gradient. But a blind
    # query's weights of 1 exist in float32 only.
    exact = jnp.float32 if kind == "blind" else jnp.float64
    with jax.enable_x64(True):
        learned = [None if x is None else jnp.asarray(np.asarray(x), exact) for x in learned]
        expected = values_and_gradients(full_matrix, *learned, visibility)
    expected = jax.tree.map(lambda x: np.asarray(x, np.float32), expected)
    jax.tree.map(functools.partial(assert_within, 2e-6), found, expected)


def assert_within(bound, found, expected):
    """The largest difference is this small against the largest entry."""
    assert found.dtype == expected.dtype and found.shape == expected.shape
    found, expected = (np.asarray(x, np.float32) for x in (found, expected))
    assert np.abs(found - expected).max() <= bound * np.abs(expected).max()


@of_all_kernels
def test_large_logits_of_a_query_that_sees_nothing_weigh_as_in_the_full_matrix(kernel):
    """Beside -1e9, float32 rounds logits to multiples of 64, so some weights are not 1."""
    query, key, value, bias, visibility = arrays(2, 1, 1, 140, 300, depth=16, kind="blind")
    given = (query * 30, key, value, bias, visibility)
    ways = (INTERPRETED[kernel], full_matrix)
    found, expected = (values_and_gradients(way, *given) for way in ways)
    jax.tree.map(functools.partial(assert_within, 2e-5), found, expected)


@of_all_kernels
@pytest.mark.parametrize("kind", ["packed", "blind"])
def test_bfloat16_differs_from_float32_by_its_rounding(kernel, kind):
    *learned, visibility = arrays(3, 2, 2, 200, 200, depth=64, kind=kind)
    rounded = [x.astype(jnp.bfloat16) for x in learned]
    exact = values_and_gradients(full_matrix, *(x.astype(jnp.float32) for x in rounded), visibility)
    # The model casts queries and keys to float32 for the logits.
    query, key, value, bias = rounded
    given = (query.astype(jnp.float32), key.astype(jnp.float32), value, bias, visibility)
    ways = (INTERPRETED[kernel], full_matrix)
    found, expected = (values_and_gradients(way, *given) for way in ways)

    def compare(found, expected, exact):
        assert found.dtype == expected.dtype
        errors = [np.abs(np.asarray(x, np.float32) - exact).max() for x in (found, expected)]
        # The kernel's matmuls take bfloat16, as XLA's do on a TPU. On a CPU, those of the full
        # matrix take float32 for the logits and their gradients.
        assert errors[0] <= max(2 * errors[1], 2**-7 * np.abs(exact).max())

    jax.tree.map(compare, found, expected, exact)


def test_only_blocks_that_some_query_needs_are_computed():
    sizes = Sizes(512, 512, 128, 128)
    found = functools.partial(find_needed_blocks, sizes=sizes)
    segments = jnp.repeat(jnp.array([[1, 2]]), 256, axis=1)[:, None]
    # Each half of a row sees itself.
    halves = np.kron(np.eye(2, dtype=bool), np.ones((2, 2), bool))
    np.testing.assert_array_equal(found(segments, segments)[0], halves)
    ordered = jnp.concatenate([segments, jnp.arange(512)[None, None]], axis=1)
    np.testing.assert_array_equal(found(ordered, ordered)[0], np.tril(halves))
    # One query that sees nothing weighs all keys.
    blind = segments.at[0, 0, 300].set(9)
    rows = found(blind, segments)[0]
    assert rows[2].all() and not rows[3, :2].any()
    read = tpu_attention._blocks_to_read(jnp.array([[[False, True, False, True, False]]]))
    np.testing.assert_array_equal(read, [1, 1, 1, 3, 3])
    _, bounds = gpu_attention._bounds(jnp.array([[[False, True, False, True, False], [False] * 5]]))
    np.testing.assert_array_equal(bounds, [[[1, 4], [0, 0]]])


@of_all_kernels
def test_attention_drops_the_same_keys(kernel, monkeypatch):
    monkeypatch.setattr(attending, "KERNEL_FROM", 0)
    monkeypatch.setattr(MODULES[kernel], "supports", lambda device: True)
    monkeypatch.setattr(attending.cpu_attention, "is_available", lambda: False)
    monkeypatch.setattr(MODULES[kernel], "attention", INTERPRETED[kernel])
    given = arrays(4, 2, 2, 40, 40)
    assert attending.choose_implementation(2, 2, 40, 40, float32=True) == kernel
    mask = np.random.default_rng(0).integers(0, 2, (2, 2, 1, 40))
    dropped = lambda x: x * mask * 2  # noqa: E731
    ways = (functools.partial(way, apply_dropout=dropped) for way in (attention, full_matrix))
    found, expected = (
        values_and_gradients(lambda *x, way=way: way(*x[:4], x[4]), *given) for way in ways
    )
    jax.tree.map(functools.partial(assert_within, 2e-6), found, expected)


@of_all_kernels
def test_its_flops_count_as_the_full_matrixs_do(kernel):
    given = arrays(0, 2, 2, 128, 128, depth=16)

    def counted(way):
        gradients = lambda *x: values_and_gradients(way, *x)  # noqa: E731
        return count_flops(jax.make_jaxpr(gradients)(*given).jaxpr)

    expected = counted(full_matrix)
    assert counted(INTERPRETED[kernel]) == expected
    mesh = AbstractMesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    with jax.sharding.use_abstract_mesh(mesh):
        assert counted(INTERPRETED[kernel]) == expected  # on each of four devices a quarter


@pytest.mark.slow
@of_all_kernels
def test_a_model_trains_as_without_it_on_four_devices(kernel):
    """With rows and heads sharded, in scanned layers, also if groups of rows sum by themselves."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=4"
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("kernel_on_four_devices.py"), kernel],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["calls"] > 0
    np.testing.assert_allclose(found["within"], found["without"], rtol=0, atol=1e-5)
