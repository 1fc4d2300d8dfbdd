"""Reads rows from disk: `<dataset>/<subset or "default">/<split>` in one of `SUFFIXES`."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from t0repro.errors import INSTALL_PYARROW, UserError
from t0repro.tasks.csv_rows import DELIMITERS, count_csv, line_of_row, read_csv
from t0repro.words import json_fault

SUFFIXES = (".jsonl", ".parquet", ".csv", ".tsv")
DEPTH = 100
"""How deeply the lists and objects of a row may be nested."""
_TOO_DEEP = f"its lists and objects are nested more than {DEPTH} deep"


def dataset_folder(root: Path, dataset: str, subset: str | None) -> Path:
    """The folder of one dataset configuration."""
    return root / dataset / (subset or "default")


def splits_on_disk(folder: Path) -> list[str]:
    """Names of the splits in a dataset's folder, sorted, judged by file names alone."""
    if not folder.is_dir():
        return []
    return sorted(
        {
            path.stem
            for path in folder.iterdir()
            # Story Cloze's own CSV files have a reader of their own (story_cloze.py).
            if path.suffix in SUFFIXES and not path.name.startswith("cloze_test_")
        }
    )


def find_rows_file(root: Path, dataset: str, subset: str | None, split: str) -> Path | None:
    """The file of a split, or None if the folder has none."""
    folder = dataset_folder(root, dataset, subset)
    for suffix in SUFFIXES:
        path = folder / f"{split}{suffix}"
        if path.is_file():
            return path
    return None


def rows_file(root: Path, dataset: str, subset: str | None, split: str) -> Path:
    """The file of a split.

    Raises:
      UserError: if it is missing.
    """
    path = find_rows_file(root, dataset, subset, split)
    if path is not None:
        return path
    folder = dataset_folder(root, dataset, subset)
    held = ", ".join(splits_on_disk(folder)) or "nothing"
    raise UserError(
        f"The rows of {dataset}{'/' + subset if subset else ''}, split {split!r}, are missing; its"
        f" folder holds {held}.",
        where=str(folder / f"{split}.jsonl"),
        fix="Put the split there, one JSON object per line or as Parquet, CSV or TSV.",
    )


def read_rows(path: Path, start: int = 0, stop: int | None = None) -> Iterator[dict[str, Any]]:
    """Yields rows `start` to `stop` (exclusive) of a file; rows before `start` are not parsed.

    Raises:
      UserError: If a line is not a row in UTF-8; it names the file and the line.
    """
    if path.suffix == ".parquet":
        return _read_parquet(path, start, stop)
    read = read_csv if path.suffix in DELIMITERS else _read_jsonl
    return read(path, start, stop)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yields (line number from 1, line) of each line that is not blank, that is, of each row."""
    # In bytes: each line is decoded by itself, so that an error names its line.
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.isspace():
                yield number, line


def _read_jsonl(path: Path, start: int, stop: int | None) -> Iterator[dict[str, Any]]:
    for number, line in itertools.islice(_lines(path), start, stop):
        try:
            row = json.loads(line.decode("utf-8"))
            # JSON can contain lone surrogates, which UTF-8 cannot encode: reject them here.
            if b"\\ud" in line or b"\\uD" in line:
                json.dumps(row, ensure_ascii=False).encode("utf-8")
        except ValueError as error:  # includes UnicodeError
            raise _broken_line(path, number, json_fault(error)) from error
        except RecursionError as error:
            raise _broken_line(path, number, _TOO_DEEP) from error
        # Counting brackets is cheap, and most lines have too few to be nested that deeply.
        if line.count(b"[") + line.count(b"{") > DEPTH and _depth(row) > DEPTH:
            raise _broken_line(path, number, _TOO_DEEP)
        if not isinstance(row, dict):
            raise _broken_line(path, number, "it is not an object of field names and values")
        yield row


def _depth(value: Any) -> int:
    """How deeply lists and objects are nested; computed without recursion."""
    deepest, waiting = 0, [(value, 0)]
    while waiting:
        item, depth = waiting.pop()
        if isinstance(item, dict | list):
            deepest = max(deepest, depth + 1)
            inside = item.values() if isinstance(item, dict) else item
            # Use an explicit stack: the nesting may exceed Python's recursion limit.
            waiting += [(each, depth + 1) for each in inside]
    return deepest


def _broken_line(path: Path, number: int, reason: str) -> UserError:
    return UserError(
        f"A line is not a row in JSON: {reason}.",
        where=f"{path}, line {number}",
        fix="Fix or remove that line; each line must be one JSON object in UTF-8.",
    )


def _parquet(path: Path) -> Any:
    try:
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise UserError(
            "Rows in Parquet need pyarrow, which is not installed.",
            where=str(path),
            fix=INSTALL_PYARROW,
        ) from error
    try:
        return pyarrow.parquet.ParquetFile(path)
    except (OSError, ValueError) as error:  # pyarrow's ArrowInvalid is a ValueError
        raise UserError(
            f"The file is not Parquet: {error}", where=str(path), fix="Write the file again."
        ) from error


def _read_parquet(path: Path, start: int, stop: int | None) -> Iterator[dict[str, Any]]:
    first = 0  # of the batch
    with _parquet(path) as file:
        end = file.metadata.num_rows if stop is None else stop
        groups = []
        for group in range(file.num_row_groups):
            # Count rows per row group, so that rows before `start` are not decoded.
            last = first + file.metadata.row_group(group).num_rows
            if last > start and first < end:
                groups.append((group, first))
            first = last
        for group, first in groups:
            # Decoded bytes are text only if they are UTF-8; to_pylist raises otherwise.
            for batch in file.iter_batches(row_groups=[group]):
                low, high = max(start - first, 0), min(end - first, batch.num_rows)
                if low < high:
                    yield from _batch_rows(path, batch.slice(low, high - low), first + low)
                first += batch.num_rows


def _batch_rows(path: Path, batch: Any, first: int) -> list[dict[str, Any]]:
    try:
        return batch.to_pylist()
    except UnicodeDecodeError as error:
        raise UserError(
            f"Text is not UTF-8: {error}.",
            where=f"{path}, rows {first + 1} to {first + batch.num_rows}",
            fix="Write the file again, from text in UTF-8.",
        ) from error


def place_of_row(path: Path, index: int) -> str:
    """Where row `index`, from 0, is: the file and the line, or the row in a Parquet file."""
    if path.suffix == ".parquet":
        return f"{path}, row {index + 1}"
    if path.suffix in DELIMITERS:
        return f"{path}, line {line_of_row(path, index)}"
    # Blank lines are not rows, so find the line's number by counting.
    number, _ = next(itertools.islice(_lines(path), index, None), (index + 1, b""))
    return f"{path}, line {number}"


def number_of_rows(path: Path) -> int:
    """Number of rows of a file, counted without parsing; cached while the file is unchanged."""
    status = path.stat()
    # Time and size are in the key, so that a changed file is counted again.
    return _number_of_rows(path, status.st_mtime_ns, status.st_size)


@functools.cache
def _number_of_rows(path: Path, modified: int, size: int) -> int:
    del modified, size  # part of the key alone
    if path.suffix == ".parquet":
        with _parquet(path) as file:
            return file.metadata.num_rows
    return count_csv(path) if path.suffix in DELIMITERS else sum(1 for _ in _lines(path))


def class_names(path: Path) -> dict[str, list[str]]:
    """Column -> names of its classes, from the metadata that `datasets` writes to Parquet files."""
    if path.suffix != ".parquet":
        return {}
    with _parquet(path) as file:
        written = (file.schema_arrow.metadata or {}).get(b"huggingface")
    features = json.loads(written)["info"]["features"] if written else {}
    return {
        name: feature["names"]
        for name, feature in features.items()
        if isinstance(feature, dict) and feature.get("_type") == "ClassLabel"
    }


def sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal; cached while the file is unchanged."""
    status = path.stat()
    return _sha256(path, status.st_mtime_ns, status.st_size)


@functools.cache
def _sha256(path: Path, modified: int, size: int) -> str:
    del modified, size  # part of the key alone
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def kept_rows(count: int, max_rows: int | None, seed: int | None = None) -> Collection[int]:
    """Which of `count` rows are kept, at most `max_rows`: evenly spaced, or drawn by a seed.

    A seed draws the rows that T-Few draws from the same rows.
    """
    if max_rows is None or count <= max_rows:
        return range(count)
    if seed is not None:
        # As in r-three/t-few, dataset_readers.py: NumPy's old generator shuffles all rows.
        order = list(range(count))
        import numpy as np  # commands that only check gin files start without it

        np.random.RandomState(seed).shuffle(order)
        return frozenset(order[:max_rows])
    # Rows where the scaled index passes an integer: evenly spaced, exactly max_rows of them.
    passes = (at for at in range(count) if (at + 1) * max_rows // count > at * max_rows // count)
    return frozenset(passes)
