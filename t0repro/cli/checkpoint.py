"""`t0repro checkpoint inspect`, `diff` and `verify`: what checkpoints hold, and if it is sound."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from t0repro.words import counted

if TYPE_CHECKING:
    from t0repro.converters.compare import Comparison
    from t0repro.converters.inspection import Inspection

_ROWS_SHOWN = 20


def inspect(
    path: Annotated[
        str,
        typer.Argument(
            help="A model_dir, a checkpoint_<step> directory, a prefix .../model.ckpt-<step>, or a"
            " Hugging Face directory."
        ),
    ],
    step: Annotated[int | None, typer.Option(help="This step, not the latest.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print every tensor of a checkpoint (name, shape, type, norm) and which model it is.

    Example: t0repro checkpoint inspect runs/t0
    """
    from t0repro.converters.inspection import inspect_checkpoint

    inspection = inspect_checkpoint(path, step)
    if as_json:
        import json

        typer.echo(json.dumps(inspection.to_json(), indent=1))
    else:
        _print_inspection(inspection)


def diff(
    a: Annotated[str, typer.Argument(help="A checkpoint of any format.")],
    b: Annotated[str, typer.Argument(help="Another, of any format.")],
    tol: Annotated[
        float, typer.Option(help="Largest absolute difference to let pass; 0: the same bits.")
    ] = 0.0,
    slots: Annotated[bool, typer.Option(help="Compare the optimizer's slots too.")] = True,
) -> None:
    """Compare two checkpoints tensor by tensor; exit code 1 when they differ beyond --tol.

    Example: t0repro checkpoint diff runs/t0 runs/t0_jax
    """
    from t0repro.converters.compare import compare

    comparison = compare(a, b, tolerance=tol, slots=slots)
    _print_comparison(comparison)
    if comparison.failures:
        raise typer.Exit(1)


def verify(
    path: Annotated[
        str,
        typer.Argument(
            help="A model_dir, a checkpoint_<step> directory, a prefix .../model.ckpt-<step>, or a"
            " Hugging Face directory."
        ),
    ],
    step: Annotated[int | None, typer.Option(help="This step, not the latest.")] = None,
) -> None:
    """Check a checkpoint: files, sizes, checksums, shapes, no NaN or Inf; exit code 1 if it fails.

    Example: t0repro checkpoint verify runs/t0_jax
    """
    from t0repro.converters.verification import verify as verify_checkpoint

    verification = verify_checkpoint(path, step)
    ref, family = verification.checkpoint, verification.family
    typer.echo(
        f"{ref.path} ({ref.format}): {family.name}, {counted(verification.tensors, 'tensor')}"
    )
    typer.echo(f"Checked: {'; '.join(verification.checks)}.")
    for gap in verification.unchecked:
        typer.echo(f"Could not be checked: {gap}")
    for problem in verification.problems:
        typer.echo(f"Problem: {problem}")
    if verification.problems:
        raise typer.Exit(1)
    typer.echo("All that was checked is well." if verification.unchecked else "All is well.")


def _print_inspection(inspection: Inspection) -> None:
    from t0repro.parameters.shape import describe

    rows = [("name", "shape", "type", "norm")]
    for item in inspection.tensors:
        shape = "x".join(map(str, item.shape)) or "scalar"
        rows.append((item.name, shape, item.dtype, f"{item.norm:.6g}"))
    _print_table(rows)
    ref, family = inspection.checkpoint, inspection.family
    slots = "with optimizer slots" if inspection.slots else "without optimizer slots"
    typer.echo(f"\n{ref.path} ({ref.format}), step {inspection.step}")
    typer.echo(f"{family.name}: {describe(family)}")
    typer.echo(
        f"{counted(inspection.parameters, 'parameter')},"
        f" {counted(len(inspection.tensors), 'tensor')},"
        f" {inspection.bytes / 1e6:.1f} MB, {slots}"
    )


def _print_comparison(comparison: Comparison) -> None:
    differences = comparison.differences
    if not differences:
        typer.echo(f"All {comparison.tensors} tensors are equal, bit for bit.")
        return
    rows = [("tensor", "difference", "max", "RMS", "")]
    for item in differences[:_ROWS_SHOWN]:
        largest, rms = (f"{value:.3g}" if value == value else "" for value in (item.max, item.rms))
        rows.append((item.key, item.reason, largest, rms, item.detail))
    _print_table(rows)
    if len(differences) > _ROWS_SHOWN:
        typer.echo(f"... and {len(differences) - _ROWS_SHOWN} more")
    beyond = f"{len(comparison.failures)} beyond the tolerance of {comparison.tolerance:g}"
    equal = comparison.tensors - len(differences)
    typer.echo(
        f"\n{len(differences)} of {comparison.tensors} tensors differ, {beyond};"
        f" {equal} are equal, bit for bit."
    )


def _print_table(rows: list[tuple[str, ...]]) -> None:
    """Prints rows in columns, never cut short, so that names can be searched for and copied."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        typer.echo("  ".join(cells).rstrip())
