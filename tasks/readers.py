"""Finds a split's rows: in a local folder, then on the hub if allowed, else with its authors."""

from __future__ import annotations

import csv
import dataclasses
import fnmatch
import functools
import itertools
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from t0repro.errors import UserError
from t0repro.files import write_atomically
from t0repro.tasks import rows
from t0repro.tasks.catalogue import CatalogueEntry, HubPlace, catalogue, label

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
) -> LocalReader | None:
    """The reader of a split's local file, or None if there is none.

    Args:
      root: The folder of datasets; defaults to the one that T0REPRO_DATA_DIR names, if any.
      dataset: The Hugging Face name.
      subset: The configuration, or None.
      split: The file's name without its suffix.
    """
    # Without a folder there are no local rows, but the hub may be allowed.
    if root is None and not os.environ.get(rows.DATA_VARIABLE):
        return None
    root = root or rows.data_folder()
    path = rows.find_rows_file(root, dataset, subset, split)
    if path is not None:
        return LocalReader.of(path)
    path = manual_file(root, dataset, subset, split)
    return StoryClozeReader.of(path) if path is not None else None


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
        rows.rows_file(root, dataset, subset, split)  # raises an error that names what is missing
    entry = catalogue().get((dataset, subset))
    if entry is not None and entry.hub is not None and hub_is_allowed():
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
        f"Put the split there, one JSON object per line or as Parquet"
        f"{'' if named else f', and set {rows.DATA_VARIABLE} to that folder of datasets'}"
    )
    if entry is None:
        return UserError(what, where=where, fix=put + ".")
    if entry.hub is None:
        fix = how_to_ask(dataset, subset, split, folder)
        return UserError(what, where=where, fix=fix)
    fix = (
        f"{put}; or set {HUB_VARIABLE}=1 to let it be downloaded from"
        f" https://huggingface.co/datasets/{entry.hub.repository}."
    )
    return UserError(what, where=where, fix=fix)


# Story Cloze ------------------------------------------------------------------------------------

# The University of Rochester sends CSV files to applicants who fill in a form. The files are read
# unchanged, and their columns get the names that `datasets` gave them.

STORY_CLOZE_FORM = "https://cs.rochester.edu/nlp/rocstories/"

# Names of the files as they are sent, by split, and of their columns. Source of both: the loading
# script story_cloze of `datasets` 2.4.0.
STORY_CLOZE_FILES: Mapping[str, str] = {
    "validation": "cloze_test_val__spring2016 - cloze_test_ALL_val.csv",
    "test": "cloze_test_test__spring2016 - cloze_test_ALL_test.csv",
}
STORY_CLOZE_COLUMNS: Mapping[str, str] = {
    "InputStoryid": "story_id",
    "InputSentence1": "input_sentence_1",
    "InputSentence2": "input_sentence_2",
    "InputSentence3": "input_sentence_3",
    "InputSentence4": "input_sentence_4",
    "RandomFifthSentenceQuiz1": "sentence_quiz1",
    "RandomFifthSentenceQuiz2": "sentence_quiz2",
    "AnswerRightEnding": "answer_right_ending",
}


def manual_file(root: Path, dataset: str, subset: str | None, split: str) -> Path | None:
    """A split's file under the name that its authors gave it, or None if it is not there."""
    if dataset != "story_cloze" or subset != "2016" or split not in STORY_CLOZE_FILES:
        return None
    path = rows.dataset_folder(root, dataset, subset) / STORY_CLOZE_FILES[split]
    return path if path.is_file() else None


def how_to_ask(dataset: str, subset: str | None, split: str, folder: Path) -> str:
    """How to get a dataset that may not be redistributed, and where to put it."""
    if dataset == "story_cloze":
        name = STORY_CLOZE_FILES.get(split, f"{split}.jsonl")
        return (
            f"Ask its authors by the form at {STORY_CLOZE_FORM} and put the file that they send,"
            f" under its own name, here: {folder / name}"
        )
    return (
        f"Ask its authors, and put the rows, one JSON object per line, into {folder}/{split}.jsonl"
    )


def read_story_cloze(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the rows of one of the CSV files, with the columns that they have in `datasets`.

    Raises:
      UserError: If a column is missing, a line is truncated or the text is not UTF-8.
    """
    # utf-8-sig drops the byte-order mark that spreadsheets write.
    with open(path, newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        try:
            missing = set(STORY_CLOZE_COLUMNS) - set(reader.fieldnames or ())
            if missing:
                raise _broken(path, 1, f"the columns {sorted(missing)} are missing")
            for row in reader:
                brought = {new: row[old] for old, new in STORY_CLOZE_COLUMNS.items()}
                answer = brought["answer_right_ending"]
                # DictReader completes a short line with None.
                if None in brought.values() or answer not in ("1", "2"):
                    raise _broken(path, reader.line_num, "it is cut, or its answer is not 1 or 2")
                yield {**brought, "answer_right_ending": int(answer)}
        except (UnicodeDecodeError, csv.Error) as error:
            raise _broken(path, reader.line_num + 1, str(error)) from error


def _broken(path: Path, line: int, reason: str) -> UserError:
    return UserError(
        f"A line is not a row of Story Cloze: {reason}.",
        where=f"{path}, line {line}",
        fix="Save the file again as it was sent, as CSV with its first line, in UTF-8.",
    )


# From the hub -------------------------------------------------------------------------------------
# `datasets` no longer runs loading scripts, so it reads the hub's own Parquet branch. Most
# repositories were renamed: the catalogue lists where each dataset is today. Downloads stay in
# Hugging Face's cache (HF_HOME), which is used offline.

BATCH = 1000
"""Number of rows converted from Arrow at once."""

TIMEOUT_SECONDS = 10.0


def user_cache() -> Path:
    """This package's folder in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "t0repro"


@dataclasses.dataclass(frozen=True)
class HubReader:
    """A split of a repository, at the commit that the branch pointed to."""

    place_on_hub: HubPlace
    split: str
    commit: str
    # Not compared: the commit already decides the rows.
    data: Any = dataclasses.field(compare=False, repr=False)

    def count(self) -> int:
        """Number of rows."""
        return len(self.data)

    def read(self, start: int = 0, stop: int | None = None) -> Iterator[dict[str, Any]]:
        """Rows `start` to `stop`."""
        stop = len(self.data) if stop is None else min(stop, len(self.data))
        # Arrow stores columns; converting a thousand rows at a time is cheap and bounds memory.
        for first in range(start, stop, BATCH):
            columns = self.data[first : min(first + BATCH, stop)]
            names = list(columns)
            for row in zip(*columns.values(), strict=True):
                yield dict(zip(names, row, strict=True))

    def place(self, index: int) -> str:
        """The repository, the commit and the row."""
        return (
            f"{self.place_on_hub.repository} at {self.commit[:12]}, split {self.split},"
            f" row {index + 1}"
        )

    def class_names(self) -> Mapping[str, Sequence[str]]:
        """Column -> names of its classes, for every column of class labels."""
        import datasets

        features = self.data.features
        return {
            name: feature.names
            for name, feature in features.items()
            if isinstance(feature, datasets.ClassLabel)
        }

    def origin(self) -> dict[str, Any]:
        """The repository, configuration, branch and commit."""
        return {
            "source": "hub",
            "repository": self.place_on_hub.repository,
            "configuration": self.place_on_hub.configuration,
            "revision": self.place_on_hub.revision,
            "commit": self.commit,
            "split": self.split,
            "rows": len(self.data),
        }


def hub_reader(entry: CatalogueEntry, split: str) -> HubReader:
    """Returns the reader of a split, downloaded or taken from the cache.

    Raises:
      UserError: If the hub cannot be reached or does not have the split.
    """
    assert entry.hub is not None
    return _load(entry.dataset, entry.subset, entry.hub, split, entry.splits.get(split))


@functools.cache
# Read once per process: the branch may move between two calls.
def _load(
    dataset: str, subset: str | None, place: HubPlace, split: str, expected: int | None
) -> HubReader:
    import datasets
    import huggingface_hub

    try:
        commit, files = _resolve(place, split)
        # A commit's files never change, so use cached ones without a request.
        paths = [
            huggingface_hub.hf_hub_download(
                place.repository, name, repo_type="dataset", revision=commit
            )
            for name in files
        ]
        # By files and not by name: `datasets` refuses a repository that still has a loading script.
        data = datasets.load_dataset("parquet", data_files={split: paths}, split=split)
    except UserError:
        raise
    except Exception as error:  # each layer below raises its own exceptions
        raise UserError(
            f"Split {split!r} of {place.repository} cannot be read from the hub: "
            f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}",
            where=_address(place),
            fix=(
                "Check the network and the repository, or provide the rows yourself:"
                f" $T0REPRO_DATA_DIR/{dataset}/{subset or 'default'}/{split}.jsonl (or .parquet)."
            ),
        ) from error
    # Only after a complete download: whatever is remembered must be readable offline.
    _remember(place, split, commit, files)
    # Only a warning: the rows are usable, and T0's sizes may be out of date.
    if expected is not None and len(data) != expected:
        logging.warning(
            "%s, split %s, has %d rows on the hub today; T0's had %d.",
            place.repository,
            split,
            len(data),
            expected,
        )
    return HubReader(place, split, commit, data)


def _resolve(place: HubPlace, split: str) -> tuple[str, list[str]]:
    """The branch's commit and the split's files; offline, those of the last download."""
    import huggingface_hub

    try:
        info = huggingface_hub.HfApi().dataset_info(
            place.repository, revision=place.revision, timeout=TIMEOUT_SECONDS
        )
    # Whatever the network error, use the last download if there is one.
    except Exception:
        record = _record(place, split)
        if not record.is_file():
            raise
        remembered = json.loads(record.read_text(encoding="utf-8"))
        return remembered["commit"], remembered["files"]
    held = [file.rfilename for file in info.siblings or ()]
    return str(info.sha), _files(place, split, held)


def _files(place: HubPlace, split: str, held: Sequence[str]) -> list[str]:
    """The Parquet files of a split, `<configuration>/<split>/NNNN.parquet`.

    The hub calls a repository's only configuration `default` if the repository names none.
    """
    pattern = f"{place.configuration}/{split}/*.parquet"
    found = sorted(name for name in held if fnmatch.fnmatchcase(name, pattern))
    if {name.split("/")[0] for name in held if name.endswith(".parquet")} == {"default"}:
        found = sorted(name for name in held if fnmatch.fnmatchcase(name, f"default/{split}/*"))
    folders = {name.split("/")[0] for name in found}
    if len(folders) == 1:
        return found
    raise UserError(
        f"{place.repository} holds {'several configurations' if found else 'no file'} for"
        f" {pattern}.",
        where=_address(place),
        fix="Provide the split as a local file; see docs/data.md.",
    )


def _record(place: HubPlace, split: str) -> Path:
    """The file that records which commit and files were downloaded, for later use offline."""
    name = f"{place.repository}@{place.revision}/{place.configuration}/{split}.json"
    # `*` stands for the only configuration, and is awkward in a file name.
    return user_cache() / "hub" / name.replace("*", "_")


def _remember(place: HubPlace, split: str, commit: str, files: Sequence[str]) -> None:
    write_atomically(_record(place, split), json.dumps({"commit": commit, "files": list(files)}))


def _address(place: HubPlace) -> str:
    revision = place.revision.replace("/", "%2F")
    return f"https://huggingface.co/datasets/{place.repository}/tree/{revision}"
