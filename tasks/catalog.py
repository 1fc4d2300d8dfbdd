"""T0's datasets: its own table, what is known about each, and where its data is today.

datasets.csv: T0's table, from bigscience-workshop/t-zero.
catalog.csv: splits and their sizes in T0's time, license, today's repository.
features.json: each dataset's features in `datasets` 1.12, which T0's templates were written for.
p3_sizes.csv: number of examples per task and split of the released P3, after each template dropped
the rows that it has no prompt for. From google-research/FLAN at e9e4ec6e, flan/v2/constants_t0.py
(Apache-2.0).
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import json
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_DATA = Path(__file__).parent / "data"
TABLE = _DATA / "datasets.csv"
CATALOG = _DATA / "catalog.csv"
FEATURES = _DATA / "features.json"
P3_SIZES = _DATA / "p3_sizes.csv"


@dataclasses.dataclass(frozen=True)
class T0Dataset:
    """A row of T0's table: one dataset configuration.

    Attributes:
      dataset: The Hugging Face name.
      subset: The configuration, or None.
      train: The first model trained on it: BASE (T0), GPT_EVAL (T0+), SGLUE (T0++), or "" if none.
      evaluate: BASE, BIAS_FAIRNESS, or "".
      train_size: Number of training examples; 0 where the table has no count.
    """

    dataset: str
    subset: str | None
    train: str
    evaluate: str
    train_size: int


@dataclasses.dataclass(frozen=True)
class Alias:
    """Another name that a column goes by today.

    Attributes:
      name: The column's name in the data.
      after: The end of the prefix in the data's class names, if they have one: `:` if the data has
        `NUM:date` for `date`.
    """

    name: str
    after: str = ""


@dataclasses.dataclass(frozen=True)
class HubPlace:
    """Where a dataset is on the Hugging Face hub today.

    Attributes:
      repository: `owner/name`.
      configuration: The configuration's folder in the revision, `*` if there is only one.
      revision: A branch. The hub itself maintains `refs/convert/parquet` in Parquet, as
        `<configuration>/<split>/NNNN.parquet`, with or without a loading script.
    """

    repository: str
    configuration: str
    revision: str


@dataclasses.dataclass(frozen=True)
class CatalogEntry:
    """What is known about a dataset configuration.

    Attributes:
      dataset: The Hugging Face name in T0's time.
      subset: The configuration, or None.
      splits: Split -> number of rows, as in `datasets` 1.12.
      license: The data's license; empty if not known.
      hub: Where it is today, or None if only its authors provide it.
      aliases: Column -> other names that it goes by today.
    """

    dataset: str
    subset: str | None
    splits: Mapping[str, int]
    license: str
    hub: HubPlace | None
    aliases: Mapping[str, Sequence[Alias]]

    @property
    def label(self) -> str:
        """The dataset and its subset, as shown to users."""
        return label(self.dataset, self.subset)


SYNTHETIC = "synthetic_"


def is_synthetic(dataset: str) -> bool:
    """Whether a dataset's rows are generated, as names such as `synthetic_imdb` show."""
    return dataset.startswith(SYNTHETIC)


def modeled_on(dataset: str) -> str:
    """The dataset whose templates, columns and metrics a dataset uses.

    This is the dataset itself, except that `synthetic_imdb` uses those of `imdb`, so that T0's
    prompts also apply to generated rows.
    """
    return dataset.removeprefix(SYNTHETIC)


def label(dataset: str, subset: str | None) -> str:
    """`dataset` or `dataset/subset`."""
    return dataset if subset is None else f"{dataset}/{subset}"


def t0_datasets() -> list[T0Dataset]:
    """The rows of T0's table, in its order."""
    with open(TABLE, newline="", encoding="utf-8") as file:
        return [
            T0Dataset(
                row["HF_name"],
                row["subset"] or None,
                row["do_train"],
                row["do_eval"],
                int(row["train_size"] or 0),
            )
            for row in csv.DictReader(file)
        ]


@functools.cache
def catalog() -> Mapping[tuple[str, str | None], CatalogEntry]:
    """Every dataset configuration of T0's table, keyed by (dataset, subset)."""
    with open(CATALOG, newline="", encoding="utf-8") as file:
        entries = [_entry(row) for row in csv.DictReader(file)]
    # Read-only, since all callers share one object.
    return types.MappingProxyType({(entry.dataset, entry.subset): entry for entry in entries})


def _entry(row: Mapping[str, str]) -> CatalogEntry:
    # `train=120 validation=30`: splits in the order of the dataset.
    sizes = (item.split("=") for item in row["splits"].split())
    return CatalogEntry(
        dataset=row["dataset"],
        subset=row["subset"] or None,
        splits={split: int(size) for split, size in sizes},
        license=row["license"],
        hub=(
            HubPlace(row["repository"], row["configuration"], row["revision"])
            # Any other source is the authors themselves.
            if row["source"] == "hub"
            else None
        ),
        aliases=_aliases(row["aliases"]),
    )


def _aliases(text: str) -> dict[str, list[Alias]]:
    """Parses `column=other`, or `column=other:` if class names have a prefix ending in a colon."""
    found: dict[str, list[Alias]] = {}
    # A column may occur several times, once for each of its other names.
    for item in filter(None, text.split(";")):
        column, other = item.split("=")
        name = other.rstrip(":")
        found.setdefault(column, []).append(Alias(name, other[len(name) :]))
    return found


@functools.cache
def _all_features() -> Mapping[str, Mapping[str, Any]]:
    return json.loads(FEATURES.read_text(encoding="utf-8"))


def features_of(dataset: str, subset: str | None) -> Mapping[str, Any] | None:
    """Column -> feature, or None for a dataset that is not in the catalog."""
    return _all_features().get(label(modeled_on(dataset), subset))


def rounds_of(dataset: str) -> Mapping[str, Mapping[str, str]]:
    """Task name suffix -> {split of the task: split of ANLI}; empty for other datasets.

    ANLI's three rounds are splits of one dataset (train_r1, dev_r1, test_r1, ...); T0 makes each
    round a task.
    """
    if dataset != "anli":
        return {}
    return {
        f"_r{number}": {
            "train": f"train_r{number}",
            "validation": f"dev_r{number}",
            "test": f"test_r{number}",
        }
        for number in (1, 2, 3)
    }


@functools.cache
def p3_sizes() -> Mapping[str, Mapping[str, int]]:
    """Task -> split -> number of examples; omits tasks that P3 lacks or whose size is not known."""
    sizes: dict[str, dict[str, int]] = {}
    with open(P3_SIZES, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            sizes.setdefault(row["task"], {})[row["split"]] = int(row["examples"])
    return sizes
