"""`t0repro adapters`: merges adapters into their base, and gets the base back."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from t0repro.cli.commands import App
from t0repro.cli.convert import Force, Target, print_conversion
from t0repro.cli.paths import source
from t0repro.cli.results import echo
from t0repro.converters.merging import merge as merge_adapter
from t0repro.converters.merging import unmerge as unmerge_adapter

app = App(
    "adapters",
    help="Merge adapters into their base, and get the base back; convert --to peft exports one.",
    no_args_is_help=True,
    example="t0repro adapters merge runs/my_adapter runs/merged --to hf",
)

_FullFormat = Literal["mtf", "t5x", "jax", "hf"]
_RecordedBase = Annotated[
    str | None,
    typer.Option(callback=source, help="The base.", show_default="where it was recorded"),
]


@app.command()
def merge(
    adapter: Annotated[
        str,
        typer.Argument(callback=source, help="An adapter's checkpoint, or a folder of PEFT's."),
    ],
    out: Target,
    to: Annotated[_FullFormat, typer.Option(help="The format to write.")],
    base: _RecordedBase = None,
    force: Force = False,
) -> None:
    """Write the base with an adapter merged into it, as a full checkpoint.

    `t0repro convert` does the same and has options for types, vocabularies and layouts.

    Example:
      t0repro adapters merge runs/my_adapter runs/merged --to hf
    """
    echo(f"reading {adapter} ...", err=True)

    print_conversion(merge_adapter(adapter, out, to, base=base, force=force))


@app.command()
def unmerge(
    merged: Annotated[
        str, typer.Argument(callback=source, help="A checkpoint that merge or convert wrote.")
    ],
    out: Target,
    to: Annotated[
        _FullFormat | None, typer.Option(help="The format to write.", show_default="the base's")
    ] = None,
    base: _RecordedBase = None,
    force: Force = False,
) -> None:
    """Write the base of a merged checkpoint, bit for bit.

    Reads the base from the path that the merge recorded and compares its hash. Merging it again
    must give the merged checkpoint, bit for bit.

    Example:
      t0repro adapters unmerge runs/merged runs/base
    """
    echo(f"reading {merged} ...", err=True)

    print_conversion(unmerge_adapter(merged, out, to, base=base, force=force))
