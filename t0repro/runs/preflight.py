"""Checks of a run before it starts, one list per mode: the real start and `--dry_run` call it.

Nothing is trained, evaluated or written, and no parameter is read. Cheap checks come first:

    Mesh TensorFlow's files   credentials and addresses; mixture, split, caches or rows; shards;
                              checkpoints (their index alone)
    T5X's training            each dataset: mixture, split, caches or rows, shards, lengths,
                              vocabularies; the checkpoint to restore (its index alone)
    T5X's eval and infer      files of examples; the dataset; the checkpoints

In T5X's modes each check gives a line, and all that is wrong is reported at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from t0repro.config.configuration import Configuration
from t0repro.config.inference_plan import InferencePlan, InferPlan
from t0repro.config.run_config import ModelConfig, RunConfig
from t0repro.config.training_plan import RestoreConfig, SeqioDataConfig
from t0repro.converters.tensors import CheckpointRef
from t0repro.errors import UserError
from t0repro.words import counted

Say = Callable[[str], None]
NO_CHECKPOINT_YET = "T0REPRO_NO_CHECKPOINT_YET"
"""Set where auxiliary jobs are checked before their training has saved the first checkpoint."""
_SHOWN = 5  # names of parameters that a line shows


def check_mesh_transformer(configuration: Configuration, *, jax: bool, at_hand: bool) -> None:
    """Checks what a run of Mesh TensorFlow's dialect reads and where it writes.

    Args:
      configuration: The run.
      jax: Whether the JAX stack runs it.
      at_hand: Whether tasks that cannot be read here are dropped from the mixture.

    Raises:
      UserError: For the first thing that is wrong.
    """
    from t0repro.config import cloud
    from t0repro.converters import run_checks
    from t0repro.data import checks

    inputs, config = configuration.inputs, configuration.run_or_refusal
    cloud.check_addresses(inputs, jax=jax)
    if isinstance(config, RunConfig):
        cloud.check_outputs(config, jax=jax)
    checks.check_data(inputs, at_hand=at_hand)
    trains = inputs.mode == "train" and inputs.mixture_or_task_name is not None
    if trains and jax and (data := configuration.run.plan.train_data) is not None:
        name, shards = data.mixture_or_task_name, data.num_shards
        checks.check_shards(name, data.split, shards, use_cached=data.use_cached)
    if trains:
        checks.note_uncached(inputs.use_cached)
    run_checks.check_checkpoints(inputs, jax=jax)


def check_inference(plan: InferencePlan, say: Say) -> None:
    """Checks an evaluation or an inference.

    Args:
      plan: The run.
      say: Receives a line about each thing that was checked.

    Raises:
      UserError: If anything is wrong, with all of it.
    """
    vocabularies = (plan.input_vocabulary, plan.output_vocabulary)
    checks = [("examples", lambda: _data(plan.data, plan.model, vocabularies))]
    if isinstance(plan, InferPlan) and plan.files is not None:
        # First, because it registers the task whose examples the next check looks for.
        checks.insert(0, ("files", lambda: _files(plan)))
    checks.append(("checkpoints", lambda: _checkpoints(plan.restore, plan.model)))
    _run(checks, say)


def check_training(config: RunConfig, vocabularies: tuple[Any, Any], say: Say) -> None:
    """Checks a training run; see `check_inference`.

    Args:
      config: The run.
      vocabularies: The records of the model's vocabularies of inputs and targets.
      say: Receives a line about each thing that was checked.
    """
    plan = config.plan
    datasets = {
        "train": plan.train_data,
        "train_eval": plan.train_eval_data,
        "infer_eval": plan.infer_eval_data,
    }
    checks: list[tuple[str, Callable[[], Iterator[str]]]] = [
        (name, _data_check(data, config.model, vocabularies, name == "train"))
        for name, data in datasets.items()
        if isinstance(data, SeqioDataConfig)
    ]
    if (restore := plan.restore) is not None:
        checks.append(("restore", lambda: _restored(restore, config)))
    rows = config.batch_size // config.num_microbatches
    say(f"batch: {counted(config.batch_size, 'row')}, microbatches of {rows}")
    _run(checks, say)


def _data_check(
    data: SeqioDataConfig, model: ModelConfig, vocabularies: tuple[Any, Any], trains: bool
) -> Callable[[], Iterator[str]]:
    # A function of its own: a lambda written in the loop would see the last dataset alone.
    return lambda: _data(data, model, vocabularies, trains=trains, may_lack_split=not trains)


def _run(checks: Sequence[tuple[str, Callable[[], Iterator[str]]]], say: Say) -> None:
    errors: list[UserError] = []
    for name, check in checks:
        try:
            for line in check():
                say(f"{name}: {line}")
        except UserError as error:
            errors.append(error)
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise UserError("\n".join(str(error) for error in errors))


# ---- The checks ---------------------------------------------------------------------------------


def _files(plan: InferPlan) -> Iterator[str]:
    from t0repro import compat
    from t0repro.runs.batch_infer import register_files

    compat.install()
    assert plan.files is not None
    register_files(plan)
    yield f"{plan.files.kind} files at {', '.join(plan.files.paths)}"


def _data(
    data: SeqioDataConfig,
    model: ModelConfig,
    vocabularies: tuple[Any, Any],
    *,
    trains: bool = False,
    may_lack_split: bool = False,
) -> Iterator[str]:
    """The tasks, their splits, caches or rows, lengths and vocabularies.

    In a training run, evaluations of tasks without the split are left out, as in T5X.
    """
    from t0repro import compat
    from t0repro.data import checks
    from t0repro.data.vocabularies import check_rows, check_vocabularies

    compat.install()
    name = data.mixture_or_task_name
    checks.check_mixture(name)
    with_split = (
        checks.tasks_to_train_on(data) if trains else checks.tasks_with_split(name, data.split)
    )
    # T5X leaves such an evaluation out rather than stop the training.
    if not with_split and may_lack_split:
        yield f"left out: no task of {name} has a split {data.split!r}"
        return
    if not with_split:
        raise checks.no_task_has(
            name, data.split, "train/utils.DatasetConfig.split" if trains else checks.SPLIT
        )
    yield f"{counted(len(with_split), 'task')} of {name} with the split {data.split!r}"
    checks.check_readable(name, data.split, use_cached=data.use_cached, tasks=with_split)
    checks.check_shards(name, data.split, data.num_shards, use_cached=data.use_cached)
    yield "cached" if data.use_cached else "not cached: made from rows"
    checks.check_lengths(name, data.sequence_length)
    check_vocabularies(name, *vocabularies)
    check_rows(model.vocab_size, *vocabularies)
    yield f"the tasks' vocabularies are the model's ({model.vocab_size:,} rows)"


def _restored(restore: RestoreConfig, config: RunConfig) -> Iterator[str]:
    """The checkpoint that a training run starts from, unless it continues from one of its own."""
    from t0repro.converters import sources

    if os.path.isdir(config.model_dir) and sources.list_checkpoints(config.model_dir):
        yield f"not read: {config.model_dir} has checkpoints"
        return
    yield from _checkpoints(restore, config.model)


def _checkpoints(restore: RestoreConfig, model: ModelConfig) -> Iterator[str]:
    """Which checkpoints there are, and whether their parameters are the model's."""
    if NO_CHECKPOINT_YET in os.environ:
        yield "not saved yet"
        return
    from t0repro.converters.arithmetic import check_configured
    from t0repro.runs.chosen import chosen

    for ref in chosen(restore):
        check_configured(ref, model)
        yield f"{ref.path} ({ref.format}): {_fit(ref, restore, model)}"


def _fit(ref: CheckpointRef, restore: RestoreConfig, model: ModelConfig) -> str:
    """How a checkpoint's parameters fill the model's.

    Raises:
      UserError: If one is missing or of another shape.
    """
    from t0repro.converters import sources
    from t0repro.converters.arithmetic import repeated_biases
    from t0repro.parameters.assignment import assigned_names

    # Names and shapes stand in the checkpoint's index, so even a large one is checked at once.
    expected = {f"target/{name}": shape for name, shape in model.shape.parameters().items()}
    tensors = sources.open_checkpoint(ref).tensors
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


def _listed(what: str, names: Sequence[str]) -> str:
    if not names:
        return f"{what}: none"
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{what}: {', '.join(names[:_SHOWN])}{more}"
