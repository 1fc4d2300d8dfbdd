"""Training batches read from a prompt cache with numpy only: no TensorFlow, no SeqIO.

The batches equal SeqIO's entry by entry, if the tasks have no preprocessors after SeqIO's
CacheDatasetPlaceholder. This covers the examples, their truncation and packing and, with the same
seed and rates, their order (`tf_order`). Mesh TensorFlow's batches are also the same if each
example has tokens in both features, except that it puts EOS at the end of a row whose targets it
truncates.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from t0repro.data.resuming import Batch, ResumableBatches
from t0repro.data.tf_order import ShuffleSeeds, draws, shuffled
from t0repro.errors import UserError
from t0repro.files import input_path
from t0repro.progress import say
from t0repro.tasks.prompt_cache.folders import PROVENANCE, damage, shard_names
from t0repro.tasks.prompt_cache.records import RecordsInTurns, integers, read_records
from t0repro.words import counted

FEATURES = ("inputs", "targets")
_SHUFFLED = 1000  # size of the shuffle buffer, as in SeqIO
_HELD = 10_000  # with fewer examples, SeqIO keeps them in memory and shuffles files once
_FILES = 16  # number of files read in turn, and
_TURN = 16  # records per turn, as in SeqIO's FileDataSource
_ORDER = "tf.data"  # earlier versions sampled with numpy's generator, and recorded no order
_EOS = 1  # in every T5's vocabulary

Example = dict[str, np.ndarray]


class CachedBatches(ResumableBatches):
    """Endless training batches of cached tasks; implements `training.start.BatchSource`.

    A resumed run continues after its last batch: with the checkpoint's seed, the batches before it
    are rebuilt and skipped.

    Args:
      folders: The cache folder or address of each task, mapped to the task's rate in the mixture; a
        sequence mixes the tasks in proportion to their numbers of examples.
      sequence_length: Tokens per row of `inputs` and of `targets`; longer examples are truncated.
      batch_size: Rows in a batch.
      split: The split to read.
      pack: Whether a row holds as many examples as fit.
      shuffle: Whether examples come in SeqIO's random order, or in the order of the files.
      seed: Seed for the order; None picks one, which checkpoints record.

    Raises:
      UserError: If a folder is not a complete cache of the split, no task has an example, a length
        is missing, `batch_size` is less than 1, or rates are negative, NaN, infinite or all 0.
    """

    def __init__(
        self,
        folders: Mapping[str, float] | Sequence[str],
        sequence_length: Mapping[str, int],
        batch_size: int,
        *,
        split: str = "train",
        pack: bool = True,
        shuffle: bool = True,
        seed: int | None = None,
    ):
        # What is recorded names folders as they were given; a bucket's have another path here.
        self._paths = {str(folder): input_path(folder) for folder in folders}
        counts = {name: count_examples(path, split) for name, path in self._paths.items()}
        given = dict(folders) if isinstance(folders, Mapping) else counts
        # A task without examples would be sampled forever.
        self._rates = {str(folder): float(given[folder]) for folder in given if counts[str(folder)]}
        self._counts = counts
        if not self._rates:
            raise UserError(f"No task has an example in {split!r}.", where=", ".join(counts))
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
        rates = [*self._rates.values()]
        if not all(0 <= rate < math.inf for rate in rates) or not any(rates):
            raise UserError(
                f"The rates are {rates}.",
                where="folders",
                fix="Give each task a finite rate of at least 0, and one of them more than 0.",
            )
        self._lengths = {name: sequence_length[name] for name in FEATURES}
        self._batch_size, self._split = batch_size, split
        self._pack, self._shuffle = pack, shuffle
        super().__init__(seed)

    def open(self, step: int, saved: Path | None) -> Iterator[Batch]:
        """Batches from where the run continues; see `training.start.BatchSource`."""
        paths = [self._paths[name] for name in self._rates]
        if unfinished := [path for path in paths if not _ends_in_eos(path, self._split)]:
            say(
                f"warning: the targets of {counted(len(unfinished), 'cached task')} do not end in"
                f" EOS ({_EOS}), {unfinished[0].name} first; preprocessors after SeqIO's"
                " CacheDatasetPlaceholder, which may add EOS or mask spans, do not run here; the"
                " commands that train with SeqIO run them"
            )
        return super().open(step, saved)

    def _position(self, saved: Path | None) -> dict[str, Any]:
        # Without a checkpoint there is no position to resume, and nothing to report about it.
        return {} if saved is None else super()._position(saved)

    def _to_numpy(self, element: Mapping[str, Any]) -> Batch:
        return dict(element)

    def _arguments(self) -> dict[str, Any]:
        return {
            "cached": self._rates,
            "split": self._split,
            "sequence_length": self._lengths,
            "batch_size": self._batch_size,
            "pack": self._pack,
            "shuffle": self._shuffle,
        } | ({"order": _ORDER} if self._shuffle or len(self._rates) > 1 else {})

    # ---- From examples to batches ---------------------------------------------------------------

    def _dataset(self, seed: int, shard: int = 0) -> Iterator[Batch]:
        del shard  # there is only one
        return self._batches(self._rows(seed))

    def first(self, count: int) -> Iterator[Batch]:
        """The first batches for an evaluation, without shuffling, as `EvalBatches` takes them.

        Each task is repeated once per row to fill. If packing leaves too few rows, all rows are
        repeated.
        """
        assert not self._shuffle and self._seed is not None
        epochs, seed = count * self._batch_size, self._seed
        rows = (row for _ in itertools.count() for row in self._rows(seed, epochs))
        return itertools.islice(self._batches(rows), count)

    def _batches(self, in_rows: Iterator[list[Example]]) -> Iterator[Batch]:
        while True:
            rows = list(itertools.islice(in_rows, self._batch_size))
            yield to_batch(rows, self._lengths, positions=self._pack)

    def _rows(self, seed: int, epochs: int | None = None) -> Iterator[list[Example]]:
        """The examples of each row: endless, or of a number of epochs of each task."""
        trimmed = (
            {name: example[name][: self._lengths[name]] for name in FEATURES}
            for example in self._mixed(seed, epochs)
        )
        return _packed(trimmed, self._lengths) if self._pack else ([each] for each in trimmed)

    def _mixed(self, seed: int, epochs: int | None) -> Iterator[Example]:
        """Examples of all tasks, sampled by the tasks' rates until a sampled task has no more."""
        # SeqIO uses one seed for every task and for sampling, skips tasks with rate 0, and sorts
        # tasks by name, which is the name of a task's folder.
        folders = sorted(self._rates, key=lambda folder: Path(folder).name)
        rates = {folder: self._rates[folder] for folder in folders if self._rates[folder]}
        tasks = [self._examples(folder, seed, epochs) for folder in rates]
        if len(tasks) == 1:
            yield from tasks[0]
            return
        for at in draws([*rates.values()], seed):
            example = next(tasks[at], None)
            if example is None:
                return
            yield example

    def _examples(self, folder: str, seed: int, epochs: int | None) -> Iterator[Example]:
        """A task's examples; if shuffled, sampled from a buffer that spans epochs."""
        examples = self._epochs(folder, seed, epochs)
        # One buffer for all epochs: SeqIO repeats a task before it shuffles the examples.
        return shuffled(examples, _SHUFFLED, ShuffleSeeds(seed)) if self._shuffle else examples

    def _epochs(self, folder: str, seed: int, epochs: int | None) -> Iterator[Example]:
        """A task's examples, its files read repeatedly; if shuffled, in random order of files."""
        path = self._paths[folder]
        order = shards = [path / name for name in shards_of(path, self._split)]
        seeds = ShuffleSeeds(seed)
        for epoch in itertools.count() if epochs is None else range(epochs):
            if self._shuffle and (epoch == 0 or self._counts[folder] >= _HELD):
                order = [*shuffled(iter(shards), len(shards), seeds)]
            for record in by_turns(order):
                yield integers(record, FEATURES)


def count_examples(folder: Path, split: str) -> int:
    """Number of examples of a cached split.

    Raises:
      UserError: If the cache is missing or incomplete.
    """
    if found := damage(folder, split):
        raise UserError(
            f"This is not a complete cache of split {split!r}: {found}.",
            where=str(folder),
            fix="Name the folders of tasks, CACHE_DIR/TASK, which t0repro cache or"
            " seqio_cache_tasks wrote.",
        )
    stats = folder / f"stats.{split}.json"
    if stats.is_file():
        return int(json.loads(stats.read_text())["examples"])
    return sum(1 for name in shards_of(folder, split) for _ in read_records(folder / name))


def _ends_in_eos(folder: Path, split: str) -> bool:
    """Whether the first targets in a cache end in EOS."""
    if (folder / PROVENANCE).is_file():
        return True  # in its own vocabulary, since `t0repro cache` wrote it
    records = by_turns([folder / name for name in shards_of(folder, split)])
    targets = integers(next(records), FEATURES)["targets"]
    return bool(targets.size and targets[-1] == _EOS)


def shards_of(folder: Path, split: str) -> list[str]:
    """Names of the files of a cached split."""
    return shard_names(split, json.loads((folder / f"info.{split}.json").read_text())["num_shards"])


def by_turns(shards: Sequence[Path]) -> Iterator[bytes]:
    """The files' records in the order in which SeqIO reads them.

    It takes up to 16 records from one of 16 files, then from the next. A file that has ended is
    replaced, at its next turn, by the first file that has not been started.
    """
    waiting = map(RecordsInTurns, shards)
    begun = list(itertools.islice(waiting, _FILES))
    while begun:
        round_, begun = begun, []
        for shard in round_:
            records = shard.take(_TURN)
            yield from records
            if len(records) == _TURN:
                begun.append(shard)
            elif another := next(waiting, None):
                begun.append(another)


def _packed(examples: Iterator[Example], lengths: Mapping[str, int]) -> Iterator[list[Example]]:
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


def to_batch(
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
