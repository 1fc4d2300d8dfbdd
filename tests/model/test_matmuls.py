"""Matmuls of bfloat16 arrays on a CPU; other platforms compile what they would without them."""

import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from t0repro.model.matmuls import BATCHED_MATMUL, MATMUL, einsum

CASES = {
    "ri,io->ro": ((48, 32), (32, 64)),
    "bhqd,bhkd->bhqk": ((2, 3, 20, 16), (2, 3, 24, 16)),
    "bhqk,bhkd->bhqd": ((2, 3, 20, 24), (2, 3, 24, 16)),
}
DEVICES = {
    "tpu": AbstractDevice("TPU v4", 1, "tpu"),
    "cuda": AbstractDevice("NVIDIA H100", 1, "gpu"),
}


def operands(equation, dtype):
    """Two operands and a gradient of the result, normally distributed."""
    x, y = (
        jax.random.normal(jax.random.key(at), shape, dtype)
        for at, shape in enumerate(CASES[equation])
    )
    result = jax.eval_shape(functools.partial(jnp.einsum, equation), x, y)
    return x, y, jax.random.normal(jax.random.key(2), result.shape, dtype)


def result_and_gradients(function, equation):
    def compute(x, y, d_result):
        result, pull_back = jax.vjp(functools.partial(function, equation), x, y)
        return result, *pull_back(d_result)

    return jax.jit(compute)


def lowered(function, equation, dtype, platform):
    arrays = operands(equation, dtype)
    scope = contextlib.nullcontext()
    if platform != "cpu":
        mesh = AbstractMesh((1,), ("data",), abstract_device=DEVICES[platform])
        scope = use_abstract_mesh(mesh)
    with scope:
        traced = result_and_gradients(function, equation).trace(*arrays)
        return traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("equation", CASES)
@pytest.mark.parametrize(
    ("platform", "dtype"),
    [("tpu", jnp.bfloat16), ("cuda", jnp.bfloat16), ("tpu", jnp.float32), ("cpu", jnp.float32)],
)
def test_other_platforms_and_dtypes_compile_jaxs_own_einsum(platform, dtype, equation):
    assert lowered(einsum, equation, dtype, platform) == lowered(
        jnp.einsum, equation, dtype, platform
    )


def as_logits(equation, x, y):
    """A float32 result, with a float32 gradient."""
    return einsum(equation, x, y, jnp.float32).astype(x.dtype)


@pytest.mark.parametrize("function", [einsum, as_logits])
@pytest.mark.parametrize("equation", CASES)
def test_a_cpu_multiplies_bfloat16_and_adds_in_float32(equation, function):
    text = lowered(function, equation, jnp.bfloat16, "cpu")
    types = re.findall(r"dot_general.*: \(tensor<.*x(\w+)>, tensor<.*x(\w+)>\) -> .*x(\w+)>", text)
    # The result and both gradients.
    assert types == [("bf16", "bf16", "f32")] * 3
    # Where a matmul has two batch axes, XLA converts its operands after all.
    assert not re.search(r"batching_dims = \[\d+,", text)


@pytest.mark.parametrize("equation", CASES)
def test_results_on_a_cpu_are_exact_up_to_one_rounding(equation):
    arrays = operands(equation, jnp.bfloat16)
    exact = result_and_gradients(einsum, equation)(*(x.astype(jnp.float32) for x in arrays))
    for computed, expected in zip(
        result_and_gradients(einsum, equation)(*arrays), exact, strict=True
    ):
        assert computed.dtype == jnp.bfloat16
        # bfloat16 has 8 bits, so rounding to nearest errs by at most 2**-8 of a value.
        np.testing.assert_allclose(
            np.asarray(computed, np.float32), expected, rtol=2**-8, atol=1e-5
        )


@pytest.mark.parametrize("equation", CASES)
def test_a_rematerialization_policy_saves_a_rounded_result_by_its_name(equation):
    """On a CPU the policies of `jax.checkpoint` see no matmul in it."""
    x, y, _ = operands(equation, jnp.bfloat16)

    def matmuls(policy):
        def square(x):
            return jnp.sum(jnp.square(jnp.square(einsum(equation, x, y))))

        gradient = jax.grad(jax.checkpoint(square, policy=policy))
        return str(jax.make_jaxpr(gradient)(x)).count(" dot_general[")

    names = jax.checkpoint_policies.save_only_these_names
    own, other = (BATCHED_MATMUL, MATMUL) if equation.startswith("b") else (MATMUL, BATCHED_MATMUL)
    assert matmuls(names(own)) < matmuls(names(other)) == matmuls(None)
