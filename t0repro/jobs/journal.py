"""The journal of auxiliary jobs, one line per event, and the status derived from it."""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from t0repro.errors import UserError
from t0repro.storage.disk import name_in_errors, sync
from t0repro.terminal import bars

FOLDER = "auxiliary"
JOURNAL = "journal.jsonl"

State = Literal["waiting", "running", "succeeded", "retrying", "given up", "missed"]
_STATES: Mapping[str, State] = {
    "seen": "waiting",
    "started": "running",
    "interrupted": "waiting",
    "again": "waiting",
    "failed": "retrying",
    "succeeded": "succeeded",
    "given up": "given up",
    "missed": "missed",
}
FINAL: frozenset[State] = frozenset(["succeeded", "given up", "missed"])


@dataclasses.dataclass(frozen=True, order=True)
class Point:
    """One checkpoint with one mixture: the subject of one job, and one point of a curve."""

    step: int
    mixture: str


@dataclasses.dataclass(frozen=True)
class PointProgress:
    """A point's progress.

    Attributes:
      attempt: number of the latest job, from 1; 0 before the first.
      failures: jobs that failed by themselves since the controller was asked to retry; interrupted
        ones do not count.
      published: whether its results are in their final place.
      seconds: duration of the job that succeeded.
      metric: its main metric, as (tag, value).
      reason: why the latest job failed.
    """

    state: State = "waiting"
    attempt: int = 0
    failures: int = 0
    published: bool = False
    seconds: float | None = None
    metric: tuple[str, float] | None = None
    reason: str = ""

    @property
    def is_final(self) -> bool:
        """Whether no further job will be started."""
        return self.state in FINAL


class JobJournal:
    """Reads a folder's journal and adds to it; the caller holds the folder's lock while it adds."""

    def __init__(self, folder: Path):
        """Reads the existing journal.

        Raises:
          UserError: if a line is damaged in a way that only editing explains.
        """
        self.path = folder / JOURNAL
        self.progress: dict[Point, PointProgress] = {}
        lines = self.path.read_bytes().split(b"\n") if self.path.exists() else []
        for number, line in enumerate(lines, 1):
            try:
                if line:
                    self._take(json.loads(line))
            except (ValueError, KeyError, TypeError) as error:
                # A dying process leaves only a bad last line, or a truncated one.
                if number < len(lines) and not _was_cut(line):
                    raise UserError(
                        f"Line {number} of the journal cannot be read: {error}.",
                        where=str(self.path),
                        fix="Restore the file, or delete the folder to run every job again.",
                    ) from error

    def add(self, event: str, point: Point, **details: Any) -> PointProgress:
        """Writes an event ("seen", "started", "failed", ...) and returns the point's progress."""
        line = {"event": event, **dataclasses.asdict(point), **details}
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        _append(self.path, json.dumps(line | {"time": now}))
        self._take(line)
        return self.progress[point]

    def _take(self, event: Mapping[str, Any]) -> None:
        point = Point(event["step"], event["mixture"])
        before = self.progress.get(point, PointProgress())
        if event["event"] == "published":
            self.progress[point] = dataclasses.replace(before, published=True)
            return
        metric = event.get("metric")
        self.progress[point] = dataclasses.replace(
            before,
            state=_STATES[event["event"]],
            attempt=event.get("attempt", before.attempt),
            # A user who asks for another try has removed the cause of the earlier failures.
            failures=0
            if event["event"] == "again"
            else before.failures + (event["event"] == "failed"),
            seconds=event.get("seconds", before.seconds),
            metric=(metric[0], metric[1]) if metric else before.metric,
            reason=event.get("reason", before.reason),
        )


def _append(path: Path, line: str) -> None:
    is_new = not path.exists()
    with name_in_errors(path), open(path, "ab") as file:
        # A line truncated by a power failure must not absorb this one.
        cut = file.tell() > 0 and not _ends_in_newline(path)
        file.write((b"\n" if cut else b"") + line.encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    # A new file's name is on disk only once its folder is.
    if is_new:
        sync(path.parent)


def _ends_in_newline(path: Path) -> bool:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _was_cut(line: bytes) -> bool:
    """Whether a line is truncated, as a killed write leaves it."""
    return line.startswith(b"{") and not line.endswith(b"}")


HEADER = ("checkpoint", "mixture", "state", "attempts", "seconds", "metric")


def read_status(model_dir: Path) -> dict[Point, PointProgress]:
    """Every point of a training run's auxiliary jobs, by step and mixture.

    Raises:
      UserError: if there are none.
    """
    folder = model_dir / FOLDER
    if not (folder / JOURNAL).exists():
        raise UserError(
            "There are no auxiliary jobs here.",
            where=str(model_dir),
            fix=f"Give {model_dir.parent}."
            if model_dir.name == FOLDER and (model_dir / JOURNAL).exists()
            else "Give the folder of a training run beside which `t0repro aux` runs or has run.",
        )
    return dict(sorted(JobJournal(folder).progress.items()))


def rows(status: dict[Point, PointProgress]) -> list[tuple[str, ...]]:
    """The cells of a table with the columns of HEADER."""
    return [
        (
            f"{point.step:,}",
            point.mixture,
            # A point that finally succeeded still has the reason of an earlier failure.
            f"{each.state}: {each.reason}" if _is_bad(each) else each.state,
            str(each.attempt),
            "" if each.seconds is None else f"{each.seconds:.0f}",
            "" if each.metric is None else f"{each.metric[0]} {each.metric[1]:.4g}",
        )
        for point, each in status.items()
    ]


def _is_bad(progress: PointProgress) -> bool:
    return progress.state in ("retrying", "given up") and bool(progress.reason)


def to_json(status: dict[Point, PointProgress]) -> list[dict[str, Any]]:
    """One object for each point."""
    return [
        {
            "step": point.step,
            "mixture": point.mixture,
            "state": each.state,
            "attempts": each.attempt,
            "seconds": each.seconds,
            "metric": None if each.metric is None else {each.metric[0]: each.metric[1]},
            "reason": each.reason or None,
        }
        for point, each in status.items()
    ]


def curves(status: dict[Point, PointProgress]) -> list[str]:
    """One line for each mixture: its main metric over the steps, as bars, from first to last.

    Values that are NaN or Inf are left out of curves; the table has them.
    """
    lines = []
    by_mixture = sorted(status.items(), key=lambda item: (item[0].mixture, item[0].step))
    for mixture, points in itertools.groupby(by_mixture, key=lambda item: item[0].mixture):
        found = [
            (point.step, each.metric)
            for point, each in points
            if each.metric is not None and math.isfinite(each.metric[1])
        ]
        # One point does not make a curve.
        if len(found) > 1:
            tag, values = found[0][1][0], [metric[1] for _, metric in found]
            steps = f"steps {found[0][0]:,} to {found[-1][0]:,}"
            ends = f"{values[0]:.4g} to {values[-1]:.4g}"
            lines.append(f"{mixture}: {tag}  {bars(values)}  {ends}, {steps}")
    return lines
