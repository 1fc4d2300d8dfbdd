"""Every way to compute attention equals the reference, full matrices, gradients included."""

import dataclasses
import functools
import subprocess
import sys
from pathlib import Path

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from t0repro.model import attention as attending
from t0repro.model import cpu_attention
from t0repro.model.attention import attention, number_of_blocks
from t0repro.model.attention_mask import AttentionMask
from t0repro.model.blockwise_attention import blockwise_attention
from t0repro.model.full_attention import full_matrix
from t0repro.model.t5 import T5, initial_parameters
from t0repro.partitioning import memory
from t0repro.training.train_step import loss_and_gradients

from ..helpers import tiny_models as tiny

needs_compiler = pytest.mark.skipif(not cpu_attention.is_available(), reason="no C++ compiler here")
KINDS = ("packed", "causal", "cross", "prefix", "blind")


def arrays(seed, batch, heads, length, keys, *, depth=4, kind="packed", biased=True):
    """Query, key, value, position bias, and who sees whom; of kind "blind" some see nothing."""
    rng = np.random.default_rng(seed)
    shapes = [(batch, heads, size, depth) for size in (length, keys, keys)]
    query, key, value = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    query *= depth**-0.5
    bias = rng.normal(size=(heads, length + keys - 1)).astype(np.float32) if biased else None
    last = max(2, min(length, keys) // 4)  # segments
    of_keys = np.sort(rng.integers(1, last + 1, (batch, keys)))
    of_queries = of_keys if length == keys else np.sort(rng.integers(1, last + 1, (batch, length)))
    orders = (None, None)
    if kind == "causal":
        orders = (np.arange(length)[None], np.arange(keys)[None])
    elif kind == "prefix":
        places = [np.arange(size)[None] for size in (length, keys)]
        orders = tuple(np.where(x < length // 3, 0, x) for x in places)
    elif kind == "blind":
        of_queries = np.where(np.arange(length)[None] < 1 + length // 3, last + 2, of_queries)
    seen = (of_queries, of_keys, *orders)
    as_array = lambda x: None if x is None else jnp.asarray(x)  # noqa: E731
    return *map(as_array, (query, key, value, bias)), AttentionMask(*map(as_array, seen))


def values_and_gradients(function, *given):
    *learned, visibility = given
    cotangent = np.random.default_rng(0).normal(size=given[0].shape)

    @jax.jit
    def both(*learned):
        y, pull_back = jax.vjp(lambda *learned: function(*learned, visibility), *learned)
        return y, pull_back(jnp.asarray(cotangent, y.dtype))

    return both(*learned)


def in_blocks(blocks, query, key, value, bias, visibility):
    sizes = (query.shape[0], query.shape[2], key.shape[2])
    return blockwise_attention(query, key, value, bias, visibility.broadcast(*sizes), blocks)


def by_kernel(query, key, value, bias, visibility):
    sizes = (query.shape[0], query.shape[2], key.shape[2])
    return cpu_attention.attention(query, key, value, bias, visibility.broadcast(*sizes))


def assert_close(found, expected):
    compare = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=2e-6)
    jax.tree.map(compare, found, expected)


@settings(max_examples=8)
@given(
    seed=st.integers(0, 99),
    batch=st.integers(1, 3),
    heads=st.integers(1, 2),
    length=st.integers(2, 9),
    keys=st.integers(1, 9),
    blocks=st.integers(2, 5),
    kind=st.sampled_from(KINDS),
    biased=st.booleans(),
)
def test_blocks_give_values_and_gradients_of_the_full_matrix(
    seed, batch, heads, length, keys, blocks, kind, biased
):
    given_ = arrays(seed, batch, heads, length, keys, kind=kind, biased=biased)
    blocks = min(blocks, length)
    found = values_and_gradients(functools.partial(in_blocks, blocks), *given_)
    assert_close(found, values_and_gradients(full_matrix, *given_))


# batch, heads, queries, keys, depth
SIZES = ((2, 3, 70, 70, 64), (1, 2, 37, 131, 128), (2, 1, 25, 3, 40), (1, 2, 114, 114, 1))


@needs_compiler
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_kernel_gives_values_and_gradients_of_the_full_matrix(size, kind):
    given_ = arrays(1, *size[:4], depth=size[4], kind=kind, biased=kind != "cross")
    found, expected = (values_and_gradients(way, *given_) for way in (by_kernel, full_matrix))

    def compare(one, other):
        # Of the largest: sums over all keys cancel out in some entries.
        bound = 2e-6 * max(1, np.abs(other).max())
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=bound)

    jax.tree.map(compare, found, expected)


@needs_compiler
def test_the_kernel_stays_within_its_memory_on_a_cpu_without_avx(tmp_path):
    program = tmp_path / "attention_memory"
    sources = (Path(__file__).parent, Path(cpu_attention.__file__).parent, jax.ffi.include_dir())
    build = ["g++", "-w", "-std=c++17", "-O0", "-fsanitize=address", "-pthread"]
    build += [f"-I{folder}" for folder in sources]
    built = subprocess.run(
        [*build, str(sources[0] / "attention_memory.cc"), "-o", str(program)], check=False
    )
    if built.returncode:
        pytest.skip("g++ with AddressSanitizer is not installed")
    # With the default red zones all memory happens to be aligned already.
    environment = {"ASAN_OPTIONS": "detect_leaks=0:redzone=16:max_redzone=16"}
    done = subprocess.run([program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@needs_compiler
@pytest.mark.parametrize("float32", [True, False], ids=["float32", "bfloat16"])
def test_the_kernel_serves_attention_of_some_size_on_one_cpu(float32):
    way = functools.partial(attending.choose_implementation, float32=float32)
    assert way(8, 6, 512, 512) == "cpu"
    assert way(8, 6, 1, 512) == "full"  # decoding
    assert way(8, 2, 24, 24) == "full"
    assert way(8, 32, 1024, 1024) == "cpu"
    with jax.set_mesh(jax.make_mesh((1, 1), ("data", "model"))):
        assert way(8, 6, 512, 512) == "cpu"


@needs_compiler
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_rounds_bfloat16_results_once(kind):
    *learned, bias, visibility = arrays(1, 2, 3, 70, 70, depth=64, kind=kind)
    learned = [x.astype(jnp.bfloat16) for x in learned]
    found = values_and_gradients(by_kernel, *learned, bias, visibility)
    widened = [x.astype(jnp.float32) for x in learned]
    y, (*gradients, d_bias) = values_and_gradients(by_kernel, *widened, bias, visibility)
    # Of the cotangent too, and the gradients are those of the values that were given.
    rounded = lambda x: x.astype(jnp.bfloat16)  # noqa: E731
    assert (found[0] == rounded(y)).all()
    for one, other in zip(found[1], (*map(rounded, gradients), d_bias), strict=True):
        assert one.dtype == other.dtype
        bound = 2**-7 * np.abs(other.astype(np.float32)).max()
        np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (one, other)), atol=bound)


@needs_compiler
def test_the_kernel_rounds_to_bfloat16_as_jax_does():
    # One query weighs two keys alike: results are means, a fourth of them between two numbers.
    key = jax.random.normal(jax.random.key(0), (1, 1, 2, 256), jnp.bfloat16)
    edges = jnp.array([jnp.inf, -jnp.inf, jnp.nan, 3e38], jnp.bfloat16)
    value = key.at[0, 0, 0, :4].set(edges)
    query, ones = jnp.zeros((1, 1, 1, 256), jnp.bfloat16), jnp.ones((1, 1), int)
    mask = AttentionMask(ones, jnp.ones((1, 2), int)).broadcast(1, 1, 2)
    y = cpu_attention.attention(query, key, value, None, mask)[0, 0, 0]
    expected = (value[0, 0].astype(jnp.float32).sum(0) / 2).astype(jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(y, np.float32), np.asarray(expected, np.float32))


def test_without_a_compiler_attention_is_xlas(monkeypatch, tmp_path):
    script = """
from t0repro.model import attention
print(attention.choose_implementation(8, 6, 512, 512, float32=True))
"""
    environment = {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "full\n"
    assert not list(tmp_path.iterdir())


def test_bfloat16_keeps_its_types_and_differs_by_its_rounding():
    query, key, value, bias, visibility = arrays(1, 2, 2, 8, 8, kind="blind")
    given_ = (query, key, jnp.asarray(value, jnp.bfloat16), jnp.asarray(bias, jnp.bfloat16))
    ours = values_and_gradients(functools.partial(in_blocks, 4), *given_, visibility)
    theirs = values_and_gradients(full_matrix, *given_, visibility)

    def compare(one, other):
        assert one.dtype == other.dtype
        one, other = (np.asarray(x, np.float32) for x in (one, other))
        np.testing.assert_allclose(one, other, atol=0.02 * np.abs(other).max())

    jax.tree.map(compare, ours, theirs)


@pytest.mark.parametrize(
    "way",
    [
        full_matrix,
        functools.partial(in_blocks, 4),
        pytest.param(by_kernel, marks=needs_compiler),
    ],
    ids=["full", "4", "kernel"],
)
def test_weights_of_bfloat16_logits_sum_to_one_up_to_their_rounding(way):
    """Also where logits are large, as T5's are: their log_z in bfloat16 was off by up to 14%."""
    query, key, value, bias, visibility = arrays(1, 2, 2, 64, 64)
    query, key, bias = (jnp.asarray(x, jnp.bfloat16) for x in (8 * query, key, bias + 20))
    sums = way(query, key, jnp.ones(value.shape, jnp.bfloat16), bias, visibility)
    np.testing.assert_allclose(np.asarray(sums, np.float32), 1, atol=2**-7)


def gradients_of(changes):
    """A compiled loss with its gradients, with dropout, and the parameters to call it with."""
    config = dataclasses.replace(tiny.MODEL, dropout_rate=0.2, **changes)
    model = T5(config, tiny.FLOAT32)
    params = initial_parameters(model, jax.random.key(0))
    (batch,) = tiny.batches(1)

    def gradients(params):
        key = jax.random.key(3)
        return loss_and_gradients(model, params, batch, num_microbatches=2, dropout_key=key)

    return jax.jit(gradients).lower(params).compile(), params


@pytest.mark.always
@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param(
            {"position_bias_per_layer": True, "recompute": "full"}, marks=pytest.mark.slow
        ),
        pytest.param({"scan_layers": True, "recompute": "minimal"}, marks=pytest.mark.slow),
        {"scan_layers": True},
    ],
    ids=["shared position bias", "position bias per layer, recomputed", "scanned", "scanned, kept"],
)
def test_a_models_loss_and_gradients_are_the_same(monkeypatch, changes):
    """With dropout: what is dropped of the weights is dropped of the values."""
    ways = [gradients_of(changes)]
    if cpu_attention.is_available():
        monkeypatch.setattr(attending, "KERNEL_FROM", 0)
        ways.append(gradients_of(changes))
        assert "t0repro_attention_gradients" in ways[-1][0].as_text()
        monkeypatch.setattr(attending, "KERNEL_FROM", 1 << 23)
    monkeypatch.setattr(memory, "ATTENTION_BLOCK_BYTES", 400)
    ways.append(gradients_of(changes))
    assert len({step.as_text() for step, _ in ways}) == len(ways)
    one, *others = [step(params) for step, params in ways]
    compare = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-6)
    for other in others:
        jax.tree.map(compare, one, other)


def test_a_long_sequence_needs_a_fraction_of_the_memory(monkeypatch):
    qkv = [jax.ShapeDtypeStruct((8, 4, 512, 8), jnp.float32)] * 3
    bias = jax.ShapeDtypeStruct((4, 1023), jnp.float32)
    segments = jnp.ones((8, 512), jnp.int32)

    def temporaries(function):
        loss = lambda *x: jnp.sum(function(*x, AttentionMask(segments, segments)))  # noqa: E731
        compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))).lower(*qkv, bias).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    matrix = 4 * 8 * 4 * 512 * 512
    assert temporaries(full_matrix) > matrix
    assert temporaries(functools.partial(in_blocks, 16)) < matrix / 3
    if cpu_attention.is_available():
        assert temporaries(attention) < matrix / 8


def test_blocks_keep_within_the_bound_and_divide_the_length_if_they_can():
    assert number_of_blocks(8, 6, 512, 512) == 1  # 50 MB
    assert number_of_blocks(8, 32, 1024, 1024) == 16  # 1 GiB
    assert number_of_blocks(8, 32, 1000, 1024) == 20  # 16 would not divide 1,000
    assert number_of_blocks(8, 32, 1021, 1021) == 16  # a prime number of queries
    assert number_of_blocks(1 << 20, 64, 509, 509) == 509  # no more than queries
