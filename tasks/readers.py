"""Where a split's rows come from: a local folder, then the hub if allowed, then its authors."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from t0repro.errors import UserError
from t0repro.tasks import manual, rows
from t0repro.tasks.catalogue import catalogue, label

HUB_VARIABLE = "T0REPRO_DATA_HUB"


class Reader(Protocol):
    """The rows of one split; hashable, and equal only to a reader of the same rows."""

    def count(self) -> int:
        """Number of rows, none of them checked."""
        ...

    def read(self, start: int = 0, stop: int | None = None) -> Iterator[dict[str, Any]]:
        """Rows `start` to `stop`, as the data has them."""
        ...

    def place(self, index: int) -> str:
        """Where row `index`, from 0, stands, for a person."""
        ...

    def class_names(self) -> Mapping[str, Sequence[str]]:
        """Column -> names of its classes, as far as the data tells them."""
        ...

    def origin(self) -> dict[str, Any]:
        """What the rows are and of which version, as JSON."""
        ...


@dataclasses.dataclass(frozen=True)
class LocalReader:
    """A file under a folder of datasets, in its present version."""

    path: Path
    modified: int
    size: int

    @classmethod
    def of(cls, path: Path) -> LocalReader:
        """The reader of a file as it is now."""
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
        """Of a Parquet file that `datasets` wrote."""
        return rows.class_names(self.path)

    def origin(self) -> dict[str, Any]:
        """The file, its size in bytes, when it was modified and its checksum."""
        return {
            "source": "local",
            "path": str(self.path),
            "bytes": self.size,
            "modified_ns": self.modified,
            "sha256": rows.sha256(self.path),
        }


@dataclasses.dataclass(frozen=True)
class StoryClozeReader(LocalReader):
    """One of Story Cloze's own CSV files."""

    def count(self) -> int:
        """Number of rows."""
        return sum(1 for _ in self.read())

    def read(self, start: int = 0, stop: int | None = None) -> Iterator[dict[str, Any]]:
        """Rows `start` to `stop`."""
        return itertools.islice(manual.read_story_cloze(self.path), start, stop)

    def place(self, index: int) -> str:
        """The file and the row below its header."""
        return f"{self.path}, row {index + 1}"

    def class_names(self) -> Mapping[str, Sequence[str]]:
        """None."""
        return {}

    def origin(self) -> dict[str, Any]:
        """As a local file's, from its authors."""
        return {**super().origin(), "source": "manual"}


def hub_is_allowed() -> bool:
    """Whether the user asked for the network: T0REPRO_DATA_HUB=1."""
    value = os.environ.get(HUB_VARIABLE, "")
    if value not in ("", "0", "1"):
        raise UserError(
            f"{HUB_VARIABLE} is {value!r}.", fix=f"Set {HUB_VARIABLE}=1 to allow it, or 0."
        )
    return value == "1"


def local_reader(
    root: Path | None, dataset: str, subset: str | None, split: str
) -> LocalReader | None:
    """The reader of a local file, or None where there is none.

    Args:
      root: the folder of the datasets; None is the one that T0REPRO_DATA_DIR names, if any.
      dataset: the Hugging Face name.
      subset: the configuration, or None.
      split: the file's name.
    """
    if root is None and not os.environ.get(rows.DATA_VARIABLE):
        return None
    root = root or rows.data_folder()
    path = rows.find_rows_file(root, dataset, subset, split)
    if path is not None:
        return LocalReader.of(path)
    path = manual.manual_file(root, dataset, subset, split)
    return StoryClozeReader.of(path) if path is not None else None


def find_reader(root: Path | None, dataset: str, subset: str | None, split: str) -> Reader:
    """The reader of a split: local if it is there, else from the hub if that is allowed.

    A root that is given, rather than taken from T0REPRO_DATA_DIR, is the only place that is looked
    into.

    Raises:
      UserError: if there is none; it says every way to get the rows.
    """
    local = local_reader(root, dataset, subset, split)
    if local is not None:
        return local
    if root is not None:
        rows.rows_file(root, dataset, subset, split)  # says what is missing
    entry = catalogue().get((dataset, subset))
    if entry is not None and entry.hub is not None and hub_is_allowed():
        from t0repro.tasks.hub import hub_reader

        return hub_reader(entry, split)
    raise _missing(dataset, subset, split)


def _missing(dataset: str, subset: str | None, split: str) -> UserError:
    named = os.environ.get(rows.DATA_VARIABLE)
    folder = rows.dataset_folder(Path(named or f"${rows.DATA_VARIABLE}"), dataset, subset)
    held = (", ".join(rows.splits_on_disk(folder)) or "nothing") if named else None
    what = f"The rows of {label(dataset, subset)}, split {split!r}, are missing"
    what += f"; its folder holds {held}." if named else f", and {rows.DATA_VARIABLE} is not set."
    where = str(folder / f"{split}.jsonl")
    entry = catalogue().get((dataset, subset))
    put = (
        f"Put the split there, one JSON object a line or as Parquet"
        f"{'' if named else f', and set {rows.DATA_VARIABLE} to that folder of datasets'}"
    )
    if entry is None:
        return UserError(what, where=where, fix=put + ".")
    if entry.hub is None:
        fix = manual.how_to_ask(dataset, subset, split, folder)
        return UserError(what, where=where, fix=fix)
    fix = (
        f"{put}; or set {HUB_VARIABLE}=1 to let it be downloaded from"
        f" https://huggingface.co/datasets/{entry.hub.repository}."
    )
    return UserError(what, where=where, fix=fix)
