"""Why a run may need SeqIO after all: None, or what in the run needs it, as a clause."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from t0repro import compat
from t0repro.config.data import PIECES_OR_BYTES, EvalDataConfig, SeqioDataConfig, TrainDataConfig
from t0repro.config.run import MeshEvalRun, Run, TrainRun, to_seqio_config
from t0repro.data.cached import count_examples
from t0repro.data.eval_examples import why_evaluation_needs_seqio, why_reading_needs_seqio
from t0repro.data.mixing import FEATURES
from t0repro.errors import UserError
from t0repro.tasks.registry import find_tasks


def why_training_needs_seqio(config: TrainRun, vocabularies: tuple[Any, Any]) -> str | None:
    """Why a T5X run's data cannot be read without SeqIO.

    Args:
      config: The run; its tasks are described, and SeqIO is not imported.
      vocabularies: The records of the model's vocabularies of inputs and targets.
    """
    plan = config.plan
    train, evaluation, inferred = plan.train_data, plan.train_eval_data, plan.infer_eval_data
    # A loss over answer choices reads the tasks' rows alone.
    if config.model.choice_loss is not None and plan.infer_eval_data is None:
        return None
    if "model" in plan.user_classes:
        return "the model is a class of yours, which is given SeqIO's vocabularies"
    if not all(isinstance(each, PIECES_OR_BYTES) for each in vocabularies):
        return "a vocabulary of the model is neither of pieces nor of bytes"
    if not isinstance(train, SeqioDataConfig):
        return "train's dataset function is not T5X's"
    if why := _why_batches_need_seqio(train):
        return why
    if train.use_cached and plan.save is not None and plan.save.data and compat.is_installed():
        return "checkpoints hold the state of SeqIO's pipeline"
    if evaluation is not None:
        if evaluation.seed is None or evaluation.shuffle:
            return "train_eval's data has no seed or is shuffled"
        if why := _why_batches_need_seqio(evaluation):
            return f"of train_eval, {why}"
    if inferred is not None and (
        why := why_evaluation_needs_seqio(
            inferred.mixture_or_task_name, inferred.split, use_cached=inferred.use_cached
        )
    ):
        return f"of infer_eval, {why}"
    return None


def why_mesh_run_needs_seqio(config: Run) -> str | None:
    """The same for a run of Mesh TensorFlow's dialect, in any mode."""
    if isinstance(config, TrainRun):
        return _why_mesh_training_needs_seqio(config.plan.train_data, config)
    if not isinstance(config, MeshEvalRun):
        return None  # lines of text, and the vocabularies of a described mixture
    data = config.eval_data
    if not isinstance(data, EvalDataConfig):
        if config.mode == "perplexity_eval":
            return _why_mesh_training_needs_seqio(data, config)
        return f"mode {config.mode} has no mesh_eval_dataset_fn"
    name, split, use_cached = data.mixture_or_task_name, data.split, data.use_cached
    if config.mode in ("perplexity_eval", "score_from_dataset"):
        return why_reading_needs_seqio(name, split, use_cached=use_cached)
    if data.pack or data.shuffle_eval_examples:
        return f"mode {config.mode} reads packed or shuffled examples"
    return why_evaluation_needs_seqio(name, split, use_cached=use_cached)


def _why_mesh_training_needs_seqio(data: Any, config: Run) -> str | None:
    if not isinstance(data, TrainDataConfig):
        return "run.train_dataset_fn is not mesh_train_dataset_fn"
    if data.checkpoint_input_pipeline and data.use_cached and compat.is_installed():
        return "checkpoints hold the state of tf.data's pipeline"
    return _why_batches_need_seqio(to_seqio_config(data, config))


def _why_batches_need_seqio(data: SeqioDataConfig) -> str | None:
    """Why the batches of a dataset are SeqIO's alone."""
    if data.converter != "encoder_decoder":
        return "the model's feature converter is not EncDecFeatureConverter"
    lengths = data.sequence_length
    if lengths is None or not {*FEATURES} <= {*lengths}:
        return "the lengths of inputs and targets are not both given"
    if not data.trim_output_features:
        return "trim_output_features is False"
    if why := why_reading_needs_seqio(
        data.mixture_or_task_name, data.split, use_cached=data.use_cached
    ):
        return why
    if not data.use_cached:
        return None
    for task in find_tasks(data.mixture_or_task_name):
        # The checks that follow refuse a task without a cache, or one with a damaged cache.
        if data.split in task.splits and task.cache_dir is not None:
            try:
                if not count_examples(Path(task.cache_dir), data.split):
                    return f"the cache of {task.name} has no example in {data.split!r}"
            except UserError:
                continue
    return None
