"""The gin files that a name of none may have meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath


def nearest_gin_files(name: str, folders: Iterable[str]) -> str:
    """Up to three files with the same words in another order, or with similar ones.

    Args:
      name: the name of a file that does not exist.
      folders: where it was looked for; the files beside where it would be are compared with it,
        and all that this package ships.
    """
    import t0repro.gin

    shipped = Path(str(t0repro.gin.__file__)).parent
    beside = str(PurePosixPath(name).parent)
    found = {
        path.relative_to(folder).as_posix(): path
        for folder in map(Path, folders)
        for path in sorted((folder / beside).glob("*.gin"))
        if path.is_relative_to(folder)
    }
    found |= {path.relative_to(shipped).as_posix(): path for path in shipped.rglob("*.gin")}
    by_words: dict[str, list[str]] = {}
    for file in found:
        by_words.setdefault(_words(file), []).append(file)
    near = difflib.get_close_matches(_words(name), by_words, n=3, cutoff=0.5)
    files = [file for words in near for file in by_words[words]][:3]
    return f"nearest: {', '.join(files)}" if files else "no file has a similar name"


def _words(name: str) -> str:
    """The words of a file's name, in the order of the alphabet."""
    return " ".join(sorted(re.split(r"[\W_]+", PurePosixPath(name).stem)))
