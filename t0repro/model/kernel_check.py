"""Compares an attention kernel with full matrices on the device, before its first use there.

No test here runs on every accelerator, compiler and driver that a user has. So the first time that
a kernel is chosen, it computes two small cases, values and gradients, and full matrices compute
the same in float32. If a result differs by more than its bound, or the kernel does not compile, the
kernel is not used in this process, and a line says why.

A kernel that passes leaves an empty file in JAX's compilation cache, or else in the user's cache.
Its name stands for the kernel's source, the kind of device and the versions of JAX and the driver:
the comparison, which takes seconds, is not repeated until one of them changes.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import hashlib
import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from t0repro.model import cpu_attention
from t0repro.model.attention_mask import AttentionMask
from t0repro.model.full_attention import full_matrix
from t0repro.partitioning.processes import all_agree
from t0repro.progress import say
from t0repro.storage import is_address, make_folder

Kernel = Callable[..., Any]

EXACT, ROUNDED = 1e-5, 2**-6
"""The largest difference from float32, relative to the largest entry.

The C++ kernel computes in float32; bfloat16 results are rounded. Those of GPUs and TPUs round the
operands of matmuls to TF32 or bfloat16, which changed results by up to 0.006 in the cases below.
"""

_RESULTS = ("values", "gradient of query", "gradient of key", "gradient of value")
_BATCH, _HEADS, _DEPTH = 2, 2, 64
# Several blocks of each kernel, the last of which is padded.
_LENGTH, _KEYS = 600, 300


def is_sound(name: str, kernel: Kernel, device: Any, *, float32: bool, spans: bool = False) -> bool:
    """Whether a kernel agrees with full matrices on devices of a kind; True if none is attached.

    Args:
      name: cpu, tpu or gpu.
      kernel: computes attention from query, key, value, position bias and mask.
      device: a device of the kind; it may be abstract.
      float32: whether values are float32; otherwise they are bfloat16.
      spans: whether devices of several processes run it together, all of which call this function.
    """
    kind = device.device_kind
    attached = next((x for x in jax.local_devices() if x.device_kind == kind), None)
    if attached is None:
        return True  # compiled for devices elsewhere
    sound = _check(name, kernel, attached, float32)
    return all_agree(f"attention/{name}/{float32}", sound) if spans else sound


@functools.cache
def _check(name: str, kernel: Kernel, device: Any, float32: bool) -> bool:
    record = _record(name, device, float32)
    if record.exists():
        return True
    # The caller may be tracing a step, for several devices. A thread has neither trace nor mesh.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        fault = thread.submit(find_fault, name, kernel, device, float32=float32).result()
    if fault:
        say(
            f"attention: not using the kernel for {name}: on {device.device_kind},"
            f" {fault}. --attention kernel uses it nevertheless."
        )
        return False
    with contextlib.suppress(OSError):
        make_folder(record.parent)
        record.touch()
    return True


def find_fault(name: str, kernel: Kernel, device: Any, *, float32: bool) -> str:
    """What is wrong with a kernel's results on a device, in words; "" if nothing is."""
    bound = EXACT if name == "cpu" and float32 else ROUNDED
    for case, arguments in _cases(jnp.float32 if float32 else jnp.bfloat16).items():
        try:
            expected = _values_and_gradients(full_matrix, _exact(arguments), device)
            results = _values_and_gradients(kernel, arguments, device)
        except Exception as error:  # whatever a compiler or driver raises
            lines = str(error).splitlines() or [""]
            return f"{case} attention fails: {type(error).__name__}: {lines[0]}"
        biased = arguments[3] is not None
        names = (*_RESULTS, *["gradient of position bias"] * biased)
        for result, got, want in zip(names, results, expected, strict=True):
            difference = np.abs(got - want).max() / np.abs(want).max()
            if not difference <= bound:  # NaN too
                return f"{case} attention differs: {result} by {difference:.2g}, more than {bound}"
    return ""


def _cases(dtype: Any) -> dict[str, tuple[Any, ...]]:
    """Query, key, value, position bias and mask of each case, by its name."""
    rng = np.random.default_rng(0)

    def normal(*sizes: int) -> Any:
        return jnp.asarray(rng.normal(size=sizes).astype(np.float32))

    def segments(size: int, *ends: int) -> Any:
        row = np.searchsorted(ends, np.arange(size), side="right") + 1
        return jnp.asarray(np.tile(np.where(row > len(ends), 0, row), (_BATCH, 1)), jnp.int32)

    def case(keys: int, biased: bool, mask: AttentionMask) -> tuple[Any, ...]:
        # As in the model, queries and keys are float32 with values of the activations' dtype.
        query, key, value = (
            normal(_BATCH, _HEADS, size, _DEPTH).astype(dtype) for size in (_LENGTH, keys, keys)
        )
        bias = normal(_HEADS, _LENGTH + keys - 1) if biased else None
        query = query.astype(jnp.float32) * _DEPTH**-0.5
        return query, key.astype(jnp.float32), value, bias, mask

    # Two texts and padding; that of the queries sees no key.
    packed = segments(_LENGTH, _LENGTH // 3, _LENGTH - 50)
    read = segments(_KEYS, _KEYS // 2, _KEYS)
    order = jnp.arange(_LENGTH, dtype=jnp.int32)[None]
    return {
        "causal": case(_LENGTH, True, AttentionMask(packed, packed, order, order)),
        "cross": case(_KEYS, False, AttentionMask(packed, read)),
    }


def _exact(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    *learned, mask = arguments
    return *(None if x is None else x.astype(jnp.float32) for x in learned), mask


def _values_and_gradients(function: Kernel, arguments: tuple[Any, ...], device: Any) -> list[Any]:
    """The values and the gradients of what is learned, in float32 on the host."""

    @jax.jit
    def compute(learned: Any, mask: Any) -> Any:
        values, pull_back = jax.vjp(lambda *x: function(*x, mask), *learned)
        # Any cotangent whose entries differ.
        cotangent = jnp.cos(jnp.arange(values.size).reshape(values.shape)).astype(values.dtype)
        return values, pull_back(cotangent)

    *learned, mask = arguments
    # Full matrices are exact on GPUs and TPUs only so; kernels are to be as they are used.
    precision = "highest" if function is full_matrix else None
    with jax.default_matmul_precision(precision) if precision else contextlib.nullcontext():
        results = compute(*jax.device_put((learned, mask), device))
    return [np.asarray(x, np.float32) for x in jax.tree.leaves(results)]


def _record(name: str, device: Any, float32: bool) -> Path:
    """The file that stands for a kernel that passed."""
    versions = (
        jax.__version__,
        importlib.metadata.version("jaxlib"),
        device.client.platform_version,
    )
    about = (name, float32, device.device_kind, versions, cpu_attention.describe_processor())
    digest = hashlib.sha256(repr(about).encode())
    for source in (Path(__file__), *sorted(Path(__file__).parent.glob("*attention*"))):
        digest.update(source.read_bytes())
    folder = jax.config.jax_compilation_cache_dir
    parent = Path(folder) if folder and not is_address(folder) else cpu_attention.cache_folder()
    return parent / f"attention-{name}-{digest.hexdigest()[:16]}.passed"
