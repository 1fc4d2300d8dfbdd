"""`t0repro reproduce`: T0's zero-shot evaluation of a checkpoint, from nothing to the report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from t0repro.cli.groups import expand_groups
from t0repro.cli.paths import output, source
from t0repro.cli.results import echo


@expand_groups
def reproduce(
    out: Annotated[
        Path, typer.Option(callback=output, help="Folder for weights, scores and report.")
    ],
    name: Annotated[
        str | None, typer.Argument(help="A released checkpoint, as `checkpoint released` lists it.")
    ] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(callback=source, help="A checkpoint of your own instead, in any format."),
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(metavar="[LABEL=]DIR", help="Evaluate it with this adapter; repeatable."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Evaluate a sample of this many inputs per prompt.")
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(help="Also tell the hours on such devices: v5e-8, or 8xNVIDIA H100."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry_run", help="Only plan.")] = False,
) -> None:
    r"""Evaluate a checkpoint on T0's held-out prompts, next to the published figures.

    Prints what it takes: rows, bytes, memory, and hours from a minute's measurement. It asks once,
    then downloads what is missing, scores and writes the report. Started again, it continues.

    Example:
      t0repro reproduce bigscience/T0_3B --out runs/t0_3b --limit 100
    """
    echo("importing JAX and T0's prompts ...", err=True)
    from t0repro.cli.bodies import reproduce as body

    asked = body.Asked(name, checkpoint, tuple(adapter or ()), limit)
    body.run(asked, out, devices=devices, yes=yes, dry_run=dry_run)
