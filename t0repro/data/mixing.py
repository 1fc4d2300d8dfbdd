"""Training batches of several tasks made with numpy only: mixed at rates, shuffled and packed.

The batches equal SeqIO's entry by entry: examples, their truncation and packing and, with the same
seed and rates, their order. Mesh TensorFlow's batches are also the same if each
example has tokens in both features, except that it puts EOS at the end of a row whose targets it
truncates.
"""

from __future__ import annotations

import abc
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from t0repro.data.resuming import Batch, ResumableBatches
from t0repro.data.tf_order import ShuffleSeeds, draws, shuffle_like_tf
from t0repro.errors import UserError

FEATURES = ("inputs", "targets")
KEPT_IN_MEMORY = 10_000
"""SeqIO keeps a task of fewer examples than this in memory, for each shard."""
_SHUFFLE_BUFFER = 1000  # size of the shuffle buffer, as in SeqIO
_ORDER = "tf.data"  # earlier versions sampled with numpy's generator, and recorded no order

Example = dict[str, np.ndarray]
Item = TypeVar("Item")


class MixedBatches(ResumableBatches):
    """Endless training batches of tasks; a subclass reads their examples (`_epochs`).

    A resumed run continues after its last batch: with the checkpoint's seed, the batches before it
    are rebuilt and skipped.

    Args:
      rates: The rate of each task, in SeqIO's order of tasks.
      sequence_length: Tokens per row of `inputs` and of `targets`; longer examples are truncated.
      batch_size: Rows in a batch.
      split: The split to read.
      pack: Whether a row holds as many examples as fit.
      shuffle: Whether examples come in SeqIO's random order, or in the order of the data.
      seed: Seed for the order; None picks one, which checkpoints record.
      num_shards: Number of shards of the examples, each of which makes an equal part of the rows.
    """

    def __init__(
        self,
        rates: Mapping[str, float],
        sequence_length: Mapping[str, int],
        batch_size: int,
        *,
        split: str,
        pack: bool,
        shuffle: bool,
        seed: int | None,
        num_shards: int,
    ):
        if absent := [name for name in FEATURES if name not in sequence_length]:
            raise UserError(
                f"The lengths lack {' and '.join(absent)}.",
                where="sequence_length",
                fix="Give a length for each of inputs and targets.",
            )
        if batch_size < 1:
            raise UserError(
                f"A batch cannot have {batch_size} rows.",
                where="batch_size",
                fix="Give at least 1.",
            )
        if not all(0 <= rate < math.inf for rate in rates.values()) or not any(rates.values()):
            raise UserError(
                f"The rates are {[*rates.values()]}.",
                where="folders",
                fix="Give each task a finite rate of at least 0, and one of them more than 0.",
            )
        self._rates = dict(rates)
        self._lengths = {name: sequence_length[name] for name in FEATURES}
        self._batch_size, self._split = batch_size, split
        self._pack, self._shuffle = pack, shuffle
        super().__init__(seed, num_shards)

    @abc.abstractmethod
    def _epochs(self, task: str, seed: int, shard: int) -> Iterator[Iterator[Example]]:
        """The examples of a task's shard, of one epoch after the other without end."""

    def _position(self, saved: Any) -> dict[str, Any]:
        # Without a checkpoint there is no position to resume, and nothing to report about it.
        return {} if saved is None else super()._position(saved)

    def _to_numpy(self, element: Mapping[str, Any]) -> Batch:
        return dict(element)

    def _arguments(self) -> dict[str, Any]:
        return {
            "split": self._split,
            "sequence_length": self._lengths,
            "batch_size": self._batch_size,
            "pack": self._pack,
            "shuffle": self._shuffle,
            "num_shards": self.num_shards,
        } | ({"order": _ORDER} if self._shuffle or len(self._rates) > 1 else {})

    def dataset(self, seed: int, shard: int = 0) -> Iterator[Batch]:
        """Endless batches of a shard for a seed; see `ResumableBatches`."""
        return self._batches(self._rows(seed, shard), self._batch_size // self.num_shards)

    def first(self, count: int) -> Iterator[Batch]:
        """The first batches for an evaluation, without shuffling, as `EvalBatches` takes them.

        Each task is repeated once per row to fill. If packing leaves too few rows, all rows are
        repeated. There are fewer batches only if there is no example.
        """
        assert not self._shuffle and self._seed is not None
        epochs, seed = count * self._batch_size, self._seed
        rows = _chain_until_empty(self._rows(seed, 0, epochs) for _ in itertools.count())
        return itertools.islice(self._batches(rows, self._batch_size), count)

    def epoch(self, seed: int) -> Iterator[Batch]:
        """The rows of one pass through each task, one row a batch."""
        return self._batches(self._rows(seed, 0, 1), 1)

    def _batches(self, in_rows: Iterator[list[Example]], size: int) -> Iterator[Batch]:
        while len(rows := list(itertools.islice(in_rows, size))) == size:
            yield _to_batch(rows, self._lengths, positions=self._pack)

    def _rows(self, seed: int, shard: int, epochs: int | None = None) -> Iterator[list[Example]]:
        """The examples of each row: endless, or of a number of epochs of each task."""
        trimmed = (
            {name: example[name][: self._lengths[name]] for name in FEATURES}
            for example in self._mix(seed, shard, epochs)
        )
        return pack_rows(trimmed, self._lengths) if self._pack else ([each] for each in trimmed)

    def _mix(self, seed: int, shard: int, epochs: int | None) -> Iterator[Example]:
        """Examples of all tasks, sampled by the tasks' rates until a sampled task has no more."""
        # SeqIO uses one seed for every task and for sampling, and skips tasks with rate 0.
        rates = {task: rate for task, rate in self._rates.items() if rate}
        tasks = [self._examples(task, seed, shard, epochs) for task in rates]
        if len(tasks) == 1:
            yield from tasks[0]
            return
        for at in draws([*rates.values()], seed):
            example = next(tasks[at], None)
            if example is None:
                return
            yield example

    def _examples(self, task: str, seed: int, shard: int, epochs: int | None) -> Iterator[Example]:
        """A task's examples; if shuffled, sampled from a buffer that spans epochs."""
        examples = _chain_until_empty(itertools.islice(self._epochs(task, seed, shard), epochs))
        # One buffer for all epochs: SeqIO repeats a task before it shuffles the examples.
        return (
            shuffle_like_tf(examples, _SHUFFLE_BUFFER, ShuffleSeeds(seed))
            if self._shuffle
            else examples
        )


def _chain_until_empty(epochs: Iterable[Iterator[Item]]) -> Iterator[Item]:
    """The items of all epochs; ends with one that has none, as tf.data's repeat does."""
    for epoch in epochs:
        for first in epoch:
            yield first
            yield from epoch
            break
        else:
            return


def pack_rows(examples: Iterator[Example], lengths: Mapping[str, int]) -> Iterator[list[Example]]:
    """The examples of each row: consecutive ones, until one does not fit in both features.

    SeqIO and Mesh TensorFlow pack groups of as many examples as the longer feature has tokens. They
    pack each group separately, so its last row ends with it even if the next example would fit:

        group     1  1  1  1  1  1  2  2  2 ...
        row       1  1  2  2  3  3  4  4  5 ...
                                 ^ ended with the group, not full
    """
    while group := list(itertools.islice(examples, max(lengths.values()))):
        row: list[Example] = []
        room = dict(lengths)
        for example in group:
            if any(len(example[name]) > room[name] for name in FEATURES):
                yield row
                row, room = [], dict(lengths)
            row.append(example)
            room = {name: room[name] - len(example[name]) for name in FEATURES}
        yield row


def _to_batch(
    rows: Sequence[Sequence[Example]], lengths: Mapping[str, int], *, positions: bool
) -> Batch:
    """Rows of examples as arrays, with the features of t0repro.data.batches: int32 [rows, length].

    Args:
      rows: The examples of each row, which fit it.
      lengths: Tokens per row of each feature.
      positions: Whether to add each token's position and segment, as packed rows need.
    """
    batch: Batch = {}
    for name in FEATURES:
        tokens, segments, places = (np.zeros((len(rows), lengths[name]), np.int32) for _ in "123")
        for number, row in enumerate(rows):
            start = 0
            # As SeqIO numbers segments: an example without tokens in this feature has none in it.
            for segment, example in enumerate((each for each in row if len(each[name])), start=1):
                end = start + len(example[name])
                tokens[number, start:end] = example[name]
                segments[number, start:end] = segment
                places[number, start:end] = np.arange(end - start)
                start = end
        batch[name] = tokens
        if positions:
            batch |= {f"{name}_segmentation": segments, f"{name}_position": places}
    return batch
