"""Checks that a run's rows and vocabularies are available before it builds or writes anything."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from t0repro import storage
from t0repro.config.configuration import RunInputs
from t0repro.config.data import Converter, SeqioDataConfig
from t0repro.config.gin.errors import unknown_mixture
from t0repro.config.model import ModelConfig
from t0repro.data.cached import count_examples, shards_of
from t0repro.data.fingerprints import compute_rate
from t0repro.errors import UserError
from t0repro.partitioning.processes import gather, is_alone
from t0repro.progress import say
from t0repro.tasks.availability import (
    SKIP_MISSING,
    drop_missing_tasks,
    find_registered,
    missing_tasks,
    refuse_missing_rows,
)
from t0repro.tasks.metrics import metric_names
from t0repro.tasks.prompt_cache.folders import read_skipped
from t0repro.tasks.prompt_cache.provenance import check_caches
from t0repro.tasks.registry import (
    DEMO_MODULE,
    DescribedTask,
    cache_dirs,
    find_tasks,
    prompted_mixtures,
    prompted_tasks,
    registered_mixtures,
    registered_tasks,
)
from t0repro.tasks.source import PromptedRows
from t0repro.tasks.vocabulary import check_ids
from t0repro.words import counted, shortened, some

_NAMES_SHOWN = 5


def check_data(inputs: RunInputs, *, skip_missing: bool = False, seed: int | None = None) -> None:
    """Checks that the run's mixture is registered and its rows are available.

    A run that reads text files, or uses a dataset function other than t5's, names no mixture and is
    not checked.

    Args:
      inputs: The run's inputs.
      skip_missing: Whether to drop tasks from the mixture that cannot be read, and list them on
        stderr.
      seed: The seed that is bound for the data, if any.

    Raises:
      UserError: If there is no such mixture, or rows or caches are missing.
    """
    name = inputs.mixture_or_task_name
    if name is None:
        return
    check_mixture(name)
    if skip_missing:
        drop_missing_tasks(name, inputs.split, use_cached=inputs.use_cached)
        check_same_tasks(name, inputs.split)
    check_readable(name, inputs.split, use_cached=inputs.use_cached)
    tasks = tasks_with_split(name, inputs.split)
    lengths, cached = inputs.sequence_length, inputs.use_cached
    check_features(tasks, inputs.split, lengths, use_cached=cached, seed=seed)
    if inputs.mode == "train":
        check_rates(name, tasks)
    if inputs.mode == "train" and inputs.sequence_length is not None:
        # Packing takes every feature's length, also one that no model reads.
        features = find_tasks(name)[0].output_features
        _check_lengths_given([each for each in features if each not in inputs.sequence_length])


def check_same_tasks(name: str, split: str, tasks: Iterable[str] | None = None) -> None:
    """Checks that all processes read the same tasks, as their hosts may lack different rows.

    Each host makes its batches by itself, so they would differ unnoticed.

    Args:
      name: The task or mixture.
      split: The split.
      tasks: The names of the tasks that this process reads; None for all that have the split.

    Raises:
      UserError: If the tasks differ, in every process.
    """
    if is_alone():
        return
    if tasks is None:
        # A name that is not registered is a later check's.
        tasks = [task.name for task in find_registered(name) if split in splits_of(task)]
    processes = gather((socket.gethostname(), list(tasks)))
    first_host, firsts = processes[0]
    for index, (host, theirs) in enumerate(processes):
        sides = {
            f"process 0 on {first_host}": set(firsts) - set(theirs),
            f"process {index} on {host}": set(theirs) - set(firsts),
        }
        if any(sides.values()):
            only = (
                f"only {process} has {some(sorted(names), _NAMES_SHOWN)}"
                for process, names in sides.items()
                if names
            )
            raise UserError(
                f"The tasks of {name!r} with the split {split!r} differ between"
                f" {' and '.join(sides)}: {'; '.join(only)}.",
                where=SKIP_MISSING,
                fix="Give every host the same rows and caches.",
            )


def note_uncached(use_cached: bool) -> None:
    """Reports once, before a training run, what SeqIO would warn about for every task."""
    if not use_cached:
        say(
            "note: the tasks are not cached, so the run renders examples as it reads them;"
            " `t0repro cache` renders them once"
        )


SPLIT = "MIXTURE_OR_TASK_SPLIT (utils.DatasetConfig.split)"
"""The settings of an evaluation's or inference's split: T5X's macro, and its binding."""


def check_mixture(name: str, where: str | None = None) -> None:
    """Raises UserError, with the place that binds it, unless a mixture or task is registered."""
    if name not in registered_mixtures() and name not in registered_tasks():
        raise unknown_mixture(name, where)


def check_lengths(
    name: str, lengths: Mapping[str, int] | None, converter: Converter = "encoder_decoder"
) -> None:
    """Checks that the lengths are of the features of a batch, as SeqIO's converters require.

    Args:
      name: A registered task or mixture.
      lengths: Tokens per feature; None stands for the longest example's.
      converter: The converter. A decoder's reads targets alone without a length for inputs, and
        PassThroughFeatureConverter reads no lengths.

    Raises:
      UserError: If a length is missing, or of another feature.
    """
    features = find_tasks(name)[0].output_features
    used = [each for each in ("inputs", "targets") if each in features]
    if lengths is None or converter == "pass_through":
        return
    # First, since a misspelt name also leaves its feature without a length.
    if unknown := [each for each in lengths if each not in used]:
        raise UserError(
            f"There are lengths for {' and '.join(unknown)}, which no task has.",
            where="utils.DatasetConfig.task_feature_lengths",
            fix=f"Give a length for each of {', '.join(used)}.",
        )
    optional = ("inputs",) if converter == "decoder" else ()
    _check_lengths_given([each for each in used if each not in (*lengths, *optional)])


def _check_lengths_given(missing: Sequence[str]) -> None:
    if missing:
        raise UserError(
            f"The lengths lack {' and '.join(missing)}.",
            where="run.sequence_length",
            fix=f"Give a length for each of the tasks' features; {missing[0]} has none.",
        )


def check_tokens(tasks: Sequence[Any], model: ModelConfig, *, mesh: bool = False) -> None:
    """Checks that tasks give what a model reads: a row of tokens for each feature.

    Args:
      tasks: The tasks to read.
      model: The model; one without an encoder reads targets alone.
      mesh: Whether Mesh TensorFlow's functions make the batches, which convert any number.

    Raises:
      UserError: If a feature is missing, or has another rank or type.
    """
    for task in tasks:
        features = task.output_features
        needed = ("targets",) if model.decoder_only else ("inputs", "targets")
        if missing := [each for each in needed if each not in features]:
            raise UserError(
                f"The task {task.name} has no {' and no '.join(missing)}; it has"
                f" {', '.join(features) or 'no features'}.",
                fix=f"Choose a task with {' and '.join(needed)}, which this model reads.",
            )
        for name in ("inputs", "targets"):
            # A described feature is a row of int32.
            rank = getattr(features.get(name), "rank", 1)
            type_ = getattr(features.get(name), "dtype", "int32")
            if rank != 1 or (type_ != "int32" and not mesh):
                raise UserError(
                    f"The {name} of the task {task.name} have rank {rank} and type"
                    f" {getattr(type_, 'name', type_)}.",
                    fix="Give the model tokens: a seqio.Feature of rank 1 and int32.",
                )


def check_rates(name: str, tasks: Sequence[Any]) -> None:
    """Raises UserError if a mixture's rate of one of its tasks cannot be computed."""
    for task in tasks:
        try:
            compute_rate(name, task)
        except UserError:
            raise
        except Exception as error:  # a user's function may raise any
            raise UserError(
                f"The rate of the task {task.name} in {name} cannot be computed:"
                f" {shortened(f'{type(error).__name__}: {error}', 200)}",
                where="seqio.MixtureRegistry.add",
                fix="A rate by number of examples needs the task's cache, or num_input_examples"
                " where its source is made; or give the mixture a number as the task's rate.",
            ) from error


def check_features(
    tasks: Sequence[Any],
    split: str,
    lengths: Mapping[str, int] | None,
    *,
    use_cached: bool,
    seed: int | None = None,
) -> None:
    """Checks that each task gives its output features; see `seqio_tasks.check_features`."""
    for task in tasks:
        # A prompt always gives inputs and targets.
        if isinstance(task.source, PromptedRows):
            vocabulary = task.output_features["targets"].vocabulary
            # Ours is checked when it is opened.
            if not hasattr(vocabulary, "given_ids"):
                check_ids(vocabulary)
        else:
            from t0repro.tasks import seqio_tasks

            seqio_tasks.check_features(task, split, lengths, use_cached=use_cached, seed=seed)


def splits_of(task: Any) -> Sequence[str]:
    """A SeqIO task's splits.

    Raises:
      UserError: If it has none, like a task of TensorFlow Datasets without its data, or its source
        cannot be opened.
    """
    try:
        splits = task.splits if isinstance(task, DescribedTask) else task.source.splits
    except Exception as error:  # each kind of source raises its own
        raise UserError(
            f"The data of the task {task.name} cannot be opened:"
            f" {shortened(f'{type(error).__name__}: {error}', 200)}",
            fix="Check the name and version of its dataset, and the folder where TensorFlow"
            " Datasets prepared it: --t5_tfds_data_dir.",
        ) from error
    if not splits:
        raise UserError(
            f"The data of the task {task.name} are not on this machine: it has no splits.",
            fix="Name the folder where TensorFlow Datasets prepared them: --t5_tfds_data_dir.",
        )
    return splits


def tasks_with_split(name: str, split: str) -> list[Any]:
    """The SeqIO tasks of a task or mixture that have the split."""
    return [task for task in find_tasks(name) if split in splits_of(task)]


def has_metric(task: Any) -> bool:
    """Whether a task has a metric, SeqIO's or a described one."""
    described = isinstance(task, DescribedTask)
    return bool(metric_names(task.prompt) if described else task.metric_objs)


def tasks_to_train_on(data: SeqioDataConfig) -> list[Any]:
    """The SeqIO tasks that a training run reads: those that have the split or the parts it names.

    SeqIO checks the split only for the tasks of a mixture. It passes a single task's split on to
    TensorFlow Datasets, which also supports `train[:90%]` and `train+validation`.
    """
    tasks = tasks_with_split(data.mixture_or_task_name, data.split)
    if tasks or data.use_cached:
        return tasks
    import seqio

    task = seqio.get_mixture_or_task(data.mixture_or_task_name)
    source = getattr(task, "source", None)  # a mixture has none
    if not isinstance(source, seqio.TfdsDataSource):
        return tasks
    parts = {part.partition("[")[0].strip() for part in data.split.split("+")}
    return [task] if parts <= set(source.splits) else []


def missing_split_error(name: str, split: str, where: str | None) -> UserError:
    """The error for a split that no task of a task or mixture has; `where` is its place."""
    tasks = find_tasks(name)
    splits = sorted({each for task in tasks for each in task.splits})
    # Those that can be read here, unless there is none.
    here = [
        each
        for each in splits
        if len(missing_tasks(tasks, each, use_cached=False))
        < sum(each in task.splits for task in tasks)
    ]
    return UserError(
        f"No task of {name!r} has a split {split!r}.",
        where=where,
        fix=f"Choose one of {', '.join(here or splits)}, or another task.",
    )


def nothing_to_evaluate_error(name: str, split: str) -> UserError:
    """The error for a task or mixture without a task that has both the split and a metric."""
    return UserError(
        f"{name!r} has nothing to evaluate: no task has both the split {split!r} and a metric.",
        where="utils.DatasetConfig",
        fix="Choose another split (MIXTURE_OR_TASK_SPLIT) or mixture.",
    )


def check_readable(
    name: str,
    split: str,
    *,
    use_cached: bool,
    tasks: Sequence[Any] | None = None,
) -> None:
    """Checks that examples can be read: from caches, or from rows.

    Args:
      name: The task or mixture.
      split: The split.
      use_cached: Whether to read caches.
      tasks: The tasks to read; None for all that have the split.

    Raises:
      UserError: If caches or rows are missing, or if a task can only be read from a cache but
        should not be.
    """
    tasks = tasks_with_split(name, split) if tasks is None else tasks
    if use_cached:
        _check_cached(name, split, tasks)
    else:
        _check_rows(split, tasks)


def _check_cached(name: str, split: str, tasks: Sequence[Any]) -> None:
    """Raises UserError if one of the tasks has no cache, or an incomplete one.

    Tasks that SeqIO cannot cache are read without one. Findings that need not stop a run, such as
    rows that have changed since, are warnings on stderr.
    """
    missing = list(missing_tasks(tasks, split, use_cached=True))
    if not missing:
        check_caches(tasks, split)
        return
    searched = list(cache_dirs())
    target = searched[0] if searched else "CACHE_DIR"
    # t0repro's own cache command covers prompted tasks only.
    if all(task in prompted_tasks() for task in missing):
        # Name the mixture if the command would otherwise list too many tasks.
        many = len(missing) > _NAMES_SHOWN and name in prompted_mixtures()
        selection = f"--mixture {name}" if many else f"--tasks '{','.join(missing)}'"
        command = f"t0repro cache {selection} --cache_dir {target}"
    else:
        command = f"seqio_cache_tasks --tasks='{','.join(missing)}' --output_cache_dir={target}"
    demo = missing[0].startswith("demo_")
    modules = f" --module_import {DEMO_MODULE}" if demo else ", with this run's --module_import"
    skipped = {task for folder in searched for task in read_skipped(folder)}
    above = (os.path.dirname(folder.rstrip("/")) for folder in searched)
    holder = next((x for x in above if storage.is_directory(storage.join(x, missing[0]))), None)
    if holder is not None:
        fix = f"Name the folder above: {holder}."
    elif skipped.issuperset(missing):
        fix = (
            "The cache was made with --skip_missing: give it here too, which leaves a mixture's"
            " tasks out whose split to train on is missing; or choose another split."
        )
    else:
        fix = (
            f"{command}{modules}. Name the folder with"
            " --additional_task_cache_dirs; or read without a cache:"
            " mesh_train_dataset_fn.use_cached = False, in an evaluation mesh_eval_dataset_fn's;"
            " or, for rank-eval, no --cache_dir."
        )
    raise UserError(
        f"use_cached = True, but tasks of {name!r} are not cached ({len(missing)} of {len(tasks)}):"
        f" {some(missing, _NAMES_SHOWN)}.",
        where="searched "
        + (", ".join(map(_name_searched, searched)) or "nowhere: no folder of caches is named"),
        fix=fix,
    )


def _name_searched(folder: str) -> str:
    # Relative to a folder that may not be the one that is meant.
    return folder if storage.exists(folder) else f"{storage.absolute(folder)}, which does not exist"


def check_shards(name: str, split: str, num_shards: int, *, use_cached: bool) -> None:
    """Checks that every shard has an example of each task, if their numbers are known.

    SeqIO ends a shard of a mixture when one of its tasks has no more examples, which may be long
    after training began.

    Args:
      name: The task or mixture.
      split: The split to shard.
      num_shards: Number of shards.
      use_cached: Whether to read caches.

    Raises:
      UserError: If a task has too few examples, or a shard has no file with an example.
    """
    if num_shards == 1:
        return
    for task in tasks_with_split(name, split):
        cached = use_cached and task.supports_caching
        if isinstance(task, DescribedTask):
            examples, sizes = _count_described(task, split, cached)
        else:
            examples, sizes = _count_seqio(task, split, cached)
        if examples is None:  # the source does not report its number
            continue
        few = examples < num_shards
        if cached and not few and len(sizes) >= num_shards:  # sharded by files
            few = not all(any(sizes[shard::num_shards]) for shard in range(num_shards))
        if few:
            raise UserError(
                f"Not every one of {num_shards} shards has an example of the task {task.name}: in"
                f" {split!r} it has {counted(examples, 'example')} in"
                f" {counted(len(sizes), 'file')}.",
                fix="Take fewer shards (t0repro.jax_training.data_shards, in T5X's files"
                " train/utils.DatasetConfig.num_shards).",
            )


def _count_described(task: DescribedTask, split: str, cached: bool) -> tuple[int, list[int]]:
    """A task's number of examples or, without its cache, of rows, and the sizes of its files."""
    if not cached:
        return task.source.num_input_examples(split), [1]
    assert task.cache_dir is not None
    folder = Path(task.cache_dir)
    sizes = [(folder / name).stat().st_size for name in shards_of(folder, split)]
    return count_examples(folder, split), sizes


def _count_seqio(task: Any, split: str, cached: bool) -> tuple[int | None, list[int]]:
    """The same of a task of SeqIO's; the number is None if its source does not report it."""
    import tensorflow as tf

    # SeqIO has no public function for the cached files.
    source = task._get_cached_source(split) if cached else task.source
    files = source.list_shards(split)
    if cached:
        sizes = [tf.io.gfile.stat(file).length for file in files]
        return task.get_cached_stats(split)["examples"], sizes
    return source.num_input_examples(split), [1] * len(files)


def _check_rows(split: str, tasks: Sequence[Any]) -> None:
    """Raises UserError if a prompted task's rows are missing, or a task needs a cache."""
    if needing := [task.name for task in tasks if task.requires_caching]:
        raise UserError(
            f"The task {needing[0]} can only be read from a cache: its CacheDatasetPlaceholder"
            " is required.",
            fix="Cache it with seqio_cache_tasks, and bind use_cached = True.",
        )
    for task in tasks:
        if isinstance(task.source, PromptedRows):
            # Finding the reader is enough: it fails if there are no rows, and reads none.
            refuse_missing_rows(task.source, split, alone=len(tasks) == 1)
