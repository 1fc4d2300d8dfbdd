"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

DEFAULT_MODULE = "t0repro.tasks.t0"

Modules = Annotated[
    list[str] | None,
    typer.Option("--module_import", help="A module that registers tasks; repeatable."),
]
ModulesOrT0 = Annotated[
    list[str] | None,
    typer.Option(
        "--module_import",
        help="A module that registers tasks; repeatable.",
        show_default=DEFAULT_MODULE,
    ),
]
Templates = Annotated[
    list[Path] | None,
    typer.Option(
        help="A file of your own prompts, in promptsource's YAML format; repeatable. Then no module"
        " is imported by default."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Resamples = Annotated[int, typer.Option(help="Random weightings for the intervals.", min=100)]
BootstrapSeed = Annotated[int, typer.Option(help="Seed of the random weightings.")]
TrainMixtures = Annotated[
    list[str] | None,
    typer.Option(
        help="A mixture that was trained on: its prompts do not count as held out; repeatable."
    ),
]
Label = Annotated[str, typer.Option(help="Name of the run in the report.")]
Title = Annotated[str, typer.Option(help="Heading of the report.")]
DType = Literal["float32", "bfloat16"]


def modules_or_t0(
    modules: Sequence[str] | None, templates: Sequence[Path] | None = None
) -> list[str]:
    """The modules that were named; T0's own if neither modules nor prompts were."""
    # One's own prompts need no tasks of T0's beside them.
    return list(modules or ([] if templates else [DEFAULT_MODULE]))
