"""The gate that every command runs inside: errors become messages and exit codes.

Exit codes: 0 all is well; 1 something failed (or, for commands that judge, the answer is no); 2 a
mistake of the user's; 130 interrupted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import sys
from collections.abc import Iterator

from t0repro.errors import UserError

FAILURE, USER_ERROR = 1, 2


@dataclasses.dataclass
class Settings:
    """What a command learns from its options about its errors.

    Attributes:
      debug: let every exception through, with its traceback.
    """

    debug: bool = False


@contextlib.contextmanager
def gate(command: str, *, show_unexpected: bool = False) -> Iterator[Settings]:
    """Runs a command's body; exits with a message where it fails.

    Args:
      command: the name to print before messages.
      show_unexpected: keep the traceback of an exception that is nobody's mistake: it may come
        hours into a run.
    """
    settings = Settings()
    try:
        yield settings
    except Exception as error:
        if settings.debug:
            raise
        mistake = find_user_error(error)
        if mistake is not None:
            print(f"{command}: {mistake}", file=sys.stderr)
            sys.exit(USER_ERROR)
        if show_unexpected:
            raise
        text = " ".join(str(error).split()) or "no message"
        print(f"{command}: {type(error).__name__}: {text}", file=sys.stderr)
        print(f"  to do: '{command} --debug ...' shows where this happened.", file=sys.stderr)
        sys.exit(FAILURE)


# tf.data reports an exception of a Python function as an error of its own whose text begins with
# the exception's, "UserError: ...", and goes on with its traceback.
_WRAPPED = re.compile(r"UserError: (.*?)(?=\n+Traceback|\n\n|\Z)", re.DOTALL)


def find_user_error(error: BaseException | None) -> str | None:
    """The text of the UserError that an exception is, was caused by, or carries in its message."""
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, UserError):
            return str(error)
        wrapped = _WRAPPED.search(str(error))
        if wrapped:
            return wrapped.group(1).strip()
        error = error.__cause__ or error.__context__
    return None
