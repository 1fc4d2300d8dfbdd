"""`t0repro checkpoint`: inspects, compares and verifies checkpoints; downloads released ones."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from t0repro.cli.echo import echo
from t0repro.cli.options import AsJson
from t0repro.cli.paths import output
from t0repro.cli.results import print_json
from t0repro.words import counted, sized

if TYPE_CHECKING:
    from t0repro.converters.compare import Comparison
    from t0repro.converters.inspection import Inspection

_ROWS_SHOWN = 20


_Path = Annotated[
    str,
    typer.Argument(
        help="A model_dir, a checkpoint_<step> directory, a prefix .../model.ckpt-<step>, or a"
        " Hugging Face directory."
    ),
]
_Step = Annotated[
    int | None, typer.Option(help="Step of the checkpoint.", show_default="the latest")
]
_Name = Annotated[str, typer.Argument(help="A name listed by `t0repro checkpoint released`.")]


def inspect(path: _Path, step: _Step = None, as_json: AsJson = False) -> None:
    """Print every tensor of a checkpoint (name, shape, type, norm) and which model it is.

    Example: t0repro checkpoint inspect runs/t0
    """
    from t0repro.converters.inspection import inspect_checkpoint

    inspection = inspect_checkpoint(path, step)
    if as_json:
        print_json(inspection.to_json())
    else:
        _print_inspection(inspection)


def diff(
    a: Annotated[str, typer.Argument(help="A checkpoint in any format.")],
    b: Annotated[str, typer.Argument(help="Another checkpoint, in any format.")],
    tol: Annotated[
        float, typer.Option(help="Largest absolute difference to accept; 0 requires the same bits.")
    ] = 0.0,
    slots: Annotated[bool, typer.Option(help="Compare the optimizer's slots too.")] = True,
    as_json: AsJson = False,
) -> None:
    """Compare two checkpoints tensor by tensor; exit code 1 if they differ by more than --tol.

    Example: t0repro checkpoint diff runs/t0 runs/t0_jax
    """
    echo(f"reading {a} and {b} ...", err=True)
    from t0repro.converters.compare import compare

    comparison = compare(a, b, tolerance=tol, slots=slots)
    if as_json:
        print_json(comparison)
    else:
        _print_comparison(comparison)
    # The exit code is the answer, for scripts.
    if comparison.failures:
        raise typer.Exit(1)


def verify(path: _Path, step: _Step = None) -> None:
    """Check a checkpoint's files, sizes, checksums, shapes and values.

    Exit code 1: a file is missing or damaged, or a value is NaN, infinite or not what the
    conversion wrote; 2: there is no checkpoint.

    Example: t0repro checkpoint verify runs/t0_jax
    """
    echo(f"reading {path} ...", err=True)
    from t0repro.converters.sources import find_checkpoint
    from t0repro.converters.verification import verify as verify_checkpoint
    from t0repro.errors import UserError

    found = find_checkpoint(path, step)
    try:
        verification = verify_checkpoint(found.path)
    except UserError as error:
        # What other commands refuse to read is what this one looks for.
        echo(f"Problem: {error}")
        raise typer.Exit(1) from error
    ref, family = verification.checkpoint, verification.family
    echo(f"{ref.path} ({ref.format}): {family.name}, {counted(verification.tensors, 'tensor')}")
    echo(f"Checked: {'; '.join(verification.checks)}.")
    for gap in verification.unchecked:
        echo(f"Not checked: {gap}")
    for problem in verification.problems:
        echo(f"Problem: {problem}")
    if verification.problems:
        raise typer.Exit(1)
    # A plain "no problem" only where everything could be checked.
    echo("No problem in what was checked." if verification.unchecked else "No problem.")


def released(
    family: Annotated[
        str | None, typer.Option(help="Only names or families that contain this.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the names of released checkpoints, for `fetch` and `plan`.

    Example: t0repro checkpoint released --family lm100k
    """
    from t0repro.converters.released import catalogue

    wanted = (family or "").lower()
    found = [e for e in catalogue().values() if wanted in f"{e.name} {e.family}".lower()]
    if as_json:
        print_json([{**vars(e), "parameters": e.shape.parameter_count()} for e in found])
        return
    rows = [("name", "family", "format", "parameters", "licence", "address")]
    for entry in found:
        count = f"{entry.shape.parameter_count():,}"
        licence = entry.license or "not stated"
        rows.append((entry.name, entry.family, entry.format, count, licence, entry.address))
    _print_table(rows)


def fetch(
    name: _Name,
    to: Annotated[Path, typer.Option(callback=output, help="The folder to download to.")],
    step: Annotated[
        int | None,
        typer.Option(help="Step in a Mesh TensorFlow folder.", show_default="the latest"),
    ] = None,
    revision: Annotated[str, typer.Option(help="Revision of a Hugging Face repository.")] = "main",
    base_url: Annotated[
        str | None,
        typer.Option(help="A mirror of the Hugging Face hub or of Google Cloud Storage."),
    ] = None,
) -> None:
    """Download a released checkpoint; a second start resumes the download.

    Only with T0REPRO_CHECKPOINT_HUB=1 in the environment, because checkpoints are large.

    Example: T0REPRO_CHECKPOINT_HUB=1 t0repro checkpoint fetch t5.1.1.lm100k.xl --to runs/lm100k
    """
    echo(f"looking for the files of {name} ...", err=True)
    from t0repro.converters import released as released_checkpoints

    found = released_checkpoints.find(name)
    done = released_checkpoints.fetch(found, to, base_url=base_url, revision=revision, step=step)
    what = "was downloaded already" if done.present else "downloaded"
    echo(f"{name} {what}: {done.path} ({counted(done.files, 'file')}, {sized(done.bytes)}).")
    echo(f"Licence: {found.license or f'not stated in the catalogue; see {found.source}'}.")


def plan(
    name: _Name,
    to: Annotated[
        Path, typer.Option(callback=output, help="The folder that it would be downloaded to.")
    ] = Path(),
    as_json: AsJson = False,
) -> None:
    """Say how much disk and memory a released checkpoint needs, and whether this machine has it.

    Example: t0repro checkpoint plan bigscience/T0_3B
    """
    from t0repro.converters import needs as needs_
    from t0repro.converters.released import find
    from t0repro.parameters.shape import describe

    found = find(name)
    needs, machine = needs_.needs_of(found), needs_.this_machine(to)
    if as_json:
        about = {"name": found.name, "family": found.family, "format": found.format}
        print_json({**about, "needs": needs, "machine": machine})
        return
    echo(f"{found.name} ({found.family}, {found.format}): {describe(found.shape)}")
    echo(f"{needs.parameters:,} parameters")
    rows = [("", "needs", "here", "")]
    # Against what is free now, not against what the machine has.
    for what, needed, has in (
        ("disk, the checkpoint in float32", needs.disk, machine.disk),
        ("disk, a checkpoint while training", needs.training_disk, machine.disk),
        ("memory, evaluation", needs.evaluation, machine.memory),
        ("memory, training with Adafactor", needs.training, machine.memory),
    ):
        fits = "fits" if needed <= has else "does not fit"
        rows.append((what, sized(needed), sized(has), fits))
    _print_table(rows)
    for accelerator, memory in machine.accelerators:
        one = f"{accelerator}, {sized(memory)}"
        for what, needed in (("evaluation", needs.evaluation), ("training", needs.training)):
            # Rounded up: parameters can be sharded across devices, but not a device.
            devices = -(-needed // memory)
            echo(f"{one}: {what} takes at least {devices} of them.")
    if not machine.accelerators:
        echo("This machine has no NVIDIA accelerator.")
    echo("Activations need memory as well, depending on batch size and lengths.")


def _print_inspection(inspection: Inspection) -> None:
    from t0repro.parameters.shape import describe

    rows = [("name", "shape", "type", "norm")]
    for item in inspection.tensors:
        shape = "x".join(map(str, item.shape)) or "scalar"
        rows.append((item.name, shape, item.dtype, f"{item.norm:.6g}"))
    _print_table(rows)
    ref, family = inspection.checkpoint, inspection.family
    slots = "with optimizer slots" if inspection.slots else "without optimizer slots"
    echo(f"\n{ref.path} ({ref.format}), step {inspection.step}")
    echo(f"{family.name}: {describe(family)}")
    echo(
        f"{counted(inspection.parameters, 'parameter')},"
        f" {counted(len(inspection.tensors), 'tensor')},"
        f" {sized(inspection.bytes)}, {slots}"
    )


def _print_comparison(comparison: Comparison) -> None:
    differences = comparison.differences
    if not differences:
        echo(f"All {comparison.tensors} tensors are equal, bit for bit.")
        return
    rows = [("tensor", "difference", "max", "RMS", "")]
    for item in differences[:_ROWS_SHOWN]:
        # NaN (no comparison possible) is shown as nothing.
        largest, rms = (f"{value:.3g}" if value == value else "" for value in (item.max, item.rms))
        rows.append((item.key, item.reason, largest, rms, item.detail))
    _print_table(rows)
    if len(differences) > _ROWS_SHOWN:
        echo(f"... and {len(differences) - _ROWS_SHOWN} more")
    beyond = f"{len(comparison.failures)} by more than {comparison.tolerance:g}"
    equal = comparison.tensors - len(differences)
    echo(
        f"\n{len(differences)} of {comparison.tensors} tensors differ, {beyond};"
        f" {equal} are equal, bit for bit."
    )


def _print_table(rows: list[tuple[str, ...]]) -> None:
    """Prints rows in columns without truncation, so that names can be searched for and copied."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        echo("  ".join(cells).rstrip())
