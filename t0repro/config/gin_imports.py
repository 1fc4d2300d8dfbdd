"""The modules that gin files import: which are allowed, and a listing without importing any.

An `import` line of a gin file runs the module's code. `--gin_import_allowlist` names the modules
that gin files may import in addition to those that every run imports. Without it they may import
any, as in t5 and T5X.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from t0repro.config import gin_door
from t0repro.config.gin_errors import configuration_errors, nearest_gin_files
from t0repro.errors import UserError

_OPTION = "--gin_import_allowlist"
# Packages that every run imports, or that are only described (t5x, seqio, optax).
_OWN = ("__gin__", "__main__", "t0repro", "mesh_tensorflow", "t5", "t5x", "seqio", "optax")

DEFAULTS = "defaults.gin"  # of Mesh TensorFlow

Allowlist = Sequence[str] | None


@dataclasses.dataclass(frozen=True)
class GinImport:
    """An `import` line of a gin file or an override, or a binding of `DatasetConfig.module`.

    Attributes:
      module: The module, as the line names it.
      place: The file and line.
      allowed: Whether the allowlist permits it.
    """

    module: str
    place: str
    allowed: bool


def is_allowed(module: str, allowlist: Allowlist) -> bool:
    """Whether gin files may import a module: the allowlist has it or a package that contains it."""
    if allowlist is None:
        return True
    # With the dot, so that `tasks` does not allow `tasks_of_a_stranger` too.
    return any(module == name or module.startswith(f"{name}.") for name in (*_OWN, *allowlist))


def restrict_imports(allowlist: Allowlist) -> None:
    """Makes gin refuse other imports in everything that this process parses from now on.

    Args:
      allowlist: Names of modules and packages; None lifts the restriction.
    """
    gin_door.check_imports(
        lambda module, location: check_allowed(module, allowlist, _place(location))
    )


def check_allowed(module: str, allowlist: Allowlist, place: str) -> None:
    """Refuses a module that a gin file names unless the allowlist permits it.

    Raises:
      UserError: with the place that names it.
    """
    if not is_allowed(module, allowlist):
        raise UserError(
            f"A gin file imports {module!r}, which {_OPTION} does not allow.",
            where=place,
            fix=f"Read that module, which the import would run; then add {_OPTION}={module}.",
        )


def list_imports(
    files: Sequence[str], overrides: Sequence[str], folders: Sequence[str], allowlist: Allowlist
) -> list[GinImport]:
    """The imports of gin files, their includes and overrides, in order; nothing is imported.

    The modules that T5X's `DatasetConfig.module` names, mostly through a macro, come last.

    Args:
      files: The gin files.
      overrides: Statements of the command line.
      folders: Where to look for files and includes; the first match wins.
      allowlist: See `restrict_imports`.

    Raises:
      UserError: If a file is missing or is not a gin file, or files include each other.
    """
    gin_door.extend_readers()
    from gin.config_parser import BindingStatement, ImportStatement

    with configuration_errors():
        read = [line for file in files for line in _statements_of_file(file, ["", *folders], ())]
        read += _statements("\n".join(overrides), ["", *folders], ())
    named = [(line.module, line.location) for line in read if isinstance(line, ImportStatement)]
    named += _dataset_modules([line for line in read if isinstance(line, BindingStatement)])
    return [
        GinImport(module, _place(location), is_allowed(module, allowlist))
        for module, location in dict.fromkeys(named)
    ]


def _dataset_modules(bindings: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Yields the modules that `DatasetConfig.module` is bound to, with the line that names each."""
    # If a name is bound several times, gin takes the last.
    last = {(line.scope, line.selector, line.arg_name): line for line in bindings}
    # A macro's binding has no argument: its name is the selector.
    macros = {line.selector: line for line in bindings if not line.arg_name}
    for line in last.values():
        if line.arg_name == "module" and line.selector.endswith("DatasetConfig"):
            if isinstance(line.value, Macro):
                line = macros.get(line.value.name, line)
            if isinstance(line.value, str):
                yield line.value, line.location


def mesh_folders(prefixes: Sequence[str]) -> list[str]:
    """Where Mesh TensorFlow's gin files are looked for, found without importing t5."""
    t5 = package_folder("t5")
    # In gin's order: t5's files, this project's, then --gin_location_prefix.
    theirs = _recorded_files() if t5 is None else t5 / "models" / "gin"
    return [str(theirs), str(_own_files()), *prefixes]


def default_bindings() -> str:
    """The gin file that Mesh TensorFlow reads before all others."""
    package = package_folder("mesh_tensorflow")
    folder = _recorded_files() if package is None else package / "transformer" / "gin"
    return str(folder / DEFAULTS)


def has_module(package: str, inside: str) -> bool:
    """Whether an installed package has a module, found without importing either."""
    folder = package_folder(package)
    if folder is None:
        return False
    path = folder.joinpath(*inside.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def package_folder(name: str) -> Path | None:
    """An installed package's folder, found without importing it; None if it is not installed."""
    spec = importlib.util.find_spec(name)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def _own_files() -> Path:
    import t0repro.gin

    return Path(str(t0repro.gin.__file__)).parent


def _recorded_files() -> Path:
    """What stands in for the gin files of packages that are not installed."""
    return _own_files() / "mtf"


def _statements_of_file(
    file: str, folders: Sequence[str], within: tuple[str, ...]
) -> Iterator[Any]:
    """Yields a file's imports and bindings, includes read; `within` are the including files."""
    # gin would recurse until Python stops it.
    if file in within:
        raise UserError(
            "Gin files include each other without end.",
            where=file,
            fix="Remove the `include` that leads back to the file itself.",
        )
    # Search as gin does: each folder in turn, and in each folder every reader.
    for path in [file] if os.path.isabs(file) else [os.path.join(at, file) for at in folders]:
        for reader, exists in gin_door.file_readers():
            # The reader for installed packages logs an error if it finds nothing.
            logging.disable(logging.ERROR)
            try:
                found = exists(path)
            finally:
                logging.disable(logging.NOTSET)
            if found:
                with reader(path) as text:
                    yield from _statements(text, folders, (*within, file))
                return
    raise UserError(
        f"There is no gin file {file}.",
        where=within[-1] if within else "--gin_file",
        fix=f"Correct the name: {nearest_gin_files(file, folders)}."
        f" Searched: {', '.join(folder or '.' for folder in folders)}.",
    )


def _statements(text: Any, folders: Sequence[str], within: tuple[str, ...]) -> Iterator[Any]:
    """Yields the imports and bindings of an open file, or of overrides in one string."""
    from gin import config_parser

    for statement in config_parser.ConfigParser(text, Unresolved()):
        if isinstance(statement, config_parser.IncludeStatement):
            yield from _statements_of_file(statement.filename, folders, within)
        else:
            yield statement


@dataclasses.dataclass(frozen=True)
class Macro:
    """A reference to a macro, as in `module = %MIXTURE_OR_TASK_MODULE`."""

    name: str


class Unresolved:
    """A delegate of gin's parser that resolves nothing: of a reference it keeps a macro's name."""

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> Macro | None:
        """Called by gin's parser for @name."""
        # `%name` is gin's shorthand for `@name/gin.macro()`; files have either.
        name = scoped_configurable_name.removesuffix("/macro").removesuffix("/gin.macro")
        return Macro(name) if evaluate and name != scoped_configurable_name else None

    def macro(self, macro_name: str) -> Macro:
        """Called by gin's parser for %name."""
        return Macro(macro_name)


def _place(location: Any) -> str:
    if location.filename is None:
        return f"the command line: {location.line_content.strip()!r}"
    return f"{location.filename}:{location.line_num}"
