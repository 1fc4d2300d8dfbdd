"""Models on the bench: opened checkpoints, which score the choices of the rows shown."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import numpy as np

from t0repro.browse.scores import Scores, rank_choices
from t0repro.browse.shown_rows import ShownRow
from t0repro.errors import UserError
from t0repro.evaluation.opened import (
    Checkpoint,
    attach_adapter,
    check_adapter_fits,
    open_adapter_at,
    open_checkpoint,
)
from t0repro.runs.text_scores import score
from t0repro.tasks.task import TaskDescription
from t0repro.tasks.vocabulary import VOCABULARY_VARIABLE, VocabularyFile, is_here

_MOST_KEPT = 20_000  # scored inputs in memory


class Models:
    """Opened checkpoints by their labels; scores stay in memory."""

    def __init__(self, checkpoints: Mapping[str, Checkpoint]):
        self._checkpoints = checkpoints
        # JAX may compute in one thread at a time here; a page that is closed does not stop it.
        self._lock = threading.Lock()
        self._known: dict[tuple[object, ...], np.ndarray] = {}

    @property
    def labels(self) -> list[str]:
        """The models' names."""
        return list(self._checkpoints)

    def score(
        self, label: str, task: TaskDescription, rows: Sequence[ShownRow]
    ) -> list[Scores | None]:
        """The scores of rows' choices; None for a row without choices.

        Raises:
          UserError: If the vocabulary is not the model's.
        """
        vocabulary = task.vocabulary
        if not isinstance(vocabulary, VocabularyFile):
            raise UserError(
                f"{task.prompt.name} has a vocabulary that this page cannot score with.",
                fix="Score it with t0repro rank-eval.",
            )
        if not is_here(vocabulary):
            raise UserError(
                f"The vocabulary {vocabulary.address} is not on this machine.",
                fix=f"Name a copy: {VOCABULARY_VARIABLE}=PATH.",
            )
        asked = [_request(row) for row in rows]
        with self._lock:
            new = {
                each: None
                for each in asked
                if each and (label, vocabulary, *each) not in self._known
            }
            if new:
                found = score(
                    self._checkpoints[label],
                    [text for text, _ in new],
                    [list(choices) for _, choices in new],
                    vocabulary=vocabulary,
                )
                if len(self._known) > _MOST_KEPT:
                    self._known.clear()
                for each, values in zip(new, found, strict=True):
                    self._known[label, vocabulary, *each] = values[: len(each[1])]
            # Within the lock, or another thread may have forgotten them.
            values = [each and self._known[label, vocabulary, *each] for each in asked]
        return [
            None if found is None else rank_choices(found, row)
            for found, row in zip(values, rows, strict=True)
        ]


def _request(row: ShownRow) -> tuple[str, tuple[str, ...]] | None:
    if row.example is None or not row.example.choices:
        return None
    return row.example.inputs, tuple(row.example.choices)


def open_models(checkpoints: Mapping[str, str], adapters: Mapping[str, str]) -> Models:
    """Opens checkpoints, and adapters over the first of them.

    Args:
      checkpoints: Label -> path.
      adapters: Label -> path.

    Raises:
      UserError: If one cannot be opened, or an adapter is of another base.
    """
    # A wrong adapter is refused before a large base is read.
    opened = {label: open_adapter_at(path) for label, path in adapters.items()}
    models = {label: open_checkpoint(path, None, "float32") for label, path in checkpoints.items()}
    base = next(iter(models.values()))
    for adapter in opened.values():
        check_adapter_fits(base, adapter)
    models |= {label: attach_adapter(base, adapter) for label, adapter in opened.items()}
    return Models(models)
