"""Checks of a run's data before it starts."""

from __future__ import annotations

from typing import Any

from t0repro.config.run_config import RunConfig
from t0repro.config.training_plan import SeqioDataConfig
from t0repro.data.checks import (
    check_lengths,
    check_mixture,
    check_readable,
    check_shards,
    no_task_has,
    tasks_to_train_on,
    tasks_with_split,
)
from t0repro.data.vocabularies import check_rows, check_vocabularies


def check_data(config: RunConfig, vocabularies: tuple[Any, Any]) -> None:
    """Checks tasks, splits, caches and vocabularies, before anything is built or written.

    Args:
      config: The run.
      vocabularies: The records of the model's vocabularies of inputs and targets.

    Raises:
      UserError: If a task is missing, not cached, or encoded with another vocabulary, if no task
        has the split to train on, if the model's embedding is too small for the vocabulary, or if
        a feature's length is missing.
    """
    plan = config.plan
    for data in (plan.train_data, plan.train_eval_data, plan.infer_eval_data):
        if not isinstance(data, SeqioDataConfig):
            continue
        name = data.mixture_or_task_name
        check_mixture(name)
        check_lengths(name, data.sequence_length)
        check_vocabularies(name, *vocabularies)
        check_rows(config.model.vocab_size, *vocabularies)
        trains = data is plan.train_data
        # Evaluations without the split are left out, as in T5X.
        tasks = tasks_to_train_on(data) if trains else tasks_with_split(name, data.split)
        if not tasks and trains:
            raise no_task_has(name, data.split, "train/utils.DatasetConfig.split")
        check_readable(name, data.split, use_cached=data.use_cached, tasks=tasks)
        check_shards(name, data.split, data.num_shards, use_cached=data.use_cached)
