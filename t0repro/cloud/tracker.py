"""Sends a run's metrics and files to experiment trackers: Weights & Biases, MLflow, TensorBoard.

A tracker follows the run's folder. On either stack, the metrics are lines of metrics.jsonl. What
was sent is kept in `tracking.json` beside them, so a run that is killed and restarted continues the
same run of the tracker, and nothing is sent twice.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import importlib.util
import json
import os
import re
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Literal, Protocol

from t0repro.errors import UserError
from t0repro.event_files import event_writer
from t0repro.files import make_folder, write_atomically
from t0repro.progress import say

Outcome = Literal["finished", "failed", "stopped"]


class TrackerName(enum.StrEnum):
    """The trackers."""

    WANDB = "wandb"
    MLFLOW = "mlflow"
    TENSORBOARD = "tensorboard"


@dataclasses.dataclass(frozen=True)
class TrackedRun:
    """A run's data for a tracker.

    Attributes:
      folder: what the run writes into; a tracker's name for the run is the folder's name.
      parameters: settings of the run; nested mappings are joined by dots.
      files: patterns, relative to the folder, of the files to send when the run ends.
    """

    folder: Path
    parameters: Mapping[str, Any]
    files: tuple[str, ...]

    @property
    def name(self) -> str:
        """The run's name."""
        return self.folder.resolve().name

    def flat_parameters(self) -> dict[str, Any]:
        """Parameters by dotted names; those that are not set are left out."""
        return dict(_flat("", self.parameters))

    def found_files(self) -> list[Path]:
        """The files there are, each once."""
        found = {path for pattern in self.files for path in self.folder.glob(pattern)}
        return sorted(path for path in found if path.is_file())


class Tracker(Protocol):
    """One run in one tracker.

    Attributes:
      run_id: the tracker's own identifier, with which a restarted run continues.
    """

    run_id: str

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Records the values of one step."""

    def flush(self) -> None:
        """Returns once everything that was logged is stored, locally or at the tracker's server."""

    def send_file(self, path: Path, name: str) -> None:
        """Stores a file under a name that may contain slashes."""

    def close(self, outcome: Outcome) -> None:
        """Ends the run."""


def open_tracker(name: TrackerName, run: TrackedRun, run_id: str | None) -> Tracker:
    """Begins the run in a tracker, or continues the one with this identifier.

    Raises:
      UserError: if the tracker's package is not installed, or its server cannot be reached.
    """
    try:
        return _OPENERS[name](run, run_id)
    except ModuleNotFoundError as error:
        if error.name != name:  # a package that the tracker's own package needs
            raise
        raise _not_installed(name) from error


def check_trackers(names: Iterable[TrackerName] | None) -> None:
    """Raises UserError for a tracker whose package is not installed; imports none."""
    for name in names or ():
        own = name is not TrackerName.TENSORBOARD
        if own and name not in sys.modules and importlib.util.find_spec(name) is None:
            raise _not_installed(name)


def _not_installed(name: TrackerName) -> UserError:
    return UserError(
        f"--tracker {name} needs the package {name}.",
        where="--tracker",
        fix=f"Install it: EXTRAS={name} bash scripts/setup.sh",
    )


def _flat(prefix: str, values: Mapping[str, Any]):
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(f"{prefix}{name}.", value)
        elif value is not None:
            yield prefix + name, value


# ---- Following a run -----------------------------------------------------------------------------

TRACKING_FILE = "tracking.json"
_SECONDS = 5.0  # between polls of the metrics

_WRITING = threading.Lock()


@contextlib.contextmanager
def tracked(names: Iterable[TrackerName], run: TrackedRun) -> Iterator[None]:
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
            stack.enter_context(_followed(name, run))
        yield


@contextlib.contextmanager
def _followed(name: TrackerName, run: TrackedRun) -> Iterator[None]:
    is_new = not run.folder.exists()
    make_folder(run.folder)
    sent = _Sent.read(run.folder, name)
    say(f"tracking: opening a run of {name} ...")
    try:
        tracker = open_tracker(name, run, sent.run_id)
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
            for path in self._run.found_files():
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
            series, step, values = _parts(line)
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
        return cls(**_tracking(folder).get(name, {}))

    def write(self, folder: Path, name: str) -> None:
        # Each tracker has a thread, and all share the file.
        with _WRITING:
            state = _tracking(folder) | {name: dataclasses.asdict(self)}
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


def _tracking(folder: Path) -> dict[str, Any]:
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


def _parts(line: dict[str, Any]) -> tuple[str, int, dict[str, float]]:
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


# ---- Weights & Biases: in the project WANDB_PROJECT, by default `t0repro` ------------------------

# The library's own settings decide the rest. With WANDB_MODE=offline it writes into the run's
# folder; `wandb sync` sends that later.

_WANDB_STEP = "global_step"


def _open_wandb(run: TrackedRun, run_id: str | None) -> _WandbRun:
    """Begins a run, or continues one.

    Raises:
      UserError: if the server cannot be reached or rejects the user.
    """
    import wandb  # pyright: ignore[reportMissingImports]

    try:
        # Saving files ignores the run's `silent` and warns about each file that it links.
        wandb.setup(wandb.Settings(silent=True))
        opened = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "t0repro"),
            name=run.name,
            id=run_id,
            resume="allow",
            dir=os.fspath(run.folder),
            config=run.flat_parameters(),
            # Training uses the terminal, and the user's own repository has the code.
            settings=wandb.Settings(silent=True, console="off", disable_git=True),
        )
    except (wandb.errors.Error, OSError) as error:
        raise UserError(
            f"Weights & Biases did not begin a run: {error}",
            where="--tracker wandb",
            fix="Log in with `wandb login`, or set WANDB_MODE=offline.",
        ) from error
    # wandb drops values of a step below its own latest one. With a metric as the axis, evaluations
    # of earlier checkpoints are kept as well.
    opened.define_metric(_WANDB_STEP, hidden=True)
    opened.define_metric("*", step_metric=_WANDB_STEP)
    return _WandbRun(opened)


class _WandbRun:
    """A Tracker that writes one run of Weights & Biases."""

    def __init__(self, run: Any):
        self._run, self.run_id = run, run.id

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Records the values of one step."""
        self._run.log({**values, _WANDB_STEP: step})

    def flush(self) -> None:
        """Does nothing, because the library keeps what was logged on disk until it is sent."""

    def send_file(self, path: Path, name: str) -> None:
        """Adds a file to the run's files."""
        base = str(path)[: -len(name)] if str(path).endswith(name) else os.fspath(path.parent)
        self._run.save(os.fspath(path), base_path=base, policy="now")

    def close(self, outcome: Outcome) -> None:
        """Ends the run with its state."""
        self._run.finish(exit_code=0 if outcome == "finished" else 1)


# ---- MLflow: at MLFLOW_TRACKING_URI, in MLFLOW_EXPERIMENT_NAME (default: t0repro) ----------------

# MLflow's own limits on one request and on a parameter.
_METRICS_PER_REQUEST = 1000
_PARAMETERS_PER_REQUEST = 100
_LONGEST_PARAMETER = 6000

_MLFLOW_STATUS: dict[Outcome, str] = {
    "finished": "FINISHED",
    "failed": "FAILED",
    "stopped": "KILLED",
}


def _open_mlflow(run: TrackedRun, run_id: str | None) -> _MlflowRun:
    """Begins an MLflow run, or continues one.

    Raises:
      UserError: if the server cannot be reached or refuses.
    """
    from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]
    from mlflow.entities import Param  # pyright: ignore[reportMissingImports]

    with _few_retries(), _mlflow_errors():
        client = MlflowClient()
        if run_id is not None:
            # The run may have been ended as killed or failed.
            client.update_run(run_id, status="RUNNING")
            return _MlflowRun(client, run_id)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "t0repro")
        experiment = client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment else client.create_experiment(name)
        created = client.create_run(experiment_id, run_name=run.name)
        parameters = [
            Param(_mlflow_key(name), str(value)[:_LONGEST_PARAMETER])
            for name, value in run.flat_parameters().items()
        ]
        for start in range(0, len(parameters), _PARAMETERS_PER_REQUEST):
            part = parameters[start : start + _PARAMETERS_PER_REQUEST]
            client.log_batch(created.info.run_id, params=part)
        return _MlflowRun(client, created.info.run_id)


@contextlib.contextmanager
def _few_retries() -> Iterator[None]:
    """Limits the retries of an unreachable server to three, unless the user sets a number."""
    name = "MLFLOW_HTTP_REQUEST_MAX_RETRIES"
    if name in os.environ:
        yield
        return
    # With MLflow's 7, a command with a wrong address would wait silently for four minutes. Once the
    # run has begun, 7 are right, because an outage must not lose metrics.
    os.environ[name] = "3"
    try:
        yield
    finally:
        del os.environ[name]


class _MlflowRun:
    """A Tracker that writes one run of MLflow."""

    def __init__(self, client: Any, run_id: str):
        self._client, self.run_id = client, run_id
        self._waiting: list[Any] = []

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Records the values of one step; `flush` sends them."""
        from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]

        # In milliseconds of wall-clock time, because MLflow also plots metrics by time.
        now = int(time.time() * 1000)
        self._waiting += [
            Metric(_mlflow_key(name), value, now, step) for name, value in values.items()
        ]

    def flush(self) -> None:
        """Sends what was logged; keeps what a failing server did not accept."""
        with _mlflow_errors():
            while self._waiting:
                part = self._waiting[:_METRICS_PER_REQUEST]
                self._client.log_batch(self.run_id, metrics=part)
                del self._waiting[: len(part)]

    def send_file(self, path: Path, name: str) -> None:
        """Uploads a file into the run's artifacts."""
        # MLflow takes the folder as an argument and keeps the file's local name.
        folder = str(PurePosixPath(name).parent)
        with _mlflow_errors():
            self._client.log_artifact(self.run_id, str(path), None if folder == "." else folder)

    def close(self, outcome: Outcome) -> None:
        """Ends the run with its state."""
        with _mlflow_errors():
            self._client.set_terminated(self.run_id, _MLFLOW_STATUS[outcome])


def _mlflow_key(name: str) -> str:
    """A name with only the characters that MLflow accepts."""
    return re.sub(r"[^\w\-. /]", "_", name)


@contextlib.contextmanager
def _mlflow_errors() -> Iterator[None]:
    from mlflow.exceptions import MlflowException  # pyright: ignore[reportMissingImports]

    try:
        yield
    except (MlflowException, OSError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"MLflow did not take the run's metrics: {reason}",
            where=os.environ.get("MLFLOW_TRACKING_URI", "the local MLflow store"),
            fix="Check MLFLOW_TRACKING_URI and that its server runs.",
        ) from error


# ---- TensorBoard: every run writes its metrics there; this adds the settings and texts -----------

# Bytes of the largest file that is added as a text.
_LONGEST_TEXT = 100_000
_TEXTS = {".gin", ".json", ".md", ".txt"}


def _open_tensorboard(run: TrackedRun, run_id: str | None) -> _TensorBoardRun:
    """Writes the parameters; a resumed run continues in further event files."""
    return _TensorBoardRun(run, continued=run_id is not None)


class _TensorBoardRun:
    """A Tracker that writes texts into the run's folder, beside the metrics there."""

    def __init__(self, run: TrackedRun, *, continued: bool):
        self._writer, self.run_id = event_writer(run.folder), run.name
        if not continued:
            values = json.dumps(run.flat_parameters(), indent=2, default=str)
            self._write("parameters", values)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Does nothing, because the run itself writes its metrics into event files."""

    def flush(self) -> None:
        """Flushes the event file, so that readers see what was written."""
        self._writer.flush()

    def send_file(self, path: Path, name: str) -> None:
        """Adds a text file as a text; other files are only in the run's folder."""
        if path.suffix in _TEXTS and path.stat().st_size <= _LONGEST_TEXT:
            self._write(name, path.read_text(encoding="utf-8"))

    def close(self, outcome: Outcome) -> None:
        """Writes the run's state and closes the event file."""
        self._write("outcome", outcome)
        self._writer.close()

    def _write(self, name: str, text: str) -> None:
        # Indented by four, which Markdown shows verbatim.
        self._writer.write_texts(0, {name: "\n".join("    " + line for line in text.split("\n"))})


_OPENERS: Mapping[TrackerName, Callable[[TrackedRun, str | None], Tracker]] = {
    TrackerName.WANDB: _open_wandb,
    TrackerName.MLFLOW: _open_mlflow,
    TrackerName.TENSORBOARD: _open_tensorboard,
}
