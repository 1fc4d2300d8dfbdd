"""`t0repro doctor`: whether this installation works, and what is missing."""

from __future__ import annotations

import typer

from t0repro.cli.options import AsJson


def doctor(
    as_json: AsJson = False,
) -> None:
    """Check versions, devices, Mesh TensorFlow, extras and data; exit 1 if something is broken.

    Example: t0repro doctor --json
    """
    from t0repro import doctor as checks

    diagnosis = checks.diagnose()
    typer.echo(diagnosis.to_json() if as_json else diagnosis.to_text())
    if diagnosis.broken or not diagnosis.works:
        raise typer.Exit(1)
