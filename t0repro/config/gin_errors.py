"""The one gate that errors of gin's parser, and of the modules that gin files import, pass."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from t0repro.errors import UserError, nearest_names


@contextlib.contextmanager
def configuration_errors() -> Iterator[None]:
    """Turns what fails while modules are imported and gin is parsed into UserErrors, words kept.

    Whatever fails there is in a file or an override of the user's; the original exception stays
    attached as the cause.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        unknown = re.match(r"No Task or Mixture found with name '(.*)'", str(error))
        if unknown:
            raise unknown_mixture(unknown.group(1)) from error
        if isinstance(error, ModuleNotFoundError):
            raise UserError(
                f"{error}.",
                where="--module_import, or an `import` line of a gin file",
                fix="Check the module's name; its folder must be on PYTHONPATH or installed.",
            ) from error
        where = None
        if isinstance(error, SyntaxError) and error.text:
            where = f"{error.filename or '--gin_param'}: {error.text.strip()}"
        # gin appends the whole configuration to what it says of an undefined macro.
        message = str(error).partition(" in config string:")[0].strip() or repr(error)
        raise UserError(message, where=where, fix="Mend the gin file or the override.") from error


def unknown_mixture(name: str) -> UserError:
    """The error for a task or mixture that no imported module registers, with the nearest names."""
    import seqio

    known = sorted({*seqio.MixtureRegistry.names(), *seqio.TaskRegistry.names()})
    return UserError(
        f"There is no task or mixture {name!r}; most like it: {nearest_names(name, known)}.",
        where=f"{len(known)} tasks and mixtures are registered by the imported modules",
        fix="Correct MIXTURE_NAME, or name the module that registers it with --module_import.",
    )
