"""Turns T5X's records of data, checkpoints and evaluations into parts of a TrainingPlan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from t0repro.config.t5x import modules, programs, records
from t0repro.config.t5x.gin_files import Places
from t0repro.config.training_plan import (
    ActionConfig,
    ActionMode,
    BestCheckpoints,
    EarlyStoppingConfig,
    EvaluatorConfig,
    LoggerConfig,
    RestoreConfig,
    SaveConfig,
    SeqioDataConfig,
    TerminateOnNanConfig,
)
from t0repro.errors import UserError

DATA, SAVE = "utils.DatasetConfig", "utils.SaveCheckpointConfig"
RESTORE, BEST = "utils.RestoreCheckpointConfig", "checkpoints.SaveBestCheckpointer"
_LOGGERS = {
    records.PyLoggingLogger: "py",
    records.TensorBoardLogger: "tensorboard",
    records.JSONLogger: "json",
}
_NO_TRANSFORMATIONS = "checkpoints are changed by assignment_map alone."
_NO_CLASSES = "checkpoints are read and written in one way, which keeps T5X's tree."


def dataset_config(record: records.DatasetConfig, scope: str, places: Places) -> SeqioDataConfig:
    """The examples that a record describes.

    Args:
      record: The record.
      scope: Its scope in gin, for instance "train", or "".
      places: Where its values were set.

    Raises:
      UserError: For an argument without a counterpart here, with its place.
    """
    name = f"{scope}/{DATA}" if scope else DATA
    if record.use_custom_packing_ops:
        raise places.refused(
            f"{name}.use_custom_packing_ops",
            True,
            "SeqIO's compiled packing is not built here; its packing in TensorFlow is used.",
        )
    if not isinstance(record.mixture_or_task_name, str):
        raise places.refused(
            f"{name}.mixture_or_task_name",
            record.mixture_or_task_name,
            "it must be the name of a registered task or mixture.",
            "Register the task in a module that the gin file imports, and bind its name.",
        )
    if record.num_shards != 1 and scope != "train":
        raise places.refused(
            f"{name}.num_shards",
            record.num_shards,
            "only the data of a training run are divided into shards.",
            f"Bind train/{DATA}.num_shards.",
        )
    lengths = record.task_feature_lengths
    return SeqioDataConfig(
        mixture_or_task_name=record.mixture_or_task_name,
        sequence_length=None if lengths is None else dict(lengths),
        split=record.split,
        batch_size=record.batch_size,
        shuffle=record.shuffle,
        seed=record.seed,
        use_cached=record.use_cached,
        pack=record.pack,
        use_memory_cache=record.use_memory_cache,
        trim_output_features=record.trim_output_features,
        num_shards=record.num_shards,
    )


def save_config(record: records.SaveCheckpointConfig | None, places: Places) -> SaveConfig | None:
    """Which checkpoints to write and keep; None for none.

    Raises:
      UserError: For an argument without a counterpart here, with its place.
    """
    if record is None:
        return None
    places.check_unset(
        record,
        SAVE,
        {"state_transformation_fns": _NO_TRANSFORMATIONS, "checkpoint_manager_cls": _NO_CLASSES},
    )
    # In T5X, a separate checkpointer class keeps the best checkpoints.
    best = record.checkpointer_cls
    if isinstance(best, programs.Checkpointer):
        best = None
    if best is not None and not isinstance(best, records.SaveBestCheckpointer):
        raise places.refused(f"{SAVE}.checkpointer_cls", best, _NO_CLASSES)
    return SaveConfig(
        # 0 also means none: the run then saves at checkpoint_steps and at the end.
        period=record.period or None,
        steps=tuple(record.checkpoint_steps or ()),
        keep=record.keep,
        dtype=_one_of(record.dtype, (None, "float32", "bfloat16"), f"{SAVE}.dtype", places),
        data=record.save_dataset,
        # T5X's default manager ignores it, and so does this project.
        keep_data=record.keep_dataset_checkpoints,
        best=None if best is None else _best(best, places),
        keep_period=record.keep_period or (best and best.force_keep_period),
    )


def _best(record: records.SaveBestCheckpointer, places: Places) -> BestCheckpoints:
    return BestCheckpoints(
        metric=record.metric_name_to_monitor,
        mode=_one_of(record.metric_mode, ("max", "min"), f"{BEST}.metric_mode", places),
        keep_without_metric=record.keep_checkpoints_without_metrics,
    )


def restore_config(
    record: records.RestoreCheckpointConfig | None, places: Places
) -> RestoreConfig | None:
    """Where parameters come from; None, like an empty list of paths, restores nothing.

    Raises:
      UserError: For an argument without a counterpart here, with its place.
    """
    if record is None:
        return None
    # T5X's pretrain.gin binds [] to start from initialized parameters.
    if not record.path:
        if record.adapter is not None:
            raise places.refused(
                f"{RESTORE}.adapter",
                record.adapter,
                "its base is not given.",
                "Set the path to the base.",
            )
        return None
    places.check_unset(
        record,
        RESTORE,
        {
            "state_transformation_fns": _NO_TRANSFORMATIONS,
            "checkpointer_cls": _NO_CLASSES,
            "checkpoint_manager_cls": _NO_CLASSES,
            "restore_dataset": "the position in the data is resumed from model_dir's own"
            " checkpoints alone.",
        },
    )
    # float16 too: it only rounds the values read, and no run computes in it.
    types = (None, "float32", "bfloat16", "float16")
    return RestoreConfig(
        path=record.path if isinstance(record.path, str) else tuple(record.path),
        mode=_one_of(record.mode, ("specific", "latest", "all"), f"{RESTORE}.mode", places),
        dtype=_one_of(record.dtype, types, f"{RESTORE}.dtype", places),
        assignment_map=tuple((old, new) for old, new in record.assignment_map or ()),
        strict=record.strict,
        fallback_to_scratch=record.fallback_to_scratch,
        adapter=record.adapter,
    )


def evaluator_config(record: Any, places: Places) -> EvaluatorConfig | None:
    """The reporting of an evaluation with the tasks' metrics; None without an evaluator.

    Raises:
      UserError: For an evaluator or a logger that is not SeqIO's.
    """
    if record is None:
        return None
    if not isinstance(record, records.Evaluator):
        raise places.refused(
            "inference_evaluator_cls", record, "the evaluator is SeqIO's.", "Bind @seqio.Evaluator."
        )
    loggers = []
    for logger in record.logger_cls:
        if type(logger) not in _LOGGERS:
            raise places.refused(
                "seqio.Evaluator.logger_cls", logger, "the loggers are SeqIO's three."
            )
        # Only the JSON logger has this argument.
        results = getattr(logger, "write_n_results", None)
        kind: Any = _LOGGERS[type(logger)]
        loggers.append(LoggerConfig(kind, logger.output_dir, results))
    return EvaluatorConfig(tuple(loggers), record.num_examples, record.use_memory_cache)


def actions_config(
    actions: Mapping[str, Any] | None, places: Places
) -> dict[ActionMode, tuple[ActionConfig, ...]]:
    """The actions on metrics, by the metrics' origin.

    Raises:
      UserError: For a mode or an action that T5X does not have.
    """
    name, found = "train.actions", dict[ActionMode, tuple[ActionConfig, ...]]()
    for mode, items in (actions or {}).items():
        known: Any = _one_of(mode, ("TRAIN", "TRAIN_EVAL", "INFER_EVAL"), name, places)
        found[known] = tuple(_action(item, name, places) for item in items)
    return found


def _action(record: Any, name: str, places: Places) -> ActionConfig:
    if isinstance(record, records.EarlyStopping):
        task, metric = record.metric
        mode = _one_of(record.mode, ("min", "max"), "trainer.EarlyStoppingAction.mode", places)
        references, where = ("best", "previous"), "trainer.EarlyStoppingAction.reference"
        reference = _one_of(record.reference, references, where, places)
        # gin reads 0 as an int.
        tolerances = float(record.atol), float(record.rtol)
        return EarlyStoppingConfig(task, metric, mode, record.patience, *tolerances, reference)
    if isinstance(record, records.TerminateOnNan):
        return TerminateOnNanConfig(record.task, record.metric)
    made = modules.user_class(record, places)
    if made is None:
        kind = type(record)
        raise UserError(
            f"{name} has @{kind.__module__}.{kind.__qualname__}, which is not an action.",
            where=places.place(name),
            fix="Derive it from t0repro.training.trainer.BaseAction (docs/trainer.md).",
        )
    return made


def _one_of(value: Any, allowed: tuple, name: str, places: Places) -> Any:
    if value not in allowed:
        words = ", ".join(repr(item) for item in allowed)
        raise places.refused(name, value, f"it must be one of {words}.", f"Bind one of {words}.")
    return value


# ---- The gin argument behind each field, to find the place of its value --------------------------

_DATA = {
    "sequence_length": "task_feature_lengths",
    **{
        name: name
        for name in (
            "mixture_or_task_name split batch_size shuffle seed use_cached pack use_memory_cache"
            " trim_output_features num_shards"
        ).split()
    },
}
_SAVE = {
    "period": "period",
    "steps": "checkpoint_steps",
    "keep": "keep",
    "dtype": "dtype",
    "data": "save_dataset",
    "keep_data": "keep_dataset_checkpoints",
    "keep_period": "keep_period",
}
_RESTORE = (
    *("path", "mode", "assignment_map", "strict", "fallback_to_scratch", "dtype"),
    "adapter",
)


def data_fields(prefix: str, scope: str = "") -> dict[str, str]:
    """Fields of a SeqioDataConfig whose DatasetConfig has this scope."""
    name = f"{scope}/utils.DatasetConfig" if scope else "utils.DatasetConfig"
    return {f"{prefix}.{field}": f"{name}.{argument}" for field, argument in _DATA.items()}


def save_fields(prefix: str) -> dict[str, str]:
    """Fields of a SaveConfig."""
    name = "utils.SaveCheckpointConfig"
    return {f"{prefix}.{field}": f"{name}.{argument}" for field, argument in _SAVE.items()}


def restore_fields(prefix: str) -> dict[str, str]:
    """Fields of a RestoreConfig."""
    return {f"{prefix}.{field}": f"utils.RestoreCheckpointConfig.{field}" for field in _RESTORE}


def evaluator_fields(prefix: str) -> dict[str, str]:
    """Fields of an EvaluatorConfig; its loggers share one place."""
    return {
        f"{prefix}.num_examples": "seqio.Evaluator.num_examples",
        f"{prefix}.use_memory_cache": "seqio.Evaluator.use_memory_cache",
        f"{prefix}.loggers": "seqio.Evaluator.logger_cls",
        f"{prefix}.loggers.write_n_results": "seqio.JSONLogger.write_n_results",
    }
