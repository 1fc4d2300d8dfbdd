"""The rules by which gin's bindings make a run's optimizer, schedule and number of steps."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, get_args

from t0repro.config.configuration import RunInputs
from t0repro.config.gin import door
from t0repro.config.gin.door import Reference
from t0repro.config.model import ModelConfig
from t0repro.config.mtf.arguments import Arguments, full_name
from t0repro.config.optimizer import (
    AdafactorConfig,
    AdamWeightDecayConfig,
    OptimizerConfig,
    ScheduleConfig,
)
from t0repro.config.run import TrainRun
from t0repro.config.settings import arguments_of, check_field
from t0repro.errors import UserError

# Mesh TensorFlow's name -> the optimizer.
OPTIMIZERS: Mapping[str, Any] = {
    full_name(names["mtf"]): kind
    for kind in get_args(OptimizerConfig)
    if "mtf" in (names := getattr(kind, "gin_configurables", {}))
}
# The functions that a schedule may be; one of them has two names.
SCHEDULES = tuple(
    full_name(name)
    for name in (
        "optimize.product_learning_rate", "learning_rate_schedules.product_learning_rate",
        "learning_rate_schedules.constant", "learning_rate_schedules.constant_learning_rate",
        "learning_rate_schedules.learning_rate_schedule_noam",
        "learning_rate_schedules.linear_decay", "learning_rate_schedules.linear_warmup",
        "learning_rate_schedules.linear_decay_learning_rate",
        "learning_rate_schedules.slanted_triangular", "learning_rate_schedules.truncated_rsqrt",
    )
)  # fmt: skip
_PRODUCT = "product_learning_rate"
# Dimensions of a T5's variables; an optimizer option for any other dimension has no effect.
_DIMENSIONS = {"vocab", "d_model", "d_ff", "heads", "d_kv", "buckets"}


def read_train_steps(arguments: Arguments, inputs: RunInputs) -> int:
    """The global step at which training ends.

    Raises:
      UserError: For neither a number of steps nor auto_train_steps.
    """
    steps: Any = arguments.run["train_steps"]
    if not callable(steps):  # a number, or nonsense
        place = arguments.place("train_steps")
        check_field(TrainRun, "train_steps", steps, place)
        return steps
    reference = arguments.reference("utils.run", "train_steps")
    # The default is auto_train_steps too.
    if reference is not None and reference.name != "auto_train_steps":
        arguments.refuse(f"train_steps = @{reference.name}", "train_steps")
    if inputs.sequence_length is None:
        raise UserError(
            "run.train_steps counts tokens, and run.sequence_length is None.",
            where=arguments.place("train_steps"),
            fix="Bind run.train_steps to a number.",
        )
    count_steps: Any = steps
    return count_steps(inputs.batch_size, inputs.sequence_length)


def read_optimizer(arguments: Arguments, model: ModelConfig) -> OptimizerConfig | None:
    """The optimizer with its options; names in them are resolved to paths in the model.

    Raises:
      UserError: For an optimizer or an option that the JAX stack lacks.
    """
    reference = arguments.reference("utils.run", "optimizer")
    if reference is None:
        if (bound := door.value_of(full_name("utils.run"), "optimizer")) is not None:
            arguments.refuse(
                f"the optimizer {_format_value(arguments, bound, 'optimizer')}", "optimizer"
            )
        return None
    kind = OPTIMIZERS.get(reference.selector)
    if kind is None:
        arguments.refuse(f"the optimizer {reference.name}", "optimizer")
    names = model.mesh_variables()
    rules: dict[str, Any] = {"frozen": _find_frozen(arguments, names)}
    options = arguments.read(reference.selector, reference.scope)
    if kind is AdafactorConfig:
        rules |= _adafactor_rules(arguments, reference, options, names)
    elif kind is AdamWeightDecayConfig:
        patterns = options["exclude_from_weight_decay"] or ()
        rules["exclude_from_weight_decay"] = tuple(
            path for path, name in names.items() if any(re.search(x, name) for x in patterns)
        )
    for each in arguments_of(kind, "mtf").values():
        if full_name(each.configurable) == reference.selector and each.argument not in options:
            raise UserError(
                f"{reference.name}.{each.argument} is not bound, and it has no default.",
                where=arguments.place("optimizer"),
                fix=f'Add --gin_param="{reference.name}.{each.argument} = ...".',
            )
    return arguments.settings(kind, "optimizer.", scope=reference.scope, **rules)


def _find_frozen(arguments: Arguments, names: Mapping[str, str]) -> tuple[str, ...]:
    """Paths of the parameters that run.variable_filter excludes from training."""
    pattern = arguments.run["variable_filter"]
    if pattern is None:
        return ()
    place = arguments.place("variable_filter")
    if not isinstance(pattern, str):
        arguments.refuse("a function as variable_filter", "variable_filter")
    try:
        # Mesh TensorFlow searches, so a pattern may match anywhere in a variable's name.
        frozen = tuple(path for path, name in names.items() if not re.search(pattern, name))
    except re.error as error:
        raise UserError(
            f"run.variable_filter = {pattern!r} is not a regular expression: {error}.",
            where=place,
            fix="Correct the pattern.",
        ) from None
    if len(frozen) == len(names):
        raise UserError(
            f"run.variable_filter = {pattern!r} matches no variable: nothing would be trained.",
            where=place,
            fix=f"Names are for instance {', '.join(list(names.values())[:3])}.",
        )
    return frozen


def _adafactor_rules(
    arguments: Arguments,
    reference: Reference,
    options: Mapping[str, Any],
    names: Mapping[str, str],
) -> dict[str, Any]:
    # Dimension names of other models have no effect in a T5.
    stacked = set(options["stacked_dim_names"] or ()) & _DIMENSIONS
    where = (reference.selector, *reference.scopes)
    if stacked:
        arguments.refuse(f"{sorted(stacked)} as stacked dimensions", "stacked_dim_names", *where)
    rate = options["decay_rate"]
    if rate is not None and not isinstance(rate, int | float):
        arguments.refuse(f"decay_rate = {rate!r}", "decay_rate", *where)
    excluded = options["exclude_from_parameter_scale"] or ()
    return {
        # A substring of the name in Mesh TensorFlow; in its Adam, a regular expression.
        "exclude_from_parameter_scale": tuple(
            path for path, name in names.items() if any(part in name for part in excluded)
        ),
    }


def read_schedule(
    arguments: Arguments, train_steps: int, optimizer: OptimizerConfig | None
) -> ScheduleConfig | None:
    """The schedule: a function, a constant, a list of factors, or Adafactor's own default.

    Raises:
      UserError: For a schedule that the JAX stack lacks.
    """
    # A schedule with an end counts to total_run_steps if it is bound.
    total_train_steps = train_steps
    if (steps := arguments.run["total_run_steps"]) is not None:
        place, name = arguments.place("total_run_steps"), "run.total_run_steps"
        check_field(ScheduleConfig, "total_train_steps", steps, place, name)
        total_train_steps = steps
    bound = door.value_of(full_name("utils.run"), "learning_rate_schedule")
    if bound is None:
        if not isinstance(optimizer, AdafactorConfig):
            return None
        # Adafactor's own default depends on whether updates are scaled by the parameter.
        scaled = {"multiply_by_parameter_scale": optimizer.multiply_by_parameter_scale}
        return ScheduleConfig("adafactor_default", scaled, total_train_steps)
    if isinstance(bound, int | float):
        return ScheduleConfig("constant", {"value": float(bound)}, total_train_steps)
    if isinstance(bound, list | tuple):
        # Mesh TensorFlow calls its product with the factors; the product's offset may be bound.
        product = {
            **arguments.read(f"learning_rate_schedules.{_PRODUCT}"),
            "factors": _read_factors(arguments, bound, ""),
        }
        return ScheduleConfig(_PRODUCT, product, total_train_steps)
    reference = door.reference_to(bound)
    if reference is None:
        what = f"the schedule {_format_value(arguments, bound, 'learning_rate_schedule')}"
        arguments.refuse(what, "learning_rate_schedule")
    name, values = _read_function(arguments, reference)
    for argument in values:
        scopes = reference.scopes
        arguments.note(f"schedule.arguments.{argument}", reference.selector, argument, *scopes)
    return ScheduleConfig(name, values, total_train_steps)


def _read_function(arguments: Arguments, reference: Reference) -> tuple[str, dict[str, Any]]:
    """A schedule's name and arguments."""
    if reference.selector not in SCHEDULES:
        arguments.refuse(f"the schedule {reference.selector}", "learning_rate_schedule")
    values = dict(arguments.read(reference.selector, reference.scope))
    if reference.name == _PRODUCT:
        raw = door.value_of(reference.selector, "factors", reference.scope)
        values["factors"] = _read_factors(arguments, raw, reference.scope)
    return reference.name, values


def _read_factors(arguments: Arguments, raw: Any, scope: str) -> list[Any]:
    """The factors of a product called in a scope: numbers, or functions with arguments."""
    factors: list[Any] = []
    for item in raw if isinstance(raw, list | tuple) else ():
        reference = door.reference_to(item, within=scope)
        if reference is not None:
            name, values = _read_function(arguments, reference)
            factors.append({"name": name, "arguments": values})
        elif isinstance(number := door.follow_macros(item), int | float):
            factors.append(number)
        else:
            arguments.refuse(f"the factor {item!r}", "learning_rate_schedule")
    return factors


def _format_value(arguments: Arguments, bound: Any, argument: str) -> str:
    """A value of `utils.run`; one that gin calls, as it is written."""
    return door.format_value(bound) if door.is_reference(bound) else repr(arguments.run[argument])
