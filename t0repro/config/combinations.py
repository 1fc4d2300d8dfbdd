"""Settings of a training run that an adapter, or a loss over answer choices, refuses."""

from __future__ import annotations

from collections.abc import Mapping

from t0repro.config.data import SeqioDataConfig
from t0repro.config.optimizer import MultiOptimizerConfig
from t0repro.config.run import TrainRun
from t0repro.errors import UserError


def check_combinations(config: TrainRun) -> None:
    """Refuses settings that do not go with the run's adapter or its loss over answer choices.

    Raises:
      UserError: For the first such setting, with its place.
    """
    if config.model.adapter is not None:
        what = "An adapter cannot be trained with this setting"
        _refuse_first(config, what, "model.adapter", _refused_with_adapter(config))
    elif (restore := config.plan.restore) is not None and restore.adapter is not None:
        raise UserError(
            f"The run trains the whole model, but {restore.adapter} is to be the start of an"
            " adapter.",
            where=config.provenance.get("plan.restore.adapter"),
            fix="Bind the adapter to be trained. To train the whole model from the adapter merged"
            " into its base, name the adapter's checkpoint as the one to restore.",
        )
    if config.model.choice_loss is not None:
        what = "ChoiceLoss cannot be trained with this setting"
        _refuse_first(config, what, "model.choice_loss", _refused_with_choice_loss(config))


def _refuse_first(config: TrainRun, what: str, cause: str, refused: Mapping[str, str]) -> None:
    """Raises the error for the first of the refused settings, if there is one."""
    for field, why in refused.items():
        places = config.provenance
        raise UserError(f"{what} ({field}): {why}", where=places.get(field) or places.get(cause))


def _refused_with_adapter(config: TrainRun) -> dict[str, str]:
    """Field -> why an adapter refuses its value, and what to do."""
    optimizer, restore, refused = config.optimizer, config.plan.restore, {}
    # Both choose parameters by name, which an adapter's targets do already.
    if isinstance(optimizer, MultiOptimizerConfig) or getattr(optimizer, "frozen", ()):
        refused["optimizer"] = (
            "all of its parameters have one optimizer. Choose what it changes by its targets."
        )
    if "model" in config.plan.user_classes:
        refused["plan.user_classes.model"] = "it is for this project's own T5."
    if restore is None:
        return refused
    # The adapter records its base's hash, and later commands read the base unchanged.
    if restore.variable_filter:
        refused["plan.restore.variable_filter"] = (
            "its base is a whole checkpoint. Remove the filter."
        )
    if restore.assignment_map:
        refused["plan.restore.assignment_map"] = "its base is read as it is. Remove the map."
    if restore.fallback_to_scratch:
        refused["plan.restore.fallback_to_scratch"] = (
            "its base is a whole checkpoint. Leave it at False."
        )
    # T5X's finetune.gin binds float32, which rounds nothing.
    if restore.dtype not in (None, "float32"):
        refused["plan.restore.dtype"] = (
            "its base is read as it is. Bind adapters.lora.base_dtype or"
            " adapters.ia3.base_dtype, the type that it is held in."
        )
    return refused


def _refused_with_choice_loss(config: TrainRun) -> dict[str, str]:
    """Field -> why a loss over answer choices refuses its value, and what to do."""
    data, refused = config.plan.train_data, {}
    # A row's choices are segments of the decoder that all read the row's one input.
    if config.model.decoder_only:
        refused["model.model_type"] = "the model needs an encoder."
    if "model" in config.plan.user_classes:
        refused["plan.user_classes.model"] = "it is for this project's own T5."
    if config.plan.train_eval_data is not None:
        refused["plan.train_eval_data"] = (
            "train_eval has no answer choices. Bind train_eval_dataset_cfg = None."
        )
    if data is not None and data.pack:
        refused["plan.train_data.pack"] = (
            "a row holds one example with its choices. Bind pack = False."
        )
    if isinstance(data, SeqioDataConfig) and data.converter != "encoder_decoder":
        refused["plan.train_data.converter"] = (
            "batches are made of examples and their choices. Remove the binding of"
            " feature_converter_cls."
        )
    if data is not None and data.use_cached:
        refused["plan.train_data.use_cached"] = (
            "examples are rendered from their rows. Bind use_cached = False."
        )
    if data is not None and data.num_shards > 1:
        refused["plan.train_data.num_shards"] = (
            "its examples are not divided into shards. Leave them at 1."
        )
    return refused
