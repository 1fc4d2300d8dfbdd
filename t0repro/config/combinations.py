"""Settings of a training run that an adapter, or a loss over answer choices, refuses."""

from __future__ import annotations

from collections.abc import Iterator

from t0repro.config.optimizer import MultiOptimizerConfig
from t0repro.config.run import TrainRun
from t0repro.errors import UserError


def check_combinations(config: TrainRun) -> None:
    """Refuses settings that do not go with the run's adapter or its loss over answer choices.

    Raises:
      UserError: For the first such setting, with its place.
    """
    places, restore = config.provenance, config.plan.restore
    if config.model.adapter is None and restore is not None and restore.adapter is not None:
        raise UserError(
            f"The run trains the whole model, but {restore.adapter} is to be the start of an"
            " adapter.",
            where=places.get("plan.restore.adapter"),
            fix="Bind the adapter to be trained. To train the whole model from the adapter merged"
            " into its base, name the adapter's checkpoint as the one to restore.",
        )
    for cause, shown, refused in (
        ("model.adapter", "An adapter", _list_refused_with_adapter),
        ("model.choice_loss", "ChoiceLoss", _list_refused_with_choice_loss),
    ):
        for field, why in refused(config):
            raise UserError(
                f"{shown} cannot be trained with this setting ({field}): {why}",
                where=places.get(field) or places.get(cause),
                fix="Change the setting, or train without it.",
            )


def check_has_base(config: TrainRun) -> None:
    """Refuses to train an adapter whose base is not given, which compiling a run does not need.

    Raises:
      UserError: With the place of the adapter.
    """
    restore = config.plan.restore
    if config.model.adapter is not None and (restore is None or not restore.path):
        raise UserError(
            "The run trains an adapter, but its base is not given.",
            where=config.provenance.get("model.adapter"),
            fix="Bind utils.run.init_checkpoint to the base, a checkpoint of any format.",
        )


def _list_refused_with_adapter(config: TrainRun) -> Iterator[tuple[str, str]]:
    """Yields each field whose value an adapter refuses: why, and what to do."""
    optimizer, restore = config.optimizer, config.plan.restore
    if config.model.adapter is None:
        return
    # Both choose parameters by name, which an adapter's targets do already.
    if isinstance(optimizer, MultiOptimizerConfig) or getattr(optimizer, "frozen", ()):
        why = "all of its parameters have one optimizer. Choose what it changes by its targets."
        yield "optimizer", why
    if "model" in config.plan.user_classes:
        yield "plan.user_classes.model", _OWN_MODEL
    if restore is None:
        return
    # The adapter records its base's hash, and later commands read the base unchanged.
    if restore.variable_filter:
        why = "its base is a whole checkpoint. Remove the filter."
        yield "plan.restore.variable_filter", why
    if restore.assignment_map:
        yield "plan.restore.assignment_map", "its base is read as it is. Remove the map."
    if restore.fallback_to_scratch:
        why = "its base is a whole checkpoint. Leave it at False."
        yield "plan.restore.fallback_to_scratch", why
    # T5X's finetune.gin binds float32, which rounds nothing.
    if restore.dtype not in (None, "float32"):
        why = (
            "its base is read as it is. Bind adapters.lora.base_dtype or"
            " adapters.ia3.base_dtype, the type that it is held in."
        )
        yield "plan.restore.dtype", why


def _list_refused_with_choice_loss(config: TrainRun) -> Iterator[tuple[str, str]]:
    """Yields each field whose value a loss over answer choices refuses: why, and what to do."""
    data = config.plan.train_data
    if config.model.choice_loss is None:
        return
    # A row's choices are segments of the decoder that all read the row's one input.
    if config.model.decoder_only:
        yield "model.model_type", "the model needs an encoder."
    if "model" in config.plan.user_classes:
        yield "plan.user_classes.model", _OWN_MODEL
    if config.plan.train_eval_data is not None:
        why = "train_eval has no answer choices. Bind train_eval_dataset_cfg = None."
        yield "plan.train_eval_data", why
    if data is None:
        return
    if data.pack:
        why = "a row holds one example with its choices. Bind pack = False."
        yield "plan.train_data.pack", why
    if config.plan.converter != "encoder_decoder":
        why = (
            "batches are made of examples and their choices. Remove the binding of"
            " feature_converter_cls."
        )
        yield "plan.train_data.converter", why
    if data.use_cached:
        why = "examples are rendered from their rows. Bind use_cached = False."
        yield "plan.train_data.use_cached", why
    if data.num_shards > 1:
        why = "its examples are not divided into shards. Leave them at 1."
        yield "plan.train_data.num_shards", why


_OWN_MODEL = "it is for this project's own T5."
