"""Reads a run's optimizer and learning-rate schedule from gin's bindings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from t0repro.config.configuration import NotOnJax
from t0repro.config.gin_door import Bindings, Reference, followed, reference_to, resolved, value_of
from t0repro.config.mtf import packages
from t0repro.config.run_config import (
    AdafactorConfig,
    AdamWeightDecayConfig,
    ModelConfig,
    MomentumConfig,
    OptimizerConfig,
    ScheduleConfig,
    SgdConfig,
)
from t0repro.errors import UserError

_RUN = "mesh_tensorflow.transformer.utils.run"
_OPTIMIZE = "mesh_tensorflow.optimize"
_SCHEDULES = "mesh_tensorflow.transformer.learning_rate_schedules"
_ADAFACTOR = f"{_OPTIMIZE}.AdafactorOptimizer"
_ADAM = f"{_OPTIMIZE}.AdamWeightDecayOptimizer"
_MOMENTUM = f"{_OPTIMIZE}.MomentumOptimizer"
_SGD = f"{_OPTIMIZE}.SgdOptimizer"
_DECAY = f"{_OPTIMIZE}.adafactor_decay_rate_pow"
# The same function is configurable under two names.
_PRODUCTS = (f"{_SCHEDULES}.product_learning_rate", f"{_OPTIMIZE}.product_learning_rate")
# Dimensions of a T5's variables; an optimizer option for any other dimension has no effect.
_DIMENSIONS = {"vocab", "d_model", "d_ff", "heads", "d_kv", "buckets"}

_ADAFACTOR_FIELDS = (
    "multiply_by_parameter_scale", "beta1", "clipping_threshold", "factored", "epsilon1",
    "epsilon2", "min_dim_size_to_factor",
)  # fmt: skip
_ADAM_FIELDS = ("weight_decay_rate", "beta_1", "beta_2", "epsilon")

# For the reader. Binding learning_rate changes nothing, since the run passes its own.
KNOWN_BINDINGS: Mapping[str, Any] = {
    _ADAFACTOR: {
        *_ADAFACTOR_FIELDS, "decay_rate", "exclude_from_parameter_scale", "stacked_dim_names",
        "learning_rate",
    },
    _ADAM: {*_ADAM_FIELDS, "exclude_from_weight_decay", "learning_rate"},
    _MOMENTUM: {"momentum", "learning_rate"},
    _SGD: {"learning_rate"},
    _DECAY: ...,
    f"{_SCHEDULES}.product_learning_rate": {"factors", "offset"},
    f"{_OPTIMIZE}.product_learning_rate": {"factors", "offset"},
    f"{_SCHEDULES}.constant": {"value"},
    f"{_SCHEDULES}.constant_learning_rate": {"learning_rate"},
    f"{_SCHEDULES}.learning_rate_schedule_noam": {
        "warmup_steps", "linear_decay_fraction", "multiplier", "offset",
    },
    f"{_SCHEDULES}.linear_decay": {"steps_or_fraction"},
    f"{_SCHEDULES}.linear_decay_learning_rate": {"initial_lr", "offset"},
    f"{_SCHEDULES}.linear_warmup": {"steps_or_fraction"},
    f"{_SCHEDULES}.slanted_triangular": {
        "cut_fraction", "ratio", "max_learning_rate", "start_step",
    },
    f"{_SCHEDULES}.truncated_rsqrt": {"warmup_steps"},
}  # fmt: skip


class OptimizerReader:
    """Reads a run's optimizer and schedule.

    Args:
      bindings: to look up the places of values and of refused bindings.
      run: the arguments of `utils.run`.
      provenance: field -> where its value was set; filled in.
    """

    def __init__(self, bindings: Bindings, run: Mapping[str, Any], provenance: dict[str, str]):
        self._bindings, self._run, self._provenance = bindings, run, provenance

    # ---- The optimizer ----

    def optimizer(self, model: ModelConfig) -> OptimizerConfig | None:
        """The optimizer with its options; names in them are resolved to paths in the model."""
        reference = reference_to(value_of(_RUN, "optimizer"))
        if reference is None:
            if self._run["optimizer"] is not None:
                self._refuse_run("optimizer", f"the optimizer {self._run['optimizer']!r}")
            return None
        readers: dict[str, Callable[..., OptimizerConfig]] = {
            _ADAFACTOR: self._adafactor,
            _ADAM: self._adam,
            _MOMENTUM: self._momentum,
            _SGD: lambda reference, names, frozen: SgdConfig(frozen),
        }
        if reference.selector not in readers:
            self._refuse_run("optimizer", f"the optimizer {reference.name}")
        names = model.mesh_variables()
        return readers[reference.selector](reference, names, self._frozen(names))

    def _frozen(self, names: Mapping[str, str]) -> tuple[str, ...]:
        """Paths of the parameters that run.variable_filter excludes from training."""
        pattern = self._run["variable_filter"]
        if pattern is None:
            return ()
        if not isinstance(pattern, str):
            self._refuse_run("variable_filter", "a function as variable_filter")
        self._note("optimizer.frozen", Reference("", _RUN), "variable_filter")
        # Mesh TensorFlow searches, so a pattern may match anywhere in a variable's name.
        frozen = tuple(path for path, name in names.items() if not re.search(pattern, name))
        if len(frozen) == len(names):
            raise UserError(
                f"run.variable_filter = {pattern!r} matches no variable: nothing would be trained.",
                where=self._bindings.find((), _RUN, "variable_filter"),
                fix=f"Names are for instance {', '.join(list(names.values())[:3])}.",
            )
        return frozen

    def _adafactor(
        self, reference: Reference, names: Mapping[str, str], frozen: tuple[str, ...]
    ) -> AdafactorConfig:
        arguments = self._arguments(reference)
        # Dimension names of other models have no effect in a T5.
        stacked = set(arguments["stacked_dim_names"] or ()) & _DIMENSIONS
        if stacked:
            self._refuse(reference, "stacked_dim_names", f"{sorted(stacked)} as stacked dimensions")
        rate = arguments["decay_rate"]
        if rate is not None and not isinstance(rate, int | float):
            self._refuse(reference, "decay_rate", f"decay_rate = {rate!r}")
        for name in (*_ADAFACTOR_FIELDS, "decay_rate", "exclude_from_parameter_scale"):
            self._note(f"optimizer.{name}", reference, name)
        # Adafactor's constructor calls this function, so gin calls it in the optimizer's scope.
        power = Reference(reference.scope, _DECAY)
        decay = self._arguments(power)
        self._note("optimizer.decay_exponent", power, "exponent")
        self._note("optimizer.decay_offset", power, "offset")
        excluded = arguments["exclude_from_parameter_scale"] or ()
        return AdafactorConfig(
            **{name: arguments[name] for name in _ADAFACTOR_FIELDS},
            decay_exponent=decay["exponent"],
            decay_offset=decay["offset"],
            decay_rate=rate,
            exclude_from_parameter_scale=tuple(
                # A substring of the name in Mesh TensorFlow; in its Adam, a regular expression.
                path
                for path, name in names.items()
                if any(part in name for part in excluded)
            ),
            frozen=frozen,
        )

    def _adam(
        self, reference: Reference, names: Mapping[str, str], frozen: tuple[str, ...]
    ) -> AdamWeightDecayConfig:
        arguments = self._arguments(reference)
        for name in (*_ADAM_FIELDS, "exclude_from_weight_decay"):
            self._note(f"optimizer.{name}", reference, name)
        patterns = arguments["exclude_from_weight_decay"] or ()
        return AdamWeightDecayConfig(
            **{name: arguments[name] for name in _ADAM_FIELDS},
            exclude_from_weight_decay=tuple(
                path
                for path, name in names.items()
                if any(re.search(pattern, name) for pattern in patterns)
            ),
            frozen=frozen,
        )

    def _momentum(
        self, reference: Reference, names: Mapping[str, str], frozen: tuple[str, ...]
    ) -> MomentumConfig:
        arguments = self._arguments(reference)
        if "momentum" not in arguments:
            raise UserError(
                "MomentumOptimizer.momentum is not bound, and it has no default.",
                where=self._bindings.find((), _RUN, "optimizer"),
                fix='Add --gin_param="MomentumOptimizer.momentum = 0.9".',
            )
        self._note("optimizer.momentum", reference, "momentum")
        return MomentumConfig(arguments["momentum"], frozen)

    # ---- The schedule ----

    def schedule(
        self, total_train_steps: int, optimizer: OptimizerConfig | None
    ) -> ScheduleConfig | None:
        """The schedule: a function, a constant, a list of factors, or Adafactor's own default."""
        value = self._run["learning_rate_schedule"]
        for field in ("schedule", "schedule.name"):
            self._note(field, Reference("", _RUN), "learning_rate_schedule")
        if value is None:
            if not isinstance(optimizer, AdafactorConfig):
                return None
            # Adafactor's own default depends on whether updates are scaled by the parameter.
            scaled = {"multiply_by_parameter_scale": optimizer.multiply_by_parameter_scale}
            return ScheduleConfig("adafactor_default", scaled, total_train_steps)
        if isinstance(value, int | float):
            return ScheduleConfig("constant", {"value": float(value)}, total_train_steps)
        if isinstance(value, list | tuple):
            # gin would call the factors; this needs the functions they refer to.
            factors = self._factors(value_of(_RUN, "learning_rate_schedule"), "")
            # Mesh TensorFlow calls its product with the factors; the product's offset may be bound.
            product = self._arguments(Reference("", _PRODUCTS[0])) | {"factors": factors}
            return ScheduleConfig("product_learning_rate", product, total_train_steps)
        reference = reference_to(value_of(_RUN, "learning_rate_schedule"))
        if reference is None:
            self._refuse_run("learning_rate_schedule", f"the schedule {value!r}")
        name, arguments = self._function(reference, "schedule.arguments")
        return ScheduleConfig(name, arguments, total_train_steps)

    def _function(self, reference: Reference, field: str | None = None) -> tuple[str, dict]:
        """A schedule's name and arguments."""
        if reference.selector not in KNOWN_BINDINGS or not (
            reference.selector.startswith(_SCHEDULES) or reference.selector in _PRODUCTS
        ):
            self._refuse_run("learning_rate_schedule", f"the schedule {reference.selector}")
        arguments = self._arguments(reference)
        for argument in arguments if field else ():
            self._note(f"{field}.{argument}", reference, argument)
        if reference.selector in _PRODUCTS:
            raw = value_of(reference.selector, "factors", reference.scope)
            arguments["factors"] = self._factors(raw, reference.scope)
        return reference.name, arguments

    def _factors(self, raw: Any, scope: str) -> list[Any]:
        """The factors of a product called in a scope: numbers, or functions with arguments."""
        factors = []
        for item in raw if isinstance(raw, list | tuple) else ():
            reference = reference_to(item, within=scope)
            if reference is not None:
                name, arguments = self._function(reference)
                factors.append({"name": name, "arguments": arguments})
            elif isinstance(number := followed(item), int | float):
                factors.append(number)
            else:
                self._refuse_run("learning_rate_schedule", f"the factor {item!r}")
        return factors

    # ---- Arguments and places ----

    def _arguments(self, reference: Reference) -> dict[str, Any]:
        """A configurable's arguments in its scope: defaults, then bindings."""
        module, _, name = reference.selector.rpartition(".")
        signature = inspect.signature(getattr(packages.module(module), name))
        defaults = {
            parameter.name: parameter.default
            for parameter in signature.parameters.values()
            if parameter.default is not parameter.empty
            and not repr(parameter.default).startswith("<object object")  # gin.REQUIRED
        }
        return {**defaults, **resolved(reference.scope, reference.selector)}

    def _note(self, field: str, reference: Reference, argument: str) -> None:
        self._provenance[field] = self._bindings.source(
            reference.scopes, reference.selector, argument
        )

    def _refuse_run(self, argument: str, what: str) -> NoReturn:
        self._refuse(Reference("", _RUN), argument, what)

    def _refuse(self, reference: Reference, argument: str, what: str) -> NoReturn:
        raise NotOnJax(
            f"The JAX stack does not support {what} ({reference.name}.{argument}).",
            where=self._bindings.source(reference.scopes, reference.selector, argument),
            fix="Change the binding, or run with --backend=mtf.",
        )
