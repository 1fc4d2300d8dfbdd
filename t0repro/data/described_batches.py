"""Batches of described tasks, from caches or rows, without SeqIO."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from t0repro.config.data import EvalDataConfig, SeqioDataConfig
from t0repro.data.cached import CachedBatches
from t0repro.data.fingerprints import Fingerprint, fingerprint_rows
from t0repro.data.mixing import FEATURES, KEPT_IN_MEMORY, Example, MixedBatches
from t0repro.data.resuming import Batch
from t0repro.tasks.prompted_examples import UNCUT, prompted_examples, shard_of
from t0repro.tasks.registry import find_tasks, prompted_mixtures, task_descriptions


class RenderedBatches(MixedBatches):
    """Endless training batches of described tasks; implements `training.feed.BatchSource`.

    They equal SeqIO's (t0repro.data.mixing) of the same tasks with `use_cached = False`. A task of
    fewer than 10,000 rows for each shard stays in memory; a larger one is rendered again in each
    epoch, with the same random choices.

    Args:
      rates: Name of each task -> its rate in the mixture.
      sequence_length: Tokens per row of `inputs` and of `targets`; longer examples are truncated.
      batch_size: Rows in a batch.
      **options: As for `MixedBatches`.
    """

    def __init__(
        self,
        rates: Mapping[str, float],
        sequence_length: Mapping[str, int],
        batch_size: int,
        **options: Any,
    ):
        # By name, as SeqIO orders a mixture's tasks; their order decides what is sampled.
        self._tasks = {name: task_descriptions()[name] for name in sorted(rates)}
        in_order = {name: rates[name] for name in self._tasks}
        super().__init__(in_order, sequence_length, batch_size, **options)

    def _arguments(self) -> dict[str, Any]:
        return {"rendered": self._rates, **super()._arguments()}

    def fingerprint(self) -> Fingerprint:
        """See `ResumableBatches`."""
        return {name: fingerprint_rows(task, self._split) for name, task in self._tasks.items()}

    def _epochs(self, task: str, seed: int, shard: int) -> Iterator[Iterator[Example]]:
        del seed  # which decides nothing before examples are shuffled
        # Counting also checks all rows: an error in them comes before the first step.
        fits = (
            self._tasks[task].rows.num_input_examples(self._split)
            < KEPT_IN_MEMORY * self.num_shards
        )
        return self._read_once(task, shard) if fits else self._reread(task, shard)

    def _reread(self, task: str, shard: int) -> Iterator[Iterator[Example]]:
        while True:
            yield self._read(task, shard)

    def _read_once(self, task: str, shard: int) -> Iterator[Iterator[Example]]:
        """The same, rendered during the first epoch."""
        # tee keeps what `first` yields until `again` is read, so that no row is rendered twice.
        first, again = itertools.tee(self._read(task, shard))
        yield first
        examples = list(again)
        while True:
            yield iter(examples)

    def _read(self, task: str, shard: int) -> Iterator[Example]:
        select = shard_of(shard, self.num_shards)
        for example in prompted_examples(self._tasks[task], self._split, UNCUT, select):
            yield {name: example[name][: self._lengths[name]] for name in FEATURES}


def make_described_batches(data: SeqioDataConfig, seed: int | None) -> MixedBatches:
    """The batches of a described mixture or task, from its caches or from its rows."""
    assert data.sequence_length is not None
    mixture = prompted_mixtures().get(data.mixture_or_task_name)
    rates = {
        task: 1.0 if mixture is None else mixture.rate(task.name)
        for task in find_tasks(data.mixture_or_task_name)
        if data.split in task.splits
    }
    options: dict[str, Any] = {
        "split": data.split,
        "pack": data.pack,
        "shuffle": data.shuffle,
        "seed": seed,
        "num_shards": data.num_shards,
    }
    of_lengths = data.sequence_length, data.batch_size
    if data.use_cached:
        folders = {task.cache_dir: rate for task, rate in rates.items() if task.cache_dir}
        return CachedBatches(folders, *of_lengths, **options)
    return RenderedBatches(
        {task.name: rate for task, rate in rates.items()}, *of_lengths, **options
    )


def make_mesh_batches(data: SeqioDataConfig, seed: int | None, shard: int = 0) -> Iterator[Batch]:
    """Mesh TensorFlow's batches of described tasks, without end; None draws a seed."""
    seed = _draw_if_none(seed)
    batches = make_described_batches(data, seed).dataset(seed, shard)
    return _end_in_eos(batches, data.mixture_or_task_name)


def make_mesh_rows(
    data: EvalDataConfig, lengths: Mapping[str, int]
) -> list[tuple[str, Iterator[Batch]]]:
    """The rows of an evaluation as mesh_eval_dataset_fn makes them, by task: int32 [1, length].

    Args:
      data: The evaluation's data; its tasks are described.
      lengths: Tokens per row of each feature.
    """
    seed = _draw_if_none(data.seed)
    rows_by_task = []
    for task in find_tasks(data.mixture_or_task_name):
        if data.split in task.splits:
            task_data = SeqioDataConfig(
                task.name,
                lengths,
                data.split,
                1,
                data.shuffle_eval_examples,
                seed,
                use_cached=data.use_cached,
                pack=data.pack,
            )
            rows = make_described_batches(task_data, seed).epoch(seed)
            rows_by_task.append(
                (task.name, itertools.islice(_end_in_eos(rows, task.name), data.limit))
            )
    return rows_by_task


def _draw_if_none(seed: int | None) -> int:
    return secrets.randbits(31) if seed is None else seed


def _end_in_eos(batches: Iterator[Batch], name: str) -> Iterator[Batch]:
    """In Mesh TensorFlow, EOS replaces a full row's last token, if the task adds EOS."""
    features = find_tasks(name)[0].output_features
    ends = [feature for feature in FEATURES if features[feature].add_eos]
    for batch in batches:
        for feature in ends:
            # Padding is 0 and EOS is 1, so this turns the last token of a full row alone into EOS.
            np.minimum(batch[feature][:, -1], 1, out=batch[feature][:, -1])
        yield batch
