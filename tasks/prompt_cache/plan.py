"""A cache run's work as plain data, which workers can unpickle without SeqIO."""

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


@dataclasses.dataclass(frozen=True)
class CachePlan:
    """All prompts left to render.

    Attributes:
      prompts: Those of a dataset come one after another.
      vocabularies: SHA-256 -> the serialized SentencePiece model, extra ids included.
      selected: Number of tasks selected.
      left_out: (task, split, reason) for each split whose rows are not available.
      seqio_version: Version to write into SeqIO's info files.
    """

    prompts: tuple[Prompt, ...]
    vocabularies: Mapping[str, bytes]
    selected: int
    left_out: tuple[tuple[str, str, str], ...]
    seqio_version: str

    def tasks(self) -> list[CachedTask]:
        """The tasks left to cache."""
        return [task for prompt in self.prompts for task in prompt.tasks]


@dataclasses.dataclass(frozen=True)
class Request:
    """The request on the command line.

    Attributes:
      modules: Modules to import, which register tasks.
      patterns: Patterns of task names, in which `*` matches anything.
      mixtures: Mixtures whose tasks to cache.
      folder: The cache folder.
      splits: Only these splits; None caches all splits of a task.
      at_hand: Leave out splits whose rows are missing, rather than stop.
      seed: Seed for the templates' random choices and the order of examples.
      min_shards: Minimum number of files per split.
      templates: Files of the user's own templates.
    """

    modules: tuple[str, ...]
    patterns: tuple[str, ...]
    mixtures: tuple[str, ...]
    folder: str
    splits: tuple[str, ...] | None = None
    at_hand: bool = False
    seed: int = 0
    min_shards: int = 16
    templates: tuple[str, ...] = ()
