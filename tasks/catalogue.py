"""T0's datasets: its own table, and what is known of each dataset and of where its data is today.

datasets.csv: T0's table, after bigscience-workshop/t-zero.
catalog.csv: splits and their sizes in T0's time, licence, today's repository.
features.json: the features of each in `datasets` 1.12, which T0's templates were written for.
p3_sizes.csv: examples of each task and split of the released P3. The counts are those of
  google-research/FLAN at e9e4ec6e, flan/v2/constants_t0.py (Apache-2.0): what is left after a
  template has dropped the rows that it has no prompt for.
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
CATALOGUE = _DATA / "catalog.csv"
FEATURES = _DATA / "features.json"
P3_SIZES = _DATA / "p3_sizes.csv"


@dataclasses.dataclass(frozen=True)
class T0Dataset:
    """A dataset configuration of T0.

    Attributes:
      dataset: the Hugging Face name.
      subset: the configuration, or None.
      train: which training mixture it entered with: BASE (T0), GPT_EVAL (T0+), SGLUE (T0++), or "".
      evaluate: BASE, BIAS_FAIRNESS, or "".
      train_size: the number of training examples, 0 where it is not trained on and has no count.
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
      name: of the column in the data.
      after: the class names of the data have a prefix that ends so, as `NUM:date` has for `date`.
    """

    name: str
    after: str = ""


@dataclasses.dataclass(frozen=True)
class HubPlace:
    """Where a dataset lies on the Hugging Face hub today.

    Attributes:
      repository: `owner/name`.
      configuration: folder of the configuration in the revision, `*` where there is only one.
      revision: a branch; `refs/convert/parquet` is the one that the hub itself keeps in Parquet,
        `<configuration>/<split>/NNNN.parquet`, loading scripts or not.
    """

    repository: str
    configuration: str
    revision: str


@dataclasses.dataclass(frozen=True)
class CatalogueEntry:
    """What is known of a dataset configuration.

    Attributes:
      dataset: the Hugging Face name in T0's time.
      subset: the configuration, or None.
      splits: split -> number of rows, as in `datasets` 1.12.
      licence: of the data, as far as it is known; empty where it is not.
      hub: where it lies today, or None where it is only to be had from its authors.
      aliases: column -> other names that it goes by today.
    """

    dataset: str
    subset: str | None
    splits: Mapping[str, int]
    licence: str
    hub: HubPlace | None
    aliases: Mapping[str, Sequence[Alias]]

    @property
    def label(self) -> str:
        """The dataset and its subset, for a person."""
        return label(self.dataset, self.subset)


SYNTHETIC = "synthetic_"


def is_synthetic(dataset: str) -> bool:
    """Whether a dataset's rows are generated, which its name says: `synthetic_imdb`."""
    return dataset.startswith(SYNTHETIC)


def modelled_on(dataset: str) -> str:
    """The dataset whose templates, columns and metrics a dataset has.

    That is the dataset itself, except that `synthetic_imdb` has those of `imdb`: a name that says
    that rows are generated must not stand in the way of finding the prompts for them.
    """
    return dataset.removeprefix(SYNTHETIC)


def label(dataset: str, subset: str | None) -> str:
    """`dataset` or `dataset/subset`."""
    return dataset if subset is None else f"{dataset}/{subset}"


def t0_datasets() -> list[T0Dataset]:
    """The rows of the table in its order."""
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
def catalogue() -> Mapping[tuple[str, str | None], CatalogueEntry]:
    """Every dataset configuration of T0's table, by dataset and subset."""
    with open(CATALOGUE, newline="", encoding="utf-8") as file:
        entries = [_entry(row) for row in csv.DictReader(file)]
    return types.MappingProxyType({(entry.dataset, entry.subset): entry for entry in entries})


def _entry(row: Mapping[str, str]) -> CatalogueEntry:
    sizes = (item.split("=") for item in row["splits"].split())
    return CatalogueEntry(
        dataset=row["dataset"],
        subset=row["subset"] or None,
        splits={split: int(size) for split, size in sizes},
        licence=row["licence"],
        hub=(
            HubPlace(row["repository"], row["configuration"], row["revision"])
            if row["source"] == "hub"
            else None
        ),
        aliases=_aliases(row["aliases"]),
    )


def _aliases(text: str) -> dict[str, list[Alias]]:
    """`column=other`, or `column=other:` where class names carry a prefix that ends in a colon."""
    found: dict[str, list[Alias]] = {}
    for item in filter(None, text.split(";")):
        column, other = item.split("=")
        name = other.rstrip(":")
        found.setdefault(column, []).append(Alias(name, other[len(name) :]))
    return found


@functools.cache
def _all_features() -> Mapping[str, Mapping[str, Any]]:
    return json.loads(FEATURES.read_text(encoding="utf-8"))


def features_of(dataset: str, subset: str | None) -> Mapping[str, Any] | None:
    """Column -> feature, or None for a dataset that is not in the catalogue."""
    return _all_features().get(label(modelled_on(dataset), subset))


def rounds_of(dataset: str) -> Mapping[str, Mapping[str, str]]:
    """Suffix of the tasks' names -> {split of the task: split of ANLI}; empty for other datasets.

    ANLI's three rounds are splits of one dataset (train_r1, dev_r1, test_r1, ...); T0 makes a task
    of each.
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
    """Task -> split -> examples; tasks that P3 lacks, or whose size is not known, are not there."""
    sizes: dict[str, dict[str, int]] = {}
    with open(P3_SIZES, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            sizes.setdefault(row["task"], {})[row["split"]] = int(row["examples"])
    return sizes
