"""Evaluation examples of described tasks, from caches or rows, without SeqIO and tf.data.

Except for padding they equal SeqIO's and those of t5.models.mesh_transformer.mesh_eval_dataset_fn,
in the same order.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from t0repro.config.run_config import EvalDataConfig, RunConfig
from t0repro.data.cached import FEATURES, by_turns, shards_of
from t0repro.tasks.prompt_cache.folders import PROVENANCE
from t0repro.tasks.prompt_cache.records import features
from t0repro.tasks.prompted_examples import prompted_examples
from t0repro.tasks.task import (
    DescribedTask,
    find_tasks,
    is_described,
    metric_names,
)
from t0repro.tasks.text_metrics import computable

Example = dict[str, Any]
_WHOLE: Mapping[str, int] = {name: sys.maxsize for name in FEATURES}


def mesh_evaluates_alone(config: RunConfig) -> bool:
    """Whether another mode than train of Mesh TensorFlow's dialect needs neither SeqIO nor t5."""
    if config.mode in ("infer", "score_from_strings"):
        return True  # lines of text, and the vocabularies of a described mixture
    data = config.eval_data
    return (
        config.mode in ("eval", "score_eval")
        and data is not None
        and not (data.pack or data.shuffle_eval_examples)
        and evaluates_alone(data.mixture_or_task_name, data.split, use_cached=data.use_cached)
    )


def evaluates_alone(name: str, split: str, *, use_cached: bool) -> bool:
    """Whether a task or mixture can be evaluated with neither SeqIO nor t5: examples and metrics.

    Args:
      name: Its name.
      split: The split.
      use_cached: Whether to read caches.
    """
    return is_described(name) and all(
        is_evaluated_alone(task, use_cached=use_cached)
        for task in find_tasks(name)
        if split in task.splits
    )


def inferred_alone(name: str, split: str, *, use_cached: bool) -> bool:
    """Whether the examples of a task or mixture are read without SeqIO; see `evaluates_alone`."""
    return is_described(name) and all(
        isinstance(task, DescribedTask) and reads_alone(task, use_cached=use_cached)
        for task in find_tasks(name)
        if split in task.splits
    )


def is_evaluated_alone(task: Any, *, use_cached: bool) -> bool:
    """The same for one task."""
    return (
        isinstance(task, DescribedTask)
        and (task.prompt.score_eval or computable(task.prompt))
        and reads_alone(task, use_cached=use_cached)
    )


def reads_alone(task: DescribedTask, *, use_cached: bool) -> bool:
    """Whether a task's examples are read here: its rows, or a cache that `t0repro cache` wrote."""
    if task.description.sp_model is None:
        return False
    # The checks that follow refuse a task without a cache.
    return not use_cached or task.cache_dir is None or Path(task.cache_dir, PROVENANCE).is_file()


def described_with_metrics(name: str, split: str) -> list[DescribedTask]:
    """The described tasks of a task or mixture that have the split and a metric, by name."""
    return [
        task
        for task in find_tasks(name)
        if isinstance(task, DescribedTask) and split in task.splits and metric_names(task.prompt)
    ]


def described_tasks(
    data: EvalDataConfig, lengths: Mapping[str, int] | None
) -> Iterator[tuple[DescribedTask, Iterator[Example]]]:
    """Yields each task with the split and a metric, and its examples.

    Args:
      data: The evaluation's data; its tasks are described.
      lengths: Tokens per feature; None cuts nothing.
    """
    limit = data.num_eval_examples
    for task in described_with_metrics(data.mixture_or_task_name, data.split):
        examples = eval_examples(task, data.split, lengths, use_cached=data.use_cached, mesh=True)
        yield task, itertools.islice(examples, None if limit is None or limit < 0 else limit)


def eval_examples(
    task: DescribedTask,
    split: str,
    lengths: Mapping[str, int] | None,
    *,
    use_cached: bool,
    mesh: bool = False,
) -> Iterator[Example]:
    """Yields a split's examples in order, with the features that SeqIO has: tokens int32 [length].

    Args:
      task: The task.
      split: The split.
      lengths: Maximum tokens of `inputs` and `targets`; None cuts nothing.
      use_cached: Whether to read the task's cache, or else its rows.
      mesh: Whether targets that are cut still end in EOS, as in Mesh TensorFlow.

    Raises:
      UserError: If a row or a record is broken, or the rows or the vocabulary are missing.
    """
    if use_cached:
        assert task.cache_dir is not None, task.name
        examples = cached_examples(Path(task.cache_dir), split)
    else:
        examples = prompted_examples(task.description, split, _WHOLE)
    ends = [name for name, feature in task.output_features.items() if mesh and feature.add_eos]
    return examples if lengths is None else (_cut(each, lengths, ends) for each in examples)


def _cut(example: Example, lengths: Mapping[str, int], ends: Sequence[str]) -> Example:
    cut = {name: example[name][: lengths[name]] for name in FEATURES}
    for name in ends:
        if len(example[name]) > lengths[name]:
            cut[name] = np.append(cut[name][:-1], example[name][-1:])
    return {**example, **cut}


def cached_examples(folder: Path, split: str) -> Iterator[Example]:
    """Yields a cached split's examples in SeqIO's order, without shuffling; every feature.

    Raises:
      UserError: If a file is broken.
    """
    info = json.loads((folder / f"info.{split}.json").read_text(encoding="utf-8"))["features"]
    for record in by_turns([folder / name for name in shards_of(folder, split)]):
        found = features(record)
        yield {name: _value(found.get(name, ()), info[name]) for name in info}


def _value(values: Sequence[Any], info: Mapping[str, Any]) -> Any:
    """A feature as SeqIO has it: an array [length] or, if its shape is [], one value."""
    if info["dtype"] == "string":
        return np.array(values, object) if info["shape"] else values[0]
    array = np.array(values, info["dtype"])
    return array if info["shape"] else array[0]
