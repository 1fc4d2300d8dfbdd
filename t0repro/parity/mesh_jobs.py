"""Describes Mesh TensorFlow's computation, and runs it in its own process.

Mesh TensorFlow needs graph mode and process-wide gin state, which the comparing process must not
share. Jobs are passed in a JSON file; a job's results are files in its folder:

    model.ckpt-<step>.*   the start, and the states after the requested steps, as t5 saves them
    arrays.npz            losses [steps], learning_rates [steps] and, if requested,
                          activations/<name>, gradients/<variable>, token_losses, scores
    done                  written last
"""

from __future__ import annotations

import dataclasses
import io
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from t0repro.config.mtf.parser import MeshInputs
from t0repro.errors import UserError
from t0repro.storage import write_atomically

ARRAYS, DONE = "arrays.npz", "done"
Batch = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class MeshJob:
    """One run of Mesh TensorFlow's own model function on given batches.

    Attributes:
      out: the folder for the results.
      inputs: the gin files and overrides, as t5_mesh_transformer gets them.
      batches: a file of "<index>/<feature>" arrays, int32 [batch, length], one batch per step.
      start: prefix of the Mesh TensorFlow checkpoint to start from; None initializes parameters.
      snapshots: numbers of steps after which to save the state.
      tensors: whether to return activations, token losses and gradients of the first batch.
      scored: a file of "<index>/<feature>" arrays to score with the initial parameters, or None.
      float32: compute in float32 whatever gin says, as t5_mesh_transformer does without --tpu.
    """

    out: str
    inputs: MeshInputs
    batches: str
    start: str | None = None
    snapshots: Sequence[int] = ()
    tensors: bool = False
    scored: str | None = None
    float32: bool = True

    def to_json(self) -> dict[str, Any]:
        """The job for the other process."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> MeshJob:
        """The job that `to_json` described."""
        return cls(**{**values, "inputs": MeshInputs(**values["inputs"])})


@dataclasses.dataclass(frozen=True)
class MeshResult:
    """The results of a job.

    Attributes:
      folder: the folder with the checkpoints.
      start_step: the global step at the start.
      arrays: see the module's docstring.
    """

    folder: Path
    start_step: int
    arrays: Mapping[str, np.ndarray]

    def group(self, prefix: str) -> dict[str, np.ndarray]:
        """The arrays below a prefix, in the order in which they were computed."""
        return {
            name.removeprefix(f"{prefix}/"): x
            for name, x in self.arrays.items()
            if name.startswith(f"{prefix}/")
        }

    def checkpoint(self, steps_done: int) -> str:
        """Prefix of the checkpoint after so many steps."""
        return str(self.folder / f"model.ckpt-{self.start_step + steps_done}")


def run_mesh(jobs: Sequence[MeshJob]) -> list[MeshResult]:
    """Runs jobs one after the other in one process and reads their results.

    Raises:
      UserError: if Mesh TensorFlow failed; the message has the last line that it printed.
    """
    description = Path(jobs[0].out) / "jobs.json"
    write_atomically(description, json.dumps([job.to_json() for job in jobs], indent=1))
    done = subprocess.run(
        # -P: otherwise the checkout's folder gin/ would be imported in place of gin-config.
        [sys.executable, "-P", "-m", "t0repro.parity.mesh_run", str(description)],
        capture_output=True,
        text=True,
        check=False,
    )
    # A file keeps the complete output; the message has room for its last line only.
    if done.returncode:
        log = Path(jobs[0].out) / "mesh_tensorflow.log"
        write_atomically(log, done.stdout + done.stderr)
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise UserError(
            f"Mesh TensorFlow failed: {last}",
            where=str(log),
            fix="Check that t5_mesh_transformer --backend=mtf runs the same gin files.",
        )
    return [read_result(job.out) for job in jobs]


def read_result(folder: str | Path) -> MeshResult:
    """The results in a job's folder."""
    folder = Path(folder)
    start_step = int((folder / DONE).read_text())
    with np.load(folder / ARRAYS, allow_pickle=False) as arrays:
        return MeshResult(folder, start_step, dict(arrays))


def save_batches(path: str | Path, batches: Sequence[Batch]) -> str:
    """Writes batches as "<index>/<feature>" and returns the path."""
    arrays: dict[str, Any] = {
        f"{index}/{name}": x for index, batch in enumerate(batches) for name, x in batch.items()
    }
    content = io.BytesIO()
    np.savez(content, **arrays)
    write_atomically(path, content.getvalue())
    return str(path)


def load_batches(path: str | Path) -> list[dict[str, np.ndarray]]:
    """What `save_batches` wrote."""
    batches: dict[int, dict[str, np.ndarray]] = {}
    with np.load(path, allow_pickle=False) as arrays:
        for key in arrays.files:
            index, _, feature = key.partition("/")
            batches.setdefault(int(index), {})[feature] = arrays[key]
    # By number: "10" would come before "2".
    return [batches[index] for index in sorted(batches)]
