"""`t0repro convert`: converts a checkpoint from one format to another."""

from __future__ import annotations

import enum
from typing import Annotated

import typer

from t0repro.words import counted


class Layout(enum.Enum):
    """The two checkpoint layouts that T5X reads."""

    legacy = "legacy"
    orbax = "orbax"


def convert(
    src: Annotated[
        str,
        typer.Argument(
            help="A model_dir, a checkpoint_<step> directory, a prefix .../model.ckpt-<step>, or a"
            " Hugging Face directory; local or at any address that fsspec or etils.epath opens."
        ),
    ],
    dst: Annotated[str, typer.Argument(help="The directory to make.")],
    to: Annotated[str, typer.Option(help="Format to write: mtf, t5x, jax or hf.")],
    source: Annotated[
        str, typer.Option("--from", help="Format to read: auto, mtf, t5x, jax or hf.")
    ] = "auto",
    step: Annotated[int | None, typer.Option(help="This step of SRC, not the latest.")] = None,
    gin_file: Annotated[
        str | None,
        typer.Option(
            "--gin_file",
            "--gin-file",
            help="The configuration that the model was trained with, to put beside it as"
            " operative_config.gin. The sizes that it binds are compared with SRC's. By default"
            " SRC's own.",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="Type of the parameters: float32 or bfloat16. By default SRC's."),
    ] = None,
    master_dtype: Annotated[
        str | None,
        typer.Option(
            "--master_dtype",
            "--master-dtype",
            help="The same by Mesh TensorFlow's name (mtf only). By default what --gin_file binds:"
            " Mesh TensorFlow restores its checkpoints in that type alone.",
        ),
    ] = None,
    scan: Annotated[
        bool, typer.Option(help="Stack the layers, as T5X's scalable_t5 does (t5x only).")
    ] = False,
    layout: Annotated[
        Layout | None,
        typer.Option(
            help="Of T5X's checkpoints: legacy (msgpack and Zarr) or orbax (t5x only). By default"
            " legacy; T5X's managers read both."
        ),
    ] = None,
    slots: Annotated[bool, typer.Option(help="Take the optimizer's slots along.")] = True,
    t5x_importer_slots: Annotated[
        bool,
        typer.Option(
            "--t5x-importer-slots",
            help="The T5X side has square matrices' slots as T5X's own importer leaves them.",
        ),
    ] = False,
    vocab: Annotated[
        str | None, typer.Option(help="A SentencePiece model, for hf's tokenizer files.")
    ] = None,
    vocab_size: Annotated[
        int | None, typer.Option(help="Pad the vocabulary with zeros, or cut it, to this size.")
    ] = None,
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
    """Convert a checkpoint between Mesh TensorFlow, T5X, JAX and Hugging Face, slots included.

    Values stay the same bit for bit unless --dtype asks for another type. A conversion that was
    interrupted goes on where it stopped when it is started again.

    Example: t0repro convert runs/t0/model.ckpt-1112200 runs/t0_jax --to jax
    """
    from t0repro.converters.convert import convert as convert_checkpoint
    from t0repro.converters.options import Options
    from t0repro.converters.tensors import FORMATS, Format
    from t0repro.errors import UserError

    if mtf_norm_names not in (None, "rms_norm", "layer_norm"):
        raise UserError(
            f"--mtf-norm-names is {mtf_norm_names!r}.", fix="Give rms_norm or layer_norm."
        )
    formats: dict[str, Format] = {name: name for name in FORMATS}
    if to not in formats:
        raise UserError(
            f"There is no format {to!r} to convert to.", fix=f"Give one of {', '.join(FORMATS)}."
        )
    if source not in (*formats, "auto"):
        raise UserError(
            f"There is no format {source!r} to read.", fix=f"Give auto, {', '.join(FORMATS)}."
        )
    report = convert_checkpoint(
        src,
        dst,
        formats[to],
        step=step,
        source=formats.get(source),
        force=force,
        dry_run=dry_run,
        options=Options(
            slots=slots,
            norm_names=mtf_norm_names,
            dtype=dtype,
            master_dtype=master_dtype,
            scan=scan,
            layout=layout.value if layout else None,  # pyright: ignore[reportArgumentType]
            t5x_importer_slots=t5x_importer_slots,
            vocab_size=vocab_size,
            vocabulary=vocab,
            gin_file=gin_file,
        ),
    )
    for note in report.notes:
        typer.echo(f"Note: {note}")
    verb = "Would write" if report.dry_run else "Wrote"
    resumed = f" ({report.resumed} of them before an interruption)" if report.resumed else ""
    typer.echo(
        f"{verb} {report.target.path}: {report.family.name}, step {report.target.step},"
        f" {counted(report.tensors, 'tensor')}{resumed}, {report.bytes / 1e6:.1f} MB,"
        f" slots {report.slots}."
    )
