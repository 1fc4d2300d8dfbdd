"""`t0repro parity`: checks on your own run that both stacks compute the same thing."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from t0repro.cli.gin_options import GinFiles, GinFolders, GinParams, Modules
from t0repro.words import counted


class Activations(StrEnum):
    """Types that activations can have."""

    float32 = "float32"
    bfloat16 = "bfloat16"


class Injected(StrEnum):
    """Errors that can be injected into the JAX side; see t0repro.parity.inject."""

    slot_swap = "slot-swap"
    bucket_eps = "bucket-eps"
    loss_denominator = "loss-denominator"
    no_shift = "no-shift"


def parity(
    out: Annotated[Path, typer.Option("--out", help="A folder for the report and the states.")],
    gin_file: GinFiles = None,
    gin_param: GinParams = None,
    gin_location_prefix: GinFolders = None,
    module_import: Modules = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Training steps.")] = 20,
    start: Annotated[
        str | None,
        typer.Option("--from", help="A checkpoint in any format; else Mesh TensorFlow makes one."),
    ] = None,
    dtype: Annotated[
        Activations,
        typer.Option("--dtype", help="Of activations; bfloat16 is reported and not judged."),
    ] = Activations.float32,
    eval_task: Annotated[
        str | None,
        typer.Option("--eval_task", help="A task whose log-likelihoods are compared as well."),
    ] = None,
    inject: Annotated[
        Injected | None,
        typer.Option("--inject", help="Put a known error into the JAX side: it must be found."),
    ] = None,
) -> None:
    """Run both stacks from one checkpoint on the same batches and compare all that they compute.

    Activations by layer, losses, gradients, parameters and slots after the first and the last step,
    log-likelihoods. Writes parity.json, parity.md and parity.html, and names the first tensor that
    departs. Exit code 0: within the tolerances; 1: not.

    Example:
      t0repro parity --module_import t0repro.tasks.demo --gin_file dataset.gin
        --gin_file demo/t5.1.1.demo.gin --gin_file learning_rate_schedules/constant_0_001.gin
        --gin_param "MIXTURE_NAME = 'demo_train'" --gin_param "run.train_steps = 20"
        --gin_param "run.batch_size = ('tokens_per_batch', 1024)"
        --gin_param "run.sequence_length = {'inputs': 128, 'targets': 16}"
        --gin_param "pack_dataset.use_custom_ops = False" --gin_param "utils.run.mesh_shape = []"
        --gin_param "dropout_rate = 0.0" --steps 20 --out runs/parity
    """
    from absl import logging

    from t0repro.config.mtf.parser import GinInputs
    from t0repro.parity import report, run

    logging.set_verbosity(logging.ERROR)  # hides SeqIO's advice about uncached data
    inputs = GinInputs(
        model_dir=str(out / run.MESH_FOLDER),
        gin_files=gin_file or (),
        gin_params=gin_param or (),
        location_prefixes=gin_location_prefix or (),
        module_imports=module_import or (),
    )
    job = run.make_job(
        inputs, out, steps=steps, start=start, dtype=dtype.value, eval_task=eval_task
    )
    typer.echo(f"Mesh TensorFlow: {counted(len(job.batches), 'step')}", err=True)
    reference, start_step = run.run_mesh_side(job)
    typer.echo(f"JAX: {counted(len(job.batches), 'step')}", err=True)
    found = run.compare_sides(job, reference, start_step, inject.value if inject else None)
    for path in report.write_report(found, job):
        typer.echo(path)
    typer.echo(report.verdict(found))
    if not found.passed:
        raise typer.Exit(1)
