"""Attention on CPUs, computed in float32 by the kernel in attention.cc.

This machine's C++ compiler builds the kernel for this machine's instructions when a program first
needs it; the user's cache keeps the library. Without a compiler nothing is built, and other
implementations take over.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from t0repro.model.attention_mask import AttentionMask
from t0repro.model.shapes import Array, Float
from t0repro.partitioning.devices import shard_kernel
from t0repro.partitioning.flops import ATTENDED, KERNEL_MATMULS
from t0repro.storage import make_folder

_PROCESSORS = Path("/proc/cpuinfo")
_SOURCE = Path(__file__).with_name("attention.cc")
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-shared", "-pthread")
_TARGETS = tuple(KERNEL_MATMULS)
# Logical axes of what is sharded; of query, key, value, bias and mask.
_ROWS = ("batch", "heads")
_SEEN = (*[_ROWS] * 3, ("heads",), *[("batch",)] * 4)


def attention(
    query: Float[Array, "batch heads length d_kv"],
    key: Float[Array, "batch heads keys d_kv"],
    value: Float[Array, "batch heads keys d_kv"],
    position_bias: Float[Array, "heads offsets"] | None,
    mask: AttentionMask,
) -> Float[Array, "batch heads length d_kv"]:
    """Like t0repro.model.attention.attention, without dropout; only if `is_available`."""
    if position_bias is None:
        # A bias without offsets tells the kernel that there is none.
        position_bias = jnp.zeros((query.shape[1], 0), jnp.float32)
    mask = mask.broadcast(query.shape[0], query.shape[2], key.shape[2])
    query, key = query.astype(value.dtype), key.astype(value.dtype)
    attended: Any = _attend(query, key, value, position_bias.astype(jnp.float32), mask)
    return attended


@jax.custom_vjp
def _attend(query: Array, key: Array, value: Array, bias: Array, mask: Any) -> Array:
    return _forward(query, key, value, bias, mask)[0]


def _forward(query: Array, key: Array, value: Array, bias: Array, mask: Any) -> tuple[Array, Any]:
    def run(query: Array, *others: Array) -> Any:
        log_z = jax.ShapeDtypeStruct(query.shape[:-1], jnp.float32)
        return _call(_TARGETS[0], (query, *others), (query, log_z))

    y, log_z = shard_kernel(run, _SEEN, (_ROWS, _ROWS))(query, key, value, bias, *mask)
    y, log_z = checkpoint_name(y, ATTENDED), checkpoint_name(log_z, ATTENDED)
    return y, (query, key, value, bias, mask, log_z)


def _backward(residuals: Any, d_y: Array) -> tuple[Any, ...]:
    query, key, value, bias, mask, log_z = residuals

    def run(query: Array, key: Array, value: Array, bias: Array, *others: Array) -> Any:
        d_bias = jax.ShapeDtypeStruct((query.shape[0], *bias.shape), bias.dtype)
        return _call(_TARGETS[1], (query, key, value, bias, *others), (query, key, value, d_bias))

    run = shard_kernel(run, (*_SEEN, _ROWS, _ROWS), (_ROWS,) * 4)
    d_query, d_key, d_value, d_bias = run(query, key, value, bias, *mask, log_z, d_y)
    return d_query, d_key, d_value, jnp.sum(d_bias, axis=0), None


_attend.defvjp(_forward, _backward)


def _call(target: str, arguments: tuple[Any, ...], results: tuple[Any, ...]) -> Any:
    """Calls a function of the kernel; `results` have its results' shapes.

    It reads and writes [batch, length, heads, d_kv], the order of projections, so that no array is
    rearranged.
    """

    def swap(x: Any) -> Any:
        return x.swapaxes(1, 2) if x.ndim == 4 else x

    types = jax.eval_shape(lambda *results: tuple(map(swap, results)), *results)
    call = jax.ffi.ffi_call(target, types, vmap_method="sequential")
    return tuple(map(swap, call(*map(swap, arguments))))


@functools.cache
def is_available() -> bool:
    """Whether the kernel is registered with JAX; builds it if this machine has not built it yet."""
    path = _library()
    if path is None:
        return False
    try:
        functions = ctypes.CDLL(str(path))
    except OSError as error:
        logging.warning("attention: %s cannot be loaded (%s); using XLA's matmuls", path, error)
        return False
    for target in _TARGETS:
        jax.ffi.register_ffi_target(
            target, jax.ffi.pycapsule(getattr(functions, target)), platform="cpu"
        )
    return True


def _library() -> Path | None:
    """The library built from the current source; None if it cannot be built."""
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
    if compiler is None:
        return None
    include = jax.ffi.include_dir()
    # Machines with different instruction sets may share a home folder.
    parts = (
        _SOURCE.read_bytes(),
        repr((compiler, _FLAGS, jax.__version__, describe_processor())).encode(),
    )
    name = hashlib.sha256(b"".join(parts)).hexdigest()[:16]
    cache = cache_folder()
    path = cache / f"attention-{name}.so"
    if path.exists():
        return path
    try:
        make_folder(cache)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            built = Path(folder) / path.name
            command = [compiler, *_FLAGS, f"-I{include}", str(_SOURCE), "-o", str(built)]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
            built.replace(path)  # atomic, so that processes may build it at the same time
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or str(error)
        logging.warning("attention: no kernel was built, using XLA's matmuls: %s", reason[-500:])
        return None
    return path


def cache_folder() -> Path:
    """The user's cache of what this machine builds."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "t0repro"


def describe_processor() -> str:
    """Whatever `-march=native` depends on."""
    try:
        lines = _PROCESSORS.read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    return "".join(sorted({x for x in lines if x.startswith(("flags", "Features", "model name"))}))
