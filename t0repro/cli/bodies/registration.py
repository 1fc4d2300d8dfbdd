"""Registers the tasks of a T5X run, with SeqIO and TensorFlow only if it needs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from t0repro import compat
from t0repro.cli.gin_options import folders_of
from t0repro.cli.results import echo
from t0repro.cli.t5x_options import T5xOptions
from t0repro.config.data import SeqioDataConfig
from t0repro.config.run import TrainRun
from t0repro.config.t5x.calls import calls_in
from t0repro.config.t5x.gin_files import Parsed
from t0repro.config.t5x.model import read_vocabularies
from t0repro.data.checks import check_mixture, check_same_tasks
from t0repro.data.seqio_need import why_training_needs_seqio
from t0repro.errors import needs_reference_tier
from t0repro.tasks.availability import drop_missing_splits, drop_missing_tasks
from t0repro.tasks.modules import load_tasks, needs_seqio, resolve_modules
from t0repro.tasks.registry import add_cache_dirs


def register(
    parsed: Parsed,
    options: T5xOptions,
    datasets: Sequence[Any],
    why_not: Callable[[], str | None],
) -> None:
    """Registers the tasks of the modules that the gin files and the command line name.

    With --skip_missing, a mixture of the run then has only the tasks that can be read here.

    Args:
      parsed: The gin files.
      options: The flags.
      datasets: What the run reads, what it trains on first.
      why_not: Returns what in the run needs TensorFlow and SeqIO, if anything; called once this
        project's own tasks are described.

    Raises:
      UserError: If a module cannot be found, or the packages are needed and not installed.
    """
    modules = resolve_modules([*parsed.imports, *(options.module_import or ())])
    folders, flag = folders_of(options.cache_dir), "--cache_dir"
    if not needs_seqio(modules) and not options.tfds_data_dir:
        load_tasks(modules, into_seqio=False)
        add_cache_dirs(folders, flag)
        _check_mixtures(parsed, datasets)
        if options.skip_missing:
            drop_missing(datasets)
        why = why_not()
        if why is None:
            return
        if not compat.is_installed():
            raise needs_reference_tier(why)
    echo("importing the tasks, with TensorFlow and SeqIO ...", err=True)
    # Before SeqIO, which needs these patches on today's Python.
    compat.install()
    import seqio

    if options.tfds_data_dir:
        seqio.set_tfds_data_dir_override(options.tfds_data_dir)
    add_cache_dirs(folders, flag)
    load_tasks(modules, into_seqio=True)
    _check_mixtures(parsed, datasets)
    if options.skip_missing:
        drop_missing(datasets)


def _check_mixtures(parsed: Parsed, datasets: Sequence[Any]) -> None:
    """Checks that what the run reads is registered; else the error has the place of its name."""
    # A dataset function of the user's may take any name.
    read = [each.mixture_or_task_name for each in datasets if isinstance(each, SeqioDataConfig)]
    for call in calls_in(parsed.program):
        name = call.arguments.get("mixture_or_task_name")
        if isinstance(name, str) and name in read:
            check_mixture(name, call.places.get("mixture_or_task_name"))


def register_for_training(parsed: Parsed, config: TrainRun, options: T5xOptions) -> tuple[Any, Any]:
    """Registers a training run's tasks; returns the records of its model's vocabularies."""
    vocabularies, plan = read_vocabularies(parsed.program["model"], {}), config.plan
    register(
        parsed,
        options,
        [plan.train_data, plan.train_eval_data, plan.infer_eval_data],
        lambda: why_training_needs_seqio(config, vocabularies),
    )
    return vocabularies


def drop_missing(datasets: Sequence[Any]) -> None:
    """Drops what cannot be read here: tasks from the first mixture, splits from the evaluations.

    A training run stops only for what it trains on. Of a mixture that only evaluations read, tasks
    that are not prompted are dropped too: they keep their splits.
    """
    trained, trained_split = None, None
    for number, data in enumerate(datasets):
        if not isinstance(data, SeqioDataConfig):
            continue
        name, split, cached = data.mixture_or_task_name, data.split, data.use_cached
        if number == 0:
            trained, trained_split = name, split
        else:
            kept = trained if split == trained_split else None
            drop_missing_splits(name, split, use_cached=cached, kept=kept)
        if number == 0 or name != trained:
            drop_missing_tasks(name, split, use_cached=cached)
        check_same_tasks(name, split)
