"""`t0repro adapters`: merges an adapter into its base, and gives the base back."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from t0repro.cli.checkpoint import print_conversion
from t0repro.cli.results import echo
from t0repro.cli.spelling import source, target

app = typer.Typer(
    name="adapters",
    help="Merge adapters into their base, and get the base back.",
    no_args_is_help=True,
    epilog="Example: t0repro adapters merge runs/my_adapter runs/my_model --to hf",
)

_Format = Literal["mtf", "t5x", "jax", "hf"]
_Target = Annotated[
    str, typer.Argument(callback=target, help="The directory to write, or an unused address.")
]
_Base = Annotated[
    str | None,
    typer.Option(callback=source, help="The base.", show_default="where it was recorded"),
]
_Force = Annotated[
    bool, typer.Option("--force", help="Write into OUT even if it exists; other files stay.")
]


@app.callback()
def _group() -> None:
    """Merge adapters into their base, and get the base back."""


@app.command()
def merge(
    adapter: Annotated[
        str,
        typer.Argument(callback=source, help="An adapter's checkpoint, or a folder of PEFT's."),
    ],
    out: _Target,
    to: Annotated[_Format, typer.Option(help="The format to write.")],
    base: _Base = None,
    force: _Force = False,
) -> None:
    """Write the base with an adapter merged into it, as a full checkpoint.

    `t0repro convert` does the same and has options for types, vocabularies and layouts.

    Example: t0repro adapters merge runs/my_adapter runs/my_model --to hf
    """
    echo(f"reading {adapter} ...", err=True)
    from t0repro.converters.merging import merge as merge_adapter

    print_conversion(merge_adapter(adapter, out, to, base=base, force=force))


@app.command()
def unmerge(
    merged: Annotated[
        str, typer.Argument(callback=source, help="A checkpoint that merge or convert wrote.")
    ],
    out: _Target,
    to: Annotated[
        _Format | None, typer.Option(help="The format to write.", show_default="the base's")
    ] = None,
    base: _Base = None,
    force: _Force = False,
) -> None:
    """Write the base of a merged checkpoint, bit for bit.

    Reads the base from the path that the merge recorded and compares its hash. Merging it again
    must give the merged checkpoint, bit for bit.

    Example: t0repro adapters unmerge runs/my_model runs/base
    """
    echo(f"reading {merged} ...", err=True)
    from t0repro.converters.merging import unmerge as unmerge_adapter

    print_conversion(unmerge_adapter(merged, out, to, base=base, force=force))
