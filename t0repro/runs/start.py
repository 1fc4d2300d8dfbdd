"""Starts a run on the JAX stack: the mode of a configuration, and training.

A training run starts by locking its folder and opening its data and evaluations.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

from t0repro.config.configuration import Configuration
from t0repro.config.mtf.parser import refused_export
from t0repro.config.run_config import RunConfig
from t0repro.converters import sources
from t0repro.converters.restoring import starting_tree
from t0repro.data.train_data import train_batches, train_eval
from t0repro.errors import UserError
from t0repro.evaluation.evaluator import infer_eval
from t0repro.event_files import event_writer
from t0repro.partitioning.processes import is_alone, output_folder
from t0repro.runs.train import Describe, train
from t0repro.training.loop import Evaluations
from t0repro.training.metrics import OpenWriter
from t0repro.training.start import locked_for_training

# Each mode's module and function; `run` imports only the one it runs.
MODES = {
    "train": ("start", "start_configured"),
    "eval": ("evaluate", "evaluate"),
    "score_eval": ("evaluate", "evaluate"),
    "perplexity_eval": ("evaluate", "evaluate_perplexity"),
    "infer": ("text_scores", "infer"),
    "score_from_dataset": ("text_scores", "score_from_dataset"),
    "score_from_strings": ("text_scores", "score_from_strings"),
}

_ON_SEVERAL = ("train", "eval", "score_eval")


def run(configuration: Configuration) -> None:
    """Runs the configured mode.

    Raises:
      UserError: For a mode or an option that the JAX stack does not support, or for bad input.
    """
    mode, place = configuration.inputs.mode, configuration.inputs.provenance.get("mode")
    if mode not in _ON_SEVERAL and not is_alone():
        raise UserError(
            f"Mode {mode!r} runs as one process.",
            where=place,
            fix=f"Several processes are for {', '.join(_ON_SEVERAL)}; start one for this mode.",
        )
    if mode in MODES:
        module, function = MODES[mode]
        getattr(importlib.import_module(f"t0repro.runs.{module}"), function)(configuration)
    # Mesh TensorFlow's exports write SavedModels of its graph, which JAX does not have.
    elif str(mode).startswith("export"):
        raise refused_export(mode, place)
    else:
        raise UserError(
            f"There is no mode {mode!r}; there are {', '.join(MODES)}.",
            where=place,
            fix="Bind run.mode to one of these.",
        )


def start_training(
    config: RunConfig,
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
    with locked_for_training(model_dir, "jax", config, allow_changed=allow_changed) as check:
        # Look only under the lock: before it, another run might still be saving here.
        resumed = bool(sources.list_checkpoints(model_dir))
        written = output_folder(model_dir)
        train(
            config,
            train_batches(config, resumed=resumed),
            check=check,
            evaluations=Evaluations(train_eval(plan), infer_eval(config, written)),
            restore_from=lambda fresh: starting_tree(config, fresh),
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
