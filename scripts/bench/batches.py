"""Seconds per batch of T0's size in one process, compared with the predicted steps of a v3-512.

    T0REPRO_DATA_DIR=... T0REPRO_VOCAB=... t0repro cache --mixture t0_train --skip_missing \
        --splits train --output_cache_dir CACHE
    T0REPRO_DATA_DIR=... T0REPRO_VOCAB=... .venv/bin/python -P scripts/bench/batches.py CACHE

1,024 packed rows of 1,024 + 256 tokens, from all tasks of a cache in proportion to their examples,
shuffled. Three ways, each in a separate process: Mesh TensorFlow's unchanged function,
TrainBatches (the same batches), and CachedBatches, which needs no TensorFlow. Small tasks are not
held in memory, because T0's large ones are not. "busiest" is the processor time per batch of the
busiest thread. It limits the speed, however many processors there are.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

LENGTHS = {"inputs": 1024, "targets": 256}
ROWS = 1024
STEPS = {"3B": 0.663, "11B": 3.03}  # seconds, predicted; docs/scaling.md
MIXTURE = "bench_batches"
WAYS = ("mesh", "train", "numpy")


def tensorflow_batches(counts: dict[Path, int], ours: bool) -> Iterator[dict[str, Any]]:
    """Batches by SeqIO and tf.data: TrainBatches', or Mesh TensorFlow's own."""
    from t0repro import compat

    compat.install()
    import seqio

    import t0repro.tasks.t0  # noqa: F401 (registers the tasks)
    from t0repro.config.mtf.dialect import load
    from t0repro.config.mtf.parser import MeshInputs
    from t0repro.data.train_data import TrainBatches
    from t0repro.tasks.registration import add_mixture

    seqio.dataset_providers._MAX_EXAMPLES_TO_MEM_CACHE = 0
    seqio.add_global_cache_dirs([str(next(iter(counts)).parent)])
    add_mixture(MIXTURE, {folder.name: count for folder, count in counts.items()})
    if not ours:
        from t5.models import mesh_transformer

        dataset = mesh_transformer.mesh_train_dataset_fn(
            MIXTURE, LENGTHS, shuffle=True, seed=17, use_cached=True
        )
        return iter(dataset.batch(ROWS, drop_remainder=True).prefetch(2).as_numpy_iterator())
    params = (
        f"MIXTURE_NAME = '{MIXTURE}'", f"run.sequence_length = {LENGTHS}",
        f"run.batch_size = {ROWS}", "run.train_steps = 1", "run.save_checkpoints_steps = 1",
        "mesh_train_dataset_fn.use_cached = True", "mesh_train_dataset_fn.seed = 17",
        "pack_dataset.use_custom_ops = False", "utils.run.mesh_shape = []",
        "serialize_num_microbatches.tokens_per_microbatch_per_replica = None",
    )  # fmt: skip
    files = ("dataset.gin", "models/t5.1.1.small.gin", "learning_rate_schedules/constant_0_001.gin")
    return TrainBatches(load(MeshInputs("unused", files, params)).run).open(0, None)


def numpy_batches(counts: dict[Path, int]) -> Iterator[dict[str, Any]]:
    """Batches by numpy, without TensorFlow."""
    from t0repro.data.cached import CachedBatches

    rates = {str(folder): float(count) for folder, count in counts.items()}
    return CachedBatches(rates, LENGTHS, ROWS, seed=17).open(0, None)


def thread_seconds() -> dict[str, float]:
    """Processor seconds of each thread of this process, by its id."""
    seconds = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            fields = (task / "stat").read_text().rsplit(")", 1)[1].split()
        except OSError:  # it has ended
            continue
        seconds[task.name] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return seconds


def measure(batches: Iterator[dict[str, Any]], warm: int, count: int) -> dict[str, float]:
    """Seconds per batch after the first `warm` batches."""
    started, examples = time.perf_counter(), 0
    for _ in range(warm):
        next(batches)
    start = time.perf_counter() - started
    wall, used, threads = time.perf_counter(), time.process_time(), thread_seconds()
    for _ in range(count):
        examples += int(np.asarray(next(batches)["inputs_segmentation"]).max(axis=1).sum())
    wall, used = time.perf_counter() - wall, time.process_time() - used
    after = thread_seconds()
    busiest = max(after[name] - threads.get(name, 0.0) for name in after)
    return {
        "start": start, "wall": wall / count, "processors": used / count,
        "busiest": busiest / count, "examples": examples / count, "threads": len(after),
    }  # fmt: skip


def main() -> None:
    """Measures one way, or starts a process for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("cache", type=Path)
    parser.add_argument("--warm", type=int, default=3, help="batches before those that count")
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        counts = {
            path.parent: json.loads(path.read_text())["examples"]
            for path in sorted(options.cache.resolve().glob("*/stats.train.json"))
        }
        numpy_alone = options.way == "numpy"
        batches = (
            numpy_batches(counts)
            if numpy_alone
            else tensorflow_batches(counts, options.way == "train")
        )
        print(json.dumps(measure(batches, options.warm, options.batches)), flush=True)
        os._exit(0)  # do not wait for tf.data's hundreds of threads
    for way in WAYS:
        load = os.getloadavg()[0]
        done = subprocess.run(
            [sys.executable, "-P", *sys.argv, "--way", way], capture_output=True, text=True
        )
        if done.returncode:
            raise SystemExit(done.stderr[-3000:])
        found = json.loads(done.stdout.splitlines()[-1])
        shown = ", ".join(f"{name} {value:,.2f}" for name, value in found.items())
        ratios = ", ".join(
            f"{found['busiest'] / step:.2f} of {size}'s" for size, step in STEPS.items()
        )
        print(
            f"{way}: {shown}; the busiest thread takes {ratios} step; load {load:.0f}", flush=True
        )


if __name__ == "__main__":
    main()
