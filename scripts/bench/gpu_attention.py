"""Compares a layer's attention in each implementation: its memory and, on a device here, its time.

    python scripts/bench/gpu_attention.py                     # on this machine's GPU, or another
    python scripts/bench/gpu_attention.py --cards a100 h100   # compiles; needs no GPU

Compiling for a card needs pip's jax-cuda12-plugin and jax-cuda12-pjrt, of jax's version, and ptxas,
which XLA looks for in `bin` of XLA_FLAGS=--xla_gpu_cuda_data_dir=FOLDER.

Values and gradients of a T5 1.1 large's encoder layer, on one device: packed rows, 16 heads of 64,
bfloat16 with float32 logits. The arguments and results take 128 MiB with 8 rows of 1,024. Here it
prints the median of 20 runs, and the largest difference of the values and of each gradient from
those of full matrices, against the largest entry.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

HEADS, D_KV = 16, 64
RUNS = 20

# XLA's own descriptions of devices, as its compiler wants them without a device
# (GpuTargetConfigProto). Sources: NVIDIA's data sheets and CUDA's table of compute capabilities.
_CARD = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {shared}
  threads_per_core_limit: 2048
  core_count: {cores}
  fpus_per_core: {fpus}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth}
  l2_cache_size: {cache}
  clock_rate_ghz: {clock}
  device_memory_size: {memory}
  shared_memory_per_block_optin: {optin}
  cuda_compute_capability {{ major: {major} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 patch: 0 }}
device_description_str: "{name}"
"""
_CARDS: dict[str, dict[str, Any]] = {
    "a100": {
        "name": "NVIDIA A100-SXM4-40GB",
        "major": 8,
        "cores": 108,
        "fpus": 64,
        "shared": 167936,
        "optin": 166912,
        "cache": 41943040,
        "clock": 1.41,
        "bandwidth": 1555200000000,
        "memory": 42331013120,
    },
    "h100": {
        "name": "NVIDIA H100 80GB HBM3",
        "major": 9,
        "cores": 132,
        "fpus": 128,
        "shared": 233472,
        "optin": 232448,
        "cache": 52428800,
        "clock": 1.98,
        "bandwidth": 3352320000000,
        "memory": 84929347584,
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cards", nargs="+", default=[], choices=_CARDS)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--segments", type=int, default=4, help="of a row; only for the time here")
    options = parser.parse_args()
    if options.cards:
        os.environ["JAX_PLATFORMS"] = "cpu"
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_autotune_level=0"  # it would need the card
    for name in options.cards:
        device = described(name)
        for way in ("kernel", "blocks", "full"):
            program = compiled(way, device, HEADS, options.rows, options.length)
            print(f"{name}, {way}: peak {peak(program):,.0f} MiB", flush=True)
    if not options.cards:
        measure_here(options.rows, options.length, options.segments)


def described(name: str) -> Any:
    """A device that need not be attached."""
    from jax.experimental import topologies

    config = _CARD.format(**_CARDS[name])
    return topologies.get_topology_desc("", "cuda", topology="1x1x1", target_config=config).devices[
        0
    ]


def peak(program: Any) -> float:
    """MiB of arguments, results and temporaries, as far as the compiler says."""
    used = program.memory_analysis()
    # XLA for GPUs has no peak in its figures.
    sizes = used.argument_size_in_bytes, used.output_size_in_bytes, used.temp_size_in_bytes
    return (used.peak_memory_in_bytes or sum(sizes)) / 2**20


def compiled(way: str, device: Any, heads: int, rows: int, length: int) -> Any:
    """The program that computes attention's values and gradients on one device."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array([device]).reshape(1, 1), ("data", "model"))

    def shape(dtype: Any, *sizes: int) -> Any:
        sharding = NamedSharding(mesh, PartitionSpec())
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)

    of_heads = shape(jnp.bfloat16, rows, heads, length, D_KV)
    bias, segments = shape(jnp.float32, heads, 2 * length - 1), shape(jnp.int32, rows, length)
    with jax.set_mesh(mesh):
        arguments = (of_heads, of_heads, of_heads, bias, segments, of_heads)
        function = both(implementation(way, device.platform, heads, rows, length))
        return jax.jit(function).lower(*arguments).compile()


def implementation(
    way: str, platform: str, heads: int, rows: int, length: int
) -> Callable[..., Any]:
    """Attention in full matrices, in blocks or by the platform's kernel."""
    from t0repro.model import cpu_attention, gpu_attention, tpu_attention
    from t0repro.model.attention import number_of_blocks
    from t0repro.model.blockwise_attention import blockwise_attention
    from t0repro.model.full_attention import full_matrix

    def in_blocks(query: Any, key: Any, value: Any, bias: Any, visibility: Any) -> Any:
        blocks = number_of_blocks(rows, heads, length, length)
        present = visibility.broadcast(rows, length, length)
        return blockwise_attention(query, key, value, bias, present, blocks)

    def on_cpu(query: Any, key: Any, value: Any, bias: Any, visibility: Any) -> Any:
        value, present = value.astype("float32"), visibility.broadcast(rows, length, length)
        return cpu_attention.attention(query, key, value, bias, present)

    kernels = {"tpu": tpu_attention.attention, "gpu": gpu_attention.attention, "cpu": on_cpu}
    return {"kernel": kernels[platform], "blocks": in_blocks, "full": full_matrix}[way]


def both(way: Callable[..., Any]) -> Callable[..., Any]:
    """Values and gradients, as in the model, whose logits are float32."""
    import jax
    import jax.numpy as jnp

    from t0repro.model.attention_mask import AttentionMask

    def run(query: Any, key: Any, value: Any, bias: Any, segments: Any, d_y: Any) -> Any:
        def attended(query: Any, key: Any, value: Any, bias: Any) -> Any:
            query, key = query.astype(jnp.float32), key.astype(jnp.float32)
            y = way(query, key, value, bias, AttentionMask(segments, segments))
            return y.astype(d_y.dtype)

        y, pull_back = jax.vjp(attended, query, key, value, bias)
        return y, pull_back(d_y)

    return run


def measure_here(rows: int, length: int, segments: int) -> None:
    """Prints time, memory and differences on JAX's first device."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from t0repro.model import cpu_attention

    rng, device = np.random.default_rng(0), jax.devices()[0]
    if device.platform == "cpu":
        cpu_attention.is_available()  # builds it
    query, key, value, d_y = (
        jnp.asarray(rng.normal(size=(rows, HEADS, length, D_KV)), jnp.bfloat16) for _ in range(4)
    )
    bias = jnp.asarray(rng.normal(size=(HEADS, 2 * length - 1)), jnp.float32)
    of_row = 1 + jnp.arange(length, dtype=jnp.int32) * segments // length
    seen = jnp.broadcast_to(of_row, (rows, length))
    given = jax.device_put((query * D_KV**-0.5, key, value, bias, seen, d_y), device)
    expected: Any = None
    for way in ("full", "blocks", "kernel"):
        program = compiled(way, device, HEADS, rows, length)
        found = jax.block_until_ready(program(*given))
        seconds = []
        for _ in range(RUNS):
            start = time.perf_counter()
            jax.block_until_ready(program(*given))
            seconds.append(time.perf_counter() - start)
        values = [np.asarray(x, np.float32) for x in jax.tree.leaves(found)]
        expected = expected or values
        pairs = zip(values, expected, strict=True)
        apart = ", ".join(f"{np.abs(x - y).max() / np.abs(y).max():.1e}" for x, y in pairs)
        print(
            f"{device.device_kind}, {way}: {1e3 * statistics.median(seconds):.2f} ms, "
            f"peak {peak(program):,.0f} MiB, difference {apart}",
            flush=True,
        )


if __name__ == "__main__":
    main()
