"""Compares T0's commands (cache, train, evaluate) in buckets and in a local folder.

    .venv/bin/python scripts/dev/bucket_check.py                 # both stores
    .venv/bin/python scripts/dev/bucket_check.py --store s3      # one: gs (an emulator), s3 (moto)

The commands of T0's README run on the embedded demo with its variables BUCKET, CACHE_DIR and
MODEL_DIR, once with BUCKET=gs://bucket/t0 or s3://bucket/t0 and once with a folder. Cached shards,
rendered texts, targets and scores must be equal byte for byte, training losses as numbers, and the
last checkpoint's arrays bit for bit. All traffic stays on this machine. Exit code 1 if anything
differs. It takes two minutes of processor time.
"""

from __future__ import annotations

import argparse
import json
import os
import socketserver
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests"))

# Files that contain times, paths or the machine's name.
_NOT_COMPARED = ("events.out.tfevents", "provenance.json", "/results/", "COMPLETED", "/logs/")
_COMPARED = (".tfrecord", "_inputs", "_targets", "_predictions", "info.", "stats.")
STEPS = 6
SEED = "--gin_param=mesh_train_dataset_fn.seed = 1"  # otherwise each start has another data order


def sequence(place: str, steps: int = STEPS) -> None:
    """Runs T0's commands with all folders below one path.

    Raises:
      subprocess.CalledProcessError: If one fails.
    """
    variables = {
        "BUCKET": place,
        "CACHE_DIR": f"{place}/cache",
        "MODEL_DIR": f"{place}/model",
        "TRAIN_STEPS": str(steps),
        "NUM_EVAL_EXAMPLES": "24",
    }
    mixtures = "demo_train,demo_eval_score_eval"
    cache = ["--module_import=t0repro.tasks.demo", f"--mixture={mixtures}", "--min_shards=2"]
    lines = [
        [f"{ROOT}/.venv/bin/t0repro", "cache", *cache, f"--output_cache_dir={place}/cache"],
        ["bash", "scripts/train.sh", "--backend=jax", SEED],
        ["bash", "scripts/rank_eval.sh", "--backend=jax"],
    ]
    for line in lines:
        print(" ".join(line), f"  # {place}", flush=True)
        subprocess.run(line, cwd=ROOT, env={**os.environ, **variables}, check=True)


def differences(address: str, folder: Path, steps: int = STEPS) -> Iterator[str]:
    """The differences between a bucket's files and a folder's, one sentence each."""
    from t0repro import storage
    from t0repro.training.checkpoints import load_tree

    there = set(storage.file_sizes(address))
    here = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    compared = {
        name
        for name in there | here
        if any(part in name for part in _COMPARED)
        and not any(part in f"/{name}" for part in _NOT_COMPARED)
        and "checkpoint_" not in name
    }
    if not compared:
        yield "nothing was written that could be compared"
    for name in sorted(compared):
        if name not in there or name not in here:
            yield f"{name} is only {'on this disk' if name in here else 'in the bucket'}"
        elif storage.read(f"{address}/{name}") != (folder / name).read_bytes():
            yield f"{name} differs"
    print(f"{len(compared)} files were compared byte for byte")
    curve = [_losses(storage.read(f"{address}/model/metrics.jsonl"))]
    curve.append(_losses((folder / "model" / "metrics.jsonl").read_bytes()))
    if curve[0] != curve[1] or len(curve[0]) < steps:
        yield f"losses differ: {curve}"
    trees = [load_tree(f"{place}/model/checkpoint_{steps}") for place in (address, str(folder))]
    if trees[0].keys() != trees[1].keys():
        yield "the checkpoints have other arrays"
    for name in trees[0].keys() & trees[1].keys():
        if not np.array_equal(np.asarray(trees[0][name]), np.asarray(trees[1][name])):
            yield f"checkpoint_{steps}: {name} differs"
    print(f"{len(trees[0])} arrays of checkpoint_{steps} were compared bit for bit")


def _losses(lines: bytes) -> dict[int, float]:
    rows = map(json.loads, lines.splitlines())
    return {row["step"]: row["loss"] for row in rows if row.get("split") == "train"}


def _compared_with(store: str, folder: Path) -> bool:
    """Runs the sequence in a store; prints whether, and how, it differs from a folder's."""
    from helpers import bucket_servers

    server = bucket_servers.GoogleStorage() if store == "gs" else bucket_servers.S3()
    os.environ.update(server.environment(server.port))
    try:
        address = f"{server.address}/t0"
        sequence(address)
        found = list(differences(address, folder))
    finally:
        server.stop()
    print("\n".join(found) or f"{address} and a local folder hold the same.", flush=True)
    return not found


def main() -> int:
    """Runs the sequences and prints what differs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--store", choices=("gs", "s3"), action="append")
    stores = parser.parse_args().store or ["gs", "s3"]
    # Clients may hang up; the server would print a traceback each time.
    socketserver.BaseServer.handle_error = lambda *_: None
    with tempfile.TemporaryDirectory() as temporary:
        # The sequences compile the same programs.
        os.environ["JAX_COMPILATION_CACHE_DIR"] = f"{temporary}/programs"
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        folder = Path(temporary, "t0")
        sequence(str(folder))
        same = [_compared_with(store, folder) for store in stores]
    return 0 if all(same) else 1


if __name__ == "__main__":
    sys.exit(main())
