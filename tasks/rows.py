"""Finds a split's files below `<dataset>/<subset or "default">`, and reads one of them."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from t0repro.errors import UserError
from t0repro.tasks import arrow_rows
from t0repro.tasks.csv_rows import DELIMITERS, count_csv, line_of_row, read_csv
from t0repro.tasks.json_rows import count_json, place_json, read_json

_ARROW = (".parquet", ".arrow")
SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", *_ARROW, *DELIMITERS)
"""The endings of files of rows; of a split in several formats, the first of these is read."""
# As the hub names the files of a split in several.
_SHARD = re.compile(r"(?P<split>.+)-\d{5}-of-(?P<count>\d{5})")
# What `datasets` writes beside rows.
_NO_ROWS = ("dataset_dict.json", "dataset_info.json", "dataset_infos.json", "state.json")
# In copies of the hub's repositories, the folder of the only configuration.
_ONLY_SUBSET = ("default", "data", "plain_text")


def rows_suffix(path: Path) -> str | None:
    """The ending that says how a file holds rows; None if by its name it holds none."""
    # Story Cloze's own CSV files have a reader of their own (story_cloze.py).
    if path.name in _NO_ROWS or path.name.startswith("cloze_test_"):
        return None
    return next((suffix for suffix in SUFFIXES if path.name.endswith(suffix)), None)


def dataset_folder(root: Path, dataset: str, subset: str | None) -> Path:
    """The folder of one dataset configuration."""
    folder = root / dataset
    if subset is not None:
        inner = folder / subset / "data"
        return inner if inner.is_dir() else inner.parent
    if (folder / "dataset_dict.json").is_file():  # as `save_to_disk` leaves a dataset
        return folder
    there = (folder / name for name in _ONLY_SUBSET)
    return next((each for each in there if each.is_dir()), folder / "default")


def splits_on_disk(folder: Path) -> list[str]:
    """Names of the splits in a dataset's folder, sorted, judged by file names alone."""
    return sorted(_files_by_split(folder))


def find_rows_files(folder: Path, split: str) -> tuple[Path, ...]:
    """A split's files in a dataset's folder, in order; none if it is not there.

    Raises:
      UserError: If one of several is missing, or the split in another format has other rows.
    """
    files, *others = _files_by_split(folder).get(split, [()])
    shard = _SHARD.match(files[0].name) if files else None
    if shard is not None and int(shard["count"]) != len(files):
        raise UserError(
            f"The folder has {len(files)} of the {int(shard['count'])} files of split {split!r}.",
            where=str(folder),
            fix="Copy the others there too.",
        )
    for other in others:
        if other[0].parent == folder:  # named by the split; in a folder of its own lie other things
            _check_count(split, files, other)
    return files


def _check_count(split: str, files: Sequence[Path], other: Sequence[Path]) -> None:
    """Refuses the other files of a split if they hold another number of rows."""
    try:
        counts = [sum(map(number_of_rows, each)) for each in (files, other)]
    except UserError:
        return  # They may be no rows; whoever reads the first ones is told of those.
    if counts[0] != counts[1]:
        raise UserError(
            f"Split {split!r} has {counts[0]} rows in {files[0].name}, but {counts[1]} in"
            f" {other[0].name}.",
            where=str(files[0].parent),
            fix="Remove the one that is out of date, or rename it.",
        )


def _files_by_split(folder: Path) -> dict[str, list[tuple[Path, ...]]]:
    """Split -> its files: `train.jsonl`, `train-00000-of-00002.parquet`, or those in `train/`.

    The last is what `save_to_disk` writes, and what the hub's branch of Parquet files has. Of a
    split in several formats, the files to be read come first.
    """
    # Per split, files that belong together, by where they lie and their ending.
    found: dict[str, dict[tuple[int, int], list[Path]]] = {}
    for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
        for path in sorted(entry.iterdir()) if entry.is_dir() else [entry]:
            suffix = rows_suffix(path)
            if suffix is None or not path.is_file():
                continue
            split, place = entry.name, 2
            if path is entry:
                shard = _SHARD.match(split := path.name.removesuffix(suffix))
                split, place = (shard["split"], 1) if shard else (split, 0)
            group = found.setdefault(split, {})
            group.setdefault((place, SUFFIXES.index(suffix)), []).append(path)
    return {
        split: [tuple(files) for _, files in sorted(groups.items())]
        for split, groups in found.items()
    }


def read_rows(path: Path, start: int = 0, stop: int | None = None) -> Iterator[dict[str, Any]]:
    """Yields rows `start` to `stop` (exclusive) of a file; rows before `start` are not parsed.

    Raises:
      UserError: If the file is damaged, or a row is none; it names the file and the place.
    """
    if path.suffix in _ARROW:
        return arrow_rows.read_arrow(path, start, stop)
    return (read_csv if path.suffix in DELIMITERS else read_json)(path, start, stop)


def place_of_row(path: Path, index: int) -> str:
    """Where row `index`, from 0, is: the file and the line, or the row."""
    if path.suffix in _ARROW:
        return f"{path}, row {index + 1}"
    if path.suffix in DELIMITERS:
        return f"{path}, line {line_of_row(path, index)}"
    return f"{path}, {place_json(path, index)}"


def number_of_rows(path: Path) -> int:
    """Number of rows of a file, counted without parsing; cached while the file is unchanged."""
    status = path.stat()
    # Time and size are in the key, so that a changed file is counted again.
    return _number_of_rows(path, status.st_mtime_ns, status.st_size)


@functools.cache
def _number_of_rows(path: Path, modified: int, size: int) -> int:
    del modified, size  # part of the key alone
    if path.suffix in _ARROW:
        return arrow_rows.count_arrow(path)
    return (count_csv if path.suffix in DELIMITERS else count_json)(path)


def class_names(path: Path) -> dict[str, list[str]]:
    """Column -> names of its classes, where `datasets` wrote the file."""
    return arrow_rows.class_names(path) if path.suffix in _ARROW else {}


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
