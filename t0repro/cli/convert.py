"""`t0repro convert`: converts a checkpoint from one format to another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from t0repro.cli.options import DType
from t0repro.cli.paths import source, target
from t0repro.cli.results import echo
from t0repro.converters.conversion import Options
from t0repro.converters.convert import ConversionReport
from t0repro.converters.convert import convert as convert_checkpoint
from t0repro.converters.jax_tree import Layout
from t0repro.converters.tensors import Format
from t0repro.words import counted, sized

_Format = Literal[Format, "adapter"]
_SourceFormat = Literal["auto", Format]

Target = Annotated[
    str, typer.Argument(callback=target, help="The directory to write, or an unused address.")
]
Force = Annotated[
    bool, typer.Option("--force", help="Write into the target even if it exists; other files stay.")
]


def convert(
    src: Annotated[
        str,
        typer.Argument(
            callback=source,
            help="A model_dir, a checkpoint_<step> directory, a prefix .../model.ckpt-<step>, or a"
            " directory of Hugging Face's or PEFT's; local or at any address that fsspec opens.",
        ),
    ],
    dst: Target,
    to: Annotated[
        _Format,
        typer.Option(
            help="The format to write. An adapter is merged into its base, except with peft (PEFT's"
            " format) and adapter (as a training run saves it), which write the adapter alone."
        ),
    ],
    source: Annotated[_SourceFormat, typer.Option("--from", help="The format of SRC.")] = "auto",
    step: Annotated[
        int | None, typer.Option(help="The step of SRC to convert.", show_default="the latest")
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            callback=source,
            help="The base of an adapter.",
            show_default="where the adapter says that it is",
        ),
    ] = None,
    gin_file: Annotated[
        str | None,
        typer.Option(
            callback=source,
            help="The gin file that the model was trained with, written beside the checkpoint as"
            " operative_config.gin. The sizes that it binds must match SRC's.",
            show_default="SRC's own",
        ),
    ] = None,
    dtype: Annotated[
        DType | None, typer.Option(help="Type of the parameters.", show_default="SRC's")
    ] = None,
    master_dtype: Annotated[
        DType | None,
        typer.Option(
            help="Mesh TensorFlow's name for --dtype (mtf only). Mesh TensorFlow restores a"
            " checkpoint only into variables of the type that the gin file binds.",
            show_default="what --gin_file binds",
        ),
    ] = None,
    scan: Annotated[
        bool, typer.Option(help="Stack the layers, as T5X's scalable_t5 does (t5x only).")
    ] = False,
    # One at a time: if a directory has one of Orbax's files, T5X reads all of it as Orbax's.
    layout: Annotated[
        Layout | None,
        typer.Option(
            help="Layout of T5X's checkpoints: legacy (msgpack and Zarr) or orbax (t5x only). T5X's"
            " checkpoint managers read both.",
            show_default="legacy",
        ),
    ] = None,
    slots: Annotated[bool, typer.Option(help="Also convert the optimizer's slots.")] = True,
    # That importer leaves the two slots of a square matrix exchanged (docs/t5x_slots.md).
    t5x_importer_slots: Annotated[
        bool,
        typer.Option(
            "--t5x-importer-slots",
            help="The T5X side has the slots of square matrices as T5X's own importer leaves them.",
        ),
    ] = False,
    vocab: Annotated[
        Path | None, typer.Option(help="A SentencePiece model, for hf's tokenizer files.")
    ] = None,
    vocab_size: Annotated[
        int | None, typer.Option(help="Pad the vocabulary with zeros, or cut it, to this size.")
    ] = None,
    mtf_norm_names: Annotated[
        Literal["rms_norm", "layer_norm"] | None,
        typer.Option(
            help="How Mesh TensorFlow's variables spell the norms; T5 1.0's released checkpoints"
            " have layer_norm.",
            show_default="as the checkpoint that the model came from",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything and write nothing.")
    ] = False,
    force: Force = False,
) -> None:
    """Convert a checkpoint between Mesh TensorFlow, T5X, JAX and Hugging Face, slots included.

    Values stay the same bit for bit unless --dtype asks for another type. If a conversion is
    interrupted, starting it again continues where it stopped.

    Example:
      t0repro convert runs/t0/model.ckpt-1112200 runs/t0_jax --to jax
    """
    echo(f"reading {src} ...", err=True)

    options = Options(
        slots=slots,
        norm_names=mtf_norm_names,
        dtype=dtype,
        master_dtype=master_dtype,
        scan=scan,
        layout=layout,
        t5x_importer_slots=t5x_importer_slots,
        vocab_size=vocab_size,
        vocabulary=vocab,
        gin_file=gin_file,
    )
    report = convert_checkpoint(
        src,
        dst,
        to,
        step=step,
        source=None if source == "auto" else source,
        base=base,
        force=force,
        dry_run=dry_run,
        options=options,
    )
    print_conversion(report)


def print_conversion(report: ConversionReport) -> None:
    """Prints what a conversion changed and wrote."""
    for note in report.notes:
        echo(f"Note: {note}")
    verb = "Would write" if report.dry_run else "Wrote"
    resumed = f" ({report.resumed} of them before an interruption)" if report.resumed else ""
    echo(
        f"{verb} {report.target.path}: {report.family.name}, step {report.target.step},"
        f" {counted(report.tensors, 'tensor')}{resumed}, {sized(report.bytes)},"
        f" slots {report.slots}."
    )
