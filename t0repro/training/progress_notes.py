"""What a training with a plan remembers besides its state: in each checkpoint, and in model_dir.

`progress.json` in a checkpoint has the step that its periods are counted from and the memory of its
actions, such as the history of early stopping. A checkpoint is written before the evaluation of its
step, so model_dir/evaluated.json has them too, as they are after the latest evaluation.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from t0repro.files import write_atomically
from t0repro.partitioning.processes import is_first
from t0repro.training.stopping import BaseAction

PROGRESS_FILE = "progress.json"
EVALUATED_FILE = "evaluated.json"


class Progress:
    """Keeps and restores what a training remembers.

    Args:
      model_dir: the run's folder.
      step: the step that training is about to start from.
      actions: the actions of each mode; what they remembered is restored here.
      checkpoint: the checkpoint in model_dir that training continues from; None for a new run.

    Attributes:
      path: model_dir/evaluated.json.
      first_step: the step at which the run first began, from which periods are counted.
      evaluated: the step of the latest finished evaluation, if it is `step`; else None.
      stopped: whether an action said to stop after that evaluation.
    """

    def __init__(
        self,
        model_dir: str | os.PathLike[str],
        step: int,
        actions: Mapping[str, Sequence[BaseAction]],
        checkpoint: Path | None,
    ):
        self.path, self._actions = Path(model_dir) / EVALUATED_FILE, actions
        self.first_step, self.evaluated, self.stopped = step, None, False
        if checkpoint is None:
            if is_first():
                # Left by an earlier run, it would make this one's first evaluation look done.
                self.path.unlink(missing_ok=True)
            return
        # Of the same step, these are the later notes: a checkpoint is written before the actions on
        # the evaluation of its step.
        after = _read(self.path)
        notes = after if after.get("step") == step else _read(checkpoint / PROGRESS_FILE)
        self.first_step = notes.get("first_step", step)
        if notes is after:
            self.evaluated, self.stopped = step, bool(after["stopped"])
        for mode, states in notes.get("actions", {}).items():
            # By position; a run that continues with more actions starts the new ones without
            # memory.
            for action, state in zip(actions.get(mode, ()), states, strict=False):
                action.load_state_dict(state)

    def notes(self) -> dict[str, Any]:
        """What is remembered now, as JSON can hold it."""
        states = {
            mode: [item.state_dict() for item in items] for mode, items in self._actions.items()
        }
        return {"first_step": self.first_step, "actions": states}

    def save(self, folder: Path) -> None:
        """Writes the notes into a checkpoint that is being written."""
        write_atomically(folder / PROGRESS_FILE, json.dumps(self.notes()))

    def note_evaluated(self, step: int, *, stopped: bool) -> None:
        """Records that the evaluation of a step, and the actions on it, are done."""
        notes = {"step": step, "stopped": stopped, **self.notes()}
        if is_first():
            write_atomically(self.path, json.dumps(notes))


def last_evaluated(model_dir: str | os.PathLike[str]) -> int:
    """The step of the latest finished evaluation of a run; -1 if there is none."""
    return int(_read(Path(model_dir) / EVALUATED_FILE).get("step", -1))


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}
