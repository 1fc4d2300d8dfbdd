"""`t5_mesh_transformer --backend=jax`: the JAX stack behind Mesh TensorFlow's command line.

The flags and gin parameters are those of the mtf backend. This module is the seam: it turns them
into a RunConfig, finds the checkpoint to start from (Mesh TensorFlow's or ours), makes the batches
and hands all three to the stack, which knows neither flags nor gin.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from t0repro.config import checks
from t0repro.config.mtf import dialect, model_api, reader
from t0repro.config.run_config import RunConfig
from t0repro.errors import UserError
from t0repro.runs import evaluation_modes
from t0repro.runs.command_record import record_command


def run(flags: Any) -> None:
    """Runs what the flags say.

    Args:
      flags: the parsed absl flags of t5_mesh_transformer; module imports are done.

    Raises:
      UserError: for a mode or an option that the JAX stack lacks, or bad input.
    """
    config = _config(flags)
    evaluations = {
        "eval": evaluation_modes.evaluate,
        "score_eval": evaluation_modes.evaluate,
        "perplexity_eval": evaluation_modes.evaluate_perplexity,
        "infer": evaluation_modes.infer,
        "score_from_dataset": evaluation_modes.score_from_dataset,
        "score_from_strings": evaluation_modes.score_from_strings,
    }
    if config.mode == "train":
        train(config)
    elif config.mode in evaluations:
        evaluations[config.mode](config, vocabularies())
    elif str(config.mode).startswith("export"):
        raise model_api.refused_export(config.mode, config.provenance.get("mode"))
    else:
        raise UserError(
            f"There is no mode {config.mode!r}; there are train, {', '.join(evaluations)}.",
            where=config.provenance.get("mode"),
            fix="Bind run.mode to one of these.",
        )


def _config(flags: Any) -> RunConfig:
    """The RunConfig of the flags and of the gin files and parameters that they name."""
    from t0repro.cli.t5_mesh_transformer import gin_inputs
    from t0repro.converters.sources import find_checkpoint

    inputs, float32 = gin_inputs(flags), not _has_accelerator()
    if not flags.use_model_api:
        if flags.mode:
            raise UserError(
                "--mode is a flag of the Model API.",
                where="--mode",
                fix='Add --use_model_api, or say it in gin: --gin_param="run.mode = ...".',
            )
        return dialect.load(inputs, float32_activations=float32)[0]
    with checks.configuration_errors():
        bindings = model_api.parse(inputs, flags, find_checkpoint)
        config = reader.read(flags.model_dir, bindings, float32_activations=float32)
    checks.check_run(flags.model_dir, jax=True)
    return config


def vocabularies() -> tuple[Any, Any]:
    """The vocabularies of inputs and targets that `run` is bound to."""
    import gin

    found = gin.query_parameter("run.vocabulary")
    return found if isinstance(found, tuple) else (found, found)


def _has_accelerator() -> bool:
    import jax

    return jax.default_backend() != "cpu"


def train(config: RunConfig) -> None:
    """Trains from model_dir's latest checkpoint, else init_checkpoint, else random parameters."""
    from t0repro.converters import sources
    from t0repro.data.train_data import TrainBatches
    from t0repro.event_files import event_writer
    from t0repro.runs import train as training

    model_dir = Path(config.model_dir)
    has_checkpoint = model_dir.is_dir() and bool(sources.list_checkpoints(model_dir))
    start = starting_point(config)
    record_command(config)
    training.train(
        config,
        TrainBatches(config, has_checkpoint=has_checkpoint),
        restore_from=start,
        writers=[event_writer(config.model_dir)],
    )


def starting_point(config: RunConfig) -> dict[str, Any] | None:
    """The checkpoint that training starts from, as a flat T5X tree; None for a fresh start.

    Mesh TensorFlow's order: what model_dir holds wins over init_checkpoint.
    """
    from t0repro.converters import sources
    from t0repro.training.start import keep_matching

    model_dir = Path(config.model_dir)
    found = sources.list_checkpoints(model_dir) if model_dir.is_dir() else []
    if not found:
        if config.init_checkpoint is None:
            return None
        return keep_matching(sources.load_any(config.init_checkpoint), config)
    latest = sources.find_checkpoint(model_dir)
    if latest.format == "jax":
        return None  # training finds its own
    if any(ref.format == "jax" for ref in found):
        raise UserError(
            f"{latest.path} is later than the JAX checkpoints beside it.",
            where=config.model_dir,
            fix="Move one kind elsewhere, or continue with --backend=mtf.",
        )
    return sources.load_any(latest.path)
