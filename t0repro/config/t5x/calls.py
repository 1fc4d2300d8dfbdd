"""The calls that a T5X gin file makes, recorded instead of made.

gin finds a function for each configurable of `arguments`, with its arguments and their defaults.
Calling one, as gin does for `@utils.DatasetConfig()`, checks the types of the arguments and returns
a `Call`. A user's class in place of one of T5X's is such a function too: with the arguments of
T5X's class and its own, so that the rest of a run reads as if the file named T5X's class.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from t0repro.config.gin import door
from t0repro.config.gin.folders import shipped_files
from t0repro.config.run import UserClass
from t0repro.config.t5x.arguments import (
    MODULES,
    ONLY_T5X,
    REQUIRED,
    STANDARD,
    Parameter,
    parameters_of,
    standard_name,
)
from t0repro.errors import UserError

_MODEL, _TRAINER = "models.EncoderDecoderModel", "trainer.Trainer"
_METHODS = {_MODEL: ("loss_fn", "predict_batch_with_aux")}
# Classes to subclass: (module, name) -> the configurable of T5X's that a subclass stands for.
_EXTENSIONS = {
    ("t0repro.training.models", "EncoderDecoderModel"): _MODEL,
    ("t0repro.training.trainer", "BaseTrainer"): _TRAINER,
    ("t0repro.training.partitioner", "Partitioner"): "partitioning.PjitPartitioner",
    ("t0repro.training.weight_metrics", "WeightMetricsComputer"): "trainer.WeightMetricsComputer",
    ("t0repro.training.stopping", "BaseAction"): "trainer.BaseAction",
}
# Arguments that the run supplies to these classes; no gin file binds them.
_SUPPLIED = frozenset(
    "self model train_state partitioner eval_names summary_dir train_state_axes rng open_writer"
    " files partitioning say".split()
)
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class WrongArgument(UserError):
    """An argument that does not have the declared type.

    Attributes:
      selector, scopes: The configurable's selector, and gin's scopes in which it was called.
      argument: The argument's name.
    """

    def __init__(self, function: Any, argument: str, value: Any, parameter: Parameter):
        import gin

        self.selector = door.find_selector(function) or function.__name__
        self.scopes, self.argument = tuple(gin.current_scope()), argument
        self.wanted = parameter.type_in_words
        base = next((".".join(b) for b, c in _EXTENSIONS.items() if c in parameter.calls), None)
        fix = f"Bind {self.wanted}{f', or your own subclass of {base}' if base else ''}."
        if "network.Transformer" in parameter.calls:
            fix = (
                "Bind @network.Transformer(): the commands run T5 alone. Train a network of your"
                " own in Python, by t0repro.training.trainer.Trainer and your subclass of"
                " models.BaseModel or BaseTransformerModel (docs/trainer.md)."
            )
        name = f"{function.__name__}.{argument}"
        super().__init__(f"{name} is {value!r}; it must be {self.wanted}.", fix=fix)


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """A configurable as the program calls it.

    Attributes:
      configurable: Its name in `arguments`; of optax's functions, `optax.NAME`.
      arguments: Its arguments by name, calls in place of references, defaults included.
      selector, scopes: Its selector in gin, and the scopes in which it is called.
      bindable: The arguments that a gin file may bind.
      user_class: The user's class that stands for it, with the arguments that T5X's class lacks.
      places: Argument -> where it was set; filled in by `locate`.
    """

    configurable: str
    arguments: Mapping[str, Any]
    selector: str = ""
    scopes: tuple[str, ...] = ()
    bindable: frozenset[str] = frozenset()
    user_class: UserClass | None = None
    places: dict[str, str] = dataclasses.field(default_factory=dict)

    def __getitem__(self, argument: str) -> Any:
        return self.arguments[argument]

    def __repr__(self) -> str:
        return f"@{self.shown}()"

    @property
    def shown(self) -> str:
        """Its name as the gin files write it, with the scope that tells it from its like."""
        named = [scope for scope in self.scopes if not scope.isupper()]
        return "/".join([*named, short(self.selector) or self.configurable])

    def refuse(
        self, argument: str, why: str, fix: str = ONLY_T5X, value: Any = REQUIRED
    ) -> NoReturn:
        """Raises an error for an unsupported value, with the place that set it.

        Args:
          argument: The argument.
          why: Why its value is not supported.
          fix: What to do.
          value: The value to show if it is not the argument's.
        """
        value = self.arguments.get(argument) if value is REQUIRED else value
        raise UserError(
            f"{self.shown}.{argument} = {value!r}: {why}", where=self.places.get(argument), fix=fix
        )

    def note(self, argument: str, what: str) -> str:
        """A line about an argument, with its place."""
        place = self.places.get(argument)
        return f"{f'{place}: ' if place else ''}{self.shown}.{argument}{what}"

    def walk(self) -> Iterator[Call]:
        """The call and the calls among its arguments, in their order, outermost first."""
        yield self
        for value in self.arguments.values():
            yield from calls_in(value)

    def locate(self, bindings: door.Bindings) -> None:
        """Fills in the places of its arguments and of those of the calls among them."""
        for call in self.walk():
            for argument in call.arguments:
                scopes = door.outer_scopes("/".join(call.scopes))
                place = bindings.find(scopes, call.selector, argument)
                default = f"default of {short(call.selector)}"
                call.places[argument] = strip_folder(place) if place else default
            loss = call.arguments.get("loss_fn")
            if not isinstance(loss, Call):
                continue
            for argument, value in loss.arguments.items():
                place = bindings.find(call.scopes, loss.selector, argument)
                if value is not None and place is not None:
                    call.places[argument] = strip_folder(place)


def call_with_defaults(configurable: str, **arguments: Any) -> Call:
    """A call that no gin file makes, with the defaults of the other arguments."""
    parameters = parameters_of(configurable)
    defaults = {name: each.default for name, each in parameters.items()}
    return Call(configurable, defaults | arguments, configurable, bindable=frozenset(parameters))


def calls_in(value: Any) -> Iterator[Call]:
    """The calls in a value, in lists and mappings too, outermost first."""
    if isinstance(value, Call):
        yield from value.walk()
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from calls_in(item)


def short(selector: str) -> str:
    """`utils.DatasetConfig` of `t5x.utils.DatasetConfig`, as gin files write it."""
    module, _, name = selector.rpartition(".")
    if module.rpartition(".")[2][:1].isupper():  # a method of a class
        return f"{short(module)}.{name}"
    return f"{module.rpartition('.')[2]}.{name}".lstrip(".")


def strip_folder(place: str) -> str:
    """A place without this package's folder, such as `t5x/configs/runs/pretrain.gin:17`."""
    return place.replace(f"{shipped_files()}/", "")


# ---- The functions that gin finds ----------------------------------------------------------------


@functools.cache
def function_for(configurable: str) -> Any:
    """The function that gin finds for a configurable: it records its call."""
    parameters = parameters_of(configurable)
    name = configurable.rpartition(".")[2]
    return _make_recorder(name, configurable, parameters, parameters, None)


def _make_recorder(
    name: str,
    configurable: str,
    parameters: Mapping[str, Parameter],
    bindable: Mapping[str, Parameter],
    user_class: type | None,
) -> Any:
    methods = {}
    for method in _METHODS.get(configurable, ()):
        full_name = f"{configurable}.{method}"
        taken = parameters_of(full_name)
        methods[method] = _make_recorder(method, full_name, taken, taken, None)

    def record(**given: Any) -> Call:
        import gin

        required = [key for key, each in parameters.items() if each.default is REQUIRED]
        if missing := [key for key in required if key not in given]:
            raise UserError(
                f"{name} lacks {', '.join(missing)}: no gin file binds them.",
                fix="Include the run file and the model file that this one adds to.",
            )
        # Of the methods too, gin has bindings, and these hold while the model is called.
        arguments = {method: _wrap_for_gin(function)() for method, function in methods.items()}
        loss = arguments["loss_fn"].arguments if "loss_fn" in methods else {}
        bound_for_loss = {key: value for key, value in loss.items() if value is not None}
        for argument, parameter in parameters.items():
            value = _call_functions(given.get(argument, parameter.default))
            value = bound_for_loss.get(argument, value)
            called = standard_name(value.configurable) if isinstance(value, Call) else None
            if not parameter.accepts(value, called):
                raise WrongArgument(record, argument, value, parameter)
            arguments[argument] = value
        scopes, selector = tuple(gin.current_scope()), door.find_selector(record) or name
        described = None
        if user_class is not None:
            described = _describe_class(user_class, configurable, arguments)
        return Call(configurable, arguments, selector, scopes, frozenset(bindable), described)

    record.__name__ = record.__qualname__ = name
    # gin finds methods as attributes, and reads the signature to refuse unknown arguments.
    record.__dict__.update(methods, records_call=True)
    record.__signature__ = inspect.Signature(  # pyright: ignore[reportFunctionMemberAccess]
        [
            inspect.Parameter(each, inspect.Parameter.KEYWORD_ONLY, default=parameter.default)
            for each, parameter in bindable.items()
        ]
    )
    return record


def _wrap_for_gin(function: Any) -> Callable[..., Any]:
    """Gin's wrapper of a function, which supplies its bindings; the function if it has none."""
    import gin

    return gin.get_configurable(function) if door.find_selector(function) else function


def _call_functions(value: Any) -> Any:
    """A value with the functions in it called, as T5X calls `trainer_cls = @trainer.Trainer`.

    T5X does it later, but gin has the values only while it has the configuration.
    """
    # An object of the user's may answer to any name.
    if getattr(value, "records_call", None) is True:
        return value()
    if isinstance(value, Mapping):
        return {key: _call_functions(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_call_functions(item) for item in value)
    return value


def is_standard(value: Any, argument: str) -> bool:
    """Whether a value is T5X's own function or class for an argument."""
    return isinstance(value, Call) and argument in STANDARD.get(value.configurable, ())


def check_refused(program: Call) -> None:
    """Refuses arguments of which only the default is accepted.

    Raises:
      UserError: For the first argument that is set, with its place.
    """
    for call in program.walk():
        for argument, parameter in parameters_of(call.configurable).items():
            value = call.arguments.get(argument)
            # None and empty lists count as defaults that gin bound explicitly.
            unset = value == parameter.default or value in (None, (), [])
            if parameter.why and not unset and not is_standard(value, argument):
                call.refuse(argument, parameter.why, parameter.fix)


# ---- User classes in place of T5X's own ----------------------------------------------------------


def function_of_class(value: Any) -> Any:
    """The recording function of a user's usable class; any other value unchanged."""
    for base in value.__mro__ if isinstance(value, type) else ():
        configurable = _EXTENSIONS.get((base.__module__, base.__qualname__))
        if configurable is not None:
            return _make_class_recorder(value, configurable)
    return value


# gin refuses another object under a name that it has registered.
@functools.cache
def _make_class_recorder(cls: type, configurable: str) -> Any:
    inherited = parameters_of(configurable)
    taken = inspect.signature(cls).parameters
    parameters = dict(inherited)
    for name, each in taken.items():
        if name in _SUPPLIED or each.kind not in _NAMED:
            continue
        known = inherited.get(name, Parameter())
        has_default = each.default is not each.empty
        default = _record_default(each.default) if has_default else known.default
        parameters[name] = dataclasses.replace(known, default=default)
    bindable = parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in taken.values())
    # The run uses the arguments of other kinds of classes even if the class does not take them.
    if configurable in (_MODEL, _TRAINER) and not takes_all:
        bindable = {
            name: parameter
            for name, parameter in parameters.items()
            if name in taken or parameter.default is REQUIRED
        }
    return _make_recorder(cls.__name__, configurable, parameters, bindable, cls)


def _record_default(default: Any) -> Any:
    """The call of a default that is one of this project's decoding functions."""
    if getattr(default, "__module__", None) != "t0repro.model.t5x_decoding":
        return default
    configurable = MODULES["t5x.decoding"].get(default.__name__)
    return default if configurable is None else function_for(configurable)


def _describe_class(cls: type, configurable: str, arguments: Mapping[str, Any]) -> UserClass:
    inherited = parameters_of(configurable).keys() | set(_METHODS.get(configurable, ()))
    extra = {name: value for name, value in sorted(arguments.items()) if name not in inherited}
    for name, value in extra.items():
        try:
            # Through JSON, so that a run can be written and read back equal.
            extra[name] = json.loads(json.dumps(value))
        except TypeError:
            raise UserError(
                f"{cls.__name__}.{name} = {value!r}: only numbers, words, lists and dictionaries"
                " can be arguments.",
                fix="Make the object inside the class.",
            ) from None
    return UserClass(cls.__module__, cls.__qualname__, extra)
