"""The runs of an experiment, side by side."""

from __future__ import annotations

from collections.abc import Sequence

from t0repro.errors import UserError, nearest_names
from t0repro.vertex.cloud import Place, cloud_errors, connect

_FACTS = ("machine_type", "accelerator_type", "accelerator_count")


def compared(
    experiment: str, names: Sequence[str], place: Place
) -> tuple[list[str], list[list[str]]]:
    """A table of an experiment's runs: a column for each run, a row for each fact and metric.

    Args:
      experiment: its name.
      names: the runs, in this order; empty for all that are jobs.
      place: project and location.

    Returns:
      The header and the rows. A metric's cell holds its maximum and the step of it.

    Raises:
      UserError: If there is no such experiment or run.
    """
    aiplatform = connect(place)
    with cloud_errors("read the experiment", where=experiment):
        rows = aiplatform.Experiment(experiment).get_data_frame(include_time_series=False)
    # The uploader makes runs for TensorBoard's folders beside those of the jobs.
    found = {row["run_name"]: row for row in rows.to_dict("records") if _text(row.get("param.job"))}
    missing = [name for name in names if name not in found]
    if missing:
        raise UserError(
            f"The experiment {experiment} has no job {missing[0]}.",
            where="--run",
            fix=f"Nearest: {nearest_names(missing[0], found, count=3)}.",
        )
    chosen = [found[name] for name in names or sorted(found)]
    metrics = sorted(
        {
            key.removeprefix("metric.")
            for row in chosen
            for key in row
            if key.startswith("metric.") and not key.endswith("/step") and _text(row[key])
        }
    )
    table = [["state", *(_text(row["state"]) for row in chosen)]]
    table += [[fact, *(_text(row.get(f"param.{fact}")) for row in chosen)] for fact in _FACTS]
    table += [[name, *(_best(row, name) for row in chosen)] for name in metrics]
    return ["", *(row["run_name"] for row in chosen)], table


def _best(row: dict, name: str) -> str:
    value, step = _text(row.get(f"metric.{name}")), _text(row.get(f"metric.{name}/step"))
    return f"{value} at {step}" if value else ""


def _text(value: object) -> str:
    """A cell; pandas has NaN where a run lacks a value."""
    # NaN is the one value that differs from itself.
    if value is None or value != value:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
