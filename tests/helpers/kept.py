"""What takes long to make and depends on files alone: made once, kept until they change."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "kept_for_tests"
DAYS = 14
# All of this project that Mesh TensorFlow's side of a comparison imports.
COMPAT = ROOT / "t0repro" / "compat.py"


def fill_once(path: Path, fill: Callable[[Path], object]) -> Path:
    """The folder, which the first process that asks for it makes and fills."""
    path.parent.mkdir(parents=True, exist_ok=True)
    filled = path.with_name(f"{path.name}.filled")
    with FileLock(path.with_name(f"{path.name}.lock")):
        if not filled.exists():
            shutil.rmtree(path, ignore_errors=True)  # of a process that failed
            path.mkdir()
            fill(path)
            filled.touch()
    for used in (path, filled):  # see remove_old
        os.utime(used)
    return path


def digest(*sources: Path | str) -> str:
    """Of texts, of files, of all modules below folders, and of the locks."""
    found = hashlib.sha256(repr([x for x in sources if isinstance(x, str)]).encode())
    given = [x for x in sources if isinstance(x, Path)]
    for path in [*given, *(ROOT / "requirements").glob("*.lock")]:
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            found.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes())
    return found.hexdigest()[:16]


def remove_old() -> None:
    """Removes what was not used, or is a program that was compiled, more than DAYS days ago."""
    for path in [*FOLDER.glob("*"), *FOLDER.glob("programs/*")]:
        with contextlib.suppress(OSError):  # another run has removed it
            if path.name != "programs" and path.stat().st_mtime < time.time() - DAYS * 86_400:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
