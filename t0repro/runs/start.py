"""Starts a training: locks its folder, opens its data and evaluations, and trains."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from t0repro.config.configuration import Configuration
from t0repro.config.run_config import RunConfig
from t0repro.config.training_plan import TrainDataConfig, TrainingPlan
from t0repro.converters import sources
from t0repro.data.checks import tasks_with_split
from t0repro.data.seqio_data import EvalBatches, SeqioTrainBatches, train_eval_batches
from t0repro.data.train_data import TrainBatches
from t0repro.evaluation.seqio_evaluator import TaskEvaluator
from t0repro.event_files import event_writer
from t0repro.model.layer_stacks import by_layer, stacks_in
from t0repro.model.t5 import T5
from t0repro.partitioning.processes import output_folder
from t0repro.runs.description import record_command
from t0repro.runs.restore import starting_tree
from t0repro.runs.train import BatchSource, Describe, train
from t0repro.training.loop import TrainingLoop
from t0repro.training.metrics import OpenWriter
from t0repro.training.model_dir import held_for_training
from t0repro.training.planned import Evaluations, InferEval

Say = Callable[[str], None]


def start_training(
    config: RunConfig,
    *,
    describe: Describe,
    config_text: str | None = None,
    vocabularies: tuple[Any, Any] = (None, None),
    allow_changed: bool = False,
    say: Say | None = None,
) -> None:
    """Trains from model_dir's latest checkpoint, or what the plan restores, or new parameters.

    Args:
      config: The run, whose tasks are registered.
      describe: See `t0repro.runs.train.train`.
      config_text: The configuration in Markdown, for TensorBoard.
      vocabularies: SeqIO's of inputs and targets, for a model of the user's.
      allow_changed: Whether to continue in a model_dir although settings changed.
      say: Receives lines about what is being done; prints to standard error by default.

    Raises:
      UserError: If the data, the checkpoint or the folder does not fit the run.
    """
    say = say or (lambda line: print(line, file=sys.stderr, flush=True))
    plan, model_dir = config.plan, Path(config.model_dir)
    # Take the lock, and check that the settings match, before model_dir is read or written.
    with held_for_training(model_dir, "jax", config, allow_changed=allow_changed):
        # Asked under the lock: before it, another run might still be saving here.
        resumed = bool(sources.list_checkpoints(model_dir))
        written = output_folder(model_dir)
        train(
            config,
            _batches(config, resumed),
            restore_from=lambda fresh: starting_tree(config, fresh, say),
            evaluations=Evaluations(_train_eval(plan, say), _infer_eval(config, written, say)),
            writers=[event_writer(written)] if plan.log == "steps" else (),
            open_writers=lambda step: _opener_of_writers(written, config_text, step),
            describe=describe,
            vocabularies=vocabularies,
            say=say,
        )


def start_configured(configuration: Configuration) -> None:
    """Mode train of Mesh TensorFlow's dialect: the folder keeps what t5's command keeps there."""
    start_training(
        configuration.run,
        describe=lambda state, devices: record_command(configuration),
        allow_changed=configuration.allow_changed,
    )


def _batches(config: RunConfig, resumed: bool) -> BatchSource:
    """The training batches, by the dataset function that the plan's data are for."""
    plan = config.plan
    assert plan.train_data is not None, "a command has data to train on"
    if isinstance(plan.train_data, TrainDataConfig):
        return TrainBatches(config, has_checkpoint=resumed)
    saves = plan.save is not None and plan.save.data
    return SeqioTrainBatches(plan.train_data, save_dataset=saves, resumed=resumed)


def _train_eval(plan: TrainingPlan, say: Say) -> Mapping[str, EvalBatches]:
    """Batches for evaluating the training's loss, by task; none if no task has the split."""
    data = plan.train_eval_data
    if data is None:
        return {}
    found = train_eval_batches(data, plan.eval_steps)
    if not found:
        say(f"train_eval: no task of {data.mixture_or_task_name} has {data.split}")
    return found


def _infer_eval(config: RunConfig, written: Path, say: Say) -> InferEval | None:
    """What evaluates the tasks' own metrics in a training; None if the run has no such thing."""
    data, evaluator, decoding = (
        config.plan.infer_eval_data,
        config.plan.evaluator,
        config.plan.decoding,
    )
    if data is None or evaluator is None or decoding is None:
        return None
    if not any(task.metric_fns for task in tasks_with_split(data.mixture_or_task_name, data.split)):
        say(f"infer_eval: no task of {data.mixture_or_task_name} has {data.split} and a metric")
        return None
    # Every process evaluates, since they share the devices, but only the first keeps results.
    tasks = TaskEvaluator(data, evaluator, written, decoding)
    model, users = T5(config.model, config.dtypes), "model" in config.plan.user_classes

    def evaluate(loop: TrainingLoop) -> Mapping[str, Mapping[str, float]]:
        params = loop.held_state.params
        # The network alone for this project's own model; a user's generates by its methods.
        trained = loop.trainer.model if users else model
        return tasks.evaluate(trained, by_layer(params, stacks_in(params)), loop.step)

    return evaluate


def _opener_of_writers(written: Path, config_text: str | None, step: int) -> OpenWriter:
    """Opens TensorBoard's files in model_dir/<split>; those of `train` show the configuration."""

    def open_writer(split: str):
        writer = event_writer(written / split)
        if split == "train" and config_text is not None:
            # T5X puts the text at the step that the run starts from.
            writer.write_texts(step, {"config": config_text})
        return writer

    return open_writer
