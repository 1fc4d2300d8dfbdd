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

from gpu_attention import compiled, peak

from t0repro.partitioning.topologies import devices_of

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
        device = devices_of(topology)[0][0]
        program = compiled(name, device, HEADS[size], options.rows, options.length)
        line = f"{size}, {topology}, {name}: peak {peak(program):,.0f} MiB"
        if name != "blocks":
            costs: Any = program.cost_analysis()
            seconds = costs["optimal_seconds"]  # negative if the compiler does not know
            line += f", {costs['bytes accessed'] / 2**30:.2f} GiB read or written"
            line += f", {1e3 * seconds:.2f} ms" if seconds > 0 else ""
        print(line, flush=True)


if __name__ == "__main__":
    main()
