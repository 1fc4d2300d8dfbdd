"""Turns T5X's optimizer and learning-rate schedule into OptimizerConfig and ScheduleConfig."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from t0repro.config.model import ModelConfig
from t0repro.config.optimizer import (
    SCHEDULE_RANGES,
    AdafactorConfig,
    MultiOptimizerConfig,
    OptaxConfig,
    OptimizerConfig,
    OptimizerPart,
    ScheduleConfig,
)
from t0repro.config.settings import check_values
from t0repro.config.t5x.calls import Call, call_with_defaults
from t0repro.errors import nearest_names
from t0repro.parameters.shape import (
    ALL_HEURISTIC,
    AXIS_WORDS,
    HEURISTIC,
    UNFACTORED,
    FactorRuleError,
    factoring,
)

_SCHEDULE = "utils.create_learning_rate_scheduler"


def read_optimizer(model_call: Call, model: ModelConfig, places: dict[str, str]) -> OptimizerConfig:
    """The optimizer that a model's call names.

    Raises:
      UserError: For an optimizer or an option without a counterpart here, with its place.
    """
    optimizer = model_call["optimizer_def"]
    scanned = model_call["module"]["config"].configurable.startswith("scalable_t5")
    name = optimizer.configurable if isinstance(optimizer, Call) else ""
    if name == "adafactor.Adafactor":
        return _adafactor(optimizer, model, scanned, places)
    if name == "optimizers.MultiOptimizer":
        return _multi_optimizer(optimizer, model, scanned, places)
    if name == "optimizers.chain" and all(map(_is_optax, optimizer["transformations"])):
        return OptaxConfig(tuple(_plain_call(each) for each in optimizer["transformations"]))
    if _is_optax(optimizer):
        return OptaxConfig((_plain_call(optimizer),))
    model_call.refuse(
        "optimizer_def",
        "t0repro does not support this optimizer.",
        "Bind @adafactor.Adafactor() or @optimizers.chain().",
    )


def _is_optax(value: Any) -> bool:
    return isinstance(value, Call) and value.configurable.startswith("optax.")


def _multi_optimizer(
    call: Call, model: ModelConfig, scanned: bool, places: dict[str, str]
) -> MultiOptimizerConfig:
    """The parameters of each optimizer, chosen here because the user's functions are here."""
    # Imported here because it imports JAX, and an error about a misspelled macro need not wait.
    import flax.traverse_util

    name = "traversals_and_optimizers"
    every = model.shape.parameters()
    tree = flax.traverse_util.unflatten_dict({path: path for path in every}, sep="/")
    parts, taken = [], set[str]()
    for traversal, optimizer in call[name]:
        if not isinstance(optimizer, Call) or optimizer.configurable != "adafactor.Adafactor":
            call.refuse(
                name,
                "its optimizers must be Adafactor, as in T5X, whose MultiOptimizer cannot hold the"
                " state of a chain of optax.",
                "Bind @adafactor.Adafactor(), or one of optimizers.chain for all parameters.",
                value=optimizer,
            )
        if not hasattr(traversal, "iterate"):
            call.refuse(
                name,
                "it does not select parameters.",
                "Bind @traverse_util.ModelParamTraversal(), of flax, with a filter_fn.",
                value=traversal,
            )
        chosen = set(traversal.iterate(tree))
        if chosen & taken:
            both = sorted(chosen & taken)[0]
            call.refuse(name, "two optimizers would train this parameter.", value=both)
        taken |= chosen
        paths = tuple(path for path in every if path in chosen)
        parts.append(OptimizerPart(paths, _adafactor(optimizer, model, scanned, places, paths)))
    return MultiOptimizerConfig(tuple(parts))


def _adafactor(
    call: Call,
    model: ModelConfig,
    scanned: bool,
    places: dict[str, str],
    paths: Collection[str] | None = None,
) -> AdafactorConfig:
    """Adafactor's options.

    Args:
      call: The optimizer's call.
      model: The model, for the paths and shapes of its parameters.
      scanned: Whether T5X would scan the model's layers.
      places: Field -> where its value was set; filled in.
      paths: The parameters that it trains; None for all.
    """
    if scanned:
        _check_scanned(call, model)
    shapes = model.shape.parameters()
    trained = {path: shapes[path] for path in (shapes if paths is None else paths)}
    name, unscaled = "multiply_by_parameter_scale", ()
    # The only call that the argument takes is of an HParamMap.
    if isinstance(scales := call[name], Call):
        unscaled = tuple(path for path in trained if not _look_up(scales, path, call, name))
    config = call.read(
        AdafactorConfig,
        places,
        "optimizer.",
        multiply_by_parameter_scale=scales is not False,
        exclude_from_parameter_scale=unscaled,
        # None means no momentum in T5X, and 0.0 a slot without influence.
        beta1=call["beta1"] or 0.0,
        momentum_slot=call["beta1"] is not None,
        factor_map=_factor_map(call, trained),
    )
    # Applied here only to find a rule that fits no parameter before the run begins.
    for path, shape in trained.items():
        try:
            factoring(path, shape, config)
        except FactorRuleError as error:
            call.refuse("factor_map", error.what, error.fix or "")
    return config


def _factor_map(call: Call, trained: Collection[str]) -> tuple[tuple[str, str], ...]:
    """T5X's factor rules; for a T5's matrices and vectors, only None changes anything."""
    name = "factor_map"
    if (rules := call[name]) is None:
        return ALL_HEURISTIC
    if not call["factored"]:
        call.refuse(name, "with factored = False there is nothing to map.", "Bind None.")
    # T5X then replaces the map by the model's logical axes, which leave matrices to their size.
    if call["logical_factor_rules"] is not None:
        return ALL_HEURISTIC
    for path in trained:
        _look_up(rules, path, call, name)
    return tuple((pattern, _rule(rule, call)) for pattern, rule in rules["rules"])


def _rule(rule: Any, call: Call) -> str:
    if rule is None:
        return UNFACTORED
    if rule == HEURISTIC or getattr(rule, "name", "") == "token":
        return HEURISTIC
    # A gin file cannot name the members of T5X's FactorDim; these are their names.
    words = {word: word for word in AXIS_WORDS} | {"col": "column", "unfactorized": "none"}
    axes = rule if isinstance(rule, list | tuple) else ()
    known = [words.get(str(getattr(word, "name", word)).lower(), "") for word in axes]
    if not all(known) or not known:
        call.refuse(
            "factor_map",
            "a rule is None, 'heuristic' or a word for each axis.",
            f"The words: {', '.join(AXIS_WORDS)}.",
            value=rule,
        )
    return " ".join(known)


def _look_up(rules: Call, path: str, call: Call, argument: str) -> Any:
    """The value that a map has for a parameter."""
    for pattern, value in rules["rules"]:
        try:
            if re.search(pattern, path):
                return value
        except re.error as error:
            why = f"this is not a regular expression: {error}."
            call.refuse(argument, why, "Correct it.", value=pattern)
    call.refuse(
        argument, f"no rule is for {path}.", "Add a last rule, for '.*'.", value=rules["rules"]
    )


def _check_scanned(call: Call, model: ModelConfig) -> None:
    """Refuses scanned models if T5X factors a kernel that this project does not factor.

    With logical rules, T5X factors stacked kernels of any size. A single kernel, as here, is
    factored only if both of its sides are long enough.
    """
    # The possible sides of a kernel.
    shortest = min(model.d_model, model.d_ff, model.num_heads * model.d_kv)
    short = shortest < call["min_dim_size_to_factor"]
    if call["factored"] and call["logical_factor_rules"] and short:
        call.refuse(
            "logical_factor_rules",
            f"T5X would factor kernels of scanned layers with a side of {shortest}, below"
            " min_dim_size_to_factor; t0repro does not scan layers, and does not factor them.",
            "Take the model of t5x.examples.t5, whose layers are not scanned.",
        )


def _plain_call(call: Call) -> Mapping[str, Any]:
    """A call of optax as plain data, nested calls in its arguments included.

    Raises:
      UserError: If an argument is neither plain data nor such a call.
    """

    def plain(name: str, argument: Any) -> Any:
        if _is_optax(argument):
            return _plain_call(argument)
        # T5X's own schedule, which optax calls with its count of updates.
        if isinstance(argument, Call) and argument.configurable == _SCHEDULE:
            function = _SCHEDULE.rpartition(".")[2]
            set_at = {f"arguments.{key}": place for key, place in argument.places.items()}
            check_values(ScheduleConfig, vars(argument), set_at)
            return {"function": function, "arguments": dict(argument.arguments)}
        if isinstance(argument, list | tuple):
            return [plain(name, item) for item in argument]
        if isinstance(argument, Mapping):
            return {str(key): plain(name, item) for key, item in argument.items()}
        try:
            # Convert through JSON, so that TrainRun can be written and read back equal.
            return json.loads(json.dumps(argument))
        except TypeError:
            call.refuse(
                name,
                "only numbers, words, schedules and other calls of optax can be arguments.",
                value=argument,
            )

    return {
        "function": call.configurable.partition(".")[2],
        "arguments": {name: plain(name, item) for name, item in call.arguments.items()},
    }


def read_schedule(program: Call, places: dict[str, str]) -> ScheduleConfig:
    """The learning-rate schedule.

    Raises:
      UserError: If the trainer has none.
    """
    trainer: Call = program["trainer_cls"]
    call = trainer["learning_rate_fn"]
    if "learning_rate_fn" not in trainer.bindable:
        # A user's trainer takes no schedule, so nothing reads this one.
        call = call_with_defaults(_SCHEDULE, factors="constant", base_learning_rate=1.0)
    if call is None:
        trainer.refuse(
            "learning_rate_fn",
            "the learning rate must be a schedule.",
            f"Bind trainer.Trainer.learning_rate_fn = @{_SCHEDULE}().",
        )
    known = set(SCHEDULE_RANGES["factors"]) - {""}
    for name in map(str.strip, call["factors"].split("*")):
        if name not in known:
            call.refuse(
                "factors",
                f"there is no factor called {name!r}.",
                f"Correct it; nearest: {nearest_names(name, known)}.",
            )
    for argument in call.arguments:
        if argument in call.places:
            places[f"schedule.arguments.{argument}"] = call.places[argument]
    return program.read(ScheduleConfig, places, "schedule.", arguments=dict(call.arguments))
