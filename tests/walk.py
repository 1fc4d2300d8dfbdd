"""Follows a run's configuration through the code, as somebody does who reads it for the first time.

From a function on, every call is followed, in the order in which it is written, that hands on the
configuration or what was made of it, to a function or class of this project that was not read yet.
Not followed are methods, since the text does not say whose they are; what a message is made of;
`errors`, `progress` and `words`, which every reader knows; and how a checkpoint is read or a file
written to a disk or bucket, which are journeys of their own. Counted are

    stops     moves into a function of another file
    files     different files among the stops
    climbs    stops in a package above the one before, by the contract's order in pyproject.toml

    python tests/walk.py t0repro.runs.start start_training config
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
KNOWN = {"t0repro.errors", "t0repro.progress", "t0repro.words"}
# Entered, and left at once.
DISK_OR_BUCKET = ("t0repro.files", "t0repro.buckets", "t0repro.working_copies")
ANOTHER_JOURNEY = ("t0repro.converters.", *DISK_OR_BUCKET)
MAPPED = {"tasks", "converters", "gin"}  # folders at the top of the repository; see setup.py
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclasses.dataclass
class Walk:
    """The files in which the reader stops, in order."""

    stops: list[str] = dataclasses.field(default_factory=list)

    @property
    def files(self) -> set[str]:
        return set(self.stops)

    @property
    def climbs(self) -> int:
        pairs = zip(self.stops, self.stops[1:], strict=False)
        return sum(floor(there) > floor(here) for here, there in pairs)


@functools.cache
def floors() -> dict[str, int]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (contract,) = [each for each in settings["contracts"] if each["id"] == "layers"]
    layers = reversed(contract["layers"])
    return {name: at for at, layer in enumerate(layers) for name in layer.split(" | ")}


def floor(module: str) -> int:
    return floors()[module.split(".")[1]]


def path_of(module: str) -> Path | None:
    first, *rest = module.split(".")[1:] or [""]
    folder = ROOT / first if first in MAPPED else ROOT / "t0repro" / first
    path = folder.joinpath(*rest).with_suffix(".py")
    return path if path.is_file() else None


@functools.cache
def definitions(module: str) -> tuple[dict[str, ast.AST], dict[str, str]]:
    """A module's functions and classes, and what its imports call: name -> dotted name."""
    path = path_of(module)
    tree = ast.parse(path.read_text() if path else "")
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    defined = {node.name: node for node in tree.body if isinstance(node, kinds)}
    imported = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("t0repro")
        for alias in node.names
    }
    return defined, imported


def resolved(module: str, callee: ast.expr) -> tuple[str, ast.AST] | None:
    """The module and definition that a call's function names; None if it is not this project's."""
    defined, imported = definitions(module)
    if isinstance(callee, ast.Name) and callee.id in defined:
        return module, defined[callee.id]
    if isinstance(callee, ast.Name) and callee.id in imported:
        home, _, name = imported[callee.id].rpartition(".")
    elif isinstance(callee, ast.Attribute) and isinstance(callee.value, ast.Name):
        home, name = imported.get(callee.value.id, ""), callee.attr
    else:
        return None
    found, onward = definitions(home) if home and path_of(home) else ({}, {})
    if name in found:
        return home, found[name]
    # A name that a module hands on from another.
    return resolved(home, ast.Name(name)) if name in onward else None


def evaluated(node: ast.AST) -> Iterator[ast.AST]:
    """The parts of a statement or expression, arguments before the call that takes them."""
    if not isinstance(node, ast.Raise | ast.JoinedStr):
        for child in ast.iter_child_nodes(node):
            yield from evaluated(child)
        yield node


def assigned(node: Any) -> Iterator[tuple[ast.expr, ast.expr]]:
    """What a statement assigns: (target, value), each of several by itself."""
    value = node.iter if isinstance(node, ast.For) else node.value
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            yield from zip(target.elts, value.elts, strict=True)
        elif value is not None:
            yield target, value


class Reader:
    """Walks through functions; each is read once, but entered as often as it is called."""

    def __init__(self) -> None:
        self.walk, self._read = Walk(), set[tuple[str, str]]()

    def enter(self, module: str, function: Function, known: set[str]) -> None:
        if (module, function.name) in self._read or module in KNOWN:
            return
        if self.walk.stops[-1:] != [module]:
            self.walk.stops.append(module)
        self._read.add((module, function.name))
        if module.startswith(ANOTHER_JOURNEY):
            return
        known = set(known)
        for statement in function.body:
            for node in evaluated(statement):
                if isinstance(node, ast.Call):
                    self._call(module, node, known)
                elif isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr | ast.For):
                    for target, value in assigned(node):
                        if carries(module, value, known):
                            known |= names(target)

    def _call(self, module: str, call: ast.Call, known: set[str]) -> None:
        given = [*call.args, *[keyword.value for keyword in call.keywords]]
        found = resolved(module, call.func)
        if found is None or not any(carries(module, value, known) for value in given):
            return
        home, node = found
        skipped = 0
        if isinstance(node, ast.ClassDef):
            made = [x for x in node.body if isinstance(x, Function) and x.name == "__init__"]
            if not made:
                return
            # A class's own name, since every class has an __init__.
            node, skipped = rename(made[0], f"{node.name}.__init__"), 1
        assert isinstance(node, Function)
        parameters = [each.arg for each in (*node.args.posonlyargs, *node.args.args)][skipped:]
        taken = {
            name
            for name, value in zip(parameters, call.args, strict=False)
            if carries(module, value, known)
        }
        taken |= {k.arg for k in call.keywords if k.arg and carries(module, k.value, known)}
        self.enter(home, node, taken)


def rename(function: Function, name: str) -> Function:
    copy = ast.FunctionDef(**{field: getattr(function, field, None) for field in function._fields})
    copy.name = name
    return copy


def carries(module: str, value: ast.expr, known: set[str]) -> bool:
    """Whether an expression is the configuration, a part of it, or what this project made of it."""
    if isinstance(value, ast.Name):
        return value.id in known
    if isinstance(value, ast.Attribute | ast.Subscript | ast.Starred | ast.NamedExpr):
        return carries(module, value.value, known)
    if isinstance(value, ast.Call):
        # What a library makes of it, such as a path, is not followed; a changed copy is.
        ours = resolved(module, value.func) or ast.unparse(value.func) == "dataclasses.replace"
        given = [*value.args, *[keyword.value for keyword in value.keywords]]
        return bool(ours) and any(carries(module, each, known) for each in given)
    kinds = ast.Tuple | ast.List | ast.IfExp | ast.BoolOp | ast.BinOp
    if not isinstance(value, kinds):
        return False
    return any(
        carries(module, each, known)
        for each in ast.iter_child_nodes(value)
        if isinstance(each, ast.expr)
    )


def names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def walk(module: str, function: str, parameter: str) -> Walk:
    """The walk from a function on, following one of its parameters."""
    node = definitions(module)[0][function]
    assert isinstance(node, Function)
    reader = Reader()
    reader.enter(module, node, {parameter})
    return reader.walk


if __name__ == "__main__":
    found = walk(*sys.argv[1:])
    print("\n".join(found.stops))
    print(f"{len(found.stops)} stops, {len(found.files)} files, {found.climbs} climbs")
