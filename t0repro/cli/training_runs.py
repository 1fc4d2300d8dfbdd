"""`t0repro runs`, `plot` and `replay`: the state and the curves of training runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from t0repro.cli.options import AsJson
from t0repro.cli.paths import output
from t0repro.cli.results import echo, print_json, show_page
from t0repro.reports.curves import curves_in_words, curves_page, read_curves
from t0repro.reports.losses import LOSS
from t0repro.reports.training_runs import HEADER, describe_left_out, find_runs, run_rows, to_json
from t0repro.terminal import print_table, terminal


def runs(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A folder with training runs below it.")
    ] = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """List the training runs below a folder: state, step, loss, tokens, speed, time left.

    A training run is running, finished, stopped before its last step with everything saved, or
    failed; a run whose local process vanished is shown as failed. Mesh TensorFlow's runs
    record no state: they are named below the list.

    Example:
      t0repro runs runs
    """
    found = find_runs(folder)
    if as_json:
        print_json(to_json(found))
    else:
        numbers = (LOSS, "tokens", "tokens/s")
        print_table(terminal(), "", HEADER, run_rows(found), numbers=numbers)
    if left_out := describe_left_out(folder):
        echo(left_out, err=True)


def plot(
    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR...", help="Folders of training runs or evaluations, or above them."
        ),
    ],
    metric: Annotated[
        str | None,
        typer.Option(
            help="A metric of metrics.jsonl, or a tag of TensorBoard's.",
            show_default="loss; for evaluations, accuracy",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(callback=output, help="Folder for curves.json, .md and .html."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Draw a metric of several runs by step, in the terminal and as an HTML page.

    The loss is per target token; a run that has recorded it only in its own unit has a plot of its
    own. The page is a single self-contained file.

    Example:
      t0repro plot runs/a runs/b --out runs/plot
    """
    metric, panels = read_curves(folders, metric)
    content = {
        "metric": metric,
        "curves": {label: points for curves in panels.values() for label, points in curves.items()},
        "units": {label: title for title, curves in panels.items() for label in curves},
    }
    page, lines = curves_page(panels), curves_in_words(panels)
    show_page("curves", page, content, out, as_json=as_json, lines=lines)


def replay(
    folder: Annotated[
        Path, typer.Argument(help="A bad_update_<step> folder that a training run wrote.")
    ],
) -> None:
    """Recompute an update that went NaN or Inf; exit code 1 if it happens again.

    Example:
      t0repro replay runs/t0/bad_update_1200
    """
    from t0repro.training.bad_update import replay as run

    bad = run(folder)
    if bad is None:
        echo("every parameter, activation and gradient is finite")
        return
    echo(f"first: {bad}")
    raise typer.Exit(1)
