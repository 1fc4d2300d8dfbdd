"""Names that other people's files and listings give: none may lead out of its folder."""

from __future__ import annotations

import fnmatch
import os

from t0repro.errors import UserError


def is_inside(name: str) -> bool:
    """Returns whether a name from a file or listing, once joined, stays inside its folder."""
    # Joining gives an absolute name as it is, and `..` leads out of the folder.
    parts = name.split("/")
    return bool(name) and "://" not in name and not os.path.isabs(name) and ".." not in parts


def check_inside(name: str, where: str) -> None:
    """Refuses a name in a listing of somebody else's that would be a file outside of its folder.

    Raises:
      UserError: naming it.
    """
    if not is_inside(name):
        raise UserError(
            f"The listing names {name!r}, which is not below its folder.",
            where=where,
            fix="Do not trust what is there; get it from where it came from.",
        )


def check_is_name(name: str, what: str, where: str | None = None) -> None:
    """Refuses a name from a file of somebody else's that is more than one component of a path.

    Args:
      name: The name, before it becomes part of a path.
      what: What it names, for the message.
      where: The file that it stands in.

    Raises:
      UserError: If the name has a slash, or is that of a folder's parent.
    """
    if name in ("", ".", "..") or any(sign in name for sign in "/\\\0"):
        raise UserError(
            f"The {what} {name!r} is not a name: it would be a path outside its folder.",
            where=where,
            fix="Do not use this file unless you know where it comes from.",
        )


def check_is_no_pattern(path: str | os.PathLike[str], what: str) -> None:
    """Refuses a path below which other libraries do not find the files written.

    Orbax, for the parts of a checkpoint that it joins, and SeqIO, for a cache's files, search by a
    pattern that begins with the path. If a name in it has brackets, they find nothing: Orbax then
    leaves, without an error, a checkpoint that cannot be read.

    Args:
      path: the output's path.
      what: the name of the output, in the plural, for the message.

    Raises:
      UserError: if the path, used as a pattern, does not match itself.
    """
    whole = os.path.abspath(path)
    if not fnmatch.fnmatchcase(whole, whole):
        raise UserError(
            f"{what} cannot be written where a folder's name has brackets.",
            where=whole,
            fix="Choose a folder without [ and ] in its path.",
        )
