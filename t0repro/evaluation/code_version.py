"""Digests of the code that results depend on: what other code computed is not taken over."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
from collections.abc import Iterable
from pathlib import Path

_PACKAGE = Path(__file__).parent.parent

# What a pair's score depends on beside the checkpoint and the pair's tokens.
_SCORING = (
    "model/layers.py",
    "model/t5.py",
    "evaluation/engine.py",
    "evaluation/grouping.py",
    "evaluation/journal.py",
    "evaluation/packing.py",
    "evaluation/pairs.py",
)
# What a generated text depends on.
_GENERATION = ("model/layers.py", "model/t5.py", "model/decoding.py", "evaluation/generation.py")
# The packages that turn rows into tokens, and tokens into metrics, beside t0repro.tasks.
_RENDERING_PACKAGES = ("promptsource", "jinja2", "seqio", "t5", "sentencepiece")


@functools.cache
def scoring_digest() -> str:
    """16 hexadecimal digits that stand for the model's and the engine's code."""
    return _digest(_PACKAGE / name for name in _SCORING)


@functools.cache
def generation_digest() -> str:
    """16 hexadecimal digits that stand for the code of the model and of decoding."""
    return _digest(_PACKAGE / name for name in _GENERATION)


@functools.cache
def rendering_digest() -> str:
    """16 hexadecimal digits that stand for what makes examples of rows: code and versions."""
    import t0repro.tasks

    # In a checkout the folder is not below the package
    folder = Path(t0repro.tasks.__path__[0])
    files = [*sorted(folder.glob("*.py")), _PACKAGE / "evaluation/rank_tasks.py"]
    versions = [f"{name} {_version(name)}" for name in _RENDERING_PACKAGES]
    return _digest(files, versions)


def _digest(files: Iterable[Path], texts: Iterable[str] = ()) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for path in files:
        digest.update(path.read_bytes())
    for text in texts:
        digest.update(text.encode())
    return digest.hexdigest()


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"
