"""Training batches read from a prompt cache with numpy only: no TensorFlow, no SeqIO.

They equal SeqIO's (t0repro.data.mixing), if the tasks have no preprocessors after SeqIO's
CacheDatasetPlaceholder.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from t0repro.data.fingerprints import Fingerprint, fingerprint_cache
from t0repro.data.mixing import FEATURES, KEPT_IN_MEMORY, Example, MixedBatches
from t0repro.data.resuming import Batch
from t0repro.data.tf_order import ShuffleSeeds, shuffle_like_tf
from t0repro.errors import UserError
from t0repro.progress import say
from t0repro.storage import input_path
from t0repro.tasks.prompt_cache.folders import PROVENANCE, shard_names
from t0repro.tasks.prompt_cache.provenance import damage
from t0repro.tasks.prompt_cache.records import RecordsInTurns, integers, read_records
from t0repro.words import counted

_FILES = 16  # number of files read in turn, and
_TURN = 16  # records per turn, as in SeqIO's FileDataSource
_EOS = 1  # in every T5's vocabulary


class CachedBatches(MixedBatches):
    """Endless training batches of cached tasks; implements `training.feed.BatchSource`.

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
      num_shards: Number of shards of the examples, each of which makes an equal part of the rows.

    Raises:
      UserError: If a folder is not a complete cache of the split or holds no tokens, no task has an
        example, a length is missing, `batch_size` is less than 1, or rates are negative, NaN,
        infinite or all 0.
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
        num_shards: int = 1,
    ):
        # What is recorded names folders as they were given; a bucket's have another path here.
        self._paths = {str(folder): input_path(folder) for folder in folders}
        counts = {name: count_examples(path, split) for name, path in self._paths.items()}
        for path in self._paths.values():
            _check_tokens(path, split)
        given_rates = dict(folders) if isinstance(folders, Mapping) else counts
        # A task without examples would end the others.
        rates = {
            str(folder): float(given_rates[folder]) for folder in given_rates if counts[str(folder)]
        }
        self._counts = counts
        if not rates:
            raise UserError(
                f"No task has an example in {split!r}.",
                where=", ".join(counts),
                fix="Name another split, or cache tasks with rows in it.",
            )
        super().__init__(
            # SeqIO sorts tasks by name, which is the name of a task's folder.
            {folder: rates[folder] for folder in sorted(rates, key=lambda each: Path(each).name)},
            sequence_length,
            batch_size,
            split=split,
            pack=pack,
            shuffle=shuffle,
            seed=seed,
            num_shards=num_shards,
        )

    def open(self, step: int, saved: Path | None) -> Iterator[Batch]:
        """Batches from where the run continues; see `training.feed.BatchSource`."""
        paths = [self._paths[name] for name in self._rates]
        if unfinished := [path for path in paths if not _ends_in_eos(path, self._split)]:
            say(
                f"warning: the targets of {counted(len(unfinished), 'cached task')} do not end in"
                f" EOS ({_EOS}), {unfinished[0].name} first; preprocessors after SeqIO's"
                " CacheDatasetPlaceholder, which may add EOS or mask spans, do not run here; the"
                " commands that train with SeqIO run them"
            )
        return super().open(step, saved)

    def _arguments(self) -> dict[str, Any]:
        return {"cached": self._rates, **super()._arguments()}

    def fingerprint(self) -> Fingerprint:
        """See `ResumableBatches`."""
        return {path.name: fingerprint_cache(path, self._split) for path in self._paths.values()}

    def _epochs(self, task: str, seed: int, shard: int) -> Iterator[Iterator[Example]]:
        """Each epoch's examples; if shuffled, their files come in random order."""
        folder = self._paths[task]
        files, select = split_by_shard(folder, self._split, shard, self.num_shards)
        order, seeds = files, ShuffleSeeds(seed)
        for epoch in itertools.count():
            # SeqIO keeps a small task in memory from its first epoch on, so its files are shuffled
            # only once.
            if self._shuffle and (
                epoch == 0 or self._counts[task] >= KEPT_IN_MEMORY * self.num_shards
            ):
                order = [*shuffle_like_tf(iter(files), len(files), seeds)]
            yield (integers(record, FEATURES, folder) for record in select(read_in_turns(order)))


def count_examples(folder: Path, split: str) -> int:
    """Number of examples of a cached split.

    Raises:
      UserError: If the cache is missing or incomplete.
    """
    if problem := damage(folder, split):
        raise UserError(
            f"This is not a complete cache of split {split!r}: {problem}.",
            where=str(folder),
            fix="Name the folders of tasks, CACHE_DIR/TASK, which t0repro cache or"
            " seqio_cache_tasks wrote.",
        )
    stats = folder / f"stats.{split}.json"
    examples = json.loads(stats.read_text()).get("examples") if stats.is_file() else None
    if examples is not None:
        return int(examples)
    return sum(1 for name in shards_of(folder, split) for _ in read_records(folder / name))


def _check_tokens(folder: Path, split: str) -> None:
    """Refuses a cache of texts, whose tokens SeqIO would make after reading it.

    Raises:
      UserError: If inputs or targets are not rows of integers.
    """
    info = folder / f"info.{split}.json"
    features = json.loads(info.read_text()).get("features", {})
    for name in FEATURES:
        kind = features.get(name, {})
        if kind and (not kind["dtype"].startswith("int") or len(kind["shape"]) != 1):
            raise UserError(
                f"The cached {name} are not tokens: {kind['dtype']} of shape {kind['shape']}.",
                where=str(info),
                fix="Train with a command that reads the task by SeqIO, or cache it with its"
                " tokenizer before SeqIO's CacheDatasetPlaceholder.",
            )


def _ends_in_eos(folder: Path, split: str) -> bool:
    """Whether the first targets in a cache end in EOS."""
    if (folder / PROVENANCE).is_file():
        return True  # in its own vocabulary, since `t0repro cache` wrote it
    records = read_in_turns([folder / name for name in shards_of(folder, split)])
    targets = integers(next(records), FEATURES, folder)["targets"]
    return bool(targets.size and targets[-1] == _EOS)


def shards_of(folder: Path, split: str) -> list[str]:
    """Names of the files of a cached split."""
    return shard_names(split, json.loads((folder / f"info.{split}.json").read_text())["num_shards"])


def split_by_shard(
    folder: Path, split: str, shard: int, num_shards: int
) -> tuple[list[Path], Callable[[Iterator[bytes]], Iterator[bytes]]]:
    """The files that one shard of a cached split reads, and what takes its own of their records.

    SeqIO divides the files or, if there are fewer of them than shards, their examples.
    """
    files = [folder / name for name in shards_of(folder, split)]
    if len(files) >= num_shards:
        return files[shard::num_shards], iter
    return files, lambda records: itertools.islice(records, shard, None, num_shards)


def read_in_turns(shards: Sequence[Path]) -> Iterator[bytes]:
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
