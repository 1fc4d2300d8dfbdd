"""The modules that a T5X gin file imports, visible to gin only.

During parsing, gin's import function is replaced. Names of T5X, SeqIO and `__main__` resolve to
functions that record their calls. Any other module is imported when gin first looks up a name in
it. No module called `t5x` is ever placed where Python finds it, and an installed T5X is not read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from t0repro.config.gin import door
from t0repro.config.t5x.arguments import MODULES
from t0repro.config.t5x.calls import Call, function_for, function_of_class
from t0repro.errors import UserError, nearest_names


class _Served:
    """A module as gin sees it: functions by name, and nested modules."""

    def __init__(self, name: str, contents: Mapping[str, Any]):
        self._name = name
        self.__dict__.update(contents)

    def __getattr__(self, name: str) -> Any:
        known = [key for key in self.__dict__ if not key.startswith("_")]
        raise UserError(
            f"{self._name}.{name} is not supported in a T5X gin file.",
            fix=f"Known: {nearest_names(name, known, count=3)} (of {', '.join(known)}).",
        )


class _Optax:
    """optax and T5X's wrappers of it, as gin sees them: calls are recorded, not made."""

    def __init__(self, contents: Mapping[str, Any]):
        self.__dict__.update(contents)

    def __getattr__(self, name: str) -> Any:
        return _make_optax_recorder(name)


# gin refuses another object under a name that it has registered.
@functools.cache
def _make_optax_recorder(name: str) -> Any:
    """A function with the signature of optax's that records its arguments without the defaults."""
    # Here, because it imports JAX, and errors in files that need no optax should not wait for it.
    import optax

    function = getattr(optax, name, None)
    if not callable(function):
        raise UserError(
            f"optax has no {name}.", fix=f"Its names: {nearest_names(name, dir(optax), count=3)}."
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
        return function_of_class(getattr(importlib.import_module(self._name), name))


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
        if fromlist:
            return _module(name)
        if root != "optax" and not any(
            known == name or known.startswith(f"{name}.") for known in MODULES
        ):
            imports.absent.append(name)
        return _module(root)

    with door.replace_import(import_for_gin):
        yield imports


def _module(name: str) -> _Served | _Optax:
    contents: dict[str, Any] = {
        key: function_for(configurable) for key, configurable in MODULES.get(name, {}).items()
    }
    # Any function of optax can be called, so look names up rather than list them.
    if name in ("optax", "t5x.optimizers"):
        return _Optax(contents)
    inside = {
        key[len(name) + 1 :].partition(".")[0] for key in MODULES if key.startswith(f"{name}.")
    }
    if not contents and not inside:
        parent = name.rpartition(".")[0]
        raise UserError(
            f"t0repro does not support the module {name}.",
            fix=f"Known: {nearest_names(name, MODULES, count=3)}"
            + (f" (of {parent})." if parent else "."),
        )
    return _Served(name, contents | {child: _module(f"{name}.{child}") for child in inside})
