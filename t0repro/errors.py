"""Errors written for users: what is wrong, where, and what to do next."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import sys
import traceback
from collections.abc import Iterable
from types import FrameType
from typing import Any, get_args

from t0repro.words import remove_passwords, rename_for_reader


class UserError(Exception):
    """A mistake that the user can fix; commands print it without a traceback and exit with 2.

    Args:
      what: What is wrong, in one sentence.
      where: The file, key or line concerned.
      fix: What to do next.
    """

    def __init__(self, what: str, *, where: str | None = None, fix: str | None = None):
        if pointer := _lfs_pointer(where or ""):
            # Whatever is wrong with such a file, this is why.
            what = "The file is a Git LFS pointer; the content that it stands for is missing."
            where, fix = pointer, "Install git-lfs and run `git lfs pull` in the file's repository."
        place = where or ""
        is_path = what.startswith("There is no such f")  # file or folder
        near = _nearest_path(place, is_path)
        if near and not re.search(rf"(?<!\w){re.escape(near)}(?!\w)", f"{what} {fix}"):
            fix = f"{fix or ''} Nearest: {near}.".lstrip()
        # A label may stand before each path.
        several = [each.rpartition("=")[2] for each in place.split(",")]
        if is_path and len(several) > 1 and all(map(os.path.exists, several)):
            fix = f"{fix or ''} Several are given one by one, not with commas.".lstrip()
        # Now, since the names that a command's reader knows are forgotten with its context.
        self.what = rename_for_reader(what)
        self.where = where and rename_for_reader(where)
        self.fix = fix and rename_for_reader(fix)
        super().__init__(str(self))

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.fix:
            lines.append(f"  fix: {self.fix}")
        # Here, so that no message shows the password of an address.
        return remove_passwords("\n".join(lines))


def _lfs_pointer(where: str) -> str | None:
    """The file of an error's `where` that is only a pointer of Git LFS; None if there is none."""
    # A line, a key or another file may follow the path.
    for path in (where, *re.split(r"[,;:] |:\d", where)):
        # A pointer has less than 1,024 bytes (git-lfs, docs/spec.md).
        with contextlib.suppress(OSError, ValueError):
            if os.path.isfile(path) and os.path.getsize(path) < 1024:
                with open(path, "rb") as file:
                    if file.read(40) == b"version https://git-lfs.github.com/spec/":
                        return path
    return None


def _nearest_path(where: str, is_path: bool) -> str | None:
    """The path most like that of an error's `where`, which names a place that does not exist.

    Args:
      where: The place.
      is_path: Whether it is known to be a path, as a word alone may be.
    """
    # An option may stand before the path, a line after it, and a key or an argument in its place.
    path = re.sub(r":\d+$", "", re.split("[ =]", where)[-1])
    if "://" in path or not (is_path or os.sep in path or re.search(r"[.]\w{1,7}$", path)):
        return None
    with contextlib.suppress(OSError, ValueError):
        missing = path.rstrip(os.sep)
        while missing and not os.path.lexists(missing):
            parent, name = os.path.split(missing)
            if os.path.isdir(parent or os.curdir):
                if re.fullmatch(r"(checkpoint_|model[.]ckpt-)\d+", name):
                    return None  # the nearest name is not that of the nearest step
                beside = os.listdir(parent or os.curdir)
                near = difflib.get_close_matches(name, beside, n=1, cutoff=0.75)
                if not near or _is_empty(os.path.join(parent, near[0])):
                    return None
                whole = os.path.join(parent, near[0]) + path[len(missing) :]
                return whole if os.path.exists(whole) else os.path.join(parent, near[0])
            missing = parent
    return None


def _is_empty(path: str) -> bool:
    """Whether a folder has only locks, as one that a command made before it failed."""
    files = (file for _, _, names in os.walk(path) for file in names)
    return os.path.isdir(path) and all(file.startswith(".") for file in files)


INSTALL_PYARROW = "EXTRAS=parquet bash scripts/setup.sh, in a checkout, or pip install pyarrow."
# Packages of the reference tier alone, by their modules' first names.
OF_REFERENCE = {
    *("apache_beam", "clu", "datasets", "huggingface_hub", "mesh_tensorflow", "seqio"),
    *("t5", "tensorflow", "tensorflow_datasets", "tensorflow_estimator", "tensorflow_text"),
}
INSTALL_REFERENCE = (
    "Install the reference tier: TIER=reference bash scripts/setup.sh, in a checkout."
    " docs/tiers.md lists what needs it."
)


def needs_reference_tier(why: str) -> UserError:
    """The error for what TensorFlow, SeqIO or t5 must do, where they are not installed.

    Args:
      why: What needs them, as a clause.
    """
    what = "This needs SeqIO and TensorFlow, which are not installed"
    return UserError(f"{what}: {why}.", fix=INSTALL_REFERENCE)


def check_choice(value: object, kind: Any, where: str) -> None:
    """Raises UserError unless a value is one of a Literal type's, for callers without a checker."""
    if value not in get_args(kind):
        among = ", ".join(map(repr, get_args(kind)))
        raise UserError(f"{where} is {value!r}.", where=where, fix=f"Give one of {among}.")


def similar_names(name: str, known: Iterable[str], count: int = 5) -> list[str]:
    """Up to `count` known names similar to a mistyped one, the nearest first; [] if none is."""
    names = _order_names(known)
    close = difflib.get_close_matches(name, names, n=count, cutoff=0.5)
    # What begins with the name, such as a task's twin, is meant more often than what is as long.
    close.sort(key=lambda each: not each.startswith(name))
    # A dataset's name is far from its tasks' names, which contain it.
    return close or [each for each in names if len(name) > 2 and name in each][:count]


def nearest_names(name: str, known: Iterable[str], count: int = 5) -> str:
    """The similar names, quoted, to follow "Nearest: ".

    If none is similar, says so and lists the first few known names. Names without an order, such as
    a set's, are sorted, so that the same mistake always gets the same answer.
    """
    names = _order_names(known)
    if similar := similar_names(name, names, count):
        return ", ".join(map(repr, similar))
    some = ", ".join(map(repr, names[:3])) + (", ..." if len(names) > 3 else "")
    return "none is similar" + (f"; there are {some}" if names else "")


def _order_names(names: Iterable[str]) -> list[str]:
    return sorted(names) if isinstance(names, set | frozenset) else list(dict.fromkeys(names))


def place_in_module(error: BaseException) -> str | None:
    """The file and line of a user's module at which its import failed; None for another failure."""
    if isinstance(error, SyntaxError) and (error.filename or "").endswith(".py"):
        return f"{error.filename}:{error.lineno}"
    frames = [each for each in traceback.walk_tb(error.__traceback__) if _is_users(each[0])]
    if not any(frame.f_code.co_name == "<module>" for frame, _ in frames):
        return None
    frame, line = frames[-1]
    return f"{frame.f_code.co_filename}:{line}"


def _is_users(frame: FrameType) -> bool:
    """Whether a frame is not of this package, of an installed one or of Python."""
    module = frame.f_globals.get("__name__", "").partition(".")[0]
    installed = (sys.prefix, sys.base_prefix, "<")
    return module != "t0repro" and not frame.f_code.co_filename.startswith(installed)
