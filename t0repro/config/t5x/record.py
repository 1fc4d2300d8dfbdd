"""The base of the records of T5X's classes: typed arguments, instantiated at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from t0repro.config.ranges import fits, hints_of, in_words
from t0repro.errors import UserError


class WrongArgument(UserError):
    """An argument of a record that does not have the declared type.

    Attributes:
      record: the record's class.
      argument: the argument's name.
      scopes: gin's scopes in which the record was called.
      hint: the declared type; `wanted` says it in words.
    """

    def __init__(self, record: type, argument: str, value: Any, hint: Any):
        import gin

        self.record, self.argument = record, argument
        # gin knows its scopes only during the call, and the error is placed after it.
        self.scopes = tuple(gin.current_scope())
        self.hint, self.wanted = hint, in_words(hint)
        super().__init__(f"{record.__name__}.{argument} is {value!r}; it must be {self.wanted}.")


class Record:
    """A dataclass that instantiates arguments that are record classes.

    Raises:
      WrongArgument: if an argument does not have its declared type.
    """

    def __post_init__(self) -> None:
        hints = hints_of(type(self))
        for field in dataclasses.fields(self):  # pyright: ignore[reportArgumentType]
            if field.init:
                # T5X instantiates a class such as `trainer_cls = @trainer.Trainer` later, but gin's
                # values for it are available only while gin has the configuration.
                value = _called(getattr(self, field.name))
                if not fits(value, hints[field.name]):
                    raise WrongArgument(type(self), field.name, value, hints[field.name])
                # Frozen: a plain assignment would raise.
                object.__setattr__(self, field.name, value)


def _called(value: Any) -> Any:
    if isinstance(value, type) and issubclass(value, Record):
        # gin supplies the arguments, as it would for T5X's own class.
        return value()
    if isinstance(value, Mapping):
        return {key: _called(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_called(item) for item in value)
    return value
