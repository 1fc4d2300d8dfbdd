"""The runs of an experiment, side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from t0repro.cloud.vertex.google import Place, cloud_errors, connect
from t0repro.errors import UserError, nearest_names

_FACTS = ("machine_type", "accelerator_type", "accelerator_count")


@dataclasses.dataclass(frozen=True)
class ComparedRun:
    """A job's run.

    Attributes:
      facts: its machines.
      metrics: name -> the maximum and the step of it.
    """

    name: str
    state: str
    facts: dict[str, Any]
    metrics: dict[str, tuple[float, int]]


def read_runs(experiment: str, names: Sequence[str], place: Place) -> list[ComparedRun]:
    """The jobs' runs of an experiment.

    Args:
      experiment: its name.
      names: the runs, in this order; empty for all that are jobs.
      place: project and location.

    Raises:
      UserError: If there is no such experiment or run.
    """
    aiplatform = connect(place)
    with cloud_errors("read the experiment", where=experiment):
        # Curves, which are not compared, would cost the client more calls, and calls have a quota.
        rows = aiplatform.Experiment(experiment).get_data_frame(include_time_series=False)
    # The uploader makes runs for TensorBoard's folders beside those of the jobs. A run without a
    # value has NaN in its column.
    records = [
        {key: value for key, value in row.items() if value is not None and value == value}
        for row in rows.to_dict("records")
    ]
    jobs = {row["run_name"]: row for row in records if row.get("param.job")}
    missing = [name for name in names if name not in jobs]
    if missing:
        raise UserError(
            f"The experiment {experiment} has no job {missing[0]}.",
            where="--run",
            fix=f"Nearest: {nearest_names(missing[0], jobs, count=3)}.",
        )
    return [_compared_run(jobs[name]) for name in names or sorted(jobs)]


def _compared_run(row: dict[str, Any]) -> ComparedRun:
    values = {key.removeprefix("metric."): row[key] for key in row if key.startswith("metric.")}
    return ComparedRun(
        name=row["run_name"],
        state=row["state"],
        facts={fact: row[f"param.{fact}"] for fact in _FACTS if row.get(f"param.{fact}")},
        metrics={
            # `results.best_metrics` gives each metric as a pair, NAME and NAME/step.
            name: (value, int(values[f"{name}/step"]))
            for name, value in values.items()
            if f"{name}/step" in values
        },
    )


def table(runs: Sequence[ComparedRun]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: a column for each run, a row for each fact and metric."""
    metrics = sorted({name for run in runs for name in run.metrics})
    rows = [["state", *(run.state for run in runs)]]
    rows += [[fact, *(_text(run.facts.get(fact, "")) for run in runs)] for fact in _FACTS]
    rows += [[name, *(_best(run, name) for run in runs)] for name in metrics]
    return ["", *(run.name for run in runs)], rows


def _best(run: ComparedRun, name: str) -> str:
    return "{:.6g} at {}".format(*run.metrics[name]) if name in run.metrics else ""


def _text(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
