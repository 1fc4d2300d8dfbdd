"""`t0repro runs` and `t0repro plot`: how trainings stand, and their curves."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Annotated

import typer

from t0repro.cli.options import AsJson


def runs(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A folder with trainings below it.")
    ] = Path("runs"),
    json: AsJson = False,
) -> None:
    """List the trainings below a folder: state, step, loss, tokens, speed, time left.

    A training is running, finished, stopped before its last step with everything saved, or failed;
    one whose process is gone counts as failed.

    Example: t0repro runs runs
    """
    from t0repro.reports.runs import HEADER, find_runs, rows, to_json
    from t0repro.terminal import print_table, terminal

    found = find_runs(folder)
    if json:
        typer.echo(json_format.dumps(to_json(found), indent=1))
    else:
        numbers = ("loss", "tokens", "tokens/s")
        print_table(terminal(), "", HEADER, rows(found), numbers=numbers)


def plot(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Folders of trainings.")],
    metric: Annotated[
        str, typer.Option(help="A metric of metrics.jsonl, or a tag of TensorBoard's.")
    ] = "loss",
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for curves.json, .md and .html.")
    ] = None,
) -> None:
    """Draw a metric of several trainings by step, in the terminal and as an HTML page.

    The page is one file that needs nothing else.

    Example: t0repro plot runs/a runs/b --out runs/plot
    """
    from t0repro.locks import folder_lock
    from t0repro.reports.curves import curves_in_words, curves_page, read_curves
    from t0repro.reports.terminal import print_page
    from t0repro.reports.write import write_page

    curves = read_curves(folders, metric)
    page = curves_page(curves, metric)
    print_page(page)
    for line in curves_in_words(curves):
        typer.echo(line)
    if out:
        content = json_format.dumps({"metric": metric, "curves": curves}, indent=1) + "\n"
        # Two commands that write into one folder would mix their files.
        with folder_lock(out, "drawing curves"):
            paths = write_page("curves", page, content, out)
        for path in paths:
            typer.echo(f"wrote {path}")
