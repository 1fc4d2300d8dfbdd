"""What a run remembers between its starts.

A checkpoint's `progress.json` has the step from which periods are counted, what the steps up to it
trained on, and the state of its actions, such as the history of early stopping. A checkpoint is
written before the evaluation of its step, so model_dir/evaluated.json repeats all of it as it is
after the latest evaluation.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from t0repro.partitioning.processes import broadcast_from_first, is_first
from t0repro.storage import output_path, write_atomically
from t0repro.training.stopping import BaseAction

PROGRESS_FILE = "progress.json"
EVALUATED_FILE = "evaluated.json"


class RunProgress:
    """Saves and restores a run's progress: where it began, what it trained on, its actions' state.

    Args:
      model_dir: the run's folder.
      step: the step that training is about to start from.
      actions: the actions of each mode; their saved state is restored here.
      checkpoint: the checkpoint in model_dir that training continues from; None for a new run.

    Attributes:
      path: model_dir/evaluated.json.
      first_step: the step at which the run first began, from which periods are counted.
      evaluated: the step of the latest finished evaluation, if it is `step`; else None.
      stopped: whether an action stopped the run after that evaluation.
      trained: the target tokens and examples of the run's steps.
    """

    def __init__(
        self,
        model_dir: str | os.PathLike[str],
        step: int,
        actions: Mapping[str, Sequence[BaseAction]],
        checkpoint: Path | None,
    ):
        self.path, self._actions = output_path(model_dir) / EVALUATED_FILE, actions
        self.first_step, self.evaluated, self.stopped = step, None, False
        self.trained = {"target_tokens": 0, "examples": 0}
        if checkpoint is None:
            if is_first():
                # A file that an earlier run left would make this run's first evaluation look done.
                self.path.unlink(missing_ok=True)
            return
        # For the same step, these notes are newer: a checkpoint is written before its step is
        # evaluated and the actions run.
        after = _read_json(self.path)
        notes = after if after.get("step") == step else _read_json(checkpoint / PROGRESS_FILE)
        self.first_step = notes.get("first_step", step)
        self.trained |= notes.get("trained", {})
        if notes is after:
            self.evaluated, self.stopped = step, bool(after["stopped"])
        for mode, states in notes.get("actions", {}).items():
            # Matched by position; if the run resumes with more actions, the new ones start empty.
            for action, state in zip(actions.get(mode, ()), states, strict=False):
                action.load_state_dict(state)

    def notes(self) -> dict[str, Any]:
        """The progress as of now, in types that JSON can hold."""
        states = {
            mode: [item.state_dict() for item in items] for mode, items in self._actions.items()
        }
        return {"first_step": self.first_step, "trained": self.trained, "actions": states}

    def save(self, folder: Path) -> None:
        """Writes the progress into a checkpoint that is being written."""
        write_atomically(folder / PROGRESS_FILE, json.dumps(self.notes()))

    def note_evaluated(self, step: int, *, stopped: bool) -> None:
        """Records that the evaluation of a step is done, and so are the actions on it."""
        notes = {"step": step, "stopped": stopped, **self.notes()}
        if is_first():
            write_atomically(self.path, json.dumps(notes))


def last_evaluated(folder: Path) -> int:
    """The step of the latest finished evaluation of a run; -1 if there is none.

    Args:
      folder: the run's folder, which only the first process reads.
    """
    return broadcast_from_first(lambda: int(_read_json(folder / EVALUATED_FILE).get("step", -1)))


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}
