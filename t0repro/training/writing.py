"""What the file system refuses while training writes, named by the file it was refused for."""

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
      path: what is being written, for errors that do not say.

    Raises:
      UserError: in place of the file system's error, or that of a library on top of it.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # TensorStore's are ValueErrors in the system's words
        refused = storage_error(error)
        if refused is None:
            raise
        where = refused.where or os.fspath(path)
        raise UserError(refused.what, where=where, fix=refused.fix) from error
