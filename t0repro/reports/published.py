"""Figures that others have published for T0's evaluation sets, each with its source.

They are in published.csv: model, dataset (as prompts.dataset_label names it, ANLI's rounds
together), statistic over prompts (mean or median), percent, source. Further figures, such as the
paper's own table of medians, are added there, each with the source that it was read in.
"""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Collection
from pathlib import Path

_FILE = Path(__file__).parent / "published.csv"


@dataclasses.dataclass(frozen=True)
class PublishedFigure:
    """A figure that others have published, in percent, and where it stands."""

    model: str
    dataset: str
    statistic: str
    value: float
    source: str


def published_figures(datasets: Collection[str]) -> tuple[PublishedFigure, ...]:
    """The figures for some datasets, in the file's order; ANLI's for any of its rounds."""
    wanted = {family_of(dataset) for dataset in datasets}
    # A source may contain commas and quotes; newline="" leaves them to the csv module.
    with open(_FILE, encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["dataset"] in wanted]
    return tuple(
        PublishedFigure(
            row["model"], row["dataset"], row["statistic"], float(row["value"]), row["source"]
        )
        for row in rows
    )


def family_of(dataset: str) -> str:
    """The name under which a dataset's figures were published: ANLI's rounds are one."""
    return "anli" if dataset.startswith("anli/") else dataset
