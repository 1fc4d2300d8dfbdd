"""What a cache run has to do, as plain data that workers take without SeqIO or TensorFlow."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class PlainTemplate:
    """What rendering needs of a template; `own` ones are rendered in the sandbox."""

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
    """Where the rows of a split are read from, and how they are checked.

    Attributes:
      root: the folder of the datasets, or None for the one that T0REPRO_DATA_DIR names.
      dataset: the Hugging Face name.
      subset: the configuration, or None.
      file: the split's name in the data.
      max_rows: take so many, evenly spaced, or None for all.
      columns: those that the templates of this run read.
      estimate: about how many rows there are, for the progress bar.
    """

    root: str | None
    dataset: str
    subset: str | None
    file: str
    max_rows: int | None
    columns: tuple[str, ...]
    estimate: int


@dataclasses.dataclass(frozen=True)
class CachedTask:
    """A task to cache, or to add splits to.

    Attributes:
      name: the SeqIO task's.
      folder: its folder's name below the cache folder.
      splits: those left to cache.
      score_eval: whether it has one example for each answer choice.
    """

    name: str
    folder: str
    splits: tuple[str, ...]
    score_eval: bool


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A template over a dataset's splits, rendered once for its task and the task's twin.

    Attributes:
      source: seeds the template's draws, with the split and the row's number.
      dataset: the Hugging Face name.
      subset: the configuration, or None.
      rows: split -> where its rows are.
      tasks: one or two.
      vocabulary: key in the plan's vocabularies.
      eos: feature -> the token appended to it, or None.
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
        """The tasks that lack a split."""
        return tuple(task for task in self.tasks if split in task.splits)


@dataclasses.dataclass(frozen=True)
class Plan:
    """All prompts left to render.

    Attributes:
      vocabularies: SHA-256 -> the serialized SentencePiece model, extra ids included.
      selected: how many tasks were asked for.
      left_out: (task, split, reason) of splits whose rows are not at hand.
      seqio_version: for SeqIO's info files.
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
    """What was asked for on the command line.

    Attributes:
      modules: to import; they register the tasks.
      patterns: of task names, `*` standing for anything.
      mixtures: whose tasks to cache.
      folder: the cache folder.
      splits: only these, or None for all of a task's.
      at_hand: leave out splits whose rows are missing, rather than stop.
      seed: of the templates' draws and the order of examples.
      min_shards: files of a split, at least.
      templates: files of the user's own templates.
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
