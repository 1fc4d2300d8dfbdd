"""T0's table of datasets: datasets.csv beside this file, after bigscience-workshop/t-zero."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Mapping
from pathlib import Path

TABLE = Path(__file__).parent / "datasets.csv"


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
