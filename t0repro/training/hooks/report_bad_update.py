"""Stops at an update that is NaN or Inf, and names the tensor that went bad first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from t0repro.config.run import TrainRun
from t0repro.partitioning.devices import fetch
from t0repro.partitioning.processes import broadcast_from_first, is_first
from t0repro.progress import say
from t0repro.storage import output_path
from t0repro.training.bad_update import find_bad_tensor, write_bad_update
from t0repro.training.checkpoints import checkpoint_path, start_checkpoint
from t0repro.training.loop import Hook, TrainingLoop
from t0repro.training.metrics import StepMetrics
from t0repro.training.t5_model import T5Model
from t0repro.training.train_step import parameters_of
from t0repro.training.trainer import NumpyBatch


class ReportBadUpdate(Hook):
    """Stops at an update that was held back, names the tensor, and saves what reproduces it.

    List it after the hook that saves checkpoints, whose checkpoint of this step is then used.

    Args:
      config: the run's configuration.
      note: as that of SaveCheckpoints.
    """

    def __init__(self, config: TrainRun, note: Callable[[Path], None] | None = None):
        self._config, self._note, self._is_reported = config, note, False

    def on_bad_update(self, loop: TrainingLoop, batch: NumpyBatch, metrics: StepMetrics) -> None:
        """Writes the folder and stops."""
        model_dir, trainer = output_path(self._config.model_dir), loop.trainer
        model = trainer.model
        assert isinstance(model, T5Model)
        key, count = trainer.step_rng(loop.step), self._config.num_microbatches
        features = {name: fetch(x) for name, x in model.features(batch).items()}
        bad = find_bad_tensor(model, parameters_of(model, loop.stacked_state), features, key, count)
        folder = model_dir / f"bad_update_{metrics.step}"
        if is_first() and not folder.exists():
            write_bad_update(folder, self._config, loop.step, features, key)
        nothing = "loss and gradients are finite when recomputed: the optimizer overflowed"
        what = nothing if bad is None else str(bad)
        say(f"step {metrics.step} was skipped: {what}; `t0repro replay {folder}` reproduces it")
        loop.stop(f"step {metrics.step} is NaN or Inf: {what}")
        self._is_reported = True

    def finish(self, loop: TrainingLoop) -> None:
        """Saves the state for the replay unless a checkpoint of this step exists already."""
        path = checkpoint_path(self._config.model_dir, loop.step)
        # One process decides, because a save needs all of them.
        if self._is_reported and not broadcast_from_first(path.exists):
            start_checkpoint(
                self._config.model_dir, loop.stacked_state, save_notes=self._note
            ).result()
