"""The run that a T5X program describes, of any run mode."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from t0repro.config.run import EvalRun, InferRun, TrainRun
from t0repro.config.t5x.calls import T5xSource
from t0repro.config.t5x.gin_files import Parsed
from t0repro.config.t5x.inference import read_eval_run, read_infer_run
from t0repro.config.t5x.model import read_vocabularies
from t0repro.config.t5x.training import read_precompile_run, read_train_run


def read_model_vocabularies(parsed: Parsed) -> tuple[Any, Any]:
    """The vocabularies of a run's model, of inputs and of targets."""
    return read_vocabularies(parsed.program["model"], T5xSource(parsed.program, {}))


_READERS: Mapping[str, Callable[[Parsed], Any]] = {
    "train": read_train_run,
    "precompile": read_precompile_run,
    "evaluate": read_eval_run,
    "infer": read_infer_run,
}


def read_run(parsed: Parsed) -> TrainRun | EvalRun | InferRun:
    """The configuration for the program's run mode.

    Raises:
      UserError: For a value without a counterpart here or out of range, with its place.
    """
    return _READERS[parsed.program.configurable](parsed)
