"""Starts a training run: locks its folder, opens its data and evaluations, and trains."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from t0repro.config.configuration import Configuration
from t0repro.config.run import TrainRun
from t0repro.converters import finding
from t0repro.converters.restoring import open_start
from t0repro.data.train_data import make_train_eval_batches, train_batches
from t0repro.data.vocabulary_checks import vocabulary_of
from t0repro.evaluation.evaluator import infer_eval
from t0repro.event_files import event_writer
from t0repro.partitioning.processes import output_folder
from t0repro.runs.train import Describe, train
from t0repro.training.hooks.evaluate import Evaluations
from t0repro.training.metrics import OpenWriter
from t0repro.training.model_dir import lock_for_training
from t0repro.training.preemption import resumable


def start_training(
    config: TrainRun,
    *,
    describe: Describe,
    config_text: str | None = None,
    vocabularies: tuple[Any, Any] = (None, None),
    allow_changed: bool = False,
) -> None:
    """Trains from model_dir's latest checkpoint, the plan's checkpoint, or initialized parameters.

    Args:
      config: The run; its tasks must be registered.
      describe: See `t0repro.runs.train.train`.
      config_text: The configuration in Markdown, for TensorBoard.
      vocabularies: SeqIO's, of inputs and targets, for a user's model.
      allow_changed: Whether to continue in a model_dir even if settings changed.

    Raises:
      UserError: If the data, the checkpoint or the folder does not fit the run.
    """
    plan, model_dir = config.plan, os.fspath(config.model_dir)
    # Take the lock, and check that the settings match, before model_dir is read or written.
    with (
        resumable(),
        lock_for_training(
            model_dir,
            "jax",
            config,
            allow_changed=allow_changed,
            vocabulary=vocabulary_of(config),
        ) as check,
    ):
        # Look only under the lock: before it, another run might still be saving here.
        resumed = bool(finding.list_checkpoints(model_dir))
        written = output_folder(model_dir)
        train(
            config,
            train_batches(config, resumed=resumed),
            check=check,
            evaluations=Evaluations(make_train_eval_batches(plan), infer_eval(config, written)),
            restore_from=lambda fresh: open_start(config, fresh),
            # Mesh TensorFlow keeps a run's events in model_dir, T5X in a folder for each split.
            writers=[event_writer(written)] if plan.log == "steps" else (),
            open_writers=lambda step: _opener_of_writers(written, config_text, step),
            describe=describe,
            vocabularies=vocabularies,
        )


def start_configured(configuration: Configuration) -> None:
    """Mode train of Mesh TensorFlow's dialect: the folder gets the files of t5's command."""
    start_training(
        configuration.run,
        describe=lambda state, devices: configuration.record_command(),
        allow_changed=configuration.allow_changed,
    )


def _opener_of_writers(written: Path, config_text: str | None, step: int) -> OpenWriter:
    """Opens TensorBoard's files in model_dir/<split>; those of `train` show the configuration."""

    def open_writer(split: str):
        writer = event_writer(written / split)
        if split == "train" and config_text is not None:
            # T5X writes the text at the run's first step.
            writer.write_texts(step, {"config": config_text})
        return writer

    return open_writer
