"""Compiles a layer's attention for a TPU in each implementation; prints its memory and its time.

    python scripts/bench/tpu_attention.py --topologies v5p-8 v6e-4 --sizes large xl xxl

Values and gradients of an encoder layer of T5 1.1, on one device: packed rows, heads of 64,
bfloat16 with float32 logits. The arguments and results of a large's take 128 MiB with 8 rows of
1,024. Reads, writes and seconds are the compiler's estimates. It counts the body of a loop once, so
blocks have none. Needs libtpu (the extra tpu) and no TPU.
"""

from __future__ import annotations

import argparse
import itertools
import os
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from t0repro.model import tpu_attention
from t0repro.model.attention import Visibility, full_matrix, number_of_blocks
from t0repro.model.blockwise_attention import blockwise_attention
from t0repro.partitioning.topologies import devices_of

D_KV = 64
HEADS = {"large": 16, "xl": 32, "xxl": 64}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--topologies", nargs="+", default=["v5p-8"])
    parser.add_argument("--sizes", nargs="+", choices=HEADS, default=["large"])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    options = parser.parse_args()
    for topology, size, name in itertools.product(
        options.topologies, options.sizes, ("kernel", "blocks", "full")
    ):
        program = compiled(name, topology, HEADS[size], options.rows, options.length)
        line = f"{size}, {topology}, {name}: peak {_mib(program):,.0f} MiB"
        if name != "blocks":
            costs: Any = program.cost_analysis()
            seconds = costs["optimal_seconds"]  # negative if the compiler does not know
            line += f", {costs['bytes accessed'] / 2**30:.2f} GiB read or written"
            line += f", {1e3 * seconds:.2f} ms" if seconds > 0 else ""
        print(line, flush=True)


def _mib(program: jax.stages.Compiled) -> float:
    return program.memory_analysis().peak_memory_in_bytes / 2**20


def compiled(name: str, topology: str, heads: int, rows: int, length: int) -> jax.stages.Compiled:
    """The program that computes attention's values and gradients on one device."""

    def in_blocks(query, key, value, bias, visibility):
        blocks = number_of_blocks(rows, heads, length, length)
        present = visibility.for_all(rows, length, length)
        return blockwise_attention(query, key, value, bias, present, blocks)

    way = {"kernel": tpu_attention.attention, "blocks": in_blocks, "full": full_matrix}[name]

    def both(query, key, value, bias, segments, d_y):
        def attended(query, key, value, bias):
            query, key = query.astype(jnp.float32), key.astype(jnp.float32)
            return way(query, key, value, bias, Visibility(segments, segments))

        y, pull_back = jax.vjp(attended, query, key, value, bias)
        return y, pull_back(d_y)

    mesh = Mesh(np.array(devices_of(topology)[0][:1]).reshape(1, 1), ("data", "model"))

    def shape(dtype, *sizes):
        sharding = NamedSharding(mesh, PartitionSpec())
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)

    of_heads = shape(jnp.bfloat16, rows, heads, length, D_KV)
    bias, segments = shape(jnp.float32, heads, 2 * length - 1), shape(jnp.int32, rows, length)
    with jax.set_mesh(mesh):
        arguments = (of_heads, of_heads, of_heads, bias, segments, of_heads)
        return jax.jit(both).lower(*arguments).compile()


if __name__ == "__main__":
    main()
