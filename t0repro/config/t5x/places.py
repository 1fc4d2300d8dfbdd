"""Where a T5X run's values were set, and errors for unsupported values."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from t0repro.config.t5x.gin_files import Value
from t0repro.config.t5x.programs import WriteConfig
from t0repro.errors import UserError

ONLY_T5X = "Remove the binding, or run it with T5X itself."


@dataclasses.dataclass(frozen=True)
class Places:
    """Places by gin name, for instance `train/utils.DatasetConfig.pack`."""

    by_name: Mapping[str, str]

    @classmethod
    def of(cls, values: Iterable[Value]) -> Places:
        """The places of everything that a parsed configuration reads."""
        found = list(values)
        standard = {value.standard: value.place for value in found if value.standard}
        return cls(standard | {value.name: value.place for value in found})

    def place(self, name: str) -> str | None:
        """The place of a name, or of the first match that ignores its scope or module.

        A file may use another scope, or import a module under another name.
        """
        if name in self.by_name:
            return self.by_name[name]
        bare = name.rpartition("/")[2]
        last_two = ".".join(bare.rsplit(".", 2)[-2:])
        for ending in (name, bare, last_two):
            for key, place in self.by_name.items():
                if key == ending or key.endswith((f"/{ending}", f".{ending}")):
                    return place
        return None

    def refused(self, name: str, value: Any, why: str, fix: str = ONLY_T5X) -> UserError:
        """An error for an unsupported value, with the place that set it."""
        return UserError(f"{name} = {value!r}: {why}", where=self.place(name), fix=fix)

    def check_unset(self, record: Any, name: str, whys: Mapping[str, str]) -> None:
        """Refuses arguments of a record that differ from their defaults.

        Args:
          record: The record.
          name: Its name in gin, with its scope if there are several of it.
          whys: Argument -> why only its default is accepted.

        Raises:
          UserError: For the first argument that is set.
        """
        defaults = {field.name: field.default for field in dataclasses.fields(record)}
        for argument, why in whys.items():
            value, default = getattr(record, argument), defaults[argument]
            # None, empty sequences and T5X's own objects count as defaults that gin bound
            # explicitly.
            standard = argument in getattr(value, "default_of", ())
            if value != default and value not in (None, (), []) and not standard:
                raise self.refused(f"{name}.{argument}", value, why)


def check_summary(program: Any, name: str, places: Places) -> None:
    """Refuses a user's function in place of T5X's that writes config.gin.

    Raises:
      UserError: with the place that binds it.
    """
    function = program.summarize_config_fn
    if function is not None and not isinstance(function, WriteConfig):
        raise places.refused(
            f"{name}.summarize_config_fn",
            function,
            "the configuration is always written as config.gin.",
            "Bind @gin_utils.summarize_gin_config, or leave it out.",
        )


def provenance(places: Places, names: Mapping[str, str]) -> dict[str, str]:
    """Places by field of the RunConfig.

    Args:
      places: Places by gin name.
      names: Field -> gin name.
    """
    found = {field: places.place(name) for field, name in names.items()}
    return {field: place for field, place in found.items() if place}
