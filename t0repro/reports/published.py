"""What others published for the same datasets."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Collection
from pathlib import Path

# published.csv has model, dataset (as prompts.dataset_label names it, ANLI's rounds together),
# statistic over prompts (mean or median), percent and source. A figure that is added, such as
# one of the paper's medians, names the source that it was read in.
_PUBLISHED = Path(__file__).parent / "published.csv"


@dataclasses.dataclass(frozen=True)
class PublishedFigure:
    """A figure that others published, in percent, and its source."""

    model: str
    dataset: str
    statistic: str
    value: float
    source: str


def published_figures(datasets: Collection[str]) -> tuple[PublishedFigure, ...]:
    """The published figures for datasets, in the file's order; ANLI's for any of its rounds."""
    wanted = {family_of(dataset) for dataset in datasets}
    # A source may contain commas and quotes; newline="" leaves them to the csv module.
    with open(_PUBLISHED, encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["dataset"] in wanted]
    return tuple(
        PublishedFigure(
            row["model"], row["dataset"], row["statistic"], float(row["value"]), row["source"]
        )
        for row in rows
    )


def family_of(dataset: str) -> str:
    """The dataset name under which figures were published: ANLI's rounds share one."""
    return "anli" if dataset.startswith("anli/") else dataset
