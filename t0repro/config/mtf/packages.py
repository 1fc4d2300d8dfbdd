"""Mesh TensorFlow's and t5's modules: the real ones, or stand-ins that import no TensorFlow."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from t0repro.config import gin_door
from t0repro.config.gin_imports import has_module

_PACKAGES = ("tensorflow", "mesh_tensorflow", "t5", "seqio")


# Not an Exception, since gin and `configuration_errors` would turn that into a user's error.
class NeedsPackages(BaseException):
    """A configuration asks for something that only the real packages can do."""


_stand_ins: Mapping[str, Any] | None = None


def module(name: str) -> Any:
    """A module of Mesh TensorFlow or t5; within `described`, its stand-in."""
    return importlib.import_module(name) if _stand_ins is None else _stand_ins[name]


def is_described() -> bool:
    """Whether stand-ins take the place of the packages."""
    return _stand_ins is not None


def can_be_described(module_imports: Sequence[str]) -> bool:
    """Whether stand-ins may be tried: nothing has registered the real configurables with gin.

    Args:
      module_imports: Modules of tasks; a user's own may import and register anything.
    """
    from t0repro.tasks.registration import needs_seqio

    return not any(name in sys.modules for name in _PACKAGES) and not needs_seqio(module_imports)


@contextlib.contextmanager
def described() -> Iterator[None]:
    """Stand-ins for the packages within the block; afterwards gin is as it was before.

    Raises:
      NeedsPackages: From the block, if the stand-ins do not suffice.
    """
    global _stand_ins
    from t0repro.config.mtf import stand_ins

    with (
        gin_door.left_empty(lambda name: name == stand_ins.__name__),
        gin_door.search_path_restored(),
        gin_door.importing_with(_import),
    ):
        _stand_ins = stand_ins.registered()
        try:
            yield
        finally:
            _stand_ins = None


def _import(name: str, *args: Any, **kwargs: Any) -> Any:
    """Imports what a gin file names, except what stand-ins describe."""
    from t0repro.config.mtf.stand_ins import recorded

    package, _, inside = name.partition(".")
    if name in recorded()["modules"]:
        return None
    # Older gin files import modules that the packages no longer have: fail as they would.
    if package in _PACKAGES and not has_module(package, inside):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    if package != "t0repro":
        raise NeedsPackages(f"a gin file imports {name}")
    return importlib.__import__(name, *args, **kwargs)
