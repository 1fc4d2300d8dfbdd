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
    a job for another machine machines     NAMES    what Vertex AI offers (t0repro.cloud.submission)
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

import dataclasses
import enum
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from t0repro.config.configuration import Configuration, check_addresses, check_outputs
from t0repro.config.inference_plan import EvalPlan, InferencePlan, InferPlan
from t0repro.config.run_config import ModelConfig, RunConfig
from t0repro.config.training_plan import RestoreConfig, SeqioDataConfig
from t0repro.converters.tensors import CheckpointRef, TensorInfo
from t0repro.errors import UserError
from t0repro.words import counted, some

Report = Callable[[str], None]
NO_CHECKPOINT_YET = "T0REPRO_NO_CHECKPOINT_YET"
"""Set where auxiliary jobs are checked before their training has saved the first checkpoint."""


class Cost(enum.IntEnum):
    """What a check costs, the cheapest first."""

    NAMES = 0  # opens nothing
    FILES = 1  # reads small files of this machine: gin, credentials
    TASKS = 2  # imports TensorFlow and the tasks' modules; reads names and sizes of data files
    INDEX = 3  # reads a checkpoint's names and shapes, over the network for one in a bucket
    COMPILE = 4  # runs the compiler: minutes


@dataclasses.dataclass(frozen=True)
class Check:
    """One check of a list.

    Attributes:
      name: Its name in the table above.
      cost: Its cost.
      run: Raises a UserError for a fault; may yield lines about what it found.
    """

    name: str
    cost: Cost
    run: Callable[[], Iterable[str] | None]


def run_checks(
    checks: Sequence[Check], report: Callable[[str, str], None], *, all_at_once: bool = True
) -> None:
    """Runs a list of checks in order.

    Args:
      checks: The list.
      report: Receives a check's name and each of its lines.
      all_at_once: Whether all checks run before their faults are raised together; otherwise the
        first fault ends the list.

    Raises:
      UserError: If a check finds a fault.
    """
    # A misspelled name must not be reported only after minutes of compiling.
    assert [check.cost for check in checks] == sorted(check.cost for check in checks)
    # By their texts: the three datasets of a training run may lack one vocabulary.
    errors: dict[str, UserError] = {}
    for check in checks:
        try:
            for line in check.run() or ():
                report(check.name, line)
        except UserError as error:
            if not all_at_once:
                raise
            errors.setdefault(str(error), error)
    if len(errors) == 1:
        raise next(iter(errors.values()))
    if errors:
        raise UserError("\n".join(errors))


# ---- The lists -----------------------------------------------------------------------------------


def check_mesh_transformer(configuration: Configuration, *, jax: bool, at_hand: bool) -> None:
    """Checks what a run of Mesh TensorFlow's dialect reads and where it writes.

    Args:
      configuration: The run.
      jax: Whether the JAX stack runs it.
      at_hand: Whether to drop tasks from the mixture that cannot be read here.

    Raises:
      UserError: For the first fault.
    """
    inputs, config = configuration.inputs, configuration.run_or_refusal
    trains = inputs.mode == "train" and inputs.mixture_or_task_name is not None
    listed = [Check("addresses", Cost.FILES, lambda: check_addresses(inputs, jax=jax))]
    if isinstance(config, RunConfig):
        listed.insert(0, Check("outputs", Cost.NAMES, lambda: check_outputs(config, jax=jax)))
    listed.append(Check("data", Cost.TASKS, lambda: _mesh_data(configuration, at_hand)))
    if trains:
        listed.append(Check("shards", Cost.TASKS, lambda: _mesh_training_data(configuration, jax)))
    if jax and trains and isinstance(config, RunConfig):
        listed.extend(_choices(config))
    listed.append(Check("checkpoints", Cost.INDEX, lambda: _mesh_checkpoints(configuration, jax)))
    run_checks(listed, _silent, all_at_once=False)


def check_inference(
    plan: InferencePlan, report: Report | None = None, *, starts: bool = False
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
    reads = "eval" if isinstance(plan, EvalPlan) else "infer"
    listed = [
        Check("examples", Cost.TASKS, lambda: _data(plan.data, plan.model, vocabularies, reads))
    ]
    if isinstance(plan, InferPlan) and plan.files is not None:
        # First, because it registers the task whose examples the next check looks for.
        listed.insert(0, Check("files", Cost.TASKS, lambda: _files(plan)))
    # A run that starts opens each checkpoint when its turn comes, which checks it.
    if not starts:
        listed.append(
            Check(
                "checkpoints",
                Cost.INDEX,
                lambda: _checkpoints(plan.restore, plan.model, vocabularies),
            )
        )
    run_checks(listed, _named(report))


def check_training(
    config: RunConfig,
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
        Check(name, Cost.TASKS, _data_check(data, config.model, vocabularies, name))
        for name, data in datasets.items()
        if isinstance(data, SeqioDataConfig)
    ]
    listed.extend(_choices(config))
    if not starts:
        listed.append(Check("model_dir", Cost.INDEX, lambda: _model_dir(config, allow_changed)))
    if (restore := plan.restore) is not None:
        listed.append(
            Check("restore", Cost.INDEX, lambda: _restored(restore, config, vocabularies))
        )
    listed.insert(0, Check("batch", Cost.NAMES, lambda: _batch(config)))
    listed.insert(1, Check("schedule", Cost.NAMES, lambda: _schedule(config)))
    run_checks(listed, _named(report))


def _data_check(
    data: SeqioDataConfig, model: ModelConfig, vocabularies: tuple[Any, Any], reads: str
) -> Callable[[], Iterator[str]]:
    # A function of its own: a lambda in the loop would only see the last dataset.
    return lambda: _data(data, model, vocabularies, reads)


def _named(report: Report | None) -> Callable[[str, str], None]:
    return _silent if report is None else lambda name, line: report(f"{name}: {line}")


def _silent(name: str, line: str) -> None:
    """Drops a line: a run that starts reports faults only."""


# ---- The checks ----------------------------------------------------------------------------------


def _mesh_data(configuration: Configuration, at_hand: bool) -> None:
    from t0repro.data import checks

    inputs, config = configuration.inputs, configuration.run_or_refusal
    checks.check_data(inputs, at_hand=at_hand)
    if inputs.mixture_or_task_name is not None and isinstance(config, RunConfig):
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


def _batch(config: RunConfig) -> Iterator[str]:
    rows = config.batch_size // config.num_microbatches
    yield f"{counted(config.batch_size, 'row')}, microbatches of {rows}"


def _schedule(config: RunConfig) -> None:
    import jax.numpy as jnp

    from t0repro.training.optimizers import make_schedule

    if config.schedule is not None:
        # Its factors are looked up by their names when it is called.
        make_schedule(config.schedule)(jnp.asarray(0))


def _choices(config: RunConfig) -> list[Check]:
    """The check of answer choices, if the loss is over them."""
    if config.model.choice_loss is None:
        return []
    from t0repro.data.train_data import check_choices

    return [Check("choices", Cost.TASKS, lambda: check_choices(config))]


def _files(plan: InferPlan) -> Iterator[str]:
    from t0repro import compat
    from t0repro.runs.batch_infer import register_files

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
    from t0repro.data.checks import check_rows, check_vocabularies
    from t0repro.data.truncation import note_truncation
    from t0repro.partitioning.costs import check_batch

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
        raise checks.no_task_has(name, split, where)
    if reads == "eval":
        # Tasks without a metric are not read.
        tasks = [task for task in tasks if checks.has_metric(task)]
        if not tasks:
            raise checks.nothing_to_evaluate(name, split)
    yield f"{counted(len(tasks), 'task')} of {name} with the split {split!r}"
    checks.check_readable(name, split, use_cached=data.use_cached, tasks=tasks)
    checks.check_shards(name, split, data.num_shards, use_cached=data.use_cached)
    yield "cached" if data.use_cached else "not cached: rendered from rows"
    checks.check_tokens(tasks, model)
    checks.check_lengths(name, data.sequence_length)
    checks.check_features(tasks, split, data.sequence_length, use_cached=data.use_cached)
    check_vocabularies(name, *vocabularies)
    check_rows(model.vocab_size, *vocabularies)
    yield f"the tasks' vocabularies are the model's ({model.vocab_size:,} rows)"
    if trains and data.trim_output_features:
        note_truncation(tasks, split, data.sequence_length, use_cached=data.use_cached)


def _restored(
    restore: RestoreConfig, config: RunConfig, vocabularies: tuple[Any, Any]
) -> Iterator[str]:
    """The checkpoint that a training run starts from unless it resumes from one of its own."""
    from t0repro.converters import sources, storage

    if storage.is_directory(config.model_dir) and sources.list_checkpoints(config.model_dir):
        yield f"not read: {config.model_dir} has checkpoints"
        return
    yield from _checkpoints(restore, config.model, vocabularies)


def _model_dir(config: RunConfig, allow_changed: bool) -> Iterator[str]:
    """The checkpoints and the data that a run continues from in its model_dir."""
    from t0repro.data.train_data import train_batches
    from t0repro.training.checkpoints import checkpoint_path, data_folder, latest_step
    from t0repro.training.start import check_model_dir

    check_model_dir(config.model_dir, "jax", config, allow_changed=allow_changed)
    step = latest_step(config.model_dir)
    if step is None:
        yield f"{config.model_dir} has no checkpoint"
        return
    folder = data_folder(checkpoint_path(config.model_dir, step))
    train_batches(config, resumed=True).check_resumable(step, folder)
    yield f"{config.model_dir} has checkpoints, the latest of step {step:,}"


def _checkpoints(
    restore: RestoreConfig, model: ModelConfig, vocabularies: tuple[Any, Any]
) -> Iterator[str]:
    """The checkpoints found, and whether their parameters fit the model."""
    if NO_CHECKPOINT_YET in os.environ:
        yield "not saved yet"
        return
    from t0repro.converters.model_files import check_configured
    from t0repro.data.checks import check_own_tokenizer
    from t0repro.runs.checkpoint_choice import chosen

    for ref in chosen(restore):
        check_configured(ref, model)
        check_own_tokenizer(ref, *vocabularies)
        yield f"{ref.path} ({ref.format}): {_fit(ref, restore, model)}"


def _fit(ref: CheckpointRef, restore: RestoreConfig, model: ModelConfig) -> str:
    """How a checkpoint's parameters fill the model's.

    Raises:
      UserError: If one is missing or of another shape.
    """
    from t0repro.converters.model_files import repeated_biases
    from t0repro.converters.restoring import assigned_names

    # The checkpoint's index has names and shapes, so even a large one is checked at once.
    expected = {f"target/{name}": shape for name, shape in model.shape.parameters().items()}
    tensors = _tensors(ref, model)
    stored = {name: info.shape for name, info in tensors.items() if name.startswith("target/")}
    # A model with a position bias in each layer may start from one whose layers share it.
    repeated = repeated_biases(stored, model)
    stored |= {name: stored[shared] for name, shared in repeated.items()}
    names = assigned_names(expected, stored, restore.assignment_map)
    filled = {name: source for name, source in names.items() if source is not None}
    missing = [name for name in expected if name not in names]
    reshaped = [
        f"{name} {tuple(stored[source])} instead of {expected[name]}"
        for name, source in filled.items()
        if tuple(stored[source]) != tuple(expected[name])
    ]
    used = {*filled.values(), *repeated.values()}
    unused = [name for name in stored if name not in used]
    if reshaped or (missing and not restore.fallback_to_scratch):
        raise UserError(
            "The checkpoint does not fit the model: "
            + "; ".join(
                _listed(what, each)
                for what, each in (
                    ("missing", missing), ("not used", unused), ("of another shape", reshaped),
                )
                if each
            )
            + ".",
            where=str(ref.path),
            fix="Choose the gin file of the model that it was trained with, or map its names with"
            " utils.RestoreCheckpointConfig.assignment_map.",
        )  # fmt: skip
    initialized = [name for name in expected if name not in filled]
    return (
        f"{counted(len(filled), 'parameter')} of {len(expected)} match;"
        f" {_listed('initialized', initialized)}; {_listed('not used', unused)}"
    )


def _tensors(ref: CheckpointRef, model: ModelConfig) -> Mapping[str, TensorInfo]:
    """A checkpoint's names and shapes; an adapter's are its base's, of which no value is read.

    Raises:
      UserError: If an adapter is for another model, or another adapter than the one to be trained.
    """
    from t0repro.converters import sources
    from t0repro.converters.adapter_files import (
        is_adapter,
        open_adapter,
    )

    if not is_adapter(ref):
        return sources.open_checkpoint(ref).tensors
    own = open_adapter(ref)
    if model.adapter is not None:
        own.check_continues(model.adapter, model.shape)
    else:
        own.check_shape(own.note.adapter, model.shape)
    return _tensors(sources.base_of(ref), model)


def _listed(what: str, names: Sequence[str]) -> str:
    return f"{what}: {some(names) or 'none'}"
