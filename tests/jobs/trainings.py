"""A training's folder as auxiliary jobs see it, and an evaluator of a user's own."""

from __future__ import annotations

import sys
from pathlib import Path

from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.util.tensor_util import make_ndarray

from t0repro.converters.convert import convert
from t0repro.jobs.commands import JobSettings
from t0repro.jobs.controller import Controller, Policy
from t0repro.jobs.launcher import Launcher
from t0repro.jobs.local_launcher import LocalLauncher
from t0repro.progress import heard_by
from t0repro.training.checkpoints import checkpoint_path, save_tree
from t0repro.training.train_state import to_flat_tree

from ..helpers.tiny_models import new_state

# Evaluates "accuracy" as a function of the checkpoint's step, and counts how often it ran.
EVALUATOR = """
import os, pathlib, sys
sys.modules["tensorflow"] = None  # tensorboard writes events without it, and starts faster
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

checkpoint = pathlib.Path(os.environ["INITIAL_CHECKPOINT_PATH"])
step = int(checkpoint.name.replace("-", "_").rpartition("_")[2])
if ":" in str(checkpoint):  # in a bucket
    from t0repro.training.checkpoints import list_checkpoints
    assert step in list_checkpoints(os.environ["INITIAL_CHECKPOINT_PATH"].rpartition("/")[0])
else:
    assert any(checkpoint.parent.glob(checkpoint.name + "*"))
output = pathlib.Path(os.environ["EVAL_OUTPUT_DIR"])
if "://" in os.environ["EVAL_OUTPUT_DIR"]:  # a job on another machine
    from t0repro.storage import output_path
    output = output_path(os.environ["EVAL_OUTPUT_DIR"])
mixture = os.environ["MIXTURE_OR_TASK_NAME"]
writer = EventFileWriter(str(output / "inference_eval" / mixture))
value = Summary.Value(tag="accuracy", simple_value=1 - 1 / (1 + step))
writer.add_event(Event(step=step, summary=Summary(value=[value])))
writer.close()
(output / f"{mixture}_{step}_predictions").write_text(f"{step}\\n")
if "t0repro.storage.working_copies" in sys.modules:
    sys.modules["t0repro.storage.working_copies"].close_all()
with open(sys.argv[1], "a") as runs:
    runs.write(f"{step} {mixture}\\n")
"""


def make_evaluator(folder: Path) -> list[str]:
    """A command of a user's; its last argument is a file that gets a line for each run."""
    script = folder / "my_eval.py"
    script.write_text(EVALUATOR)
    return [sys.executable, str(script), str(folder / "runs.txt")]


def save_checkpoints(model_dir: Path, *steps: int, mesh: bool = False) -> None:
    """Checkpoints of a tiny model, in the format of either stack."""
    tree = to_flat_tree(new_state())
    for step in steps:
        tree["state/step"] = tree["state/step"] * 0 + step
        if not mesh:
            save_tree(checkpoint_path(model_dir, step), tree)
            continue
        source = checkpoint_path(model_dir.with_name("for_mesh"), step)
        save_tree(source, tree)
        convert(source, model_dir, "mtf")


def controller(
    model_dir: Path,
    command,
    *mixtures: str,
    launcher: Launcher | None = None,
    **policy,
):
    """A controller that looks often and retries at once."""
    target = command if isinstance(command, str) else " ".join(command)
    settings = JobSettings(mixtures=mixtures or ("m",), build_target=target)
    quick = Policy(**{"poll_seconds": 0.05, "retry_seconds": 0.01} | policy)
    return Controller(model_dir, settings, launcher or LocalLauncher(), quick)


def work_once(*args, said: list[str] | None = None, **kwargs) -> bool:
    """Works through the checkpoints that are there."""
    with heard_by(print if said is None else said.append):
        return controller(*args, **kwargs).run(lambda: False)


def curve(folder: Path, tag: str = "accuracy") -> list[tuple[int, float]]:
    """The points of a TensorBoard curve in the order in which TensorBoard reads them."""
    return [
        (event.step, round(float(make_ndarray(value.tensor)), 4))
        for path in sorted(folder.glob("events.*"))
        for event in EventFileLoader(str(path)).Load()
        for value in event.summary.value
        if value.tag == tag
    ]
