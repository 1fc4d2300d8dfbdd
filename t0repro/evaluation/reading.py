"""Reads a task's examples as a stream: (input, choice) pairs to score, or inputs to decode."""

from __future__ import annotations

import dataclasses
import hashlib
import heapq
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from t0repro.evaluation.records import digest_of_texts
from t0repro.evaluation.task_output import Judge
from t0repro.evaluation.truncation import TruncationCounter
from t0repro.tasks.prompted_examples import prompted_examples
from t0repro.tasks.task import task_descriptions

Item = TypeVar("Item")


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """Consecutive examples of one task; nearly always all of them.

    Attributes:
      last: whether the task ends with them.
    """

    task: str
    examples: Sequence[Mapping[str, Any]]
    last: bool = True


class TaskReader:
    """One task's examples, as Mesh TensorFlow's mode score_eval reads them.

    Args:
      name: the task's.
      split: of the task.
      lengths: tokens per feature; what is longer is cut, targets keep their EOS.
      limit: the most inputs, each with all of its choices: a sample. None takes all.
      use_cached: read the cached task.
    """

    def __init__(
        self,
        name: str,
        split: str,
        lengths: Mapping[str, int],
        limit: int | None = None,
        use_cached: bool = False,
    ):
        import seqio

        task: Any = seqio.TaskRegistry.get(name)
        self.name, self._split, self._lengths = name, split, lengths
        self._use_cached, self._features = use_cached, task.output_features
        self._sample = Sample(limit)
        self.judge = Judge(name, task.postprocess_fn, task.metric_fns)

    @property
    def available(self) -> int:
        """Inputs of the split, once `examples` has been read to its end."""
        return self._sample.available

    def truncation(self) -> TruncationCounter:
        """A counter of what is cut to the lengths."""
        return TruncationCounter(self._features, self._lengths)

    def examples(self) -> Iterator[dict[str, Any]]:
        """The examples in the order of the rows, an input's choices one after the other."""
        description = None if self._use_cached else task_descriptions().get(self.name)
        if description is None or description.sp_model is None:
            chosen = self._sample(_by_input(self._rows_of_seqio()))
            return itertools.chain.from_iterable(rows for _, rows in chosen)
        return prompted_examples(description, self._split, self._lengths, self._sample)

    def _rows_of_seqio(self) -> Iterator[dict[str, Any]]:
        from t0repro.mesh import compat

        compat.install()
        from t5.models import mesh_transformer

        (dataset,) = mesh_transformer.mesh_eval_dataset_fn(
            mixture_or_task_name=self.name,
            sequence_length=dict(self._lengths),
            dataset_split=self._split,
            use_cached=self._use_cached,
        )
        return map(_without_padding, dataset.dataset_fn().as_numpy_iterator())


class Sample:
    """Takes at most `limit` of the inputs that pass through it, and counts all of them.

    An input is taken or not by its number alone, so that prompts with the same rows are evaluated
    on the same inputs, whichever run reads them. (The first inputs of a file would be no sample:
    many files are sorted by class.)
    """

    def __init__(self, limit: int | None):
        self._limit = limit
        self.available = 0

    def __call__(self, numbered: Iterable[tuple[int, Item]]) -> Iterator[tuple[int, Item]]:
        """The inputs taken, in their order."""
        counted = self._counted(numbered)
        if self._limit is None:
            return counted
        lots = ((_lot(number), number, item) for number, item in counted)
        taken = heapq.nsmallest(self._limit, lots, key=lambda each: each[:2])
        return iter(sorted(((n, item) for _, n, item in taken), key=lambda each: each[0]))

    def _counted(self, numbered: Iterable[tuple[int, Item]]) -> Iterator[tuple[int, Item]]:
        for each in numbered:
            self.available += 1
            yield each


def _lot(number: int) -> bytes:
    """What decides whether an input is taken: pseudorandom, the same in every run."""
    return hashlib.blake2b(number.to_bytes(8, "little"), digest_size=8, key=b"seed 0").digest()


def windows(readers: Iterable[TaskReader], most_pairs: int) -> Iterator[list[Part]]:
    """Parts of tasks to be scored together: whole tasks, as long as they fit.

    Args:
      readers: of the tasks.
      most_pairs: of a window (the choices of an input stay together).
    """
    window: list[Part] = []
    room = most_pairs
    for reader in readers:
        examples: list[dict[str, Any]] = []
        for _, choices in _by_input(reader.examples()):
            if room < len(choices) and (window or examples):
                if examples:
                    window.append(Part(reader.name, examples, last=False))
                yield window
                window, examples, room = [], [], most_pairs
            examples += choices
            room -= len(choices)
        window.append(Part(reader.name, examples))
    if window:
        yield window


def _by_input(rows: Iterable[dict[str, Any]]) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Each input's number and rows: one for each choice where answers are ranked, else one."""
    numbers = itertools.count()

    def number(row: Mapping[str, Any]) -> int:
        return int(row["idx"][0]) if "idx" in row else next(numbers)

    for at, choices in itertools.groupby(rows, number):
        yield at, list(choices)


def data_origin(name: str, split: str, use_cached: bool) -> dict[str, Any] | None:
    """Which version of which rows a task's split is made of; None where nothing tells.

    A local file is known by its size and checksum, not by where it lies; rows of the hub by
    repository and commit; a cached task by the digest of what its cache says of itself.
    """
    import seqio

    task = seqio.TaskRegistry.get(name)
    if use_cached and task.cache_dir:
        files = sorted(Path(task.cache_dir).glob(f"*.{split}.json"))
        return {"cache": digest_of_texts(path.read_text(encoding="utf-8") for path in files)}
    source = task.source
    if not hasattr(source, "origin"):
        return None
    hidden = ("path", "modified_ns")
    origin = {key: value for key, value in source.origin(split).items() if key not in hidden}
    subset = f"/{source.subset}" if source.subset else ""
    return {"dataset": f"{source.dataset}{subset}", **origin}


def vocabulary_digest(name: str) -> str | None:
    """16 hexadecimal digits that stand for a task's SentencePiece model; None where it has none."""
    import seqio

    vocabulary = seqio.get_mixture_or_task(name).output_features["targets"].vocabulary
    model = getattr(vocabulary, "sp_model", None)
    return None if model is None else hashlib.blake2b(model, digest_size=8).hexdigest()


def _without_padding(example: Mapping[str, Any]) -> dict[str, Any]:
    """An example without the zeros that fill its sequences, which are most of its bytes."""
    row = dict(example)
    for name in ("inputs", "targets"):
        row[name] = np.trim_zeros(row[name], "b").astype(np.int32)
    return row
