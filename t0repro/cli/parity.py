"""`t0repro parity`: checks on your own run that both stacks compute the same thing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from t0repro.cli.gin_options import Demo, GinOptions, SkippedNames
from t0repro.cli.groups import expand_groups
from t0repro.cli.mesh_inputs import mesh_inputs
from t0repro.cli.options import AsJson, DType, Modules
from t0repro.cli.paths import output, source
from t0repro.cli.results import echo, print_for_people, print_json
from t0repro.progress import working
from t0repro.storage import lock_folder
from t0repro.tasks.registry import DEMO_MODULE
from t0repro.words import counted

# Those of t0repro.parity.jax_run, whose import would import JAX and slow down --help.
_Error = Literal["slot-swap", "bucket-eps", "loss-denominator", "no-shift"]


@expand_groups
def parity(
    out: Annotated[
        Path, typer.Option(callback=output, help="A folder for the report and the states.")
    ],
    skipped: SkippedNames,
    gin: GinOptions,
    module_import: Modules = None,
    steps: Annotated[int, typer.Option(min=1, help="Number of training steps.")] = 20,
    start: Annotated[
        str | None,
        typer.Option(
            "--from",
            callback=source,
            help="The checkpoint to start from, in any format.",
            show_default="Mesh TensorFlow's initial parameters",
        ),
    ] = None,
    dtype: Annotated[
        DType,
        typer.Option(help="Type of activations; bfloat16 is reported but not judged."),
    ] = "float32",
    eval_task: Annotated[
        str | None,
        typer.Option(help="A task whose log-likelihoods to compare as well."),
    ] = None,
    inject: Annotated[
        _Error | None,
        typer.Option(help="Inject a known error into the JAX side; the comparison must find it."),
    ] = None,
    demo: Demo = False,
    as_json: AsJson = False,
) -> None:
    r"""Run both stacks from one checkpoint on the same batches and compare what they compute.

    Compares the activations of each layer, losses, gradients, parameters and slots after the first
    and the last step, and log-likelihoods. Writes parity.json, parity.md and parity.html, and names
    the first tensor that exceeds its tolerance. Exit code 1 if one does.

    Example:
      t0repro parity --demo --out runs/parity
    """
    echo("reading gin files and data, with t5 and Mesh TensorFlow ...", err=True)
    from t0repro.parity import report, run

    if demo:
        gin, module_import = gin.with_demo(), [DEMO_MODULE, *(module_import or ())]
    inputs = mesh_inputs(gin, module_import, skipped, str(out / run.MESH_FOLDER))
    if (out / "parity.json").exists():
        echo(f"note: this replaces the comparison in {out}", err=True)
    # A second comparison would delete this one's files.
    with lock_folder(
        out, "a comparison of the stacks", fix="Wait for it to end, or choose another --out."
    ):
        job = run.make_job(inputs, out, steps=steps, start=start, dtype=dtype, eval_task=eval_task)
        # First, because without --from the JAX side starts from Mesh TensorFlow's parameters.
        with working(f"Mesh TensorFlow: {counted(len(job.batches), 'step')}"):
            reference, start_step = run.run_mesh_side(job)
        with working(f"JAX: {counted(len(job.batches), 'step')}"):
            found = run.compare_sides(job, reference, start_step, inject)
        paths = report.write_report(found, job)
    with print_for_people(as_json):
        for path in paths:
            echo(str(path))
        typer.echo(report.verdict(found))
    if as_json:
        print_json(json.loads(paths[0].read_text(encoding="utf-8")))
    # Exit after the report is written, because a failure is the reason to read it.
    if not found.passed:
        raise typer.Exit(1)
