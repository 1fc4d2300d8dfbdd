"""`t0repro train`, once its gin files are parsed."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

import gin
from t0repro.cli.bodies.registration import register_for_training
from t0repro.cli.options import track_training
from t0repro.cli.t5x_options import T5xOptions
from t0repro.cloud.auxiliary import auxiliary_jobs_during_training, check_jobs, hand_on_skip_missing
from t0repro.cloud.auxiliary_options import AuxiliaryOptions
from t0repro.cloud.trackers.table import TrackerName
from t0repro.config.combinations import check_has_base
from t0repro.config.run import TrainRun
from t0repro.config.t5x.gin_files import Parsed, T5xInputs
from t0repro.data.checks import note_uncached
from t0repro.data.vocabulary_checks import seqio_vocabulary
from t0repro.partitioning.processes import is_first
from t0repro.runs.description import describe_training
from t0repro.runs.preflight import check_training
from t0repro.runs.start import start_training


def train(
    parsed: Parsed,
    config: TrainRun,
    options: T5xOptions,
    jobs: AuxiliaryOptions,
    job_files: T5xInputs,
    trackers: Sequence[TrackerName] | None,
    *,
    allow_changed: bool,
) -> None:
    """Trains, with auxiliary jobs beside it if there are any; with --dry_run, only checks.

    Args:
      parsed: The gin files.
      config: The run that they describe.
      options: The flags.
      jobs: Those of auxiliary jobs.
      job_files: The gin files that the jobs start from.
      trackers: What else receives metrics, settings and files.
      allow_changed: Whether to continue if the optimizer or the model changed.

    Raises:
      UserError: If a check fails.
    """
    has_jobs = jobs.are_given and is_first()
    if options.skip_missing and has_jobs:
        jobs = hand_on_skip_missing(jobs)
    check_has_base(config)
    vocabularies = register_for_training(parsed, config, options)
    check_training(
        config,
        vocabularies,
        typer.echo if options.dry_run else None,
        starts=not options.dry_run,
        allow_changed=allow_changed,
    )
    if options.dry_run:
        if has_jobs:
            check_jobs(jobs, job_files)
        return
    with contextlib.ExitStack() as beside:
        # Only one process prints.
        if is_first():
            assert config.plan.train_data is not None
            note_uncached(config.plan.train_data.use_cached)
            beside.enter_context(track_training(trackers, Path(config.model_dir), config))
            if has_jobs:
                beside.enter_context(
                    auxiliary_jobs_during_training(config.model_dir, jobs, job_files)
                )
        start(parsed.gin_text, config, vocabularies, allow_changed)


def start(
    gin_text: str, config: TrainRun, vocabularies: tuple[Any, Any], allow_changed: bool
) -> None:
    """Trains, and writes the configuration into the folder as T5X does."""
    start_training(
        config,
        describe=lambda state, devices: describe_training(
            config.model_dir, gin_text, state, devices
        ),
        # TensorBoard shows a text as Markdown, where gin's comments would be headings.
        config_text=gin.markdown(gin_text),
        # Only a user's model calls them, and making them imports SeqIO.
        vocabularies=(seqio_vocabulary(vocabularies[0]), seqio_vocabulary(vocabularies[1]))
        if "model" in config.plan.user_classes
        else (None, None),
        allow_changed=allow_changed,
    )
