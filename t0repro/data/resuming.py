"""Batches that track their position, so that a resumed run continues exactly.

A checkpoint's folder `data/` holds position.json:

    batches     number trained on since the data began
    seed        for the order of the data: bound in gin, or picked when the run began
    arguments   whatever else decides the order (the mixture, lengths, the batch size, ...)
    made_of     the fingerprint of caches, rows, templates and rates (t0repro.data.fingerprints)

and, if configured, the state of tf.data's iterator. Without that state, the batches before the
position are rebuilt and skipped. This is exact in every case, because a given seed produces the
same data in every process, unless caches, rows, templates or rates changed: then the run is
refused.

Batches may be built from shards. Each shard has its own pipeline over its part of the examples and
supplies an equal part of the rows of every batch. With three shards, a batch of six rows is

    row     0     1     2     3     4     5
    shard   0     0     1     1     2     2

so each of several processes runs only the pipelines for the rows on its devices. Batches
depend on the number of shards but not on the number of processes.
"""

from __future__ import annotations

import abc
import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from t0repro.data.fingerprints import Fingerprint, differences
from t0repro.data.read_ahead import read_ahead
from t0repro.errors import UserError
from t0repro.partitioning.processes import broadcast_from_first
from t0repro.progress import count_progress, say
from t0repro.storage import write_atomically
from t0repro.words import counted, some

POSITION, ITERATOR = "position.json", "iterator"
_UNRECORDED = {"num_shards": 1}  # arguments that older versions did not have
_FEW = 50  # skipping fewer batches than this shows no progress bar

Batch = dict[str, np.ndarray]


class ResumableBatches(abc.ABC):
    """Endless batches of a pipeline, usually tf.data's; implements `training.feed.BatchSource`.

    A subclass defines the pipeline (`_dataset`), what decides its batches (`_arguments`), and how
    an element becomes a numpy batch (`_to_numpy`).

    Args:
      seed: Seed for the data; None picks one, which checkpoints record.
      num_shards: Number of shards that make a batch.
    """

    def __init__(self, seed: int | None, num_shards: int = 1):
        self._bound_seed = self._seed = seed
        self.num_shards = num_shards
        self.local_shards: Sequence[int] = range(num_shards)
        self._taken = 0
        self._made_of: Fingerprint = {}
        self._saves_iterator = False
        self._iterators: dict[int, Any] = {}

    def make_only(self, shards: Sequence[int]) -> None:
        """Zeroes the rows of other shards, which other processes build; before `open`."""
        self.local_shards = shards

    def open(self, step: int, saved: Path | None) -> Iterator[Batch]:
        """Batches from where the run continues; see `training.feed.BatchSource`."""
        position = self._position(saved)
        if self._seed is None:
            # Pick a seed now and save it: without one, a resumed run could not rebuild its batches.
            # The picked seed is never 0, which `or` would treat as not recorded.
            self._seed = broadcast_from_first(
                lambda: position.get("seed") or secrets.randbits(31) + 1
            )
        self._taken = self._first(step, position)
        self._made_of = self.fingerprint()
        if self._taken:
            self._check_same_data(saved)
        datasets = {index: self.dataset(self._seed, index) for index in self.local_shards}
        # Only a single pipeline's state can be saved; several shards are rebuilt and skipped.
        self._saves_iterator = self.num_shards == 1 and self._can_save_iterator(datasets[0])
        self._iterators = {index: iter(dataset) for index, dataset in datasets.items()}
        elements = self._elements()
        if self._taken:
            self._restore_position(elements, saved, position)
        batches = map(self._assemble, elements)
        # The saved state is the iterator's current position, so it must not read ahead.
        return self._count(batches if self._saves_iterator else read_ahead(batches))

    def save(self, folder: Path) -> None:
        """Writes the position after the last batch taken; the pipeline's state if configured."""
        position = {"batches": self._taken, "seed": self._seed, "arguments": self._arguments()}
        # As they were when the data were opened: they may have changed on the disk since.
        position["made_of"] = self._made_of
        if self._saves_iterator:
            self._tf_checkpoint().write(str(folder / ITERATOR))
            position["iterator"] = ITERATOR
        # Written last: a position is read only together with a complete iterator state.
        write_atomically(folder / POSITION, json.dumps(position, indent=1) + "\n")

    def check_resumable(self, step: int, saved: Path | None) -> None:
        """Checks that a run can continue in the same data, without opening them.

        Args:
          step: The checkpoint's step.
          saved: Its folder for the position in the data.

        Raises:
          UserError: If caches, rows, templates or rates are no longer those of the position.
        """
        self._made_of = self.fingerprint()
        if self._first(step, self._position(saved)):
            self._check_same_data(saved)

    @abc.abstractmethod
    def dataset(self, seed: int, shard: int = 0) -> Any:
        """An iterable over the endless batches for a seed, usually a tf.data.Dataset.

        With several shards, over the batches of one: `batch_size / num_shards` rows each.
        """

    @abc.abstractmethod
    def _arguments(self) -> dict[str, Any]:
        """Whatever decides the batches apart from the seed; JSON values."""

    def fingerprint(self) -> Fingerprint:
        """What the examples are made from, by task; {} for examples without caches or rows."""
        return {}

    @abc.abstractmethod
    def _to_numpy(self, element: Mapping[str, Any]) -> Batch:
        """A batch of int32 arrays [rows, length] from an element of the dataset."""

    def _is_resumed(self) -> bool:
        """Whether to use the position in a checkpoint."""
        return True

    def _can_save_iterator(self, dataset: Any) -> bool:
        """Whether checkpoints contain the state of tf.data's iterator."""
        del dataset
        return False

    def _first(self, step: int, position: Mapping[str, Any]) -> int:
        """Number of batches to skip before the first one."""
        del step
        return int(position.get("batches", 0))

    def _elements(self) -> Iterator[tuple[Any, ...]]:
        """Yields one element of each shard built here at a time."""
        if self.num_shards == 1:
            yield from zip(*self._iterators.values(), strict=True)
            return
        while True:
            yield tuple(self._next(index) for index in self.local_shards)

    def _next(self, shard: int) -> Any:
        for element in self._iterators[shard]:
            return element
        raise UserError(
            f"Shard {shard} of {self.num_shards} of the training data has no more examples.",
            where="the training data",
            fix="Take fewer shards: each needs an example of every task.",
        )

    def _assemble(self, elements: Sequence[Any]) -> Batch:
        """The full batch; rows of shards built elsewhere are zeros."""
        parts = [self._to_numpy(element) for element in elements]
        if self.num_shards == 1:
            return parts[0]
        batch = {}
        for name, first in parts[0].items():
            rows = np.zeros((self.num_shards, *first.shape), first.dtype)
            for shard, part in zip(self.local_shards, parts, strict=True):
                rows[shard] = part[name]
            batch[name] = rows.reshape(-1, *first.shape[1:])
        return batch

    def _count(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in batches:
            # Count before yielding: the generator does not continue until the next batch is
            # requested.
            self._taken += 1
            yield batch

    def _position(self, saved: Path | None) -> dict[str, Any]:
        """The position that a checkpoint records, or {} to start over, with the reason reported."""
        if not self._is_resumed():
            return {}
        if saved is None or not (saved / POSITION).is_file():
            say("data: from the beginning, because the checkpoint has no data position")
            return {}
        position = json.loads((saved / POSITION).read_text())
        arguments, recorded = self._arguments(), _UNRECORDED | position["arguments"]
        # Compare only this version's names: whatever an older version recorded in addition does not
        # matter.
        changed = [name for name in arguments if arguments[name] != recorded.get(name)]
        if self._bound_seed not in (None, position["seed"]):
            changed.append("seed")
        if changed:
            say(f"data: from the beginning, since {' and '.join(changed)} changed")
            return {}
        return position

    def _check_same_data(self, saved: Path | None) -> None:
        """Refuses to skip batches of other data than those that the run was trained on.

        Raises:
          UserError: If caches, rows, templates or rates are no longer those of the position.
        """
        if saved is None or not (saved / POSITION).is_file():
            return
        position = json.loads((saved / POSITION).read_text())
        then = position.get("made_of")
        if then is None:
            say(
                "note: an earlier version saved the position in the data, without a fingerprint of"
                " caches, rows and templates: whether they are still the same is not checked"
            )
            return
        if changed := differences(then, self._made_of):
            raise UserError(
                "The training data are no longer those that the run was trained on. After"
                f" {counted(self._taken, 'batch', 'batches')} it would repeat some examples and"
                f" leave out others. Changed: {some(changed, 3)}.",
                where=str(saved / POSITION),
                fix="Put caches, rows, templates and rates back as they were, or read the former"
                " cache from another folder. To read the changed data from their beginning,"
                f" bind a seed other than {position['seed']}:"
                " mesh_train_dataset_fn.seed.",
            )

    def _restore_position(
        self, elements: Iterator[Any], saved: Path | None, position: Mapping[str, Any]
    ) -> None:
        """Moves the iterators past the batches already taken."""
        taken = counted(self._taken, "batch", "batches")
        if self._saves_iterator and position.get("iterator"):
            assert saved is not None
            say(f"data: after {taken}, by the input pipeline's state")
            # Without assert_consumed, TensorFlow restores what matches and silently ignores the
            # rest.
            self._tf_checkpoint().read(str(saved / ITERATOR)).assert_consumed()
            return
        say(f"data: after {taken}, which are rebuilt and skipped")
        if self._taken < _FEW:
            for _ in range(self._taken):
                next(elements)
            return
        with count_progress(
            self._taken, "passing over", "batch", "passed over", "batches"
        ) as advance:
            for _ in range(self._taken):
                next(elements)
                advance(1)

    def _tf_checkpoint(self) -> Any:
        import tensorflow as tf

        return tf.train.Checkpoint(iterator=self._iterators[0])
