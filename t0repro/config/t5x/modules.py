"""The modules that a T5X gin file imports, visible to gin only, with the functions that gin finds.

During parsing, gin's import function is replaced. Names of T5X, SeqIO and `__main__` resolve to
functions, with the arguments that `arguments` lists, that are recorded instead of called: calling
one, as gin does for `@utils.DatasetConfig()`, checks the types of the arguments and returns a
`Call`. A user's class in place of one of T5X's is such a function too: with the arguments of T5X's
class and its own, so that the rest of a run reads as if the file named T5X's class. Any other
module is imported when gin first looks up a name in it. No module called `t5x` is ever placed where
Python finds it, and an installed T5X is not read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import json
from collections.abc import Iterator, Mapping
from typing import Any

import gin
from t0repro.config.gin import door
from t0repro.config.run import UserClass
from t0repro.config.t5x.arguments import DECODER_ONLY, MODULES, REQUIRED, Parameter, parameters_of
from t0repro.config.t5x.calls import Call
from t0repro.errors import UserError, nearest_names

_MODEL, _TRAINER = "models.EncoderDecoderModel", "trainer.Trainer"
_METHODS: Mapping[str, tuple[str, ...]] = dict.fromkeys(
    (_MODEL, DECODER_ONLY), ("loss_fn", "predict_batch_with_aux")
)
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
# optax, and T5X's wrappers of it. Any of their functions can be called, so names are looked up.
_OF_OPTAX = ("optax", "t5x.optimizers")
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class WrongArgument(UserError):
    """An argument that does not have the declared type, or the only value that it may have.

    Attributes:
      selector, scopes: The configurable's selector, and gin's scopes in which it was called.
      argument: The argument's name.
    """

    def __init__(self, function: Any, argument: str, value: Any, parameter: Parameter):
        self.selector = door.find_selector(function) or function.__name__
        self.scopes, self.argument = tuple(gin.current_scope()), argument
        self.parameter, wanted = parameter, parameter.type_in_words
        base = next((".".join(b) for b, c in _EXTENSIONS.items() if c in parameter.calls), None)
        fix = f"Bind {wanted}{f', or your own subclass of {base}' if base else ''}."
        if "network.Transformer" in parameter.calls:
            fix = (
                "Bind @network.Transformer(): the commands run T5 alone. Train a network of your"
                " own in Python, by t0repro.training.trainer.Trainer and your subclass of"
                " models.BaseModel or BaseTransformerModel (docs/trainer.md)."
            )
        what = self.describe(f"{function.__name__}.{argument}", repr(value))
        super().__init__(what, fix=parameter.fix if parameter.why else fix)

    def describe(self, name: str, value: str) -> str:
        """What is wrong, with the argument's name and value as given."""
        if self.parameter.why:
            return f"{name} = {value}: {self.parameter.why}"
        return f"{name} is {value}; it must be {self.parameter.type_in_words}."


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
        required = [key for key, each in parameters.items() if each.default is REQUIRED]
        if missing := [key for key in required if key not in given]:
            raise UserError(
                f"{name} lacks {', '.join(missing)}: no gin file binds them.",
                fix="Include the run file and the model file that this one adds to.",
            )
        # Of the methods too, gin has bindings, and these hold while the model is called.
        arguments = {
            method: (gin.get_configurable(each) if door.find_selector(each) else each)()
            for method, each in methods.items()
        }
        loss = arguments["loss_fn"].arguments if "loss_fn" in methods else {}
        bound_for_loss = {key: value for key, value in loss.items() if value is not None}
        for argument, parameter in parameters.items():
            value = _call_functions(given.get(argument, parameter.default))
            value = bound_for_loss.get(argument, value)
            called = value.configurable if isinstance(value, Call) else None
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


class _Served:
    """A module as gin sees it: functions by name, and nested modules; of optax, any function."""

    def __init__(self, name: str, contents: Mapping[str, Any]):
        self._name = name
        self.__dict__.update(contents)

    def __getattr__(self, name: str) -> Any:
        if self._name in _OF_OPTAX:
            return _make_optax_recorder(name)
        known = [key for key in self.__dict__ if not key.startswith("_")]
        raise UserError(
            f"{self._name}.{name} is not supported in a T5X gin file.",
            fix=f"Nearest: {nearest_names(name, known, count=3)} (of {', '.join(known)}).",
        )


# gin refuses another object under a name that it has registered.
@functools.cache
def _make_optax_recorder(name: str) -> Any:
    """A function with the signature of optax's that records its arguments without the defaults."""
    # Here, because it imports JAX, and errors in files that need no optax should not wait for it.
    import optax

    function = getattr(optax, name, None)
    if not callable(function):
        raise UserError(
            f"optax has no {name}.", fix=f"Nearest: {nearest_names(name, dir(optax), count=3)}."
        )

    # gin reads the signature, which this copies, to refuse unknown arguments.
    @functools.wraps(function)
    def record(*args: Any, **kwargs: Any) -> Call:
        bound = inspect.signature(function).bind(*args, **kwargs)
        selector = door.find_selector(record) or f"optax.{name}"
        return Call(f"optax.{name}", dict(bound.arguments), selector)

    return record


class _Deferred:
    """A user's module, imported when a gin file first refers to a name in it."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, name: str) -> Any:
        try:
            module = importlib.import_module(self._name)
        except AttributeError as error:  # gin would take it for a name that the module lacks
            raise ImportError(f"AttributeError: {error}").with_traceback(
                error.__traceback__
            ) from None
        if not hasattr(module, name):
            near = nearest_names(name, [each for each in dir(module) if each[0] != "_"])
            raise UserError(f"{self._name} has no {name}.", fix=f"Nearest: {near}.")
        return function_of_class(getattr(module, name))


class _Absent:
    """A module of T5X without a substitute: refused when a gin file first refers to a name in it.

    In an author's copy of T5X, it may only register tasks, and then nothing refers to it.
    """

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, _: str) -> Any:
        parent = self._name.rpartition(".")[0]
        raise UserError(
            f"t0repro does not support the module {self._name}.",
            fix=f"Nearest: {nearest_names(self._name, MODULES, count=3)} (of {parent}).",
        )


@dataclasses.dataclass(frozen=True)
class Imports:
    """The imports of gin files other than the modules served to them.

    Attributes:
      users: modules of the user's. They register tasks, and importing them may take seconds
        (TensorFlow, datasets); the caller imports them once the files are known to be valid.
      absent: modules of T5X without a substitute, imported for their side effects.
    """

    users: list[str] = dataclasses.field(default_factory=list)
    absent: list[str] = dataclasses.field(default_factory=list)


@contextlib.contextmanager
def serve_modules() -> Iterator[Imports]:
    """Serves T5X's modules to gin within the block; yields the files' other imports."""
    imports = Imports()

    def import_for_gin(name: str, *_: Any, fromlist: Any = None, **__: Any) -> Any:
        root = name.partition(".")[0]
        # Only these roots are served here; anything else is a user's module.
        if root not in ("t5x", "seqio", "optax", "__main__"):
            # Only the root is looked for: to find a submodule, Python would import its package.
            if importlib.util.find_spec(root) is None:
                raise UserError(
                    f"No module named {root!r}, which a gin file imports ({name}).",
                    fix="Install it, or correct the import.",
                )
            if name not in imports.users:
                imports.users.append(name)
            # As Python's own __import__: the module itself with a `from` list, else its root.
            return _Deferred(name if fromlist else root)
        absent = name not in _OF_OPTAX and not any(f"{x}.".startswith(f"{name}.") for x in MODULES)
        # No module of optax registers tasks.
        if absent and root not in _OF_OPTAX:
            imports.absent.append(name)
        if not fromlist:
            return _module(root)
        return _Absent(name) if absent else _module(name)

    with door.replace_import(import_for_gin):
        yield imports


def _module(name: str) -> _Served:
    contents: dict[str, Any] = {
        key: function_for(configurable) for key, configurable in MODULES.get(name, {}).items()
    }
    inside = {
        key[len(name) + 1 :].partition(".")[0] for key in MODULES if key.startswith(f"{name}.")
    }
    # Sorted: messages list them, and a set has another order in each process.
    inner = {child: _module(f"{name}.{child}") for child in sorted(inside)}
    return _Served(name, contents | inner)
