"""Follows a run's folder and sends its metrics and files to trackers.

On either stack, the metrics are lines of metrics.jsonl. What was sent is kept in `tracking.json`
in the same folder, so a run that is killed and restarted continues the same run of the tracker,
and nothing is sent twice.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import threading
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from t0repro.cloud.trackers.table import TrackerName, check_trackers
from t0repro.cloud.trackers.tracker import Outcome, TrackedRun, Tracker
from t0repro.errors import UserError
from t0repro.progress import say
from t0repro.storage import make_folder, write_atomically

TRACKING_FILE = "tracking.json"
_SECONDS = 5.0  # between polls of the metrics

_WRITING = threading.Lock()


@contextlib.contextmanager
def track(names: Iterable[TrackerName], run: TrackedRun) -> Iterator[None]:
    """Sends what the block writes into the run's folder to trackers, and the files when it ends.

    A tracker that fails does not stop the run: what it did not accept is sent again at the next
    poll, and when the same run starts again.

    Args:
      names: the trackers; the run goes to each of them.
      run: what is tracked.

    Raises:
      UserError: before the block, if a tracker cannot be opened.
    """
    with contextlib.ExitStack() as stack:
        # A tracker that is named twice would otherwise get everything twice.
        for name in dict.fromkeys(names):
            stack.enter_context(_track_one(name, run))
        yield


@contextlib.contextmanager
def _track_one(name: TrackerName, run: TrackedRun) -> Iterator[None]:
    is_new = not run.folder.exists()
    make_folder(run.folder)
    sent = _Sent.read(run.folder, name)
    say(f"tracking: opening a run of {name} ...")
    try:
        check_trackers([name])
        tracker = importlib.import_module(f"{__package__}.{name}_tracker").open_run(
            run, sent.run_id
        )
    except UserError:
        if is_new:  # remove the folder made for it
            with contextlib.suppress(OSError):
                run.folder.rmdir()
        raise
    sent.run_id = tracker.run_id
    sent.write(run.folder, name)
    say(f"tracking: run {tracker.run_id} of {name}")
    with _Follower(name, tracker, run, sent):
        yield


class _Follower:
    """A thread that sends new metrics of one run to one tracker."""

    def __init__(self, name: TrackerName, tracker: Tracker, run: TrackedRun, sent: _Sent):
        # Imports numpy, which the help of commands with --tracker does without.
        from t0repro.training.metrics import METRICS_FILE

        self._name, self._tracker, self._run = name, tracker, run
        self._sent, self._unsaved = sent, False
        self._lines = _NewLines(run.folder / METRICS_FILE)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"tracking-{name}", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: Any) -> None:
        self._ended.set()
        # The thread uses the tracker and the position in the file, as the lines below do.
        self._thread.join()
        # The last metrics are in the file by now.
        with self._failures("ends incomplete"):
            self._send_new()
            for path in self._run.list_files():
                name = path.relative_to(self._run.folder).as_posix()
                self._tracker.send_file(path, name)
        with self._failures("was not ended"):
            self._tracker.close(_outcome(kind))

    def _work(self) -> None:
        while not self._ended.wait(_SECONDS):
            with self._failures("waits"):
                self._send_new()

    def _send_new(self) -> None:
        """Sends the lines added since the last poll, and notes that they were sent."""
        for line in self._lines.read():
            series, step, values = _split_line(line)
            if series != "train":
                # A rank evaluation has a line for each task, so a split's step may have several.
                # Their names tell them apart.
                series += f" {zlib.crc32(' '.join(sorted(values)).encode()):08x}"
            if values and self._sent.add(series, step):
                self._tracker.log(step, values)
                self._unsaved = True
        self._tracker.flush()
        # Only now: a line noted as sent that was not would be lost.
        if self._unsaved:
            self._sent.write(self._run.folder, self._name)
            self._unsaved = False

    @contextlib.contextmanager
    def _failures(self, what: str) -> Iterator[None]:
        try:
            yield
        except UserError as error:
            say(f"tracking: {self._name} {what}: {error}")


class _NewLines:
    """The complete lines that were added to a file since the last poll.

    A training run that resumes replaces the file by its lines up to the checkpoint; reading then
    starts again.
    """

    def __init__(self, path: Path):
        self._path, self._file, self._offset = path, (0, 0), 0

    def read(self) -> list[dict[str, Any]]:
        try:
            with open(self._path, "rb") as file:
                status = os.fstat(file.fileno())
                identity = (status.st_dev, status.st_ino)
                if identity != self._file or status.st_size < self._offset:
                    self._file, self._offset = identity, 0
                file.seek(self._offset)
                text = file.read()
        except FileNotFoundError:
            return []
        whole = text[: text.rfind(b"\n") + 1]  # the last line may be half written
        self._offset += len(whole)
        return [json.loads(line) for line in whole.splitlines()]


@dataclasses.dataclass
class _Sent:
    """What a tracker has of a run, as tracking.json keeps it.

    Attributes:
      run_id: the tracker's run; None before it was begun.
      trained: the latest step of training, whose steps only grow.
      evaluated: the steps of every other series; checkpoints may be evaluated in any order.
    """

    run_id: str | None = None
    trained: int = -1
    evaluated: dict[str, list[int]] = dataclasses.field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path, name: str) -> _Sent:
        return cls(**_read_tracking(folder).get(name, {}))

    def write(self, folder: Path, name: str) -> None:
        # Each tracker has a thread, and all share the file.
        with _WRITING:
            state = _read_tracking(folder) | {name: dataclasses.asdict(self)}
            write_atomically(folder / TRACKING_FILE, json.dumps(state, indent=2))

    def add(self, series: str, step: int) -> bool:
        """Notes a step of a series; False if the tracker has it."""
        if series == "train":
            is_new = step > self.trained
            self.trained = max(self.trained, step)
            return is_new
        steps = self.evaluated.setdefault(series, [])
        if step in steps:
            return False
        steps.append(step)
        return True


def _read_tracking(folder: Path) -> dict[str, Any]:
    path = folder / TRACKING_FILE
    if not path.exists():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(
            f"This is not JSON: {error}.",
            where=str(path),
            fix="Remove the file: the run then starts over in the tracker.",
        ) from error


def _split_line(line: dict[str, Any]) -> tuple[str, int, dict[str, float]]:
    """The series of a line of metrics.jsonl, its step, and its values under TensorBoard's tags."""
    split, task = line.pop("split"), line.pop("task", None)
    step = int(line.pop("step"))
    series = split if task is None else f"{split}/{task}"
    numbers = {
        name: value
        for name, value in line.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    return series, step, {f"{series}/{name}": float(value) for name, value in numbers.items()}


def _outcome(kind: type[BaseException] | None) -> Outcome:
    if kind is None:
        return "finished"
    # Signals end a training run by SystemExit after it has saved its state.
    return "stopped" if issubclass(kind, KeyboardInterrupt | SystemExit) else "failed"
