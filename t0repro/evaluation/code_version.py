"""Digests of the code and the packages that determine results: of scoring, decoding, rendering."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from t0repro.compat import installed_version

_ROOT = "t0repro"
_KERNEL = ".cc"
_NAMED_KERNEL = re.compile(r'"(\w+\.cc)"')


# A pair's score: from tokens to log-likelihood, and how the journal stores it.
_SCORING = (
    "t0repro.evaluation.engine",
    "t0repro.evaluation.pairs",
)


# A decoded text: from tokens to text.
_GENERATION = ("t0repro.evaluation.generation",)


# An example: from rows to tokens. All of t0repro.tasks is included, because only the command's run
# shows which module registers a task.
_RENDERING = ("t0repro.evaluation.reading",)


# Packages whose versions decide what the modules compute.
_COMPUTING_PACKAGES = ("jax", "jaxlib", "flax", "numpy")


_RENDERING_PACKAGES = ("promptsource", "jinja2", "seqio", "t5", "sentencepiece")


ReadSource = Callable[[str], str | None]


@functools.cache
def scoring_digest() -> str:
    """Digest, 16 hex digits, of the code of the model and the scoring engine."""
    return code_digest(_SCORING, _COMPUTING_PACKAGES)


@functools.cache
def generation_digest() -> str:
    """Digest, 16 hex digits, of the code of the model and of decoding."""
    return code_digest(_GENERATION, _COMPUTING_PACKAGES)


@functools.cache
def rendering_digest() -> str:
    """Digest, 16 hex digits, of the code that turns rows into examples."""
    spec = importlib.util.find_spec("t0repro.tasks")
    assert spec is not None and spec.origin is not None
    tasks = Path(spec.origin).parent
    modules = [path.relative_to(tasks).with_suffix("") for path in tasks.rglob("*.py")]
    names = [".".join(("t0repro.tasks", *module.parts)) for module in modules]
    return code_digest([*_RENDERING, *names], _RENDERING_PACKAGES)


def code_digest(
    modules: Iterable[str], packages: Iterable[str], read: ReadSource | None = None
) -> str:
    """Digest, 16 hex digits, of modules, all their imports from t0repro, and package versions.

    Args:
      modules: full names of modules of t0repro.
      packages: distribution names; a missing one has the version "none".
      read: returns a module's source by its full name, or None if there is no such module;
        defaults to reading the installed source.
    """
    digest = hashlib.blake2b(digest_size=8)
    for name, source in sorted(collect_modules(modules, read or read_source).items()):
        digest.update(f"{name} {hashlib.blake2b(source.encode()).hexdigest()}\n".encode())
    for name in packages:
        digest.update(f"{name} {installed_version(name) or 'none'}\n".encode())
    return digest.hexdigest()


def collect_modules(modules: Iterable[str], read: ReadSource) -> dict[str, str]:
    """Full name -> source, for the modules and every module of t0repro that they import.

    Also for the kernels that they name: "t0repro.model.attention.cc" is a file of t0repro.model.
    """
    sources: dict[str, str] = {}
    waiting = list(modules)
    while waiting:
        name = waiting.pop()
        source = None if name in sources else read(name)
        if source is not None:
            sources[name] = source
            if name.endswith(_KERNEL):
                continue
            waiting += _imports(source)
            waiting += [
                f"{name.rpartition('.')[0]}.{file}" for file in _NAMED_KERNEL.findall(source)
            ]
            # Importing a module also runs its package's __init__.
            waiting += [name.rpartition(".")[0]] if name != _ROOT else []
    return sources


def _imports(source: str) -> Iterator[str]:
    """Yields names that a source imports from t0repro: modules, and names defined in modules."""
    for node in _walk_executed_nodes(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            # `from package import module` and `from module import name` look alike.
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == _ROOT)


def _walk_executed_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes except those under `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")):
            yield node
            yield from _walk_executed_nodes(node)


@functools.cache
def read_source(name: str) -> str | None:
    """Source of an installed module, without importing it; None if there is no such module."""
    parts = name.split(".")
    # Locate the folder by the first two parts: t0repro.tasks may lie outside t0repro's own.
    spec = importlib.util.find_spec(".".join(parts[:2]))
    if spec is None or spec.origin is None:
        return None
    if not spec.submodule_search_locations:
        return Path(spec.origin).read_text(encoding="utf-8") if len(parts) == 2 else None
    place = Path(spec.origin).parent.joinpath(*parts[2:])
    paths = [place / "__init__.py", place.with_suffix(".py")]
    if name.endswith(_KERNEL):
        paths = [place.parent.with_suffix(_KERNEL)]
    for path in paths:
        if path.is_file():
            return path.read_text(encoding="utf-8")
    return None
