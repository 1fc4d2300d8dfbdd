"""Examples per second of one cache, read from this disk and from buckets of two emulators.

    python scripts/bench/bucket_reads.py                     # 40,000 examples in 16 shards

Each reading runs in its own process: once as training without SeqIO reads a cache, once as SeqIO
does (records through tf.data). The emulators (gcp-storage-emulator, moto) run in this process, on
loopback. Loopback is not a network: it has no latency and no bandwidth limit, and the emulators,
written in Python, compete for the same processors. The figures show what reading from a bucket
costs here, not what a store delivers.
"""

from __future__ import annotations

import argparse
import json
import os
import socketserver
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests"))

SHARDS, TOKENS = 16, {"inputs": 250, "targets": 10}


def write_cache(folder: Path, examples: int) -> int:
    """Writes a complete cache of random tokens; returns its bytes."""
    import numpy as np

    from t0repro.tasks.prompt_cache.folders import MARKER, shard_names
    from t0repro.tasks.prompt_cache.records import FeatureEncoder, RecordFile, example, varint

    draw = np.random.default_rng(0)
    encoders = {name: FeatureEncoder(name) for name in TOKENS}
    size = 0
    for number, name in enumerate(shard_names("train", SHARDS)):
        file = RecordFile(folder / name)
        for _ in range(number, examples, SHARDS):
            tokens = {each: draw.integers(2, 32100, count) for each, count in TOKENS.items()}
            packed = {each: b"".join(map(varint, map(int, tokens[each]))) for each in tokens}
            file.write(example([encoders[each].varints(packed[each]) for each in TOKENS]))
        file.close()
        size += file.bytes
    features = {name: {"shape": [None], "dtype": "int32"} for name in TOKENS}
    info = {"num_shards": SHARDS, "features": features, "seqio_version": "0.0.18"}
    (folder / "info.train.json").write_text(json.dumps(info))
    (folder / "stats.train.json").write_text(json.dumps({"examples": examples}))
    (folder / MARKER).write_text("tfrecord")
    return size


def read(place: str, reader: str) -> tuple[float, float]:
    """Examples per second of one pass over a cache, and per second of this process's processors."""
    from t0repro.storage import input_path
    from t0repro.tasks.prompt_cache.folders import shard_names

    folder = input_path(place)
    shards = [folder / name for name in shard_names("train", SHARDS)]
    if reader == "t0repro":
        from t0repro.data.cached import read_in_turns
        from t0repro.tasks.prompt_cache.records import integers

        examples = (integers(record, list(TOKENS)) for record in read_in_turns(shards))
    else:
        import tensorflow as tf

        from t0repro.tasks.prompt_cache.seqio_stream import _records

        files = tf.data.Dataset.from_tensor_slices([str(shard) for shard in shards])
        read_file = tf.data.TFRecordDataset if "://" not in place else _records
        examples = iter(
            files.interleave(read_file, 16, 16, num_parallel_calls=tf.data.AUTOTUNE).prefetch(64)
        )
    next(examples)
    started, used = time.perf_counter(), time.process_time()
    count = sum(1 for _ in examples)
    return count / (time.perf_counter() - started), count / (time.process_time() - used)


def report(name: str, place: str) -> None:
    """Reads a cache in processes of their own and prints the figures."""
    for reader in ("t0repro", "tf.data"):
        command = [sys.executable, __file__, "--read", place, reader]
        output = subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL)
        speed, of_processors = map(float, output.split()[-2:])
        print(
            f"{name}, {reader}: {speed:,.0f} examples per second,"
            f" {of_processors:,.0f} per second of processor time",
            flush=True,
        )


def main() -> None:
    """Writes the cache and reads it from each place."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--examples", type=int, default=40_000)
    parser.add_argument("--read", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.read:
        print(*read(*arguments.read))
        return
    from helpers import bucket_servers

    from t0repro import storage

    socketserver.BaseServer.handle_error = lambda *_: None
    with tempfile.TemporaryDirectory() as folder:
        size = write_cache(Path(folder), arguments.examples)
        print(
            f"{arguments.examples:,} examples, {size / 1e6:.0f} MB, {SHARDS} shards;"
            f" {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
        )
        report("this disk", folder)
        for kind in (bucket_servers.GoogleStorage, bucket_servers.S3):
            server = kind()
            os.environ.update(server.environment(server.port))
            try:
                storage.put_tree(Path(folder), f"{server.address}/cache")
                report(
                    f"{server.address.partition(':')[0]}:// on loopback", f"{server.address}/cache"
                )
            finally:
                server.stop()


if __name__ == "__main__":
    main()
