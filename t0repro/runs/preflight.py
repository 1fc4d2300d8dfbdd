"""Checks of a run before it starts: one list per mode, cheap checks before costly ones.

    mode                      check        cost     what is checked
    Mesh TensorFlow's files   outputs      NAMES    bindings that name places to write to
                              addresses    FILES    Google's credentials, for what is in a bucket
                              data         TASKS    mixture, split, caches or rows
                              shards       TASKS    an example of each task for every shard
                              choices      TASKS    room for the choices of an example
                              checkpoints  INDEX    format, step, vocabulary, types
    T5X's training            batch        NAMES    rows and microbatches
                              schedule     NAMES    the learning rate's factors
                              train,       TASKS    mixture, split, caches or rows, shards,
                              train_eval,           lengths, vocabularies of tasks and model
                              infer_eval
                              choices      TASKS    as above
                              model_dir    INDEX    checkpoints and data that the run continues from
                              restore      INDEX    names and shapes of the parameters
    T5X's eval and infer      files        TASKS    files of examples
                              examples     TASKS    as in a training
                              checkpoints  INDEX    names and shapes of the parameters
    a job for another machine machines     NAMES    what Vertex AI offers (cloud.vertex.checks)
                              replicas     NAMES    one machine, for what runs on one
                              gin          FILES    the configuration
                              paths        FILES    buckets that the machine can reach
                              memory       COMPILE  whether the run fits

The real start, `--dry_run`, `precompile` and auxiliary jobs (by `--dry_run`) run these lists. For
evaluations, the real start skips the last check, since it opens each checkpoint when its turn
comes; a training run checks its model_dir under the folder's lock. No check trains, evaluates,
writes or reads a parameter. In T5X's modes each check prints a line, and all faults are reported at
once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from t0repro import compat
from t0repro.config.addresses import check_addresses, check_outputs
from t0repro.config.combinations import check_has_base
from t0repro.config.configuration import Configuration
from t0repro.config.data import SeqioDataConfig
from t0repro.config.model import ModelConfig
from t0repro.config.run import EvalRun, InferenceRun, InferRun, Run, TrainRun
from t0repro.partitioning.memory import check_batch
from t0repro.runs.checkpoint_checks import check_checkpoints, check_own_checkpoints, check_restored
from t0repro.runs.checks import Check, Cost, Report, run_checks
from t0repro.runs.example_files import register_files
from t0repro.words import counted


def check_mesh_transformer(configuration: Configuration, *, jax: bool, skip_missing: bool) -> None:
    """Checks what a run of Mesh TensorFlow's dialect reads and where it writes.

    Args:
      configuration: The run.
      jax: Whether the JAX stack runs it.
      skip_missing: Whether to drop tasks from the mixture that cannot be read here.

    Raises:
      UserError: For the first fault.
    """
    if not jax and configuration.only_on_jax:
        # Before a checkpoint is to be converted for a run that is refused all the same.
        raise configuration.only_on_jax
    inputs, config = configuration.inputs, configuration.run_or_refusal
    trains = inputs.mode == "train" and inputs.mixture_or_task_name is not None
    listed = [Check("addresses", Cost.FILES, lambda: check_addresses(inputs, jax=jax))]
    if isinstance(config, Run):
        listed.insert(0, Check("outputs", Cost.NAMES, lambda: check_outputs(config, jax=jax)))
    listed.append(Check("data", Cost.TASKS, lambda: _mesh_data(configuration, skip_missing)))
    if trains:
        listed.append(Check("shards", Cost.TASKS, lambda: _mesh_training_data(configuration, jax)))
    if jax and trains and isinstance(config, TrainRun):
        listed.insert(0, Check("base", Cost.NAMES, lambda: check_has_base(config)))
        listed.extend(_choices(config))
    listed.append(Check("checkpoints", Cost.INDEX, lambda: _mesh_checkpoints(configuration, jax)))
    run_checks(listed, _silent, all_at_once=False)


def check_inference(
    plan: InferenceRun, report: Report | None = None, *, starts: bool = False
) -> None:
    """Checks an evaluation or an inference.

    Args:
      plan: The run.
      report: Receives a line about each check.
      starts: Whether the run begins now, and opens its checkpoints itself.

    Raises:
      UserError: If there are faults; it lists all of them.
    """
    vocabularies = (plan.input_vocabulary, plan.output_vocabulary)
    reads = "eval" if isinstance(plan, EvalRun) else "infer"
    listed = [
        Check("examples", Cost.TASKS, lambda: _data(plan.data, plan.model, vocabularies, reads))
    ]
    if isinstance(plan, InferRun) and plan.files is not None:
        # First, because it registers the task whose examples the next check looks for.
        listed.insert(0, Check("files", Cost.TASKS, lambda: _files(plan)))
    # A run that starts opens each checkpoint when its turn comes, which checks it.
    if not starts:
        listed.append(
            Check(
                "checkpoints",
                Cost.INDEX,
                lambda: check_checkpoints(plan.restore, plan.model, vocabularies),
            )
        )
    run_checks(listed, _prefix_reports(report))


def check_training(
    config: TrainRun,
    vocabularies: tuple[Any, Any],
    report: Report | None = None,
    *,
    starts: bool = False,
    allow_changed: bool = False,
) -> None:
    """Checks a training run; see `check_inference`.

    Args:
      config: The run.
      vocabularies: The records of the model's vocabularies of inputs and targets.
      report: Receives a line about each check.
      starts: Whether the run begins now, and checks model_dir under its lock.
      allow_changed: Whether to continue in a model_dir even if settings changed.
    """
    plan = config.plan
    datasets = {
        "train": plan.train_data,
        "train_eval": plan.train_eval_data,
        "infer_eval": plan.infer_eval_data,
    }
    listed = [
        Check("batch", Cost.NAMES, lambda: _batch(config)),
        Check("schedule", Cost.NAMES, lambda: _schedule(config)),
    ]
    listed += [
        Check(name, Cost.TASKS, functools.partial(_data, data, config.model, vocabularies, name))
        for name, data in datasets.items()
        if isinstance(data, SeqioDataConfig)
    ]
    listed += _choices(config)
    if not starts:
        listed.append(
            Check("model_dir", Cost.INDEX, lambda: check_own_checkpoints(config, allow_changed))
        )
    if (restore := plan.restore) is not None:
        listed.append(
            Check("restore", Cost.INDEX, lambda: check_restored(restore, config, vocabularies))
        )
    run_checks(listed, _prefix_reports(report))


def _prefix_reports(report: Report | None) -> Callable[[str, str], None]:
    return _silent if report is None else lambda name, line: report(f"{name}: {line}")


def _silent(name: str, line: str) -> None:
    """Drops a line: a run that starts reports faults only."""


def _mesh_data(configuration: Configuration, skip_missing: bool) -> None:
    from t0repro.data import checks

    inputs, config = configuration.inputs, configuration.run_or_refusal
    data = config.plan.train_data if isinstance(config, TrainRun) else None
    checks.check_data(inputs, skip_missing=skip_missing, seed=data and data.seed)
    if inputs.mixture_or_task_name is not None and isinstance(config, Run):
        tasks = checks.tasks_with_split(inputs.mixture_or_task_name, inputs.split)
        checks.check_tokens(tasks, config.model, mesh=True)


def _mesh_training_data(configuration: Configuration, jax: bool) -> None:
    from t0repro.data import checks
    from t0repro.data.truncation import note_truncation

    if jax and (data := configuration.run.plan.train_data) is not None:
        name, shards = data.mixture_or_task_name, data.num_shards
        checks.check_shards(name, data.split, shards, use_cached=data.use_cached)
    checks.note_uncached(configuration.inputs.use_cached)
    inputs = configuration.inputs
    assert inputs.mixture_or_task_name is not None
    tasks = checks.tasks_with_split(inputs.mixture_or_task_name, inputs.split)
    note_truncation(tasks, inputs.split, inputs.sequence_length, use_cached=inputs.use_cached)


def _mesh_checkpoints(configuration: Configuration, jax: bool) -> None:
    from t0repro.converters.restoring import check_checkpoints

    check_checkpoints(configuration.inputs, jax=jax)


def _batch(config: TrainRun) -> Iterator[str]:
    rows = config.batch_size // config.num_microbatches
    yield f"{counted(config.batch_size, 'row')}, microbatches of {rows}"


def _schedule(config: TrainRun) -> None:
    import jax.numpy as jnp

    from t0repro.training.schedules import make_schedule

    if config.schedule is not None:
        # Its factors are looked up by their names when it is called.
        make_schedule(config.schedule)(jnp.asarray(0))


def _choices(config: TrainRun) -> list[Check]:
    """The check of answer choices, if the loss is over them."""
    if config.model.choice_loss is None:
        return []
    from t0repro.data.choice_batches import check_choices

    return [Check("choices", Cost.TASKS, lambda: check_choices(config))]


def _files(plan: InferRun) -> Iterator[str]:
    compat.install()
    assert plan.files is not None
    register_files(plan)
    yield f"{plan.files.kind} files at {', '.join(plan.files.paths)}"


def _data(
    data: SeqioDataConfig, model: ModelConfig, vocabularies: tuple[Any, Any], reads: str
) -> Iterator[str]:
    """The tasks, their splits, caches or rows, lengths and vocabularies.

    Args:
      data: The dataset to check.
      model: The model.
      vocabularies: The records of its vocabularies of inputs and targets.
      reads: Its reader: "train", "eval" or "infer"; of a training run's evaluations,
        "train_eval" or "infer_eval".
    """
    import psutil

    from t0repro.data import checks
    from t0repro.data.truncation import note_truncation
    from t0repro.data.vocabulary_checks import check_rows, check_vocabularies

    name, split, trains = data.mixture_or_task_name, data.split, reads == "train"
    scope = f"{reads}/" if reads not in ("eval", "infer") else ""
    where = f"{scope}utils.DatasetConfig.batch_size"
    check_batch(data.batch_size, data.sequence_length, psutil.virtual_memory().total, where)
    checks.check_mixture(name)
    tasks = checks.tasks_to_train_on(data) if trains else checks.tasks_with_split(name, split)
    if not tasks and reads.endswith("_eval"):
        # T5X skips such an evaluation rather than stop training.
        yield f"left out: no task of {name} has a split {split!r}"
        return
    if not tasks:
        where = "train/utils.DatasetConfig.split" if trains else checks.SPLIT
        raise checks.missing_split_error(name, split, where)
    if reads in ("eval", "infer_eval"):
        # Tasks without a metric are not read.
        tasks = [task for task in tasks if checks.has_metric(task)]
        if not tasks and reads == "eval":
            raise checks.nothing_to_evaluate_error(name, split)
        if not tasks:
            yield f"left out: no task of {name} with the split {split!r} has a metric"
            return
    yield f"{counted(len(tasks), 'task')} of {name} with the split {split!r}"
    checks.check_readable(name, split, use_cached=data.use_cached, tasks=tasks)
    checks.check_shards(name, split, data.num_shards, use_cached=data.use_cached)
    yield "cached" if data.use_cached else "not cached: rendered from rows"
    # Tasks whose features are passed through need not declare them; a batch that lacks one fails.
    if data.converter != "pass_through":
        checks.check_tokens(tasks, model)
    checks.check_lengths(name, data.sequence_length, data.converter)
    # T5X draws a seed to train if none is bound.
    seed = {"train": 0, "train_eval": data.seed}.get(reads)
    cached = data.use_cached
    checks.check_features(tasks, split, data.sequence_length, use_cached=cached, seed=seed)
    if reads in ("train", "train_eval"):
        checks.check_rates(name, tasks)
    check_vocabularies(name, *vocabularies, decoder_only=model.decoder_only)
    check_rows(model.vocab_size, *vocabularies, decoder_only=model.decoder_only)
    yield f"the tasks' vocabularies are the model's ({model.vocab_size:,} rows)"
    if trains and data.trim_output_features:
        note_truncation(tasks, split, data.sequence_length, use_cached=data.use_cached)
