"""`t0repro doctor`: whether this installation works, and what is missing."""

from __future__ import annotations

import typer

from t0repro.cli.options import AsJson
from t0repro.cli.results import print_json


def doctor(
    as_json: AsJson = False,
) -> None:
    """Check versions, devices, Mesh TensorFlow, extras and data; exit 1 if something is broken.

    Example: t0repro doctor --json
    """
    from t0repro import doctor as checks

    diagnosis = checks.diagnose()
    if as_json:
        print_json(diagnosis.to_json())
    else:
        typer.echo(diagnosis.to_text())
    if diagnosis.broken or not diagnosis.works:
        raise typer.Exit(1)
