"""Runs a configuration on the JAX stack."""

from __future__ import annotations

from collections.abc import Callable

from t0repro.config.configuration import Configuration
from t0repro.config.mtf.model_api import refused_export
from t0repro.errors import UserError
from t0repro.partitioning.processes import is_alone
from t0repro.runs.evaluate import evaluate
from t0repro.runs.infer import infer
from t0repro.runs.perplexity import evaluate_perplexity
from t0repro.runs.score import score_from_dataset, score_from_strings
from t0repro.runs.start import start_training

MODES: dict[str, Callable[[Configuration], None]] = {
    "train": start_training,
    "eval": evaluate,
    "score_eval": evaluate,
    "perplexity_eval": evaluate_perplexity,
    "infer": infer,
    "score_from_dataset": score_from_dataset,
    "score_from_strings": score_from_strings,
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
        MODES[mode](configuration)
    # Mesh TensorFlow's exports write SavedModels of its graph, which JAX does not have.
    elif str(mode).startswith("export"):
        raise refused_export(mode, place)
    else:
        raise UserError(
            f"There is no mode {mode!r}; there are {', '.join(MODES)}.",
            where=place,
            fix="Bind run.mode to one of these.",
        )
