"""Publishes a finished job's results, each once and in the order of steps.

Each job writes into its own folder, and only successful results leave it. TensorBoard's files go to
the training run's folder, so that both runs' curves appear together. Everything else is copied to
the mixture's folder of results, which collects the files of all steps.
"""

from __future__ import annotations

import os
import statistics
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from t0repro.event_files import MARK, read_scalars
from t0repro.files import put_file
from t0repro.jobs.journal import Point
from t0repro.locks import LOCK_FILES

RESULTS = "results"


def publish_events(point: Point, output: Path, model_dir: Path) -> None:
    """Moves a job's event files into the training run's folder.

    They are moved, not copied: TensorBoard reads every folder below the one it shows, and would
    show each point twice. An interrupted call can be repeated.

    Args:
      point: the job's point.
      output: the job's output folder. Event files keep their place below it; those at its top go to
        inference_eval/<mixture>.
      model_dir: the training run's folder, or its address.
    """
    mixture = urllib.parse.quote(point.mixture, safe="")
    for path in [path for path in _files(output) if MARK in path.name]:
        folder = path.parent.relative_to(output)
        if not folder.parts:
            folder = Path("inference_eval", mixture)
        # TensorBoard reads a folder's files in the order of their names, and never goes back.
        name = f"events.out.tfevents.{point.step:012d}.{mixture}.{path.name}"
        put_file(path, model_dir / folder / name)
        path.unlink()


def publish_files(output: Path, results: Path) -> None:
    """Copies a job's other files to the folder that collects all steps.

    Files of one step have the step in their names; a later step's report replaces an earlier one.
    """
    for path in _files(output):
        if MARK not in path.name:
            put_file(path, results / path.relative_to(output))


def main_metric(output: Path, wanted: str | None = None) -> tuple[str, float] | None:
    """A job's main metric as (tag, value at its last step); None if it logged no scalar.

    Args:
      output: the job's output folder.
      wanted: a tag; defaults to the accuracy of the evaluated tasks, or else the first tag in
        alphabetical order. If several tasks have it, returns their mean.
    """
    found = _scalars(output)
    accuracies = [one for one in found if one.tag.endswith("accuracy")]
    chosen = (
        [one for one in found if one.tag == wanted]
        if wanted is not None
        # A job that trains also logs its training run's accuracy.
        else [one for one in accuracies if one.tag.startswith("eval/")] or accuracies or found[:1]
    )
    if not chosen:
        return None
    tags = {one.tag for one in chosen}
    name = tags.pop() if len(tags) == 1 else "accuracy"
    if len(chosen) > 1:
        name = f"mean {name} of {len(chosen)} tasks"
    return name, statistics.fmean(one.value for one in chosen)


class _Scalar(NamedTuple):
    tag: str
    folder: str
    value: float


def _scalars(output: Path) -> list[_Scalar]:
    """The last value of each tag in each folder of event files, by tag and folder.

    SeqIO has a folder per task, and all have the same tags.
    """
    folders = {path.parent for path in _files(output) if MARK in path.name}
    return sorted(
        _Scalar(tag, str(folder), points[-1][1])
        for folder in folders
        for tag, points in read_scalars(folder).items()
    )


def _files(folder: Path) -> Iterator[Path]:
    for parent, _, names in os.walk(folder):
        for name in names:
            if name not in LOCK_FILES:
                yield Path(parent, name)
