"""Where a user's rows and prompts are: T0REPRO_DATA_DIR and T0REPRO_TEMPLATES.

Both may name several paths, separated by `:` (`;` on Windows).
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from t0repro.errors import UserError
from t0repro.storage import input_path

DATA_VARIABLE = "T0REPRO_DATA_DIR"
TEMPLATES_VARIABLE = "T0REPRO_TEMPLATES"


class NoRowsError(UserError):
    """The rows of a user's prompts are not on this machine."""


def data_folders() -> list[Path]:
    """The folders that T0REPRO_DATA_DIR names; a split is read from the first that has it.

    Raises:
      NoRowsError: If the variable is not set or does not name folders.
    """
    fix = (
        f"Set {DATA_VARIABLE} to a folder that holds <dataset>/<subset or default>/<split>.jsonl"
        " (or .parquet, .csv, .tsv), one row a line with the dataset's own field names."
    )
    value = os.environ.get(DATA_VARIABLE)
    if not value:
        raise NoRowsError(f"{DATA_VARIABLE} is not set, so there are no rows to read.", fix=fix)
    folders = [input_path(path, DATA_VARIABLE) for path in _paths_in(DATA_VARIABLE)]
    missing = next((folder for folder in folders if not folder.is_dir()), None)
    if missing is not None:
        absent = "is a file" if missing.exists() else "does not exist"
        raise NoRowsError(
            f"The data folder {f'{missing} ' if len(folders) > 1 else ''}{absent}.",
            where=f"{DATA_VARIABLE}={value}",
            fix=fix,
        )
    return folders


def data_is() -> str:
    """What the variable is at present, as a clause of an error's fix."""
    value = os.environ.get(DATA_VARIABLE)
    return f"it is {value!r} now" if value else "it is not set"


def find_data_file(name: str) -> Path:
    """A file below the data folders: in the first that has it, or else in the first of all."""
    paths = [folder / name for folder in data_folders()]
    return next((path for path in paths if path.is_file()), paths[0])


def template_files() -> list[str]:
    """The files that T0REPRO_TEMPLATES names.

    Raises:
      UserError: If a path has a `~`, or commas in place of colons.
    """
    return _paths_in(TEMPLATES_VARIABLE)


def check_home(path: str, where: str) -> None:
    """Refuses a path that begins with a `~`, which shells leave alone in quotation marks.

    Raises:
      UserError: If it does, and there is no such file.
    """
    if path.startswith("~") and not os.path.exists(path):
        raise UserError(
            f"The shell did not expand the ~ of {path!r}, as it does not in quotation marks.",
            where=where,
            fix="Write it without quotation marks, or $HOME in place of ~.",
        )


def _paths_in(variable: str) -> list[str]:
    value = os.environ.get(variable, "")
    if os.path.exists(value):  # a name that has the separator in it
        return [value]
    # The colon of an address, such as gs://bucket, separates nothing.
    paths = [path for path in re.split(rf"{os.pathsep}(?!//)", value) if path]
    for path in paths:
        check_home(path, variable)
        parts = path.split(",")
        if len(parts) > 1 and not os.path.exists(path) and any(map(os.path.exists, parts)):
            raise UserError(
                f"There is no {path}: several paths are separated by colons, not by commas.",
                where=variable,
                fix=f"Set {variable}={os.pathsep.join(parts)}.",
            )
    return paths
