"""The modules that gin files import: which are allowed, and a listing without importing any.

An `import` line of a gin file runs the module's code. `--gin_import_allowlist` names the modules
that gin files may import in addition to those that every run imports. Without it they may import
any, as in t5 and T5X.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from t0repro.config.gin import door
from t0repro.config.gin.errors import configuration_errors
from t0repro.config.gin.folders import no_gin_file, open_file
from t0repro.config.gin.statements import (
    ImportStatement,
    last_bindings,
    place_of,
    read_statements,
    resolve_macros,
)
from t0repro.errors import UserError

_OPTION = "--gin_import_allowlist"
# Packages that every run imports, or that are only described (t5x, seqio, optax).
_OWN = ("__gin__", "__main__", "t0repro", "mesh_tensorflow", "t5", "t5x", "seqio", "optax")

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


def restrict_imports(allowlist: Allowlist, *, t5x: bool = False) -> None:
    """Makes gin refuse other imports in everything that this process parses from now on.

    Args:
      allowlist: Names of modules and packages; None lifts the restriction.
      t5x: Whether the files are T5X's, which import nothing of Mesh TensorFlow.
    """

    def check(statement: Any) -> None:
        place = place_of(statement)
        if t5x and statement.module.startswith(_MESH):
            raise UserError(
                "This gin file is Mesh TensorFlow's, and this command reads T5X's.",
                where=place,
                fix="Run it with `t5_mesh_transformer --backend=jax`; with `t0repro explain`, leave"
                " --run_mode out.",
            )
        check_allowed(statement.module, allowlist, place)

    door.check_imports(check)


_MESH = ("mesh_tensorflow", "t5.models.mesh_transformer")


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
    door.extend_readers()
    search = ["", *folders]

    def open_include(name: str, within: Sequence[str]) -> tuple[str, str]:
        file = open_file(name, search)
        if file is None:
            raise no_gin_file(name, search, within[-1] if within else "--gin_file")
        # gin would recurse until Python stops it.
        if file[0] in within:
            raise UserError(
                "Gin files include each other without end.",
                where=file[0],
                fix="Remove the `include` that leads back to the file itself.",
            )
        return file

    statements: list[Any] = []
    with configuration_errors():
        for name in files:
            path, text = open_include(name, ())
            statements += read_statements(text, path, open_include)
        statements += read_statements("\n".join(overrides), None, open_include)
    named = [(each.module, place_of(each)) for each in statements
             if isinstance(each, ImportStatement)]  # fmt: skip
    named += _dataset_modules(statements)
    return [
        GinImport(module, place, is_allowed(module, allowlist))
        for module, place in dict.fromkeys(named)
    ]


def _dataset_modules(statements: Iterable[Any]) -> Iterator[tuple[str, str]]:
    """Yields the modules that `DatasetConfig.module` is bound to, with the line that names each."""
    bindings = last_bindings(statements)
    for binding in bindings.values():
        if binding.argument == "module" and binding.configurable.endswith("DatasetConfig"):
            named = resolve_macros(binding, bindings)
            if isinstance(named.value, str):
                yield named.value, named.place
