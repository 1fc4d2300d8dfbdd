"""Which tasks can be read on this machine, and mixtures reduced to those."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from t0repro.errors import UserError
from t0repro.progress import say
from t0repro.tasks.mixture_checks import check_rates
from t0repro.tasks.prompt_cache.folders import list_cached_splits
from t0repro.tasks.registry import (
    DescribedTask,
    PromptedMixture,
    find_tasks,
    prompted_mixtures,
    record_mixture,
    registered_mixtures,
    registered_tasks,
    task_descriptions,
)
from t0repro.tasks.source import PromptedRows
from t0repro.tasks.user_files import data_is
from t0repro.words import counted

if TYPE_CHECKING:
    import seqio


SKIP_MISSING = "--skip_missing"
"""The option, and where an error lies if it leaves out everything."""


def missing_rows(rows: PromptedRows, split: str) -> UserError | None:
    """The reason why the rows of a task's split cannot be read, or None if they can."""
    try:
        rows.reader(split)
    except UserError as error:
        return error
    return None


def refuse_missing_rows(rows: PromptedRows, split: str, *, alone: bool) -> None:
    """Raises UserError if the rows of a task's split cannot be read.

    Args:
      rows: The task's.
      split: The split to be read.
      alone: Whether there is no other task, so that this one cannot be left out.
    """
    error = missing_rows(rows, split)
    if error is None:
        return
    if alone:
        raise error
    fix = f"{(error.fix or '').rstrip('.')}; or leave such tasks out by {SKIP_MISSING}."
    raise UserError(error.what, where=error.where, fix=fix)


def tasks_with_rows(tasks: Iterable[str], split: str) -> list[str]:
    """The tasks that have the split and whose rows for it are available here.

    Raises:
      UserError: If there is none.
    """
    names = list(tasks)
    sources = {name: task_descriptions()[name].rows for name in names}
    found = [
        name
        for name, rows in sources.items()
        if split in rows.files_of_splits and missing_rows(rows, split) is None
    ]
    if not found:
        raise UserError(
            f"None of {counted(len(names), 'task')} has rows of split {split!r} on this machine.",
            where=SKIP_MISSING,
            fix=f"Set T0REPRO_DATA_DIR to the folder of the datasets; {data_is()}.",
        )
    return found


def lacks_cache(task: DescribedTask | seqio.Task) -> bool:
    """Whether a task lacks the cache that reading it with `use_cached` needs.

    SeqIO computes the examples of a task without a CacheDatasetPlaceholder while reading it.
    """
    return task.supports_caching and not task.cache_dir


def missing_tasks(
    tasks: Iterable[DescribedTask | seqio.Task], split: str, *, use_cached: bool
) -> dict[str, str]:
    """Task -> why its split cannot be read here; tasks that have no such split are skipped.

    Args:
      tasks: Tasks from SeqIO's registry.
      split: The split to be read.
      use_cached: Whether to read caches rather than rows.
    """
    found = {}
    for task in tasks:
        if split not in task.splits:
            continue
        source: Any = task.source
        if use_cached:
            if lacks_cache(task):
                found[task.name] = "not cached"
            elif _lacks_split(task.cache_dir, split):
                found[task.name] = f"split {split!r} not cached"
        # A source without prompted rows reports missing data itself, when it is read.
        elif hasattr(source, "reader") and missing_rows(source, split):
            found[task.name] = "rows not available"
    return found


def _lacks_split(cache_dir: str | None, split: str) -> bool:
    """Whether a task's cache has other splits only; not known of one in a bucket."""
    if not cache_dir or "://" in cache_dir:
        return False
    splits = list_cached_splits(Path(cache_dir))
    return bool(splits) and split not in splits


def drop_missing_splits(
    name: str, split: str, *, use_cached: bool, kept: str | None = None
) -> None:
    """Drops a split that cannot be read here from prompted tasks.

    A training run then evaluates without them, as T5X does where a task has no such split, and
    still trains on them.

    Args:
      name: A task or mixture; if there is none of this name, nothing is done.
      split: The split to be read.
      use_cached: Whether to read caches rather than rows.
      kept: A task or mixture that is trained on with this split, whose tasks keep it.
    """
    tasks = find_registered(name)
    # A task and its twin may share their rows.
    trained = [task.source for task in find_registered(kept)]
    sources = {task.name: task.source for task in tasks}
    missing = {}
    for each, why in missing_tasks(tasks, split, use_cached=use_cached).items():
        source = sources[each]
        if isinstance(source, PromptedRows) and source not in trained:
            source.drop_split(split)
            missing[each] = why
    if missing:
        say(f"{name}: split {split!r} is left out of {_name_left_out(missing)}")


def find_registered(name: str | None) -> Sequence[DescribedTask | seqio.Task]:
    """The tasks of a mixture or task; none if there is none of this name."""
    if name is not None and (name in registered_mixtures() or name in registered_tasks()):
        return find_tasks(name)
    return ()


def _name_left_out(missing: Mapping[str, str]) -> str:
    return "; ".join(f"{task} ({why})" for task, why in missing.items())


def drop_missing_tasks(name: str, split: str, *, use_cached: bool) -> None:
    """Drops tasks that cannot be read here from a mixture; the others keep their rates.

    Args:
      name: The mixture's name, or a task's; if there is none of this name, nothing is done.
      split: The split to be read.
      use_cached: Whether to read caches rather than rows.

    Raises:
      UserError: If none of the mixture's tasks can be read.
    """
    tasks = find_registered(name)
    missing = missing_tasks(tasks, split, use_cached=use_cached)
    if not missing:
        return
    kept = [task for task in tasks if task.name not in missing]
    # Tasks that lack the split altogether do not make a mixture trainable.
    if not any(split in task.splits for task in kept):
        raise UserError(
            f"Nothing of {name!r} is available: split {split!r} of {counted(len(missing), 'task')},"
            f" {' or '.join(sorted(set(missing.values())))}.",
            where=SKIP_MISSING,
            fix="Set T0REPRO_DATA_DIR to the folder of the datasets, or name a folder of caches by"
            " --additional_task_cache_dirs.",
        )
    # Never import SeqIO here: it would have neither the described mixture nor the cache folders.
    seqio = sys.modules.get("seqio")
    # Count rates that are numbers of rows here, for the remaining tasks only: for the full mixture,
    # counting would fail on the missing rows.
    if seqio is not None and name in seqio.MixtureRegistry.names():
        mixture = seqio.MixtureRegistry.get(name)
        rates = {task.name: mixture.get_rate(task) for task in kept}
        check_rates(name, rates)
        # SeqIO cannot change a mixture in place.
        seqio.MixtureRegistry.remove(name)
        seqio.MixtureRegistry.add(name, list(rates.items()))
    else:
        rates = {task.name: prompted_mixtures()[name].rate(task.name) for task in kept}
        check_rates(name, rates)
        record_mixture(PromptedMixture(name, tuple(rates), rates, None))
    say(
        f"{name}: {len(kept)} of {counted(len(tasks), 'task')}, with the rates that they"
        f" have in the full mixture. Left out: {_name_left_out(missing)}"
    )
