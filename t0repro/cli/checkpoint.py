"""`t0repro checkpoint`: looks at checkpoints, and fetches released ones."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from t0repro.cli.commands import App
from t0repro.cli.options import AsJson
from t0repro.cli.paths import output, source
from t0repro.cli.results import echo, print_columns, print_json
from t0repro.converters.finding import find_checkpoint
from t0repro.converters.inspection import Comparison, Inspection, Verification, inspect_checkpoint
from t0repro.converters.inspection import compare as compare_checkpoints
from t0repro.converters.inspection import verify as verify_checkpoint
from t0repro.converters.released import catalog, families, find, needs_of, this_machine
from t0repro.converters.released import fetch as fetch_checkpoint
from t0repro.errors import UserError
from t0repro.parameters import naming
from t0repro.parameters.shape import describe
from t0repro.words import counted, sized, some

app = App(
    "checkpoint",
    help="Inspect, compare and verify checkpoints; download released ones.",
    no_args_is_help=True,
    example="t0repro checkpoint inspect runs/demo/model",
)

# Two models may differ in every tensor; --json prints them all.
_ROWS_SHOWN = 20


_Path = Annotated[
    str,
    typer.Argument(
        callback=source,
        help="A model_dir, a checkpoint_<step> directory, a prefix .../model.ckpt-<step>, or a"
        " Hugging Face directory.",
    ),
]
_Step = Annotated[
    int | None, typer.Option(help="Step of the checkpoint.", show_default="the latest")
]
_Name = Annotated[str, typer.Argument(help="A name listed by `t0repro checkpoint released`.")]


@app.command()
def inspect(path: _Path, step: _Step = None, as_json: AsJson = False) -> None:
    """Print every tensor of a checkpoint (name, shape, type, norm) and which model it is.

    Example:
      t0repro checkpoint inspect runs/t0
    """
    inspection = inspect_checkpoint(path, step)
    if as_json:
        print_json(inspection.to_json())
    else:
        _print_inspection(inspection)


@app.command()
def diff(
    a: Annotated[str, typer.Argument(callback=source, help="A checkpoint in any format.")],
    b: Annotated[str, typer.Argument(callback=source, help="Another checkpoint, in any format.")],
    tol: Annotated[
        float, typer.Option(help="Largest absolute difference to accept; 0 requires the same bits.")
    ] = 0.0,
    slots: Annotated[bool, typer.Option(help="Also compare the optimizer's slots.")] = True,
    as_json: AsJson = False,
) -> None:
    """Compare two checkpoints tensor by tensor; exit code 1 if they differ by more than --tol.

    Example:
      t0repro checkpoint diff runs/t0 runs/t0_jax
    """
    # Printed before the imports, which take seconds.
    echo(f"reading {a} and {b} ...", err=True)

    comparison = compare_checkpoints(a, b, tolerance=tol, slots=slots)
    if as_json:
        print_json(comparison)
    else:
        _print_comparison(comparison)
    # The exit code is the answer, for scripts.
    if comparison.failures:
        raise typer.Exit(1)


@app.command()
def verify(path: _Path, step: _Step = None, as_json: AsJson = False) -> None:
    """Check a checkpoint's files, sizes, checksums, shapes and values.

    Exit code 1: a file is missing or damaged, or a value is NaN, infinite or not what the
    conversion wrote; 2: there is no checkpoint.

    Example:
      t0repro checkpoint verify runs/t0_jax
    """
    echo(f"reading {path} ...", err=True)

    found = find_checkpoint(path, step)
    try:
        verification = verify_checkpoint(found.path)
    except UserError as error:
        # This command looks for exactly what other commands refuse to read.
        if as_json:
            print_json({"checkpoint": found, "problems": [str(error)]})
        else:
            echo(f"Problem: {error}")
        raise typer.Exit(1) from error
    if as_json:
        print_json(verification)
    else:
        _print_verification(verification)
    if verification.problems:
        raise typer.Exit(1)


def _print_verification(verification: Verification) -> None:
    ref, family = verification.checkpoint, verification.family
    echo(f"{ref.path} ({ref.format}): {family.name}, {counted(verification.tensors, 'tensor')}")
    echo(f"Checked: {'; '.join(verification.checks)}.")
    for gap in verification.unchecked:
        echo(f"Not checked: {gap}")
    for problem in verification.problems:
        echo(f"Problem: {problem}")
    # Claim "no problem" without restriction only if everything could be checked.
    if not verification.problems:
        echo("No problem in what was checked." if verification.unchecked else "No problem.")


@app.command()
def released(
    family: Annotated[
        str | None,
        typer.Option(help="Only if a word of the name or family begins like this."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the names of released checkpoints, for `fetch` and `plan`.

    Example:
      t0repro checkpoint released --family lm100k
    """
    wanted = re.compile(rf"(?<![a-z0-9]){re.escape(family or '')}", re.IGNORECASE)
    found = [e for e in catalog().values() if wanted.search(f"{e.name} {e.family}")]
    if not found:
        raise UserError(
            f"No released checkpoint is called {family!r}.",
            where="--family",
            fix=f"There are {some(sorted({e.family for e in catalog().values()}), 20)}.",
        )
    if as_json:
        print_json([{**vars(e), "parameters": e.shape.parameter_count()} for e in found])
        return
    rows = [("name", "family", "format", "parameters", "license", "address")]
    for entry in found:
        count = f"{entry.shape.parameter_count():,}"
        license = entry.license or "not stated"
        rows.append((entry.name, entry.family, entry.format, count, license, entry.address))
    print_columns(rows)


@app.command()
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
    r"""Download a released checkpoint; a second start resumes the download.

    Only with T0REPRO_CHECKPOINT_HUB=1 in the environment, because checkpoints are large.

    Example:
      T0REPRO_CHECKPOINT_HUB=1 t0repro checkpoint fetch t5.1.1.lm100k.xl \
        --to runs/lm100k
    """
    echo(f"looking for the files of {name} ...", err=True)

    found = find(name)
    done = fetch_checkpoint(found, to, base_url=base_url, revision=revision, step=step)
    what = "was downloaded already" if done.present else "downloaded"
    echo(f"{name} {what}: {done.path} ({counted(done.files, 'file')}, {sized(done.bytes)}).")
    if to_know := families()[found.family].to_know:
        echo(to_know)
    echo(f"License: {found.license or f'not stated in the catalog; see {found.source}'}.")


@app.command()
def plan(
    name: _Name,
    to: Annotated[
        Path, typer.Option(callback=output, help="The folder that it would be downloaded to.")
    ] = Path(),
    as_json: AsJson = False,
) -> None:
    """Print the disk and memory that a released checkpoint needs, and whether this machine has
    them.

    Example:
      t0repro checkpoint plan bigscience/T0_3B
    """
    found = find(name)
    needs, machine = needs_of(found), this_machine(to)
    if as_json:
        about = {"name": found.name, "family": found.family, "format": found.format}
        print_json({**about, "needs": needs, "machine": machine})
        return
    echo(f"{found.name} ({found.family}, {found.format}): {describe(found.shape)}")
    echo(f"{needs.parameters:,} parameters")
    if to_know := families()[found.family].to_know:
        echo(to_know)
    rows = [("", "needs", "here", "")]
    # Compared with the memory that is free now, not with the machine's total.
    for what, needed, has in (
        ("disk, the checkpoint in float32", needs.disk, machine.disk),
        ("disk, a checkpoint while training", needs.training_disk, machine.disk),
        ("memory, evaluation", needs.evaluation, machine.memory),
        ("memory, training with Adafactor", needs.training, machine.memory),
    ):
        fits = "fits" if needed <= has else "does not fit"
        rows.append((what, sized(needed), sized(has), fits))
    print_columns(rows)
    for accelerator, memory in machine.accelerators:
        one = f"{accelerator}, {sized(memory)}"
        for what, needed in (("evaluation", needs.evaluation), ("training", needs.training)):
            # Rounded up, because only complete devices hold shards.
            devices = -(-needed // memory)
            echo(f"{one}: {what} takes at least {devices} of them.")
    if not machine.accelerators:
        echo("This machine has no NVIDIA accelerator.")
    echo("Activations need memory as well, depending on batch size and lengths.")


def _print_inspection(inspection: Inspection) -> None:
    rows = [("name", "shape", "type", "norm")]
    for item in inspection.tensors:
        shape = "x".join(map(str, item.shape)) or "scalar"
        rows.append((item.name, shape, item.dtype, f"{item.norm:.6g}"))
    print_columns(rows)
    ref, family = inspection.checkpoint, inspection.family
    slots = "with optimizer slots" if inspection.slots else "without optimizer slots"
    # The step has a line of its own, and no command counts it.
    tensors = sum(item.key != naming.STEP for item in inspection.tensors)
    echo(f"\n{ref.path} ({ref.format}), step {inspection.step}")
    echo(f"{family.name}: {describe(family)}")
    echo(
        f"{counted(inspection.parameters, 'parameter')},"
        f" {counted(tensors, 'tensor')},"
        f" {sized(inspection.bytes)}, {slots}"
    )
    if own := inspection.adapter:
        echo(
            f"It is an adapter, {own['kind']}, shown merged into its base, {own['base']}. Its own:"
            f" {counted(own['parameters'], 'parameter')},"
            f" {'with' if own['slots'] else 'without'} optimizer slots"
        )


def _print_comparison(comparison: Comparison) -> None:
    differences = comparison.differences
    if not differences:
        echo(f"The step and all {comparison.tensors} tensors are equal, bit for bit.")
        return
    rows = [("tensor", "difference", "max", "RMS", "")]
    for item in differences[:_ROWS_SHOWN]:
        # NaN, where no comparison was possible, is shown as an empty cell.
        largest, rms = (f"{value:.3g}" if value == value else "" for value in (item.max, item.rms))
        rows.append((item.key, item.reason, largest, rms, item.detail))
    print_columns(rows)
    if len(differences) > _ROWS_SHOWN:
        echo(f"... and {len(differences) - _ROWS_SHOWN} more")
    differing, failing = (
        sum(item.key != naming.STEP for item in items)
        for items in (differences, comparison.failures)
    )
    beyond = f"{failing} by more than {comparison.tolerance:g}"
    steps = "the steps differ; " if differing < len(differences) else ""
    echo(
        f"\n{steps}{differing} of {comparison.tensors} tensors differ, {beyond};"
        f" {comparison.tensors - differing} are equal, bit for bit."
    )
