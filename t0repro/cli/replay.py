"""`t0repro replay`: recomputes an update that went NaN or Inf."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from t0repro.cli.echo import echo


def replay(
    folder: Annotated[
        Path, typer.Argument(help="A bad_update_<step> folder that a training run wrote.")
    ],
) -> None:
    """Recompute an update that went NaN or Inf; exit code 1 if it does so again.

    Example: t0repro replay runs/t0/bad_update_1200
    """
    from t0repro.training.bad_update import replay as run

    bad = run(folder)
    if bad is None:
        echo("every parameter, activation and gradient is finite")
        return
    echo(f"first: {bad}")
    raise typer.Exit(1)
