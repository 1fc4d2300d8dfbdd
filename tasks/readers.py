"""Finds a split's rows: in a local folder, then on the hub if allowed, else with its authors."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from t0repro.errors import UserError
from t0repro.tasks import rows
from t0repro.tasks.catalog import CatalogEntry, catalog, label
from t0repro.tasks.hub_rows import hub_reader
from t0repro.tasks.story_cloze import how_to_ask, manual_file, read_story_cloze
from t0repro.tasks.user_files import DATA_VARIABLE, data_folders
from t0repro.words import some

HUB_VARIABLE = "T0REPRO_DATA_HUB"


class Reader(Protocol):
    """Reads the rows of one split; hashable, and equal only to a reader of the same rows."""

    def count(self) -> int:
        """Number of rows, counted without checking them."""
        ...

    def read(self, start: int = 0, stop: int | None = None) -> Iterator[dict[str, Any]]:
        """Yields rows `start` to `stop` (exclusive), unchanged."""
        ...

    def place(self, index: int) -> str:
        """Describes where row `index`, from 0, is, for a message."""
        ...

    def class_names(self) -> Mapping[str, Sequence[str]]:
        """Column -> names of its classes, if the data has them."""
        ...

    def origin(self) -> dict[str, Any]:
        """The rows' origin and version, as JSON values."""
        ...


@dataclasses.dataclass(frozen=True)
class LocalReader:
    """A file in a folder of datasets, in the version that it had when the reader was made."""

    path: Path
    modified: int
    size: int

    @classmethod
    def of(cls, path: Path) -> LocalReader:
        """The reader of a file as it is now."""
        # Include time and size, so that a changed file gives another reader.
        status = path.stat()
        return cls(path, status.st_mtime_ns, status.st_size)

    def count(self) -> int:
        """Number of rows, none of them checked."""
        return rows.number_of_rows(self.path)

    def read(self, start: int = 0, stop: int | None = None) -> Iterator[dict[str, Any]]:
        """Rows `start` to `stop`."""
        return rows.read_rows(self.path, start, stop)

    def place(self, index: int) -> str:
        """The file, and the line or row."""
        return rows.place_of_row(self.path, index)

    def class_names(self) -> Mapping[str, Sequence[str]]:
        """Column -> names of its classes, if `datasets` wrote the file, as Parquet."""
        return rows.class_names(self.path)

    def origin(self) -> dict[str, Any]:
        """The file, its size in bytes, its modification time and its SHA-256."""
        return {
            "source": "local",
            "path": str(self.path),
            "bytes": self.size,
            "modified_ns": self.modified,
            "sha256": rows.sha256(self.path),
        }


@dataclasses.dataclass(frozen=True)
class ShardedReader:
    """A split of several files in a folder of datasets, one after the other."""

    shards: tuple[LocalReader, ...]

    @property
    def path(self) -> Path:
        """The folder of the files."""
        return self.shards[0].path.parent

    def count(self) -> int:
        """Number of rows, none of them checked."""
        return sum(shard.count() for shard in self.shards)

    def read(self, start: int = 0, stop: int | None = None) -> Iterator[dict[str, Any]]:
        """Rows `start` to `stop`."""
        for shard in self.shards:
            rows_here = shard.count()
            if start < rows_here and (stop is None or stop > 0):
                yield from shard.read(max(start, 0), stop)
            start, stop = start - rows_here, None if stop is None else stop - rows_here

    def place(self, index: int) -> str:
        """The file, and the line or row."""
        for shard in self.shards[:-1]:
            if index < shard.count():
                return shard.place(index)
            index -= shard.count()
        return self.shards[-1].place(index)

    def class_names(self) -> Mapping[str, Sequence[str]]:
        """Column -> names of its classes, which no file may give another order."""
        first, *others = self.shards
        names = first.class_names()
        for shard in others:
            for column, own in shard.class_names().items():
                if own != names.get(column, own):
                    raise UserError(
                        f"The classes of {column!r} are {names[column]} in {first.path.name}, and"
                        f" {own} in {shard.path.name}.",
                        where=str(self.path),
                        fix="Write the files of a split again, with one order of its classes.",
                    )
        return names

    def origin(self) -> dict[str, Any]:
        """The folder; of all files their size in bytes, and a SHA-256 of their SHA-256s."""
        parts = [shard.origin() for shard in self.shards]
        digests = "".join(part["sha256"] for part in parts)
        return {
            "source": "local",
            "path": str(self.path),
            "files": [shard.path.name for shard in self.shards],
            "bytes": sum(part["bytes"] for part in parts),
            "sha256": hashlib.sha256(digests.encode()).hexdigest(),
        }


@dataclasses.dataclass(frozen=True)
class StoryClozeReader(LocalReader):
    """One of Story Cloze's own CSV files."""

    def count(self) -> int:
        """Number of rows."""
        return sum(1 for _ in self.read())

    def read(self, start: int = 0, stop: int | None = None) -> Iterator[dict[str, Any]]:
        """Rows `start` to `stop`."""
        return itertools.islice(read_story_cloze(self.path), start, stop)

    def place(self, index: int) -> str:
        """The file and the row below its header."""
        return f"{self.path}, row {index + 1}"

    def class_names(self) -> Mapping[str, Sequence[str]]:
        """Empty: a CSV file names no classes."""
        return {}

    def origin(self) -> dict[str, Any]:
        """As for a local file, with the source `manual`."""
        return {**super().origin(), "source": "manual"}


def hub_is_allowed() -> bool:
    """Whether the user has allowed downloads from the hub, with T0REPRO_DATA_HUB=1."""
    value = os.environ.get(HUB_VARIABLE, "")
    if value not in ("", "0", "1"):
        raise UserError(
            f"{HUB_VARIABLE} is {value!r}.", fix=f"Set {HUB_VARIABLE}=1 to allow it, or 0."
        )
    return value == "1"


def local_reader(
    root: Path | None, dataset: str, subset: str | None, split: str
) -> LocalReader | ShardedReader | None:
    """The reader of a split's local files, or None if there are none.

    Args:
      root: The folder of datasets; defaults to those that T0REPRO_DATA_DIR names, if any.
      dataset: The Hugging Face name.
      subset: The configuration, or None.
      split: The split's name on disk.
    """
    # Without a folder there are no local rows, but the hub may be allowed.
    for folder in [root] if root is not None else _list_named_folders():
        paths = rows.find_rows_files(rows.dataset_folder(folder, dataset, subset), split)
        if paths:
            readers = tuple(map(LocalReader.of, paths))
            return readers[0] if len(readers) == 1 else ShardedReader(readers)
        path = manual_file(folder, dataset, subset, split)
        if path is not None:
            return StoryClozeReader.of(path)
    return None


def _list_named_folders() -> list[Path]:
    return data_folders() if os.environ.get(DATA_VARIABLE) else []


def find_reader(root: Path | None, dataset: str, subset: str | None, split: str) -> Reader:
    """The reader of a split: a local file if there is one, else the hub if that is allowed.

    If `root` is given, rather than taken from T0REPRO_DATA_DIR, no other place is searched.

    Raises:
      UserError: If the rows are not found; it lists every way to get them.
    """
    local = local_reader(root, dataset, subset, split)
    if local is not None:
        return local
    if root is not None:
        raise _missing_rows_error([root], dataset, subset, split)
    entry = catalog().get((dataset, subset))
    if entry is not None and entry.hub is not None and hub_is_allowed():
        return hub_reader(entry, split)
    raise _missing_rows_error(_list_named_folders(), dataset, subset, split, entry)


def _missing_rows_error(
    roots: Sequence[Path],
    dataset: str,
    subset: str | None,
    split: str,
    entry: CatalogEntry | None = None,
) -> UserError:
    named = [rows.dataset_folder(root, dataset, subset) for root in roots]
    folders = named or [rows.dataset_folder(Path(f"${DATA_VARIABLE}"), dataset, subset)]
    held = list(dict.fromkeys(itertools.chain(*map(rows.splits_on_disk, named))))
    # Files that are none of rows, or are named otherwise, are what the user took for the split.
    others = [path.name for folder in named if folder.is_dir() for path in folder.iterdir()]
    fix = (
        "Put the split there, one JSON object per line or as Parquet, Arrow, CSV or TSV"
        f"{'' if named else f', and set {DATA_VARIABLE} to that folder of datasets'}."
    )
    if like := [name for name in others if name.startswith(f"{split}.")]:
        # A link to a file that is gone, another ending of JSON Lines (.ndjson) or a packed file.
        fix = (
            f"If {like[0]} is the split, unpack it or give it the ending of its format: .jsonl,"
            " .parquet, .arrow, .csv or .tsv. If it is a link, put its file back."
        )
    elif saved := [
        f"If {place} is the split, as save_to_disk wrote it, move its files to {folder / split}."
        for folder in named
        for place in (folder, folder.parent)
        if rows.is_saved_split(place)
    ]:
        fix = saved[0]
    elif entry is not None:
        fix = (
            how_to_ask(dataset, subset, split, folders[0])
            if entry.hub is None
            else f"{fix[:-1]}; or set {HUB_VARIABLE}=1 to let it be downloaded from"
            f" https://huggingface.co/datasets/{entry.hub.repository}."
        )
    name = label(dataset, subset)
    return UserError(
        f"The rows of {name}, split {split!r}, are missing; its folder holds"
        f" {some(held or sorted(others)) or 'nothing'}."
        if named
        else f"The rows of {name}, split {split!r}, are missing, and {DATA_VARIABLE} is not set.",
        where=" or ".join(str(folder / f"{split}.jsonl") for folder in folders),
        fix=fix,
    )
