"""Where gin files are: those of this package, of t5 and of Mesh TensorFlow, and a user's."""

from __future__ import annotations

import difflib
import importlib.util
import itertools
import logging
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath

from t0repro.config.gin import door
from t0repro.config.gin.door import shipped_files
from t0repro.errors import UserError

DEFAULTS = "defaults.gin"  # of Mesh TensorFlow


def mesh_folders(prefixes: Sequence[str]) -> list[str]:
    """Where Mesh TensorFlow's gin files are looked for, found without importing t5."""
    t5 = package_folder("t5")
    # In gin's order: t5's files, this project's, then --gin_location_prefix.
    files_of_t5 = _recorded_files() if t5 is None else t5 / "models" / "gin"
    return [str(files_of_t5), str(shipped_files()), *prefixes]


def default_bindings() -> str:
    """The gin file that Mesh TensorFlow reads before all others."""
    package = package_folder("mesh_tensorflow")
    folder = _recorded_files() if package is None else package / "transformer" / "gin"
    return str(folder / DEFAULTS)


def _recorded_files() -> Path:
    """Copies of the gin files of packages that are not installed."""
    return shipped_files() / "mtf"


def package_folder(name: str) -> Path | None:
    """An installed package's folder, found without importing it; None if it is not installed."""
    spec = importlib.util.find_spec(name)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def has_module(package: str, inside: str) -> bool:
    """Whether an installed package has a module, found without importing either."""
    folder = package_folder(package)
    if folder is None:
        return False
    path = folder.joinpath(*inside.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def is_shipped(place: str) -> bool:
    """Whether a file came with t5, Mesh TensorFlow or this package: its macros serve many runs."""
    shipped = ("t5/", "mesh_tensorflow/", "t0repro/", f"{_recorded_files()}/")
    return place.startswith(shipped) or "/t0repro/gin/" in place


def strip_folder(place: str) -> str:
    """A place without this package's folder, such as `t5x/configs/runs/pretrain.gin:17`."""
    return place.replace(f"{shipped_files()}/", "")


def open_file(name: str, folders: Sequence[str]) -> tuple[str, str] | None:
    """The path and text of a gin file, searched for as gin does; None if it is nowhere.

    Args:
      name: As a command line or an `include` names it.
      folders: Searched in turn, each by every reader of gin; "" is the working folder.

    Raises:
      OSError, UnicodeDecodeError: If it cannot be read, or is not text.
    """
    paths = [name] if os.path.isabs(name) else [os.path.join(at, name) for at in folders]
    for path in itertools.filterfalse(os.path.isdir, paths):
        for reader, exists in door.file_readers():
            # The reader for installed packages tells the root logger if it finds nothing. Not by
            # logging.disable, which goes through all loggers, a thousand with Google's clients.
            root = logging.getLogger()
            root.addFilter(_drop)
            try:
                is_there = exists(path)
            finally:
                root.removeFilter(_drop)
            if is_there:
                with reader(path) as file:
                    text = file.read()
                return path, text if isinstance(text, str) else text.decode()
    return None


def _drop(record: logging.LogRecord) -> bool:
    """A logger's filter that lets nothing pass."""
    del record
    return False


def no_gin_file(name: str, folders: Sequence[str], where: str) -> UserError:
    """The error for a gin file that is in none of the folders searched.

    Args:
      name: As a command line or an `include` names it.
      folders: As in `open_file`.
      where: What names it.
    """
    for folder in (Path(at, name) for at in folders):
        if folder.is_dir():
            inside = sorted(str(path) for path in folder.glob("*.gin"))
            fix = f"Name a file in it: {', '.join(inside[:3])}{', ...' if inside[3:] else '.'}"
            fix = fix if inside else "Name a gin file; no .gin file is directly in this folder."
            return UserError(f"{name} is a folder, not a gin file.", where=where, fix=fix)
    return UserError(
        f"There is no gin file {name}.",
        where=where,
        fix=f"Correct the name: {nearest_gin_files(name, folders)}; or name the file's folder with"
        f" --gin_location_prefix. Searched: {', '.join(dict.fromkeys(x or '.' for x in folders))}.",
    )


def nearest_gin_files(name: str, folders: Iterable[str]) -> str:
    """Up to three files whose names have the same words in another order, or similar ones.

    Args:
      name: the name of a file that does not exist.
      folders: where it was searched; candidates are the files in the folder where it would be, and
        all files that this package ships.
    """
    shipped = shipped_files()
    beside = str(PurePosixPath(name).parent)
    files = {
        path.relative_to(folder).as_posix()
        for folder in map(Path, folders)
        for path in sorted((folder / beside).glob("*.gin"))
        if path.is_relative_to(folder)
    }
    files |= {path.relative_to(shipped).as_posix() for path in shipped.rglob("*.gin")}
    by_words: dict[str, list[str]] = {}
    # Many folders have a small.gin: the whole path tells which is meant.
    for file in difflib.get_close_matches(name, sorted(files), n=len(files), cutoff=0.0):
        by_words.setdefault(_words_of(file), []).append(file)
    near = difflib.get_close_matches(_words_of(name), by_words, n=3, cutoff=0.5)
    nearest = [file for words in near for file in by_words[words]][:3]
    return f"nearest: {', '.join(nearest)}" if nearest else "no file has a similar name"


def _words_of(name: str) -> str:
    """The words of a file's name, in alphabetical order."""
    return " ".join(sorted(re.split(r"[\W_]+", PurePosixPath(name).stem)))
