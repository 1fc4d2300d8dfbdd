"""`t0repro compare`: two runs' losses or scores side by side, with an exit code for scripts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="compare",
    help="Compare the losses or the scores of two runs.",
    no_args_is_help=True,
)

_Tolerance = Annotated[
    float | None, typer.Option("--tol", help="Exit with 1 if a difference is larger than this.")
]
_LabelA = Annotated[str | None, typer.Option(help="What to call the first run.")]
_LabelB = Annotated[str | None, typer.Option(help="What to call the second run.")]


@app.command()
def losses(
    a: Annotated[Path, typer.Argument(help="metrics.jsonl of the first run.")],
    b: Annotated[Path, typer.Argument(help="metrics.jsonl of the second run.")],
    tol: _Tolerance = None,
    label_a: _LabelA = None,
    label_b: _LabelB = None,
) -> None:
    """Print two runs' training losses step by step, with the largest relative difference.

    Example: t0repro compare losses runs/mtf/metrics.jsonl runs/jax/metrics.jsonl --tol 1e-4
    """
    from t0repro.reports.compare import compare_losses
    from t0repro.reports.terminal import print_losses

    name_a, name_b = _names(a, b)
    compared = compare_losses(a, b, label_a=label_a or name_a, label_b=label_b or name_b)
    print_losses(compared)
    if tol is not None and not compared.within(tol):
        raise typer.Exit(1)


@app.command()
def scores(
    a: Annotated[Path, typer.Argument(help="<split>_eval folder of the first run.")],
    b: Annotated[Path, typer.Argument(help="<split>_eval folder of the second run.")],
    tol: Annotated[
        float | None,
        typer.Option(
            "--tol",
            help="Exit with 1 if a score differs by more than this per target token, or if an"
            " example is predicted differently.",
        ),
    ] = None,
    step_a: Annotated[int | None, typer.Option(help="Step of the first run; the latest.")] = None,
    step_b: Annotated[int | None, typer.Option(help="Step of the second run; the latest.")] = None,
    label_a: _LabelA = None,
    label_b: _LabelB = None,
) -> None:
    """Print where the predictions of two evaluations differ, and by how much their scores do.

    Example: t0repro compare scores runs/mtf/validation_eval runs/jax/validation_eval --tol 1e-4
    """
    from t0repro.reports.compare import compare_scores
    from t0repro.reports.terminal import print_scores

    name_a, name_b = _names(a, b)
    compared = compare_scores(
        a,
        b,
        step_a=step_a,
        step_b=step_b,
        label_a=label_a or name_a,
        label_b=label_b or name_b,
    )
    print_scores(compared)
    if tol is not None and not compared.within(tol):
        raise typer.Exit(1)


def _names(a: Path, b: Path) -> tuple[str, str]:
    """The runs' folders as labels, or a and b where they do not tell the two apart."""
    names = (a.resolve().parent.name, b.resolve().parent.name)
    return names if names[0] != names[1] and all(names) else ("a", "b")
