"""Turns errors of the file system, while training writes, into errors that name the file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from t0repro.errors import UserError
from t0repro.files import storage_error


@contextlib.contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turns a full, read-only or vanished disk into a UserError.

    Args:
      path: what is being written, for errors that do not name a file.

    Raises:
      UserError: in place of the error of the file system or of a library on top of it.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # TensorStore raises ValueErrors with the system's messages
        refused = storage_error(error)
        if refused is None:
            raise
        where = refused.where or os.fspath(path)
        raise UserError(refused.what, where=where, fix=refused.fix) from error
