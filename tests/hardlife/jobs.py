"""The jobs whose lives are made hard: real commands, what they must leave, what they must not.

Each job writes into one folder. However often it dies on the way, running its command again must
end with the same results as a run that never died, and what a dead run left must never be taken for
whole.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import flax.traverse_util
import jax
import numpy as np
import pytest

from t0repro.config.model import DTypePolicy
from t0repro.converters.finding import find_checkpoint
from t0repro.errors import UserError
from t0repro.model.t5 import T5, initial_parameters
from t0repro.training.checkpoints import (
    checkpoint_path,
    list_checkpoints,
    load_tree,
    save_tree,
)

from ..evaluation import small_model

ROOT = Path(__file__).resolve().parents[2]
T0REPRO = (sys.executable, "-P", "-m", "t0repro.cli")
TASKS = "demo_synthetic_glue_*,demo_synthetic_imdb_*"
LAST_STEP = 6
Result = Mapping[str, bytes]


@dataclasses.dataclass(frozen=True)
class Job:
    """One command.

    Attributes:
      command: its arguments, given the folder to write into.
      environment: variables that it needs, given that folder.
      result: what the folder holds in the end and must not depend on any death, by name.
      dead_check: raises if what a dead run left would be mistaken for more than it is; is given the
        folder and the result of a run that never died.
      first: the share of the run's time in which nothing is written yet (imports).
    """

    name: str
    command: Callable[[Path], list[str]]
    result: Callable[[Path], Result]
    dead_check: Callable[[Path, Result], None]
    first: float
    environment: Callable[[Path], dict[str, str]] = lambda folder: {}

    def start(self, folder: Path) -> subprocess.Popen:
        """Starts the command, in a process group of its own."""
        return subprocess.Popen(
            self.command(folder),
            cwd=ROOT,
            env={**os.environ, "JAX_PLATFORMS": "cpu", **self.environment(folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )

    def run(self, folder: Path) -> tuple[int, str]:
        """Runs the command to its end; returns its exit code and what it said."""
        process = self.start(folder)
        said, _ = process.communicate(timeout=900)
        return process.returncode, said

    def finish(self, folder: Path) -> Result:
        """Runs the command, which must succeed, and returns the result."""
        code, said = self.run(folder)
        assert code == 0, said[-4000:]
        return self.result(folder)


def kill(process: subprocess.Popen) -> None:
    """Ends a job and all of its processes as the kernel's out-of-memory killer would."""
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def timed(job: Job, folder: Path) -> tuple[Result, float]:
    """The result of a run that never died, and the seconds that it took."""
    begun = time.monotonic()
    return job.finish(folder), time.monotonic() - begun


def write_checkpoint(folder: Path) -> Path:
    """A JAX checkpoint of some megabytes in tens of tensors, with the demo's vocabulary."""
    config = dataclasses.replace(
        small_model.CONFIG,
        vocab_size=small_model.VOCABULARY,
        d_model=128,
        d_ff=256,
        num_encoder_layers=2,
        num_decoder_layers=3,
    )
    params = initial_parameters(
        T5(config, DTypePolicy("float32", "float32", "float32")), jax.random.key(0)
    )
    flat = flax.traverse_util.flatten_dict(params, sep="/")
    tree = {f"target/{path}": np.array(value) for path, value in flat.items()}
    save_tree(folder / "checkpoint_7", {**tree, "state/step": np.int32(7)})
    return folder


# Caching -----------------------------------------------------------------------------------------


def cache_job() -> Job:
    """t0repro cache on some of the demo's tasks."""

    def command(folder: Path) -> list[str]:
        return [
            *T0REPRO, "cache", "--module_import", "t0repro.tasks.demo", "--tasks", TASKS,
            "--output_cache_dir", str(folder), "--workers", "2",
        ]  # fmt: skip

    def dead_check(folder: Path, whole: Result) -> None:
        for marker in folder.glob("*/COMPLETED"):
            for path in marker.parent.iterdir():
                name = str(path.relative_to(folder))
                assert path.read_bytes() == whole[name], f"{name} is not whole"

    return Job("cache", command, visible_files, dead_check, first=0.4)


def visible_files(folder: Path) -> Result:
    """Every file below a folder, except for what is hidden (locks, staging folders)."""
    names = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    return {
        str(name): (folder / name).read_bytes()
        for name in names
        if not any(part.startswith(".") for part in name.parts)
    }


# Conversion --------------------------------------------------------------------------------------


def convert_job(source: Path, to: str) -> Job:
    """t0repro convert of one checkpoint to one format."""

    def command(folder: Path) -> list[str]:
        # --force: a death may come after the end, when the destination is whole.
        return [*T0REPRO, "convert", str(source), str(folder / "out"), "--to", to, "--force"]

    def result(folder: Path) -> Result:
        # TensorStore names JAX's chunk files at random: there the tensors are compared.
        if to != "jax":
            return visible_files(folder / "out")
        return tensors(folder / "out", 7)

    def dead_check(folder: Path, whole: Result) -> None:
        try:
            find_checkpoint(folder / "out")
        except UserError:
            return
        assert result(folder) == whole

    return Job(f"convert to {to}", command, result, dead_check, first=0.5)


def tensors(model_dir: Path, step: int) -> Result:
    """The bytes of every tensor of a JAX checkpoint."""
    tree = load_tree(checkpoint_path(model_dir, step))
    return {name: np.asarray(value).tobytes() for name, value in tree.items()}


# Training ----------------------------------------------------------------------------------------


def train_job(cache: Path) -> Job:
    """t5_mesh_transformer --backend=jax, a checkpoint every two steps, on cached tasks."""

    def command(folder: Path) -> list[str]:
        return [
            "bash", "scripts/train.sh", "--backend=jax",
            "--gin_param=run.save_checkpoints_steps = 2",
            "--gin_param=mesh_train_dataset_fn.seed = 17",
        ]  # fmt: skip

    def environment(folder: Path) -> dict[str, str]:
        return {
            "MODEL_DIR": str(folder),
            "CACHE_DIR": str(cache),
            "MIXTURE_NAME": "demo_synthetic_glue_mrpc_paraphrase",
            "TRAIN_STEPS": str(LAST_STEP),
            "TOKENS_PER_BATCH": "512",
            "INPUTS_LENGTH": "64",
            "TARGETS_LENGTH": "16",
        }

    def result(folder: Path) -> Result:
        # A folder that vanished takes the lines of earlier steps with it.
        metrics = folder / "metrics.jsonl"
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        rows = [row for row in map(json.loads, lines) if row.get("split") == "train"]
        losses = {f"loss {row['step']}": repr(row["loss"]).encode() for row in rows}
        assert len(losses) == len(rows)  # each step at most once
        return {**tensors(folder, LAST_STEP), **losses}

    def dead_check(folder: Path, whole: Result) -> None:
        for step in list_checkpoints(folder):
            tree = load_tree(checkpoint_path(folder, step))
            assert int(tree["state/step"]) == step

    return Job("train", command, result, dead_check, first=0.6, environment=environment)


# Rank evaluation ---------------------------------------------------------------------------------


def rank_eval_job(checkpoint: Path) -> Job:
    """t0repro rank-eval of the demo's evaluation mixture."""

    def command(folder: Path) -> list[str]:
        return [
            *T0REPRO, "rank-eval", "--checkpoint", str(checkpoint),
            "--mixture", "demo_eval_score_eval", "--module-import", "t0repro.tasks.demo",
            "--out", str(folder), "--inputs-length=128", "--targets-length=32", "--limit=12",
            "--tokens-per-batch=512",
        ]  # fmt: skip

    def result(folder: Path) -> Result:
        json.loads((folder / "report.json").read_text())
        # A task whose scores were all known is done before others.
        rows = sorted((folder / "metrics.jsonl").read_bytes().splitlines())
        scores = (folder / "scores.csv").read_bytes()
        return {"scores.csv": scores, "metrics.jsonl": b"\n".join(rows)}

    def dead_check(folder: Path, whole: Result) -> None:
        for path in folder.rglob("report.json"):
            json.loads(path.read_text())

    return Job("rank-eval", command, result, dead_check, first=0.5)


# File systems ------------------------------------------------------------------------------------


def mount(*arguments: str) -> None:
    """Mounts; skips the test where that is not permitted (it takes root)."""
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"mounting is not permitted here: {done.stderr.strip()}")


def unmount(folder: Path) -> None:
    """Unmounts."""
    subprocess.run(["umount", str(folder)], check=True)
