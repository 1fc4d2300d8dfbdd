"""Finds a split's files below `<dataset>/<subset or "default">`, and reads one of them."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from t0repro.errors import UserError
from t0repro.tasks import arrow_rows
from t0repro.tasks.csv_rows import DELIMITERS, count_csv, line_of_row, read_csv
from t0repro.tasks.json_rows import count_json, place_json, read_json
from t0repro.words import some

_ARROW = (".parquet", ".arrow")
SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", *_ARROW, *DELIMITERS)
"""The endings of files of rows; of a split in several formats, the first of these is read."""
# As the hub names the files of a split in several.
_SHARD = re.compile(r"(?P<split>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})")
# What `datasets` writes beside rows.
_STATE = "state.json"  # in the folder of a split, lists its files
_NO_ROWS = ("dataset_dict.json", "dataset_info.json", "dataset_infos.json", _STATE)
# How files begin that are no text, whatever they are named.
_BEGINNINGS = {
    b"PK\3\4": "a zip archive or a workbook",
    b"\x28\xb5\x2f\xfd": "packed with zstd",
    b"\xfd7zXZ": "packed with xz",
    b"BZh91AY&SY": "packed with bzip2",
    b"PAR1": "Parquet",
    b"ARROW1": "Arrow",
    b"version https://git-lfs": "a Git LFS pointer",
}
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


def is_saved_split(folder: Path) -> bool:
    """Whether `save_to_disk` wrote a folder from one split."""
    return (folder / _STATE).is_file()


def splits_on_disk(folder: Path) -> list[str]:
    """Names of the splits in a dataset's folder, sorted, judged by file names alone."""
    return sorted(_files_by_split(folder))


def find_rows_files(folder: Path, split: str) -> tuple[Path, ...]:
    """A split's files in a dataset's folder, in order; none if it is not there.

    Raises:
      UserError: If one of several is missing, or the split in another format has other rows.
    """
    files, *others = _files_by_split(folder).get(split, [()])
    if any(map(_shard, files)):
        _check_shards(split, files)
    for other in others:
        if other[0].parent == folder:  # named by the split; in a folder of its own lie other things
            _check_count(split, files, other)
    return files


def _check_shards(split: str, files: Sequence[Path]) -> None:
    """Refuses the files of a split unless they are all of one copy of it."""
    shards = [_shard(file) for file in files]
    count = max(int(shard["count"]) for shard in shards if shard)
    parts = [(int(shard["number"]), int(shard["count"])) if shard else None for shard in shards]
    copy = {(number, count) for number in range(count)}
    if others := [
        file.name
        for file, part in zip(files, parts, strict=True)
        if part not in copy or parts.count(part) > 1
    ]:
        raise UserError(
            f"Split {split!r} has files that are not of one copy of it: {some(others)}.",
            where=str(files[0].parent),
            fix="Remove those that are out of date, or of something else.",
        )
    if len(files) < count:
        raise UserError(
            f"The folder has {len(files)} of the {count} files of split {split!r}.",
            where=str(files[0].parent),
            fix="Copy the others there too.",
        )


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


def _shard(file: Path) -> re.Match[str] | None:
    return _SHARD.match(file.name)


def _files_by_split(folder: Path) -> dict[str, list[tuple[Path, ...]]]:
    """Split -> its files: `train.jsonl`, `train-00000-of-00002.parquet`, or those in `train/`.

    The last is what `save_to_disk` writes, and what the hub's branch of Parquet files has; Spark's
    is `train.parquet/`. Of a split in several formats, the files to be read come first.
    """
    # Per split, files that belong together, by where they lie and their ending.
    found: dict[str, dict[tuple[int, int], list[Path]]] = {}
    for entry in _list_visible(folder) if folder.is_dir() else ():
        for path in _list_saved(entry) if entry.is_dir() else [entry]:
            suffix = rows_suffix(path)
            if suffix is None or not path.is_file():
                continue
            split, place = entry.name.removesuffix(rows_suffix(entry) or ""), 2
            if path is entry:
                shard, split = _shard(path), path.name.removesuffix(suffix)
                split, place = (shard["split"], 1) if shard else (split, 0)
            group = found.setdefault(split, {})
            group.setdefault((place, SUFFIXES.index(suffix)), []).append(path)
    return {
        split: [tuple(files) for _, files in sorted(groups.items())]
        for split, groups in found.items()
    }


def _list_visible(folder: Path) -> list[Path]:
    """What is in a folder, without what other programs keep beside rows: `._x`, `.x.crc`."""
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def _list_saved(folder: Path) -> list[Path]:
    """What is in a split's folder; in one of `save_to_disk`'s, the files that it names, in order.

    `map` and `filter` leave their results beside those, cache-<hash>.arrow.
    """
    paths = {path.name: path for path in _list_visible(folder)}
    state = folder / _STATE
    if not state.is_file():
        return [*paths.values()]
    try:
        content = json.loads(state.read_bytes())
        named = [str(file["filename"]) for file in content["_data_files"]]
    except (ValueError, LookupError, TypeError):
        raise UserError(
            "The file does not list the files of a dataset.",
            where=str(state),
            fix="Save the dataset again with save_to_disk, or remove the file.",
        ) from None
    if content.get("_indices_data_files"):  # of 2020's versions, which later ones do not read
        raise UserError(
            "The dataset was saved as a selection of the rows of its files.",
            where=str(state),
            fix="In the `datasets` that saved it, call flatten_indices() and save_to_disk again.",
        )
    if missing := [name for name in named if name not in paths]:
        raise UserError(
            f"The folder lacks {some(missing)}, of the {len(named)} files of its dataset.",
            where=str(state),
            fix="Copy all of them there too.",
        )
    return [paths[name] for name in named]


def read_rows(path: Path, start: int = 0, stop: int | None = None) -> Iterator[dict[str, Any]]:
    """Yields rows `start` to `stop` (exclusive) of a file; rows before `start` are not parsed.

    Raises:
      UserError: If the file is damaged, or a row is none; it names the file and the place.
    """
    if path.suffix in _ARROW:
        return arrow_rows.read_arrow(path, start, stop)
    check_is_text(path)
    return (read_csv if path.suffix in DELIMITERS else read_json)(path, start, stop)


def check_is_text(path: Path) -> None:
    """Refuses a file of another kind than its ending says; gzipped JSON is read."""
    with open(path, "rb") as file:
        begins = file.read(max(map(len, _BEGINNINGS)))
    kind = next((what for start, what in _BEGINNINGS.items() if begins.startswith(start)), None)
    if begins.startswith(b"\x1f\x8b") and ".json" not in path.name:
        kind = "packed with gzip"
    if kind is not None:
        raise UserError(
            f"The file is {kind}, and its name says {path.suffix}.",
            where=str(path),
            fix="Unpack it, or give it the ending of what it is, if that is read (docs/data.md).",
        )


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
    check_is_text(path)
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


def choose_rows(count: int, max_rows: int | None, seed: int | None = None) -> Collection[int]:
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
