"""Streams a task's examples: (input, choice) pairs to score, or inputs to decode."""

from __future__ import annotations

import dataclasses
import hashlib
import heapq
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from t0repro.data.eval_examples import eval_examples
from t0repro.errors import UserError
from t0repro.evaluation.judge import make_task_judge
from t0repro.evaluation.records import digest_of_texts
from t0repro.evaluation.task_output import TruncationCounter
from t0repro.tasks.prompted_examples import prompted_examples
from t0repro.tasks.registry import DescribedTask, find_task, task_descriptions
from t0repro.tasks.vocabulary import model_of

Item = TypeVar("Item")
Row = TypeVar("Row", bound=Mapping[str, Any])

CHUNKS_IN_BUFFER = 8


@dataclasses.dataclass(frozen=True, eq=False)
class Chunk:
    """Consecutive examples of one task, which are scored in batches of their own.

    Attributes:
      task: the task's name.
      examples: the examples, an input's choices one after the other.
      last: whether these are the task's last examples.
    """

    task: str
    examples: Sequence[Mapping[str, Any]]
    last: bool = True


class TaskReader:
    """One task's examples, as Mesh TensorFlow's mode score_eval reads them.

    Args:
      name: the task's name.
      split: the split to read.
      lengths: maximum tokens per feature; longer ones are cut, and targets keep their EOS.
      limit: maximum number of inputs to sample, each with all of its choices; None takes all.
      use_cached: read the task from SeqIO's cache.
    """

    def __init__(
        self,
        name: str,
        split: str,
        lengths: Mapping[str, int],
        limit: int | None = None,
        use_cached: bool = False,
    ):
        task: Any = find_task(name)
        self.name, self._task, self._split, self._lengths = name, task, split, lengths
        self._use_cached, self._features = use_cached, task.output_features
        self._sample = Sample(limit)
        self.judge = make_task_judge(task)

    @property
    def available(self) -> int:
        """Number of inputs in the split; valid once `examples` has been read to its end."""
        return self._sample.available

    def truncation(self) -> TruncationCounter:
        """A new counter of the texts that are cut to the lengths."""
        return TruncationCounter(self._features, self._lengths)

    def examples(self) -> Iterator[dict[str, Any]]:
        """Yields examples in the order of the rows, an input's choices one after the other."""
        # A task of t0repro is rendered without SeqIO, whose graph per task takes most of the time.
        description = None if self._use_cached else task_descriptions().get(self.name)
        if description is None or description.sp_model is None:
            inputs = group_by_input(self._rows())
            chosen = self._sample(_gather_choices(inputs) if self._use_cached else inputs)
            return itertools.chain.from_iterable(rows for _, rows in chosen)
        return prompted_examples(description, self._split, self._lengths, self._sample)

    def _rows(self) -> Iterator[dict[str, Any]]:
        if isinstance(self._task, DescribedTask):
            return eval_examples(self._task, self._split, self._lengths, use_cached=True, mesh=True)
        from t0repro import compat

        compat.install()
        from t5.models import mesh_transformer

        (dataset,) = mesh_transformer.mesh_eval_dataset_fn(
            mixture_or_task_name=self.name,
            sequence_length=dict(self._lengths),
            dataset_split=self._split,
            use_cached=self._use_cached,
        )
        return map(_strip_padding, dataset.dataset_fn().as_numpy_iterator())


class Sample:
    """Keeps at most `limit` of the inputs that pass through it, and counts all of them.

    Whether an input is kept depends on the numbers alone, so that prompts over the same rows are
    evaluated on the same inputs in every run. (The first inputs of a file would be a biased sample:
    many files are sorted by class.)
    """

    def __init__(self, limit: int | None):
        self._limit = limit
        self.available = 0

    def __call__(self, numbered: Iterable[tuple[int, Item]]) -> Iterator[tuple[int, Item]]:
        """The (number, input) pairs that are kept, by number."""
        counted = self._count_inputs(numbered)
        if self._limit is None:
            return counted
        # By lot and then number, so that equal lots cannot make the choice depend on the
        # order.
        lots = ((_draw_lot(number), number, item) for number, item in counted)
        # Keeps `limit` inputs in memory, not the split.
        taken = heapq.nsmallest(self._limit, lots, key=lambda each: each[:2])
        return iter(sorted(((n, item) for _, n, item in taken), key=lambda each: each[0]))

    def _count_inputs(self, numbered: Iterable[tuple[int, Item]]) -> Iterator[tuple[int, Item]]:
        for each in numbered:
            self.available += 1
            yield each


def _draw_lot(number: int) -> bytes:
    """Pseudorandom sort key of an input, the same in every run; the lowest keys are kept."""
    return hashlib.blake2b(number.to_bytes(8, "little"), digest_size=8, key=b"seed 0").digest()


def read_buffers(
    tasks: Iterable[tuple[str, Iterable[dict[str, Any]]]], most_examples: int
) -> Iterator[list[Chunk]]:
    """Groups examples into read buffers to evaluate together: chunks of tasks as long as they fit.

    Args:
      tasks: each task's name and examples, which are read only as far as a read buffer reaches.
      most_examples: maximum number in a read buffer.
    """
    read_buffer: list[Chunk] = []
    room = most_examples
    for name, rows in tasks:
        for chunk in split_into_chunks(name, rows, max(most_examples // CHUNKS_IN_BUFFER, 1)):
            if room < len(chunk.examples) and read_buffer:
                yield read_buffer
                read_buffer, room = [], most_examples
            read_buffer.append(chunk)
            room -= len(chunk.examples)
    if read_buffer:
        yield read_buffer


def split_into_chunks(
    name: str, rows: Iterable[dict[str, Any]], most_examples: int
) -> Iterator[Chunk]:
    """Divides a task's examples into chunks, which depend on nothing but the task.

    Args:
      name: the task's name.
      rows: its examples.
      most_examples: maximum number in a chunk. The choices of an input stay together, so one input
        with more choices than that exceeds it.
    """
    examples: list[dict[str, Any]] = []
    for _, choices in group_by_input(rows):
        if examples and len(examples) + len(choices) > most_examples:
            yield Chunk(name, examples, last=False)
            examples = []
        examples += choices
    yield Chunk(name, examples)


def group_by_input(rows: Iterable[Row]) -> Iterator[tuple[int, list[Row]]]:
    """Yields each input's number and rows: a row per choice if answers are ranked, else one."""
    # Without idx, each row is an input of its own.
    numbers = itertools.count()

    def number(row: Mapping[str, Any]) -> int:
        return int(row["idx"][0]) if "idx" in row else next(numbers)

    for at, choices in itertools.groupby(rows, number):
        yield at, list(choices)


def _gather_choices(
    inputs: Iterable[tuple[int, list[dict[str, Any]]]],
) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """The inputs by number, each once with all of its rows; they are held until all are read."""
    # SeqIO reads 16 rows of each of a cache's files in turn, and Beam writes them in any order, so
    # that an input's choices come apart.
    whole: dict[int, list[dict[str, Any]]] = {}
    for number, rows in inputs:
        whole.setdefault(number, []).extend(rows)
    for number, rows in sorted(whole.items()):
        yield number, sorted(rows, key=lambda row: int(row["idx"][1]) if "idx" in row else 0)


def data_origin(name: str, split: str, use_cached: bool) -> dict[str, Any] | None:
    """Identifies the rows of a task's split and their version; None if the source does not say.

    A local file is identified by size and checksum, not by its path; rows from the hub by
    repository and commit; a cached task by a digest of the JSON files in its cache.
    """
    task: Any = find_task(name)
    if use_cached and task.cache_dir:
        # SeqIO's info and stats files, which name shards and count examples.
        files = sorted(Path(task.cache_dir).glob(f"*.{split}.json"))
        return {"cache": digest_of_texts(path.read_text(encoding="utf-8") for path in files)}
    source = task.source
    if not hasattr(source, "origin"):
        return None
    # A path differs between machines, and a time between copies of the same rows.
    hidden = ("path", "modified_ns")
    origin = {key: value for key, value in source.origin(split).items() if key not in hidden}
    subset = f"/{source.subset}" if source.subset else ""
    return {"dataset": f"{source.dataset}{subset}", **origin}


def find_dropped_rows(name: str, split: str, examples: int) -> list[int] | None:
    """The rows of a split that give none of a task's first examples; None if that is not known.

    Only t0repro's own tasks say which rows give no example, if the rows are on this machine.
    """
    task = task_descriptions().get(name)
    if task is None:
        return None
    try:
        return task.rows.dropped_rows(split, examples)
    except UserError:  # of a cached task, whose rows are missing
        return None


def vocabulary_digest(name: str) -> str | None:
    """Digest, 16 hex digits, of a task's vocabulary; None if it is not of pieces or bytes."""
    model = model_of(find_task(name).output_features["targets"].vocabulary)
    return None if model is None else hashlib.blake2b(model, digest_size=8).hexdigest()


def _strip_padding(example: Mapping[str, Any]) -> dict[str, Any]:
    """Drops the zeros that pad an example's sequences, which are most of its bytes."""
    row = dict(example)
    for name in ("inputs", "targets"):
        row[name] = np.trim_zeros(row[name], "b").astype(np.int32)
    return row
