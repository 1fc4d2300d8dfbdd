"""Runs of both stacks through t5_mesh_transformer, shared by the tests of this folder.

The data is real (RTE with T5's vocabulary) where it is at hand and the embedded demo elsewhere, so
that the agreement is proven in any checkout.
"""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ..mtf.mesh_commands import CommandServer

SHARED = Path(__file__).resolve().parents[3] / "shared"


@dataclasses.dataclass(frozen=True)
class Job:
    """What is trained and evaluated, and the environment that it needs."""

    module: str
    train: str
    evaluate: str
    environment: dict[str, str]


def _job() -> Job:
    data = Path(os.environ.get("T0REPRO_DATA_DIR") or SHARED / "data")
    vocabulary = Path(os.environ.get("T0REPRO_VOCAB") or SHARED / "vocab" / "t5.cc_all.32000.model")
    here = str(Path(__file__).parent)
    if (data / "super_glue/rte/train.jsonl").exists() and vocabulary.exists():
        environment = {"T0REPRO_DATA_DIR": str(data), "T0REPRO_VOCAB": str(vocabulary)}
        task = "super_glue_rte_GPT_3_style"
        return Job("rte_tasks", task, f"{task}_score_eval", {**environment, "PYTHONPATH": here})
    return Job("t0repro.tasks.demo", "demo_train", "demo_eval_score_eval", {"PYTHONPATH": here})


def decode_by_mesh(folder: Path, **request: Any) -> dict[str, np.ndarray]:
    """Mesh TensorFlow's inputs, variables and outputs; for the request see run_mesh_decode.py."""
    job, out = _job(), folder / "out.npz"
    request |= {"module": job.module, "task": job.train, "out": str(out)}
    script = Path(__file__).with_name("run_mesh_decode.py")
    done = subprocess.run(
        [sys.executable, "-P", str(script), json.dumps(request)],
        env={**os.environ, **job.environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(np.load(out))


class Stacks:
    """Runs t5_mesh_transformer on either stack with the same gin parameters."""

    def __init__(self, folder: Path):
        self.folder, self.job = folder, _job()
        self.said: dict[Path, str] = {}  # what each training run printed
        # Compiled as users' programs are: tests/conftest.py sets these flags for other tests.
        environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
        self.server = CommandServer({**environment, **self.job.environment})

    def run(self, backend: str, name: str, gin_files: list[str], gin_params: list[str]) -> Path:
        """Runs the command with model_dir `<folder>/<name>` and returns it."""
        model_dir = self.folder / name
        arguments = [
            f"--backend={backend}",
            f"--model_dir={model_dir}",
            f"--module_import={self.job.module}",
            *(f"--gin_file={file}" for file in gin_files),
            *(f"--gin_param={param}" for param in gin_params),
        ]
        code, stderr = self.server.run(arguments)
        assert code == 0, stderr[-3000:]
        self.said.setdefault(model_dir, stderr)  # scoring comes later, into the same folder
        return model_dir

    def train(
        self,
        backend: str,
        name: str,
        steps: int,
        *params: str,
        model: str = "demo/t5.1.1.demo.gin",
        schedule: tuple[str, ...] = ("learning_rate_schedules/constant_0_001.gin",),
    ) -> Path:
        """Trains to a step; the batches of a seed are the same on both stacks."""
        return self.run(
            backend,
            name,
            ["dataset.gin", model, *schedule],
            [
                f"MIXTURE_NAME = '{self.job.train}'",
                f"run.train_steps = {steps}",
                "run.batch_size = ('tokens_per_batch', 1024)",
                "run.sequence_length = {'inputs': 128, 'targets': 16}",
                "serialize_num_microbatches.tokens_per_microbatch_per_replica = 256",
                "run.save_checkpoints_steps = 1",
                "mesh_train_dataset_fn.seed = 7",
                "pack_dataset.use_custom_ops = False",
                "utils.run.mesh_shape = []",
                "dropout_rate = 0.0",
                "utils.get_variable_dtype.master_dtype = 'float32'",
                *params,
            ],
        )

    def score(self, backend: str, model_dir: Path, summary_dir: Path) -> Path:
        """Scores up to 64 (input, choice) pairs of each task at the latest checkpoint."""
        self.run(
            backend,
            model_dir.name,
            [str(model_dir / "operative_config.gin"), "score_eval.gin"],
            [
                f"MIXTURE_NAME = '{self.job.evaluate}'",
                "run.dataset_split = 'validation'",
                "run.batch_size = ('sequences_per_batch', 16)",
                "mesh_eval_dataset_fn.num_eval_examples = 64",
                "eval_checkpoint_step = -1",
                f"run.eval_summary_dir = '{summary_dir}'",
            ],
        )
        return summary_dir


def losses(model_dir: Path) -> dict[int, float]:
    """Training loss by global step, of metrics.jsonl."""
    lines = [json.loads(line) for line in (model_dir / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if line["split"] == "train"}


@pytest.fixture(scope="session")
def stacks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stacks]:
    """The two stacks, in a folder that all tests of the session share."""
    stacks = Stacks(tmp_path_factory.mktemp("stacks"))
    yield stacks
    stacks.server.close()


@pytest.fixture(scope="session")
def twenty_steps(stacks: Stacks) -> tuple[Path, Path]:
    """Mesh TensorFlow's run of 20 steps from random parameters, and JAX's from the same ones."""
    mtf = stacks.train("mtf", "mtf", 20)
    return mtf, stacks.train("jax", "jax", 20, f"run.init_checkpoint = '{mtf}/model.ckpt-0'")
