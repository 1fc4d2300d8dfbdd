"""User classes that a T5X gin file names in place of T5X's own.

gin sees a subclass of one of this project's extension points (`EXTENSIONS`) as a record of the same
kind, with the arguments of T5X's class and the subclass's own. The rest of a run is thus read as if
it named T5X's class. The user's class itself is instantiated when the run begins
(`UserClass.made`).
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import types
from typing import TYPE_CHECKING, Any

from t0repro.config.ranges import alternatives
from t0repro.config.t5x import records
from t0repro.config.training_plan import UserClass

if TYPE_CHECKING:  # for types only: config imports the modules that serve these classes
    from t0repro.config.t5x.places import Places

# Classes to subclass: (module, name) -> the record with T5X's arguments.
EXTENSIONS: dict[tuple[str, str], type[records.Record]] = {
    ("t0repro.training.models", "EncoderDecoderModel"): records.EncoderDecoderModel,
    ("t0repro.training.trainer", "BaseTrainer"): records.Trainer,
    ("t0repro.training.partitioner", "Partitioner"): records.PjitPartitioner,
    ("t0repro.training.weight_metrics", "WeightMetricsComputer"): records.WeightMetrics,
    ("t0repro.training.stopping", "BaseAction"): records.Action,
}
# Arguments that the run supplies to these classes; no gin file binds them.
_SUPPLIED = frozenset(
    "self model train_state partitioner eval_names summary_dir train_state_axes rng open_writer"
    " files partitioning say".split()
)
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def served_class(value: Any) -> Any:
    """The record class for a user's usable class; any other value unchanged."""
    for base in value.__mro__ if isinstance(value, type) else ():
        record = EXTENSIONS.get((base.__module__, base.__qualname__))
        if record is not None:
            return _record_class(value, record)
    return value


def base_class(hint: Any) -> str | None:
    """The class to subclass for an argument of a declared type; None if it accepts none."""
    for (module, name), record in EXTENSIONS.items():
        if record in alternatives(hint):
            return f"{module}.{name}"
    return None


def user_class(record: Any, places: Places) -> UserClass | None:
    """The class behind a record, with the arguments that T5X's class lacks.

    Raises:
      UserError: for an argument that JSON cannot represent, with its place.
    """
    cls = getattr(record, "stands_for", None)
    if cls is None:
        return None
    shared = _fields(_kind_of(record))
    named = {name for name, field in _fields(type(record)).items() if field.init} - shared.keys()
    arguments = {name: getattr(record, name) for name in sorted(named)}
    for name, value in arguments.items():
        try:
            # Convert through JSON, so that RunConfig can be written and read back equal.
            arguments[name] = json.loads(json.dumps(value))
        except TypeError:
            raise places.refused(
                f"{cls.__name__}.{name}",
                value,
                "only numbers, words, lists and dictionaries can be arguments.",
                "Make the object inside the class.",
            ) from None
    return UserClass(cls.__module__, cls.__qualname__, arguments)


def _kind_of(record: Any) -> type[records.Record]:
    return next(base for base in type(record).__mro__ if base in EXTENSIONS.values())


# gin refuses another object under a name that it has registered.
@functools.cache
def _record_class(cls: type, record: type[records.Record]) -> type[records.Record]:
    """A record with the arguments of a user's class."""
    fields = _own_fields(cls, record)
    # gin identifies a method by its class's name, so copy inherited ones.
    methods = {
        name: types.FunctionType(
            method.__code__, method.__globals__, name, method.__defaults__, method.__closure__
        )
        for name, method in vars(record).items()
        if isinstance(method, types.FunctionType) and not name.startswith("_")
    }
    for name, method in methods.items():
        method.__qualname__, method.__kwdefaults__ = f"{cls.__name__}.{name}", None
    return dataclasses.make_dataclass(
        cls.__name__,
        fields,
        bases=(record,),
        frozen=True,
        kw_only=True,
        # Use this package's module name, so that gin forgets it with the other records.
        namespace={**methods, "stands_for": cls, "__module__": records.__name__},
    )


def _fields(record: type[records.Record]) -> dict[str, dataclasses.Field]:
    fields = dataclasses.fields(record)  # pyright: ignore[reportArgumentType]
    return {field.name: field for field in fields}


def _own_fields(cls: type, record: type[records.Record]) -> list[tuple[str, Any, Any]]:
    """The fields of a user's arguments, with their defaults, as `make_dataclass` expects them."""
    parameters = inspect.signature(cls).parameters
    inherited, fields = _fields(record), []
    for name, parameter in parameters.items():
        if name in _SUPPLIED or parameter.kind not in _NAMED:
            continue
        default = parameter.default
        kind = inherited[name].type if name in inherited else Any
        if default is parameter.empty:
            if name not in inherited:
                fields.append((name, kind, dataclasses.field()))
        elif type(default).__hash__ is None:  # a dataclass refuses an unhashable default
            fields.append((name, kind, dataclasses.field(default_factory=lambda x=default: x)))
        else:
            fields.append((name, kind, dataclasses.field(default=default)))
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    # Bind these too: the run uses them, not the object.
    if takes_all or record not in (records.EncoderDecoderModel, records.Trainer):
        return fields
    for name, field in inherited.items():
        if name not in parameters and field.init and field.default is not dataclasses.MISSING:
            unbound = dataclasses.field(init=False, default=field.default)
            fields.append((name, field.type, unbound))
    return fields
