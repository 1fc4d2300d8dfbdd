"""The gin argument behind each field of a run, to find the place of each value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from t0repro.config.t5x import model as t5x_model
from t0repro.config.t5x import records

DECODE = "models.EncoderDecoderModel.predict_batch_with_aux"
METHODS = {records.BeamSearch: "beam_search", records.TemperatureSample: "temperature_sample"}
_DATA = {
    "sequence_length": "task_feature_lengths",
    **{
        name: name
        for name in (
            "mixture_or_task_name split batch_size shuffle seed use_cached pack use_memory_cache"
            " trim_output_features num_shards"
        ).split()
    },
}
_SAVE = {
    "period": "period",
    "steps": "checkpoint_steps",
    "keep": "keep",
    "dtype": "dtype",
    "data": "save_dataset",
    "keep_data": "keep_dataset_checkpoints",
    "keep_period": "keep_period",
}
_RESTORE = (
    *("path", "mode", "assignment_map", "strict", "fallback_to_scratch", "dtype"),
    "adapter",
)


def model_fields() -> dict[str, str]:
    """Fields of the model and of its dtypes."""
    names = {f"model.{field}": name for field, name in t5x_model.FIELDS.items()}
    return names | {"dtypes.activation": "network.T5Config.dtype"}


def data_fields(prefix: str, scope: str = "") -> dict[str, str]:
    """Fields of a SeqioDataConfig whose DatasetConfig has this scope."""
    name = f"{scope}/utils.DatasetConfig" if scope else "utils.DatasetConfig"
    return {f"{prefix}.{field}": f"{name}.{argument}" for field, argument in _DATA.items()}


def save_fields(prefix: str) -> dict[str, str]:
    """Fields of a SaveConfig."""
    name = "utils.SaveCheckpointConfig"
    return {f"{prefix}.{field}": f"{name}.{argument}" for field, argument in _SAVE.items()}


def restore_fields(prefix: str) -> dict[str, str]:
    """Fields of a RestoreConfig."""
    return {f"{prefix}.{field}": f"utils.RestoreCheckpointConfig.{field}" for field in _RESTORE}


def evaluator_fields(prefix: str) -> dict[str, str]:
    """Fields of an EvaluatorConfig; its loggers share one place."""
    return {
        f"{prefix}.num_examples": "seqio.Evaluator.num_examples",
        f"{prefix}.use_memory_cache": "seqio.Evaluator.use_memory_cache",
        f"{prefix}.loggers": "seqio.Evaluator.logger_cls",
        f"{prefix}.loggers.write_n_results": "seqio.JSONLogger.write_n_results",
    }


def decoding_fields(prefix: str, model: records.EncoderDecoderModel) -> dict[str, str]:
    """Fields of a DecodingPlan: the argument that decides each option."""
    options = decoding_options(model)
    return {f"{prefix}.{field}": name for field, (_, name) in options.items()} | {
        f"{prefix}.return_all_decodes": f"{DECODE}.return_all_decodes",
        f"{prefix}.prompt_with_targets": f"{DECODE}.prompt_with_targets",
    }


def decoding_options(model: records.EncoderDecoderModel) -> Mapping[str, tuple[Any, str]]:
    """The options of a model's decoding function, each with the argument that decides it."""
    # T5X's default is beam_search.
    function = model.decode_fn if model.decode_fn is not None else records.BeamSearch()
    if type(function) not in METHODS:
        return {}
    name = f"decoding.{METHODS[type(function)]}"
    found = {key: (value, f"{name}.{key}") for key, value in vars(function).items()}
    # T5X passes these as arguments, so they override what gin binds for the function.
    for given, argument in (
        (model.default_decoder_params, "models.EncoderDecoderModel.default_decoder_params"),
        (model.decoding.decoder_params, f"{DECODE}.decoder_params"),
    ):
        found |= {key: (value, argument) for key, value in (given or {}).items()}
    # T5X passes its own number of decodes too, whatever gin binds.
    return found | {"num_decodes": (model.decoding.num_decodes, f"{DECODE}.num_decodes")}
