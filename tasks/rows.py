"""Rows on disk: `<dataset>/<subset or "default">/<split>.jsonl` or `.parquet`."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from t0repro.errors import UserError

DATA_VARIABLE = "T0REPRO_DATA_DIR"
SUFFIXES = (".jsonl", ".parquet")


def data_folder() -> Path:
    """The folder that T0REPRO_DATA_DIR names.

    Raises:
      UserError: if the variable is not set or names no folder.
    """
    value = os.environ.get(DATA_VARIABLE)
    fix = (
        f"Set {DATA_VARIABLE} to a folder that holds <dataset>/<subset or default>/<split>.jsonl"
        " (or .parquet), one row a line with the dataset's own field names."
    )
    if not value:
        raise UserError(f"{DATA_VARIABLE} is not set, so there are no rows to read.", fix=fix)
    if not Path(value).is_dir():
        raise UserError(
            "The data folder does not exist.", where=f"{DATA_VARIABLE}={value}", fix=fix
        )
    return Path(value)


def dataset_folder(root: Path, dataset: str, subset: str | None) -> Path:
    """The folder of one dataset configuration."""
    return root / dataset / (subset or "default")


def splits_on_disk(folder: Path) -> list[str]:
    """Names of the splits that a dataset's folder holds, sorted; from file names alone."""
    if not folder.is_dir():
        return []
    return sorted({path.stem for path in folder.iterdir() if path.suffix in SUFFIXES})


def rows_file(root: Path, dataset: str, subset: str | None, split: str) -> Path:
    """The file of a split.

    Raises:
      UserError: if it is missing.
    """
    folder = dataset_folder(root, dataset, subset)
    for suffix in SUFFIXES:
        path = folder / f"{split}{suffix}"
        if path.is_file():
            return path
    held = ", ".join(splits_on_disk(folder)) or "nothing"
    subset_argument = f", {subset!r}" if subset else ""
    raise UserError(
        f"The rows of {dataset}{'/' + subset if subset else ''}, split {split!r}, are missing; its"
        f" folder holds {held}.",
        where=str(folder / f"{split}.jsonl"),
        fix=(
            "Put the split there, one JSON object a line or as Parquet; with the network at hand:"
            f" datasets.load_dataset({dataset!r}{subset_argument}, split={split!r}).to_parquet("
            f'"{folder / split}.parquet").'
        ),
    )


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file, one at a time.

    Raises:
      UserError: if a line is not a JSON object; it names the file and the line.
    """
    return _read_parquet(path) if path.suffix == ".parquet" else _read_jsonl(path)


def _read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:  # a broken encoding is one too
                raise _broken_line(path, number, str(error)) from error
            if not isinstance(row, dict):
                raise _broken_line(path, number, "it is not an object of field names and values")
            yield row


def _broken_line(path: Path, number: int, reason: str) -> UserError:
    return UserError(
        f"A line is not a row in JSON: {reason}.",
        where=f"{path}, line {number}",
        fix="Mend or remove that line; each line must be one JSON object.",
    )


def _read_parquet(path: Path) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except (OSError, ValueError) as error:  # pyarrow's ArrowInvalid is a ValueError
        raise UserError(
            f"The file is not Parquet: {error}", where=str(path), fix="Write it anew."
        ) from error
    with file:
        for batch in file.iter_batches():
            yield from batch.to_pylist()


def count_rows(path: Path) -> int:
    """Number of rows of a file, all read and found valid; remembered while it is unchanged.

    Raises:
      UserError: as `read_rows`.
    """
    status = path.stat()
    return _count_rows(path, status.st_mtime_ns, status.st_size)


@functools.cache
def _count_rows(path: Path, modified: int, size: int) -> int:
    del modified, size  # part of the key alone
    return sum(1 for _ in read_rows(path))


def kept_row(index: int, count: int, max_rows: int | None) -> bool:
    """Whether row `index` of `count` is among the evenly spaced `max_rows`."""
    if max_rows is None or count <= max_rows:
        return True
    return (index + 1) * max_rows // count > index * max_rows // count
