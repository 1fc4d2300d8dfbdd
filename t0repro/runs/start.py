"""Mode train: opens the data, finds the checkpoint to start from and trains."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from t0repro.config.configuration import Configuration
from t0repro.config.run_config import RunConfig
from t0repro.runs.command_record import record_command


def start_training(configuration: Configuration) -> None:
    """Trains from model_dir's latest checkpoint, or init_checkpoint, or random parameters."""
    from t0repro.converters import sources
    from t0repro.data.checks import check_shards
    from t0repro.data.train_data import TrainBatches
    from t0repro.event_files import event_writer
    from t0repro.partitioning.processes import is_first, output_folder
    from t0repro.runs import train as training
    from t0repro.training.model_dir import held_for_training

    config, data = configuration.run, configuration.run.train_data
    if data is not None:
        check_shards(
            data.mixture_or_task_name, data.split, data.num_shards, use_cached=data.use_cached
        )
    model_dir, allow_changed = Path(config.model_dir), configuration.allow_changed
    # Take the lock, and check that the settings match, before model_dir is read or written.
    with held_for_training(model_dir, "jax", config, allow_changed=allow_changed):
        has_checkpoint = bool(sources.list_checkpoints(model_dir))
        start = starting_point(config)
        if is_first():
            record_command(configuration)
        training.train(
            config,
            TrainBatches(config, has_checkpoint=has_checkpoint),
            restore_from=start,
            writers=[event_writer(output_folder(model_dir))],
        )


def starting_point(config: RunConfig) -> Mapping[str, Any] | None:
    """Loads what training starts from as a flat T5X tree, unless training restores it itself.

    As in Mesh TensorFlow, a checkpoint in model_dir takes precedence over init_checkpoint.

    Returns:
      The tree; None for a fresh start, or if model_dir's latest checkpoint is in the JAX format,
      which `train` restores.

    Raises:
      UserError: if the model is not configured as the checkpoint's config.json says.
    """
    from t0repro.converters import sources
    from t0repro.converters.arithmetic import open_configured
    from t0repro.training.start import keep_matching

    model_dir = Path(config.model_dir)
    found = sources.list_checkpoints(model_dir) if model_dir.is_dir() else []
    if not found:
        if config.init_checkpoint is None:
            return None
        initial = sources.find_checkpoint(config.init_checkpoint)
        tree = open_configured(initial, config.model)
        return keep_matching(tree, config, say=lambda line: print(line, file=sys.stderr))
    latest = sources.find_checkpoint(model_dir)
    if latest.format == "jax":
        return None  # `train` restores it
    return open_configured(latest, config.model)
