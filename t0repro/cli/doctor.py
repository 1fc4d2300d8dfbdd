"""`t0repro doctor`: whether what is installed works."""

from __future__ import annotations

import typer

from t0repro import doctor as checks
from t0repro.cli.options import AsJson
from t0repro.cli.results import print_json
from t0repro.progress import working


def doctor(as_json: AsJson = False) -> None:
    """Check versions, devices, Mesh TensorFlow, extras and data; exit 1 if something is broken.

    Example:
      t0repro doctor --json
    """
    with working("checking JAX, and Mesh TensorFlow by a training step"):
        diagnosis = checks.diagnose()
    if as_json:
        print_json(diagnosis.to_json())
    else:
        typer.echo(diagnosis.to_text())
    if diagnosis.broken or not diagnosis.works:
        raise typer.Exit(1)
