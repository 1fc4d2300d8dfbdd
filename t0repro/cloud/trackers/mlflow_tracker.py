"""MLflow: at MLFLOW_TRACKING_URI, in MLFLOW_EXPERIMENT_NAME (default: t0repro)."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]
from mlflow.entities import Metric, Param  # pyright: ignore[reportMissingImports]
from mlflow.exceptions import MlflowException  # pyright: ignore[reportMissingImports]

from t0repro.cloud.trackers.tracker import Outcome, TrackedRun, Tracker
from t0repro.errors import UserError

# MLflow's own limits on one request and on a parameter.
_METRICS_PER_REQUEST = 1000
_PARAMETERS_PER_REQUEST = 100
_LONGEST_PARAMETER = 6000

_STATUS: dict[Outcome, str] = {
    "finished": "FINISHED",
    "failed": "FAILED",
    "stopped": "KILLED",
}


def open_run(run: TrackedRun, run_id: str | None) -> Tracker:
    """Begins an MLflow run, or continues one.

    Raises:
      UserError: if the server cannot be reached or refuses.
    """
    with _few_retries(), _server_errors():
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
            Param(_metric_key(name), str(value)[:_LONGEST_PARAMETER])
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
        # In milliseconds of wall-clock time, because MLflow also plots metrics by time.
        now = int(time.time() * 1000)
        self._waiting += [
            Metric(_metric_key(name), value, now, step) for name, value in values.items()
        ]

    def flush(self) -> None:
        """Sends what was logged; keeps what a failing server did not accept."""
        with _server_errors():
            while self._waiting:
                part = self._waiting[:_METRICS_PER_REQUEST]
                self._client.log_batch(self.run_id, metrics=part)
                del self._waiting[: len(part)]

    def send_file(self, path: Path, name: str) -> None:
        """Uploads a file into the run's artifacts."""
        # MLflow takes the folder as an argument and keeps the file's local name.
        folder = str(PurePosixPath(name).parent)
        with _server_errors():
            self._client.log_artifact(self.run_id, str(path), None if folder == "." else folder)

    def close(self, outcome: Outcome) -> None:
        """Ends the run with its state."""
        with _server_errors():
            self._client.set_terminated(self.run_id, _STATUS[outcome])


def _metric_key(name: str) -> str:
    """A name with only the characters that MLflow accepts."""
    return re.sub(r"[^\w\-. /]", "_", name)


@contextlib.contextmanager
def _server_errors() -> Iterator[None]:
    try:
        yield
    except (MlflowException, OSError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"MLflow did not take the run's metrics: {reason}",
            where=os.environ.get("MLFLOW_TRACKING_URI", "the local MLflow store"),
            fix="Check MLFLOW_TRACKING_URI and that its server runs.",
        ) from error
