"""Macros of gin files: one that is set but that nothing reads is usually misspelt."""

from __future__ import annotations

from collections.abc import Callable, Collection

from t0repro.config.provenance import Bindings
from t0repro.errors import UserError

MACRO = "gin.macro"
"""The configurable under which gin keeps macros; the macro's name is its scope."""


def bound_macros() -> set[str]:
    """The names of all macros that gin's configuration binds."""
    import gin.config

    return {scope for scope, selector in gin.config._CONFIG if selector == MACRO}


def check_macros_are_read(
    bindings: Bindings,
    read: Collection[str],
    *,
    overrides: str,
    is_shipped: Callable[[str], bool],
    instead: Callable[[str], str],
) -> list[str]:
    """Refuses macros on the command line that nothing reads; those in files become warnings.

    Args:
      bindings: the configuration's bindings, with their places.
      read: the macros that are read.
      overrides: how the places of command-line overrides begin.
      is_shipped: whether a place is in a file of a package, which sets macros for many runs.
      instead: what to do about an unread macro, in words, such as the nearest names.

    Returns:
      Warnings: macros in the user's files, and macros on the command line whose readers were
      overridden.

    Raises:
      UserError: naming every macro that is refused, its place and what to do.
    """
    warnings, refused = [], []
    for (name, selector, _), place in bindings.places.items():
        is_override = place.startswith(overrides)
        # Shipped files set macros for many runs, and no run reads all of them.
        if selector != MACRO or name in read or (is_shipped(place) and not is_override):
            continue
        if name in bindings.macros:
            # Wrapper scripts set macros next to overrides of what reads them; that is no mistake.
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
            fix=" ".join(f"{name}: {instead(name)}." for name, _ in refused),
        )
    return warnings
