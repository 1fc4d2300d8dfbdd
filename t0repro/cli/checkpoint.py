"""`t0repro checkpoint` and `t0repro convert`: looks at checkpoints, fetches and converts them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from t0repro.cli.options import AsJson, DType
from t0repro.cli.results import echo, print_json
from t0repro.cli.spelling import output, source, target
from t0repro.words import columns, counted, sized

if TYPE_CHECKING:
    from t0repro.converters.convert import ConversionReport
    from t0repro.converters.inspection import Comparison, Inspection, Verification


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
    a: Annotated[str, typer.Argument(callback=source, help="A checkpoint in any format.")],
    b: Annotated[str, typer.Argument(callback=source, help="Another checkpoint, in any format.")],
    tol: Annotated[
        float, typer.Option(help="Largest absolute difference to accept; 0 requires the same bits.")
    ] = 0.0,
    slots: Annotated[bool, typer.Option(help="Also compare the optimizer's slots.")] = True,
    as_json: AsJson = False,
) -> None:
    """Compare two checkpoints tensor by tensor; exit code 1 if they differ by more than --tol.

    Example: t0repro checkpoint diff runs/t0 runs/t0_jax
    """
    # Printed before the imports, which take seconds.
    echo(f"reading {a} and {b} ...", err=True)
    from t0repro.converters.inspection import compare

    comparison = compare(a, b, tolerance=tol, slots=slots)
    if as_json:
        print_json(comparison)
    else:
        _print_comparison(comparison)
    # The exit code is the answer, for scripts.
    if comparison.failures:
        raise typer.Exit(1)


def verify(path: _Path, step: _Step = None, as_json: AsJson = False) -> None:
    """Check a checkpoint's files, sizes, checksums, shapes and values.

    Exit code 1: a file is missing or damaged, or a value is NaN, infinite or not what the
    conversion wrote; 2: there is no checkpoint.

    Example: t0repro checkpoint verify runs/t0_jax
    """
    echo(f"reading {path} ...", err=True)
    from t0repro.converters.inspection import verify as verify_checkpoint
    from t0repro.converters.sources import find_checkpoint
    from t0repro.errors import UserError

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


def released(
    family: Annotated[
        str | None, typer.Option(help="Only names or families that contain this text.")
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
    if to_know := released_checkpoints.families()[found.family].to_know:
        echo(to_know)
    echo(f"Licence: {found.license or f'not stated in the catalog; see {found.source}'}.")


def plan(
    name: _Name,
    to: Annotated[
        Path, typer.Option(callback=output, help="The folder that it would be downloaded to.")
    ] = Path(),
    as_json: AsJson = False,
) -> None:
    """Print the disk and memory that a released checkpoint needs, and whether this machine has
    them.

    Example: t0repro checkpoint plan bigscience/T0_3B
    """
    from t0repro.converters.released import families, find, needs_of, this_machine
    from t0repro.parameters.shape import describe

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
    _print_table(rows)
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
        # NaN, where no comparison was possible, is shown as an empty cell.
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
    for line in columns(rows):
        echo(line)


# ---- `t0repro convert`: converts a checkpoint from one format to another -------------------------


# Spelled out, because importing the converters' own types would delay --help by seconds.
_Format = Literal["mtf", "t5x", "jax", "hf", "peft", "adapter"]
_SourceFormat = Literal["auto", "mtf", "t5x", "jax", "hf", "peft"]

_Source = Annotated[
    str,
    typer.Argument(
        callback=source,
        help="A model_dir, a checkpoint_<step> directory, a prefix .../model.ckpt-<step>, or a"
        " directory of Hugging Face's or PEFT's; local or at any address that fsspec opens.",
    ),
]
_Target = Annotated[
    str, typer.Argument(callback=target, help="The directory to write, or an unused address.")
]
_To = Annotated[
    _Format,
    typer.Option(
        help="The format to write. An adapter is merged into its base, except with peft (PEFT's"
        " format) and adapter (as a training run saves it), which write the adapter alone."
    ),
]
_Base = Annotated[
    str | None,
    typer.Option(
        callback=source,
        help="The base of an adapter.",
        show_default="where the adapter says that it is",
    ),
]
_From = Annotated[_SourceFormat, typer.Option("--from", help="The format of SRC.")]
_SourceStep = Annotated[
    int | None, typer.Option(help="The step of SRC to convert.", show_default="the latest")
]
_GinFile = Annotated[
    str | None,
    typer.Option(
        callback=source,
        help="The gin file that the model was trained with, written beside the checkpoint as"
        " operative_config.gin. The sizes that it binds must match SRC's.",
        show_default="SRC's own",
    ),
]
_DType = Annotated[DType | None, typer.Option(help="Type of the parameters.", show_default="SRC's")]
_MasterDType = Annotated[
    DType | None,
    typer.Option(
        help="Mesh TensorFlow's name for --dtype (mtf only). Mesh TensorFlow restores a checkpoint"
        " only into variables of the type that the gin file binds.",
        show_default="what --gin_file binds",
    ),
]
_Scan = Annotated[
    bool, typer.Option(help="Stack the layers, as T5X's scalable_t5 does (t5x only).")
]
# One at a time: if a directory has one of Orbax's files, T5X reads all of it as Orbax's.
_Layout = Annotated[
    Literal["legacy", "orbax"] | None,
    typer.Option(
        help="Layout of T5X's checkpoints: legacy (msgpack and Zarr) or orbax (t5x only). T5X's"
        " checkpoint managers read both.",
        show_default="legacy",
    ),
]
_Slots = Annotated[bool, typer.Option(help="Also convert the optimizer's slots.")]
# That importer leaves the two slots of a square matrix exchanged (docs/t5x_slots.md).
_ImporterSlots = Annotated[
    bool,
    typer.Option(
        "--t5x-importer-slots",
        help="The T5X side has the slots of square matrices as T5X's own importer leaves them.",
    ),
]
_Vocabulary = Annotated[
    Path | None, typer.Option(help="A SentencePiece model, for hf's tokenizer files.")
]
_VocabularySize = Annotated[
    int | None, typer.Option(help="Pad the vocabulary with zeros, or cut it, to this size.")
]
_NormNames = Annotated[
    Literal["rms_norm", "layer_norm"] | None,
    typer.Option(
        help="How Mesh TensorFlow's variables spell the norms; T5 1.0's released checkpoints have"
        " layer_norm.",
        show_default="as the checkpoint that the model came from",
    ),
]
_DryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything and write nothing.")]
_Force = Annotated[
    bool, typer.Option("--force", help="Write into the target even if it exists; other files stay.")
]


def convert(
    src: _Source,
    dst: _Target,
    to: _To,
    source: _From = "auto",
    step: _SourceStep = None,
    base: _Base = None,
    gin_file: _GinFile = None,
    dtype: _DType = None,
    master_dtype: _MasterDType = None,
    scan: _Scan = False,
    layout: _Layout = None,
    slots: _Slots = True,
    t5x_importer_slots: _ImporterSlots = False,
    vocab: _Vocabulary = None,
    vocab_size: _VocabularySize = None,
    mtf_norm_names: _NormNames = None,
    dry_run: _DryRun = False,
    force: _Force = False,
) -> None:
    """Convert a checkpoint between Mesh TensorFlow, T5X, JAX and Hugging Face, slots included.

    Values stay the same bit for bit unless --dtype asks for another type. If a conversion is
    interrupted, starting it again continues where it stopped.

    Example: t0repro convert runs/t0/model.ckpt-1112200 runs/t0_jax --to jax
    """
    echo(f"reading {src} ...", err=True)
    from t0repro.converters.conversion import Options
    from t0repro.converters.convert import convert as convert_checkpoint

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


# ---- `t0repro adapters` --------------------------------------------------------------------------


adapters = typer.Typer(
    name="adapters",
    help="Merge adapters into their base, and get the base back.",
    no_args_is_help=True,
    epilog="Example: t0repro adapters merge runs/my_adapter runs/my_model --to hf",
)

_FullFormat = Literal["mtf", "t5x", "jax", "hf"]
_RecordedBase = Annotated[
    str | None,
    typer.Option(callback=source, help="The base.", show_default="where it was recorded"),
]


@adapters.callback()
def _group() -> None:
    """Merge adapters into their base, and get the base back."""


@adapters.command()
def merge(
    adapter: Annotated[
        str,
        typer.Argument(callback=source, help="An adapter's checkpoint, or a folder of PEFT's."),
    ],
    out: _Target,
    to: Annotated[_FullFormat, typer.Option(help="The format to write.")],
    base: _RecordedBase = None,
    force: _Force = False,
) -> None:
    """Write the base with an adapter merged into it, as a full checkpoint.

    `t0repro convert` does the same and has options for types, vocabularies and layouts.

    Example: t0repro adapters merge runs/my_adapter runs/my_model --to hf
    """
    echo(f"reading {adapter} ...", err=True)
    from t0repro.converters.merging import merge as merge_adapter

    print_conversion(merge_adapter(adapter, out, to, base=base, force=force))


@adapters.command()
def unmerge(
    merged: Annotated[
        str, typer.Argument(callback=source, help="A checkpoint that merge or convert wrote.")
    ],
    out: _Target,
    to: Annotated[
        _FullFormat | None, typer.Option(help="The format to write.", show_default="the base's")
    ] = None,
    base: _RecordedBase = None,
    force: _Force = False,
) -> None:
    """Write the base of a merged checkpoint, bit for bit.

    Reads the base from the path that the merge recorded and compares its hash. Merging it again
    must give the merged checkpoint, bit for bit.

    Example: t0repro adapters unmerge runs/my_model runs/base
    """
    echo(f"reading {merged} ...", err=True)
    from t0repro.converters.merging import unmerge as unmerge_adapter

    print_conversion(unmerge_adapter(merged, out, to, base=base, force=force))
