"""Matmuls of two arrays, written so that the CPU computes those of bfloat16 arrays fast."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from t0repro.model.shapes import Array
from t0repro.partitioning.devices import count_shards, device_to_trace_for

# Names of the rounded results, for policies of `jax.checkpoint`: it sees no matmul in a function
# with gradients of its own. The second has an index in both operands and in the result.
MATMUL, BATCHED_MATMUL = "matmul", "batched_matmul"

# Compiler options of programs whose results are compared bit for bit. XLA for GPUs measures which
# kernels are fastest each time it compiles, and so would choose others on another day; with these,
# cuBLASLt's first choice computes each matmul. Other platforms ignore them.
FIXED_KERNELS: dict[str, str | bool] = {
    "xla_gpu_deterministic_ops": True,
    "xla_gpu_enable_triton_gemm": False,
}


def einsum(equation: str, x: Array, y: Array, dtype: DTypeLike | None = None) -> Array:
    """`jnp.einsum` of two arrays, like "bhqd,bhkd->bhqk".

    XLA on CPU converts bfloat16 operands to float32 unless the result is float32, and so leaves the
    processor's bfloat16 instructions (AVX-512 and AMX) unused. There the result is computed in
    float32, then rounded, in the forward pass and in the gradients; the gradient of a float32
    result is rounded first. Other platforms compile what they would without this function.

    Args:
      equation: each index of an operand is in the other one or in the result.
      x: the first operand.
      y: the second operand.
      dtype: of the accumulation and of the result; None for that of the operands.
    """
    operands = {x.dtype, y.dtype}
    if operands == {jnp.dtype("bfloat16")} and device_to_trace_for().platform == "cpu":
        result: Any = _einsum_in_float32(equation, x, y, dtype or x.dtype)
        return result
    return jnp.einsum(equation, x, y, preferred_element_type=dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def _einsum_in_float32(equation: str, x: Array, y: Array, dtype: DTypeLike) -> Array:
    return _multiply(equation, x, y).astype(dtype)


def _multiply(equation: str, x: Array, y: Array) -> Array:
    """The result in float32, of one matmul for all heads of all rows if there are any.

    With two batch axes XLA would convert the operands after all.
    """
    if not equation.startswith("bh") or count_shards("heads") > 1:
        return jnp.einsum(equation, x, y, preferred_element_type=jnp.float32)
    merged = (each.reshape(-1, *each.shape[2:]) for each in (x, y))
    result = _multiply(equation.replace("bh", "b"), *merged)
    return result.reshape(*x.shape[:2], *result.shape[1:])


def _forward(equation: str, x: Array, y: Array, dtype: DTypeLike) -> tuple[Array, Any]:
    left, right, result = re.split(",|->", equation)
    name = BATCHED_MATMUL if set(left) & set(right) & set(result) else MATMUL
    return checkpoint_name(_einsum_in_float32(equation, x, y, dtype), name), (x, y)


def _backward(equation: str, dtype: DTypeLike, residuals: Any, d_result: Array) -> tuple[Any, Any]:
    # Without this rule, JAX would multiply by a float32 gradient, with both operands converted.
    (x, y), (left, right, result) = residuals, re.split(",|->", equation)
    d_result = d_result.astype(x.dtype)
    d_x = _einsum_in_float32(f"{result},{right}->{left}", d_result, y, x.dtype)
    return d_x, _einsum_in_float32(f"{left},{result}->{right}", x, d_result, y.dtype)


_einsum_in_float32.defvjp(_forward, _backward)
