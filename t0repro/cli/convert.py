"""`t0repro convert`: a checkpoint from one format to another."""

from __future__ import annotations

from typing import Annotated

import typer


def convert(
    src: Annotated[
        str,
        typer.Argument(
            help="A model_dir, a checkpoint_<step> directory, or a prefix .../model.ckpt-<step>."
        ),
    ],
    dst: Annotated[str, typer.Argument(help="The directory to make.")],
    to: Annotated[str, typer.Option(help="Format to write: mtf or jax.")],
    step: Annotated[int | None, typer.Option(help="This step of SRC, not the latest.")] = None,
    slots: Annotated[bool, typer.Option(help="Take the optimizer's slots along.")] = True,
    mtf_norm_names: Annotated[
        str | None,
        typer.Option(
            help="Mesh TensorFlow's spelling of norms: rms_norm, or layer_norm as in T5 1.0's"
            " released checkpoints. By default as in the checkpoint that the model came from."
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check all, write nothing.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Write into DST though it is there; other files stay.")
    ] = False,
) -> None:
    """Convert a checkpoint between Mesh TensorFlow and JAX, bit for bit, optimizer slots included.

    Example: t0repro convert runs/t0/model.ckpt-1112200 runs/t0_jax --to jax
    """
    from t0repro.converters.convert import convert as convert_checkpoint
    from t0repro.errors import UserError

    if mtf_norm_names not in (None, "rms_norm", "layer_norm"):
        raise UserError(
            f"--mtf-norm-names is {mtf_norm_names!r}.", fix="Give rms_norm or layer_norm."
        )
    if to not in ("mtf", "jax"):
        raise UserError(
            f"There is no format {to!r} to convert to.", fix="Give --to mtf or --to jax."
        )
    report = convert_checkpoint(
        src,
        dst,
        to,
        step=step,
        slots=slots,
        norm_names=mtf_norm_names,
        force=force,
        dry_run=dry_run,
    )
    verb = "Would write" if report.dry_run else "Wrote"
    typer.echo(
        f"{verb} {report.target.path}: {report.family.name}, step {report.target.step},"
        f" {report.tensors} tensors, {report.bytes / 1e6:.1f} MB, slots {report.slots}."
    )
