"""Runs on the JAX stack: a module for each mode, which `run` dispatches to, and rank-eval."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from t0repro.errors import UserError

if TYPE_CHECKING:
    from t0repro.config.configuration import Configuration

# Each mode's module and function; `run` imports only the one it runs.
MODES = {
    "train": ("start", "start_configured"),
    "eval": ("evaluate", "evaluate"),
    "score_eval": ("evaluate", "evaluate"),
    "perplexity_eval": ("perplexity", "evaluate_perplexity"),
    "infer": ("text_modes", "infer"),
    "score_from_dataset": ("text_modes", "score_from_dataset"),
    "score_from_strings": ("text_modes", "score_from_strings"),
}

_ON_SEVERAL = ("train", "eval", "score_eval")


def run(configuration: Configuration) -> None:
    """Runs the configured mode.

    Raises:
      UserError: For a mode or an option that the JAX stack does not support, or for bad input.
    """
    from t0repro.config.mtf.model_api import export_refusal
    from t0repro.partitioning.processes import is_alone

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
        raise export_refusal(mode, place)
    else:
        raise UserError(
            f"There is no mode {mode!r}; there are {', '.join(MODES)}.",
            where=place,
            fix="Bind run.mode to one of these.",
        )
