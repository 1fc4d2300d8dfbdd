"""What is cached: prompts over the splits of a dataset, and the tasks made from them."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class PlainTemplate:
    """The fields of a template that rendering needs; a user's `own` is rendered in the sandbox."""

    name: str
    id: str
    jinja: str
    answer_choices: str | None
    own: bool = False

    def digest(self) -> str:
        """SHA-256 of the Jinja of prompt and answer choices."""
        # A NUL in between: text that moves from one to the other has to change the digest.
        return hashlib.sha256(f"{self.jinja}\0{self.answer_choices}".encode()).hexdigest()


@dataclasses.dataclass(frozen=True)
class RowsOfSplit:
    """The source of a split's rows, and how to check them.

    Attributes:
      root: The folder of datasets, or None for the one that T0REPRO_DATA_DIR names.
      dataset: The Hugging Face name.
      subset: The configuration, or None.
      file: The split's name in the data.
      max_rows: Maximum number of rows, evenly spaced; None takes all.
      seed: Draws them at random instead.
      columns: Columns that this run's templates read.
      estimate: Approximate number of rows, for the progress bar.
    """

    root: str | None
    dataset: str
    subset: str | None
    file: str
    max_rows: int | None
    seed: int | None
    columns: tuple[str, ...]
    estimate: int


@dataclasses.dataclass(frozen=True)
class CachedTask:
    """A task to cache, or to add splits to.

    Attributes:
      name: The SeqIO task's name.
      folder: Its folder's name in the cache folder.
      splits: Splits that are left to cache.
      score_eval: Whether it is a twin, with one example per answer choice.
    """

    name: str
    folder: str
    splits: tuple[str, ...]
    score_eval: bool


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A template over a dataset's splits, rendered once for both a task and its twin.

    Attributes:
      source: Seeds the template's random choices, with the split and the row's number.
      dataset: The Hugging Face name.
      subset: The configuration, or None.
      template: The template.
      rows: Split -> where its rows are.
      tasks: The task, its twin, or both.
      vocabulary: Key in the plan's vocabularies.
      eos: Feature -> id of the token appended to it, or None.
    """

    source: str
    dataset: str
    subset: str | None
    template: PlainTemplate
    rows: Mapping[str, RowsOfSplit]
    tasks: tuple[CachedTask, ...]
    vocabulary: str
    eos: Mapping[str, int | None]

    def wanting(self, split: str) -> tuple[CachedTask, ...]:
        """The tasks whose caches lack a split."""
        return tuple(task for task in self.tasks if split in task.splits)
