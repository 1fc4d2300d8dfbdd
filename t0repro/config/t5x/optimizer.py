"""T5X's optimizer and learning-rate records -> OptimizerConfig and ScheduleConfig."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from t0repro.config.run_config import (
    AdafactorConfig,
    ModelConfig,
    OptaxConfig,
    OptimizerConfig,
    ScheduleConfig,
)
from t0repro.config.t5x import records
from t0repro.config.t5x.places import Places

ADAFACTOR, SCHEDULE = "adafactor.Adafactor", "utils.create_learning_rate_scheduler"
FIELDS = {
    "multiply_by_parameter_scale": "multiply_by_parameter_scale",
    "decay_exponent": "decay_rate",
    "decay_offset": "step_offset",
    "beta1": "beta1",
    "momentum_slot": "beta1",
    "clipping_threshold": "clipping_threshold",
    "factored": "factored",
    "epsilon1": "epsilon1",
    "epsilon2": "epsilon2",
    "min_dim_size_to_factor": "min_dim_size_to_factor",
    "weight_decay_rate": "weight_decay_rate",
    "weight_decay_rate_lr_exponent": "weight_decay_rate_lr_exponent",
    "global_norm_clip": "global_norm_clip_threshold",
    "max_parameter_scale": "max_parameter_scale",
    "skip_nan_updates": "skip_nan_updates",
}


def optimizer_config(
    program_model: records.EncoderDecoderModel, model: ModelConfig, places: Places
) -> OptimizerConfig:
    """The optimizer that a model's record names.

    Raises:
      UserError: For an optimizer or an option that has no counterpart here, with its place.
    """
    record = program_model.optimizer_def
    if isinstance(record, records.Adafactor):
        if isinstance(program_model.module.config, records.ScannedT5Config):
            _check_scanned(record, model, places)
        return _adafactor(record, places)
    if isinstance(record, records.OptaxChain):
        return OptaxConfig(tuple(_call(call, places) for call in record.transformations))
    if isinstance(record, records.OptaxCall):
        return OptaxConfig((_call(record, places),))
    raise places.refused(
        "models.EncoderDecoderModel.optimizer_def",
        record,
        "this optimizer is not known here.",
        "Bind @adafactor.Adafactor() or @optimizers.chain().",
    )


def _adafactor(record: records.Adafactor, places: Places) -> AdafactorConfig:
    """Adafactor's options; logical_factor_rules change nothing for matrices and vectors.

    T5X falls back to the two largest axes for those, and its scanned layers are not scanned here.
    """
    places.check_unset(
        record,
        ADAFACTOR,
        {
            "factor_map": "which axes are factored follows from their lengths.",
            "dtype_momentum": "slots are float32.",
        },
    )
    if not isinstance(record.multiply_by_parameter_scale, bool):
        raise places.refused(
            f"{ADAFACTOR}.multiply_by_parameter_scale",
            record.multiply_by_parameter_scale,
            "it is the same for every parameter.",
            "Bind True or False.",
        )
    return AdafactorConfig(
        multiply_by_parameter_scale=record.multiply_by_parameter_scale,
        decay_exponent=record.decay_rate,
        decay_offset=record.step_offset,
        # None means no momentum there, and 0.0 a slot that holds it without effect.
        beta1=record.beta1 or 0.0,
        clipping_threshold=record.clipping_threshold,
        factored=record.factored,
        epsilon1=record.epsilon1,
        epsilon2=record.epsilon2,
        min_dim_size_to_factor=record.min_dim_size_to_factor,
        momentum_slot=record.beta1 is not None,
        weight_decay_rate=record.weight_decay_rate,
        # T5X takes an exponent of 0 for none.
        weight_decay_rate_lr_exponent=record.weight_decay_rate_lr_exponent or None,
        global_norm_clip=record.global_norm_clip_threshold or None,
        max_parameter_scale=record.max_parameter_scale,
        skip_nan_updates=record.skip_nan_updates,
    )


def _check_scanned(record: records.Adafactor, model: ModelConfig, places: Places) -> None:
    """Refuses scanned models of which T5X factors a kernel that is kept whole here.

    With logical rules T5X factors a stack of kernels whatever their size; a single kernel, as here,
    only if both of its sides are long enough.
    """
    # The sides that a kernel can have.
    shortest = min(model.d_model, model.d_ff, model.num_heads * model.d_kv)
    if record.factored and record.logical_factor_rules and shortest < record.min_dim_size_to_factor:
        raise places.refused(
            f"{ADAFACTOR}.logical_factor_rules",
            record.logical_factor_rules,
            f"in scanned layers T5X would factor kernels with a side of {shortest}, which is less"
            f" than min_dim_size_to_factor; here layers are not scanned and such kernels are kept.",
            "Take the model of t5x.examples.t5, whose layers are not scanned.",
        )


def _call(value: Any, places: Places) -> Mapping[str, Any]:
    """A call of optax as plain data, including calls among its arguments.

    Raises:
      UserError: If an argument is neither plain data nor such a call.
    """
    assert isinstance(value, records.OptaxCall)

    def plain(name: str, argument: Any) -> Any:
        if isinstance(argument, records.OptaxCall):
            return _call(argument, places)
        if isinstance(argument, list | tuple):
            return [plain(name, item) for item in argument]
        try:
            # Through JSON, so that what RunConfig holds can be written and read back equal.
            return json.loads(json.dumps(argument))
        except TypeError:
            raise places.refused(
                f"optax.{value.function}.{name}",
                argument,
                "only numbers, words and other calls of optax can be arguments.",
            ) from None

    return {
        "function": value.function,
        "arguments": {name: plain(name, item) for name, item in value.arguments.items()},
    }


def schedule_config(trainer: records.Trainer, total_steps: int, places: Places) -> ScheduleConfig:
    """The learning rate's schedule.

    Raises:
      UserError: If the trainer has none, or one that is not T5X's product of factors.
    """
    record = trainer.learning_rate_fn
    fields = {field.name: field for field in dataclasses.fields(trainer)}
    if not fields["learning_rate_fn"].init:
        # A trainer of the user's that takes no schedule: nothing reads this one.
        record = records.LearningRateSchedule(factors="constant", base_learning_rate=1.0)
    if not isinstance(record, records.LearningRateSchedule):
        raise places.refused(
            "trainer.Trainer.learning_rate_fn",
            record,
            "the learning rate must be a schedule.",
            f"Bind trainer.Trainer.learning_rate_fn = @{SCHEDULE}().",
        )
    arguments = dataclasses.asdict(record)
    return ScheduleConfig("create_learning_rate_scheduler", arguments, total_steps)
