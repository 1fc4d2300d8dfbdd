"""Puts a finished job's results where people read them, each once and in the order of steps.

A job writes into a folder of its own, and only what succeeded is copied out of it: TensorBoard's
files into the training's folder, so that its curves stand beside the training's; everything else
into the mixture's folder of results, where the files of all steps come together.
"""

from __future__ import annotations

import os
import shutil
import statistics
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

from t0repro.event_files import MARK, read_scalars
from t0repro.jobs.journal import Point
from t0repro.locks import LOCK_FILES

RESULTS = "results"


def publish_events(point: Point, output: Path, model_dir: Path) -> None:
    """Copies a job's event files into the training's folder; doing it twice is as doing it once.

    Args:
      point: what the job was for.
      output: what the job wrote. Event files keep their place below it; those at its top go to
        inference_eval/<mixture>.
      model_dir: the training's folder.
    """
    mixture = urllib.parse.quote(point.mixture, safe="")
    events = [path for path in _files(output) if MARK in path.name]
    for number, path in enumerate(sorted(events)):
        folder = path.parent.relative_to(output)
        if not folder.parts:
            folder = Path("inference_eval", mixture)
        # TensorBoard reads a folder's files in the order of their names, and never goes back.
        name = f"events.out.tfevents.{point.step:012d}.{mixture}.{number}"
        _copy(path, model_dir / folder / name)


def publish_files(output: Path, results: Path) -> None:
    """Copies a job's other files to where those of all steps come together.

    Names say the step where a file is a step's own; a later step's report replaces an earlier one.
    """
    for path in _files(output):
        if MARK not in path.name:
            _copy(path, results / path.relative_to(output))


def main_metric(output: Path, wanted: str | None = None) -> tuple[str, float] | None:
    """A job's main metric as (tag, value at its last step); None if it logged no scalar.

    Args:
      output: what the job wrote.
      wanted: a tag; by default the mean of the accuracies of all tasks, or else the first tag in
        alphabetical order.
    """
    found = _scalars(output)
    if wanted is not None:
        return (wanted, found[wanted]) if wanted in found else None
    accuracies = [value for tag, value in found.items() if tag.endswith("accuracy")]
    if len(accuracies) > 1:
        return f"mean accuracy of {len(accuracies)} tasks", statistics.fmean(accuracies)
    tags = sorted(found, key=lambda tag: (not tag.endswith("accuracy"), tag))
    return (tags[0], found[tags[0]]) if tags else None


def _scalars(output: Path) -> dict[str, float]:
    """Tag -> its last value in the event files below a folder."""
    folders = sorted({path.parent for path in _files(output) if MARK in path.name})
    last: dict[str, float] = {}
    for folder in folders:
        last |= {tag: points[-1][1] for tag, points in read_scalars(folder).items()}
    return last


def _files(folder: Path) -> Iterator[Path]:
    for parent, _, names in os.walk(folder):
        for name in names:
            if name not in LOCK_FILES:
                yield Path(parent, name)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        os.link(source, temporary)
    except OSError:
        shutil.copy2(source, temporary)
    os.replace(temporary, target)
    # Renaming one name of a file to another name of the same file leaves both.
    temporary.unlink(missing_ok=True)
