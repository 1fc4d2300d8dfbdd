"""A T5X program's record -> what runs: a RunConfig, an EvalPlan or an InferPlan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from t0repro.config.inference_plan import EvalPlan, InferPlan
from t0repro.config.run_config import RunConfig
from t0repro.config.t5x import inference, programs, run
from t0repro.config.t5x.gin_files import Parsed

_READERS: Mapping[type, Callable[[Parsed], Any]] = {
    programs.TrainProgram: run.train_config,
    programs.PrecompileProgram: run.precompile_config,
    programs.EvalProgram: inference.eval_plan,
    programs.InferProgram: inference.infer_plan,
}


def converted(parsed: Parsed) -> RunConfig | EvalPlan | InferPlan:
    """What a program's run mode takes.

    Raises:
      UserError: for a value that has no counterpart here or is out of range, with its place.
    """
    return _READERS[type(parsed.program)](parsed)
