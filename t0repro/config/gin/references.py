"""Checks that every reference in gin files has a target, and that every macro set is read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from t0repro.config.gin import door
from t0repro.config.gin.door import MACRO, Bindings
from t0repro.config.gin.errors import ANYWHERE, nearest_parameter
from t0repro.config.gin.folders import is_shipped
from t0repro.errors import UserError, similar_names

# Macros that T0's commands set -> the binding to use if the model's gin file ignores the macro.
_BIND_INSTEAD = {
    "tokens_per_batch": "run.batch_size = ('tokens_per_batch', N)",
    "model_info": "tpu_estimator_model_fn.model_info_file = 'FILE'",
}


def check_references(bindings: Bindings) -> list[str]:
    """Checks that every reference has a target, and that every macro set is read.

    In Mesh TensorFlow's files, whose macro for the mixture t5 reads by name.

    Args:
      bindings: Bindings of the parsed configuration, before gin finalizes it.

    Returns:
      Warnings: macros in the user's files that nothing reads, and macros on the command line whose
      readers were overridden.

    Raises:
      UserError: For a reference without a target, and for a macro on the command line that nothing
        reads, which is usually misspelled; with the nearest known names.
    """
    macros, read = door.bound_macros(), {"MIXTURE_NAME"}
    # Unread macros are found by exclusion, so look at every binding.
    for (scope, selector), arguments in door.bound().items():
        for argument, value in arguments.items():
            place = bindings.places.get((scope, selector, argument)) or ANYWHERE
            for part in door.flatten_value(value):
                read |= _check_reference(part, macros, place)
    door.forget_required(read)
    return check_macros_are_read(
        bindings,
        read,
        overrides="--gin_param",
        is_shipped=is_shipped,
        # A misspelled macro may have been intended as an argument of `run`.
        known=[*sorted(read), *(f"run.{each}" for each in door.argument_names("utils.run"))],
        bind_instead=_BIND_INSTEAD,
    )


def check_macros_are_read(
    bindings: Bindings,
    read: Collection[str],
    *,
    overrides: str,
    is_shipped: Callable[[str], bool],
    known: Collection[str],
    bind_instead: Mapping[str, str] | None = None,
) -> list[str]:
    """Refuses macros on the command line that nothing reads; those in files become warnings.

    Args:
      bindings: the configuration's bindings, with their places.
      read: the macros that are read.
      overrides: prefix of the places of command-line overrides.
      is_shipped: whether a place is in a package's own file, which sets macros for many runs.
      known: names that an unread macro may be a misspelling of.
      bind_instead: unread macro -> the binding to use.

    Returns:
      Warnings: macros in the user's files, and macros on the command line whose readers were
      overridden.

    Raises:
      UserError: naming every refused macro, its place and what to do.
    """

    def instead(name: str) -> str:
        if bind_instead and name in bind_instead:
            return f"bind {bind_instead[name]}"
        near = ", ".join(map(repr, similar_names(name, known, 3)))
        return f"nearest: {near}" if near else "nothing that is read has a similar name"

    warnings, refused = [], []
    for (name, selector, _), place in bindings.places.items():
        is_override = place.startswith(overrides)
        # Shipped files set macros for many runs, and no single run reads all of them.
        if selector != MACRO or name in read or (is_shipped(place) and not is_override):
            continue
        if name in bindings.macros:
            # Wrapper scripts set macros and also override their readers; that is not a mistake.
            if is_override:
                warnings.append(f"{place}: what reads the macro {name} is overridden")
        elif is_override:
            refused.append((name, place))
        else:
            warnings.append(f"{place}: nothing reads the macro {name}; {instead(name)}")
    if refused:
        names = ", ".join(name for name, _ in refused)
        raise UserError(
            f"Nothing reads {'the macro' if len(refused) == 1 else 'the macros'} {names}.",
            where="; ".join(place for _, place in refused),
            fix=" ".join(f"Correct or remove {name}; {instead(name)}." for name, _ in refused),
        )
    return warnings


def _check_reference(value: Any, macros: set[str], place: str) -> set[str]:
    """The macro that a value refers to, if any; raises UserError for a missing target."""
    # With skip_unknown, gin keeps such a reference and fails only when something reads it.
    if door.is_unknown_reference(value):
        raise UserError(
            f"No configurable matching '@{value.selector}'.",
            where=place,
            fix=nearest_parameter(f"No configurable matching '{value.selector}'"),
        )
    name = door.macro_name(value)
    if name is None:
        return set()
    if name not in macros or door.is_required(name):
        near = ", ".join(map(repr, similar_names(name, macros, 3)))
        raise UserError(
            f"The macro {name} has no value.",
            where=place,
            fix=f'Add --gin_param="{name} = ..."'
            + (f", or correct the name; nearest: {near}." if near else "."),
        )
    return {name}
