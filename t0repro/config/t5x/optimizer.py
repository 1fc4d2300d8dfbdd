"""Turns T5X's optimizer and learning-rate records into OptimizerConfig and ScheduleConfig."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from t0repro.config.run_config import (
    AdafactorConfig,
    ModelConfig,
    MultiOptimizerConfig,
    OptaxConfig,
    OptimizerConfig,
    OptimizerPart,
    ScheduleConfig,
)
from t0repro.config.t5x import records
from t0repro.config.t5x.gin_files import Places
from t0repro.parameters.shape import (
    ALL_HEURISTIC,
    AXIS_WORDS,
    HEURISTIC,
    UNFACTORED,
    FactorRuleError,
    factoring,
)

_T5X_SCHEDULE = "create_learning_rate_scheduler"
ADAFACTOR, SCHEDULE = "adafactor.Adafactor", f"utils.{_T5X_SCHEDULE}"
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
    "factor_map": "factor_map",
    "exclude_from_parameter_scale": "multiply_by_parameter_scale",
}


def optimizer_config(
    program_model: records.EncoderDecoderModel, model: ModelConfig, places: Places
) -> OptimizerConfig:
    """The optimizer that a model's record names.

    Raises:
      UserError: For an optimizer or an option without a counterpart here, with its place.
    """
    record = program_model.optimizer_def
    scanned = isinstance(program_model.module.config, records.ScannedT5Config)
    if isinstance(record, records.Adafactor):
        return _adafactor(record, model, scanned, places)
    if isinstance(record, records.MultiOptimizer):
        return _multi_optimizer(record, model, scanned, places)
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


def _multi_optimizer(
    record: records.MultiOptimizer, model: ModelConfig, scanned: bool, places: Places
) -> MultiOptimizerConfig:
    """The parameters of each optimizer, chosen here because the user's functions are here."""
    # Imported here because it imports JAX, and an error about a misspelt macro need not wait.
    import flax.traverse_util

    name = "optimizers.MultiOptimizer.traversals_and_optimizers"
    every = model.shape.parameters()
    tree = flax.traverse_util.unflatten_dict({path: path for path in every}, sep="/")
    parts, taken = [], set[str]()
    for traversal, optimizer in record.traversals_and_optimizers:
        if not isinstance(optimizer, records.Adafactor):
            raise places.refused(
                name,
                optimizer,
                "its optimizers must be Adafactor, as in T5X, whose MultiOptimizer cannot hold the"
                " state of a chain of optax.",
                "Bind @adafactor.Adafactor(), or one of optimizers.chain for all parameters.",
            )
        if not hasattr(traversal, "iterate"):
            raise places.refused(
                name,
                traversal,
                "it is no choice of parameters.",
                "Bind @traverse_util.ModelParamTraversal(), of flax, with a filter_fn.",
            )
        chosen = set(traversal.iterate(tree))
        if chosen & taken:
            raise places.refused(
                name, sorted(chosen & taken)[0], "two optimizers would train this parameter."
            )
        taken |= chosen
        paths = tuple(path for path in every if path in chosen)
        parts.append(OptimizerPart(paths, _adafactor(optimizer, model, scanned, places, paths)))
    return MultiOptimizerConfig(tuple(parts))


def _adafactor(
    record: records.Adafactor,
    model: ModelConfig,
    scanned: bool,
    places: Places,
    paths: Collection[str] | None = None,
) -> AdafactorConfig:
    """Adafactor's options.

    Args:
      record: The optimizer's record.
      model: The model, for the paths and shapes of its parameters.
      scanned: Whether T5X would scan the model's layers.
      places: Where the values were set.
      paths: The parameters that it trains; None for all.
    """
    if scanned:
        _check_scanned(record, model, places)
    places.check_unset(record, ADAFACTOR, {"dtype_momentum": "slots are float32."})
    shapes = model.shape.parameters()
    trained = {path: shapes[path] for path in (shapes if paths is None else paths)}
    scales, unscaled = record.multiply_by_parameter_scale, ()
    if isinstance(scales, records.HParamMap):
        name = f"{ADAFACTOR}.multiply_by_parameter_scale"
        unscaled = tuple(path for path in trained if not _mapped(scales, path, name, places))
    config = _options(record, unscaled, _factor_map(record, trained, places))
    # Applied here only to find a rule that fits no parameter before the run begins.
    for path, shape in trained.items():
        try:
            factoring(path, shape, config)
        except FactorRuleError as error:
            raise places.refused(
                f"{ADAFACTOR}.factor_map", record.factor_map, error.what, error.fix or ""
            ) from error
    return config


def _factor_map(
    record: records.Adafactor, trained: Collection[str], places: Places
) -> tuple[tuple[str, str], ...]:
    """T5X's factor rules; for a T5's matrices and vectors, only None changes anything."""
    name = f"{ADAFACTOR}.factor_map"
    if record.factor_map is None:
        return ALL_HEURISTIC
    if not record.factored:
        raise places.refused(
            name, record.factor_map, "with factored = False there is nothing to map.", "Bind None."
        )
    # T5X then replaces the map by the model's logical axes, which leave matrices to their size.
    if record.logical_factor_rules is not None:
        return ALL_HEURISTIC
    for path in trained:
        _mapped(record.factor_map, path, name, places)
    return tuple((pattern, _rule(rule, name, places)) for pattern, rule in record.factor_map.rules)


def _rule(rule: Any, name: str, places: Places) -> str:
    if rule is None:
        return UNFACTORED
    if rule == HEURISTIC or getattr(rule, "name", "") == "token":
        return HEURISTIC
    # A gin file cannot name the members of T5X's FactorDim; these are their names.
    words = {word: word for word in AXIS_WORDS} | {"col": "column", "unfactorized": "none"}
    axes = rule if isinstance(rule, list | tuple) else ()
    found = [words.get(str(getattr(word, "name", word)).lower(), "") for word in axes]
    if not all(found) or not found:
        raise places.refused(
            name,
            rule,
            "a rule is None, 'heuristic' or a word for each axis.",
            f"The words: {', '.join(AXIS_WORDS)}.",
        )
    return " ".join(found)


def _mapped(record: records.HParamMap, path: str, name: str, places: Places) -> Any:
    """The value that the map has for a parameter."""
    for pattern, value in record.rules:
        try:
            if re.search(pattern, path):
                return value
        except re.error as error:
            raise places.refused(
                name, pattern, f"this is no regular expression: {error}.", "Correct it."
            ) from error
    raise places.refused(
        name, record.rules, f"no rule is for {path}.", "Add a last rule, for '.*'."
    )


def _options(
    record: records.Adafactor,
    unscaled: tuple[str, ...],
    factor_map: tuple[tuple[str, str], ...],
) -> AdafactorConfig:
    return AdafactorConfig(
        multiply_by_parameter_scale=record.multiply_by_parameter_scale is not False,
        decay_exponent=record.decay_rate,
        decay_offset=record.step_offset,
        # None means no momentum in T5X, and 0.0 a slot without influence.
        beta1=record.beta1 or 0.0,
        clipping_threshold=record.clipping_threshold,
        factored=record.factored,
        epsilon1=record.epsilon1,
        epsilon2=record.epsilon2,
        min_dim_size_to_factor=record.min_dim_size_to_factor,
        momentum_slot=record.beta1 is not None,
        weight_decay_rate=record.weight_decay_rate,
        # T5X treats an exponent of 0 as none.
        weight_decay_rate_lr_exponent=record.weight_decay_rate_lr_exponent or None,
        global_norm_clip=record.global_norm_clip_threshold or None,
        max_parameter_scale=record.max_parameter_scale,
        skip_nan_updates=record.skip_nan_updates,
        exclude_from_parameter_scale=unscaled,
        factor_map=factor_map,
    )


def _check_scanned(record: records.Adafactor, model: ModelConfig, places: Places) -> None:
    """Refuses scanned models if T5X factors a kernel that this project does not factor.

    With logical rules, T5X factors stacked kernels of any size. A single kernel, as here, is
    factored only if both of its sides are long enough.
    """
    # The possible sides of a kernel.
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
    """A call of optax as plain data, nested calls in its arguments included.

    Raises:
      UserError: If an argument is neither plain data nor such a call.
    """
    assert isinstance(value, records.OptaxCall)

    def plain(name: str, argument: Any) -> Any:
        if isinstance(argument, records.OptaxCall):
            return _call(argument, places)
        # T5X's own schedule, which optax calls with its count of updates.
        if isinstance(argument, records.LearningRateSchedule):
            return {"function": _T5X_SCHEDULE, "arguments": dataclasses.asdict(argument)}
        if isinstance(argument, list | tuple):
            return [plain(name, item) for item in argument]
        if isinstance(argument, Mapping):
            return {str(key): plain(name, item) for key, item in argument.items()}
        try:
            # Convert through JSON, so that RunConfig can be written and read back equal.
            return json.loads(json.dumps(argument))
        except TypeError:
            raise places.refused(
                f"optax.{value.function}.{name}",
                argument,
                "only numbers, words, schedules and other calls of optax can be arguments.",
            ) from None

    return {
        "function": value.function,
        "arguments": {name: plain(name, item) for name, item in value.arguments.items()},
    }


def schedule_config(trainer: records.Trainer, total_steps: int, places: Places) -> ScheduleConfig:
    """The learning-rate schedule.

    Raises:
      UserError: If the trainer has none, or one that is not T5X's product of factors.
    """
    record = trainer.learning_rate_fn
    fields = {field.name: field for field in dataclasses.fields(trainer)}
    if not fields["learning_rate_fn"].init:
        # A user's trainer takes no schedule, so nothing reads this one.
        record = records.LearningRateSchedule(factors="constant", base_learning_rate=1.0)
    if not isinstance(record, records.LearningRateSchedule):
        raise places.refused(
            "trainer.Trainer.learning_rate_fn",
            record,
            "the learning rate must be a schedule.",
            f"Bind trainer.Trainer.learning_rate_fn = @{SCHEDULE}().",
        )
    arguments = dataclasses.asdict(record)
    return ScheduleConfig(_T5X_SCHEDULE, arguments, total_steps)
