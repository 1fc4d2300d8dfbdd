"""Evaluation examples of described tasks, from caches or rows, without SeqIO and tf.data.

Except for padding they equal SeqIO's and those of t5.models.mesh_transformer.mesh_eval_dataset_fn,
in the same order.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from t0repro.config.data import EvalDataConfig
from t0repro.data.cached import read_in_turns, split_by_shard
from t0repro.data.checks import check_mixture
from t0repro.data.mixing import FEATURES
from t0repro.errors import UserError
from t0repro.tasks.metrics import find_uncomputable_metric, metric_names
from t0repro.tasks.prompt_cache.folders import PROVENANCE
from t0repro.tasks.prompt_cache.records import features
from t0repro.tasks.prompted_examples import UNCUT, prompted_examples, shard_of
from t0repro.tasks.registry import DescribedTask, find_tasks, is_described

Example = dict[str, Any]


def why_evaluation_needs_seqio(name: str, split: str, *, use_cached: bool) -> str | None:
    """What in the evaluation of a task or mixture needs SeqIO or t5, as a clause; None for nothing.

    Args:
      name: Its name.
      split: The split.
      use_cached: Whether to read caches.
    """
    return _first_reason(why_task_evaluation_needs_seqio, name, split, use_cached)


def why_reading_needs_seqio(name: str, split: str, *, use_cached: bool) -> str | None:
    """The same for reading the examples alone."""
    return _first_reason(why_task_reading_needs_seqio, name, split, use_cached)


def _first_reason(
    why_not: Callable[..., str | None], name: str, split: str, use_cached: bool
) -> str | None:
    if not is_described(name):
        # SeqIO has no tasks of its own, and modules that may add some are not imported without it.
        check_mixture(name)
        return f"{name!r} is SeqIO's alone"
    reasons = (
        why_not(task, use_cached=use_cached) for task in find_tasks(name) if split in task.splits
    )
    return next((why for why in reasons if why), None)


def why_task_evaluation_needs_seqio(task: DescribedTask | Any, *, use_cached: bool) -> str | None:
    """The same for the evaluation of one task, which is described or SeqIO's own."""
    if why := why_task_reading_needs_seqio(task, use_cached=use_cached):
        return why
    metric = find_uncomputable_metric(task.prompt)
    return metric and f"{task.name} has the metric {metric}"


def why_task_reading_needs_seqio(task: DescribedTask | Any, *, use_cached: bool) -> str | None:
    """The same for reading the examples of one task."""
    if not isinstance(task, DescribedTask):
        return f"{task.name} is a task of SeqIO's"
    if not use_cached and task.description.sp_model is None:
        return f"the vocabulary of {task.name} is neither pieces nor bytes"
    # The checks that follow refuse a task without a cache.
    if use_cached and task.cache_dir and not Path(task.cache_dir, PROVENANCE).is_file():
        return f"another program than t0repro cache wrote the cache of {task.name}"
    return None


def find_tasks_with_metrics(name: str, split: str) -> list[DescribedTask]:
    """The described tasks of a task or mixture that have the split and a metric, by name."""
    return [
        task
        for task in find_tasks(name)
        if isinstance(task, DescribedTask) and split in task.splits and metric_names(task.prompt)
    ]


def iterate_eval_tasks(
    data: EvalDataConfig, lengths: Mapping[str, int] | None
) -> Iterator[tuple[DescribedTask, Iterator[Example]]]:
    """Yields each task with the split and a metric, and its examples.

    Args:
      data: The evaluation's data; its tasks are described.
      lengths: Tokens per feature; None cuts nothing.
    """
    for task in find_tasks_with_metrics(data.mixture_or_task_name, data.split):
        examples = eval_examples(task, data.split, lengths, use_cached=data.use_cached, mesh=True)
        yield task, itertools.islice(examples, data.limit)


def eval_examples(
    task: DescribedTask,
    split: str,
    lengths: Mapping[str, int] | None,
    *,
    use_cached: bool,
    mesh: bool = False,
    shard: int = 0,
    num_shards: int = 1,
) -> Iterator[Example]:
    """Yields a split's examples in order, with the features that SeqIO has: tokens int32 [length].

    Args:
      task: The task.
      split: The split.
      lengths: Maximum tokens of `inputs` and `targets`; None cuts nothing.
      use_cached: Whether to read the task's cache, or else its rows.
      mesh: Whether targets that are cut still end in EOS, as in Mesh TensorFlow.
      shard: Which of the shards to read, as SeqIO divides the examples.
      num_shards: Number of shards.

    Raises:
      UserError: If a row or a record is broken, or the rows or the vocabulary are missing.
    """
    if use_cached:
        assert task.cache_dir is not None, task.name
        examples = read_cached_examples(Path(task.cache_dir), split, shard, num_shards)
    else:
        select = shard_of(shard, num_shards)
        examples = prompted_examples(task.description, split, UNCUT, select)
    ends = [name for name, feature in task.output_features.items() if mesh and feature.add_eos]
    return examples if lengths is None else (_truncate(each, lengths, ends) for each in examples)


def _truncate(example: Example, lengths: Mapping[str, int], ends: Sequence[str]) -> Example:
    cut = {name: example[name][: lengths[name]] for name in FEATURES}
    # Mesh TensorFlow puts EOS in place of the last token that is left.
    for name in ends:
        if len(example[name]) > lengths[name]:
            cut[name] = np.append(cut[name][:-1], example[name][-1:])
    return {**example, **cut}


def read_cached_examples(
    folder: Path, split: str, shard: int = 0, num_shards: int = 1
) -> Iterator[Example]:
    """Yields a cached split's examples in SeqIO's order, without shuffling; every feature.

    Args:
      folder: The cache.
      split: The split.
      shard: Which of the shards to read.
      num_shards: Number of shards.

    Raises:
      UserError: If a file is broken.
    """
    info = json.loads((folder / f"info.{split}.json").read_text(encoding="utf-8"))["features"]
    scalars = [name for name in info if not info[name]["shape"]]
    files, select = split_by_shard(folder, split, shard, num_shards)
    for record in select(read_in_turns(files)):
        values = features(record)
        if lacking := [name for name in scalars if not values.get(name)]:
            raise UserError(
                f"A cached example has no {lacking[0]}, which info.{split}.json lists.",
                where=str(folder),
                fix="Cache the task again, or copy all of the cache's files of one version.",
            )
        try:
            example = {name: _value(values.get(name, ()), info[name]) for name in info}
        except (ValueError, TypeError, OverflowError) as error:
            raise UserError(
                f"A cached example is not of the types that info.{split}.json lists: {error}.",
                where=str(folder),
                fix="Cache the task again, or copy all of the cache's files of one version.",
            ) from error
        yield example


def _value(values: Sequence[Any], info: Mapping[str, Any]) -> Any:
    """A feature as SeqIO has it: an array [length] or, if its shape is [], one value."""
    if info["dtype"] == "string":
        return np.array(values, object) if info["shape"] else values[0]
    array = np.array(values, info["dtype"])
    return array if info["shape"] else array[0]
