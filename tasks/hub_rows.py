"""Rows from the hub, whose Parquet branch needs no loading script.

`datasets` no longer runs loading scripts. Most repositories were renamed: the catalog lists where
each dataset is today. Downloads stay in Hugging Face's cache (HF_HOME), which is used offline.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import functools
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from t0repro.errors import UserError
from t0repro.hub_files import HUB
from t0repro.storage import write_atomically
from t0repro.tasks.catalog import CatalogEntry, HubPlace

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


def hub_reader(entry: CatalogEntry, split: str) -> HubReader:
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

    with _explain(dataset, subset, place, split):
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
    # Only after a complete download: whatever is remembered must be readable offline.
    remembered = json.dumps({"commit": commit, "files": list(files)})
    write_atomically(_record(place, split), remembered)
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


def bytes_to_fetch(entry: CatalogEntry, split: str) -> int:
    """Bytes that `hub_reader` would download; 0 if the split is here. Asks the hub for its lists.

    Raises:
      UserError: If the hub cannot be reached or does not have the split.
    """
    # Here, where the error says what to install.
    import huggingface_hub  # noqa: F401

    place = entry.hub
    assert place is not None
    record = _record(place, split)
    if record.is_file():
        remembered = json.loads(record.read_text(encoding="utf-8"))
        # Hugging Face's cache may have been cleared or moved since.
        if all(_is_cached(place, remembered["commit"], name) for name in remembered["files"]):
            return 0
    with _explain(entry.dataset, entry.subset, place, split):
        commit, sizes = _ask_hub(place)
        names = _files(place, split, list(sizes))
    return sum(sizes[name] for name in names if not _is_cached(place, commit, name))


def _is_cached(place: HubPlace, commit: str, name: str) -> bool:
    import huggingface_hub

    found = huggingface_hub.try_to_load_from_cache(
        place.repository, name, repo_type="dataset", revision=commit
    )
    return isinstance(found, str)  # not None, and not the mark of a file that does not exist


@contextlib.contextmanager
def _explain(dataset: str, subset: str | None, place: HubPlace, split: str) -> Iterator[None]:
    """Turns the exceptions of the libraries below into one error that says what to do."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # each layer below raises its own exceptions
        own = (
            f"provide the rows yourself: $T0REPRO_DATA_DIR/{dataset}/{subset or 'default'}/"
            f"{split}.jsonl (or .parquet, .csv, .tsv)."
        )
        fix = f"Check the network and the repository, or {own}"
        # By name: importing its class would need the reference tier here too.
        if type(error).__name__ == "GatedRepoError":
            fix = (
                f"Its authors ask you to accept their terms. Log in, accept them at"
                f" {HUB}/datasets/{place.repository}, set HF_TOKEN to a token of"
                f" your account, and start the command again; or {own}"
            )
        raise UserError(
            f"Split {split!r} of {place.repository} cannot be read from the hub: "
            f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}",
            where=_address(place),
            fix=fix,
        ) from error


def _resolve(place: HubPlace, split: str) -> tuple[str, list[str]]:
    """The branch's commit and the split's files; offline, those of the last download."""
    try:
        commit, sizes = _ask_hub(place)
    # Whatever the network error, use the last download if there is one.
    except Exception:
        record = _record(place, split)
        if not record.is_file():
            raise
        remembered = json.loads(record.read_text(encoding="utf-8"))
        return remembered["commit"], remembered["files"]
    return commit, _files(place, split, list(sizes))


def _ask_hub(place: HubPlace) -> tuple[str, dict[str, int]]:
    """The branch's commit, and the bytes of each file; without a network, it fails at once."""
    import huggingface_hub

    info = huggingface_hub.HfApi().dataset_info(
        place.repository, revision=place.revision, timeout=TIMEOUT_SECONDS, files_metadata=True
    )
    return str(info.sha), {file.rfilename: file.size or 0 for file in info.siblings or ()}


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


def _address(place: HubPlace) -> str:
    revision = place.revision.replace("/", "%2F")
    return f"https://huggingface.co/datasets/{place.repository}/tree/{revision}"
