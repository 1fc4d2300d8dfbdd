"""Converts a checkpoint from one format to another, tensor by tensor; the manifest comes last."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, get_args

import numpy as np

from t0repro import storage
from t0repro.converters import adapter_files, hf, jax_tree, model_gin, staging
from t0repro.converters.adapter_files import (
    AdapterNote,
    MergedReader,
    check_is_adapter,
    is_adapter,
)
from t0repro.converters.conversion import (
    Cast,
    Conversion,
    ExchangedSlots,
    Options,
    Resized,
    Target,
    WithoutSlots,
    adapter_conversion,
    make_conversion,
    versions,
)
from t0repro.converters.finding import checkpoint_at, find_checkpoint, list_checkpoints
from t0repro.converters.jax_tree import JaxReader
from t0repro.converters.model_files import arithmetic_source, check_run_files
from t0repro.converters.own_tokenizer import TRAINED_WITH
from t0repro.converters.sources import (
    check_checkpoint,
    check_optimizer,
    check_slots_step,
    check_step,
    fingerprint,
    has_slots,
    open_checkpoint,
)
from t0repro.converters.tensors import (
    CheckpointReader,
    CheckpointRef,
    Format,
    Output,
    Writer,
    total_bytes,
)
from t0repro.errors import UserError
from t0repro.parameters import naming
from t0repro.parameters.shape import ModelShape, recognize
from t0repro.progress import byte_progress
from t0repro.words import counted, remove_passwords, some

_BYTES_AHEAD = 1 << 30
VOCAB_DIVISOR = 128  # Mesh TensorFlow and T5X pad vocabularies to a multiple of it


@dataclasses.dataclass(frozen=True)
class ConversionReport:
    """The result of a conversion; with `dry_run`, the expected one.

    Attributes:
      source: The checkpoint that was read.
      target: The checkpoint that was written.
      family: Shape of the model in both.
      tensors: Number of tensors written, without the global step, which not every format has.
      bytes: Their total size, in bytes.
      slots: "kept", "dropped" (on request) or "none" (the source has none).
      notes: What was changed, dropped or is missing, one sentence each.
      resumed: Number of tensors that an interrupted conversion had already written.
      dry_run: True if nothing was written.
      merged: The adapter's note, if the target is an adapter merged into its base.
    """

    source: CheckpointRef
    target: CheckpointRef
    family: ModelShape
    tensors: int
    bytes: int
    slots: str
    notes: tuple[str, ...]
    resumed: int
    dry_run: bool
    merged: AdapterNote | None = None


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    to: Target,
    *,
    step: int | None = None,
    source: Format | None = None,
    base: str | os.PathLike[str] | None = None,
    force: bool = False,
    dry_run: bool = False,
    options: Options | None = None,
    **choices: Any,
) -> ConversionReport:
    """Converts parameters, optimizer slots and the global step to another format.

    Values are copied bit for bit unless `options` choose another dtype. Files get their final names
    in `dst` only once they are complete, the manifest last. After an interruption, the files
    written so far stay in a hidden directory, and the same call resumes from there.

    Args:
      src: See `finding.find_checkpoint`.
      dst: Directory, created if missing, or an address that does not exist yet. Like a model_dir,
        it receives `model.ckpt-<step>.*` and `checkpoint`, or `checkpoint_<step>/`; for hf, the
        model's files.
      to: Format to write. An adapter's checkpoint becomes a whole model, its base with the adapter
        merged into it; "peft" and "adapter" write the adapter alone, for PEFT and as a run here
        saves it.
      step: See `finding.find_checkpoint`.
      source: See `finding.find_checkpoint`.
      base: Of an adapter, the base, if it is not where the adapter says.
      force: Write into `dst` even if it exists, replacing a checkpoint of the same step and format;
        other files there are kept.
      dry_run: Check everything, write nothing.
      options: See `Options`.
      **choices: Fields of `Options`, as an alternative to `options`.

    Raises:
      UserError: If the source is missing, damaged, incomplete, not a T5 or written to during the
        conversion; if `dst` exists and `force` is not set; if there is not enough disk space; or
        if the global step does not fit int32.
    """
    options = options or Options(**choices)
    _check_request(to, options)
    destination = staging.destination(dst)
    ref = find_checkpoint(src, step, source)
    if base is not None:
        find_checkpoint(base)
        ref = dataclasses.replace(ref, base=storage.local_path(base))
    destination.check_is_free(force)
    _check_stands_for_it(destination.path, to)
    # Taken before reading the first byte, and compared after the last.
    files = fingerprint(ref)
    planned = _plan_adapter if to in ("peft", "adapter") else _plan
    report, reader, conversion = planned(ref, destination, to, options)
    if dry_run:
        return dataclasses.replace(report, dry_run=True)
    return _write(reader, report, conversion, destination, files)


_OF_A_RUN = ("run_state.json", TRAINED_WITH)


def _check_stands_for_it(folder: str, to: Target) -> None:
    """Refuses a folder that would stand for another checkpoint than the one to be written into it.

    A folder of transformers or PEFT is one checkpoint itself; in other folders they lie by step.
    """
    if storage.is_address(folder) or not storage.is_directory(folder):
        return
    alone = ("hf", "peft")
    itself, within = checkpoint_at(folder), list_checkpoints(folder)
    if to == "hf":
        itself = adapter_files.peft_ref(folder) or itself
    held = itself if itself is not None and itself.format in alone and itself.format != to else None
    if within and (to in alone or is_adapter(within[-1]) != (to == "adapter")):
        held = within[-1]
    if held is not None:
        kind = "adapter" if held is not itself and is_adapter(held) else held.format
        raise UserError(
            f"The folder holds a checkpoint of the format {kind}; one of the format {to} in it"
            " would be mistaken for the other.",
            where=held.path,
            fix="Name another folder.",
        )
    if any(storage.is_file(storage.join(folder, name)) for name in _OF_A_RUN):
        raise UserError(
            "A training run keeps its checkpoints in this folder, and would continue from what is"
            " written.",
            where=folder,
            fix="Name another folder. A run starts from a checkpoint of any format by"
            " utils.run.init_checkpoint, in T5X's dialect utils.RestoreCheckpointConfig.path.",
        )


def _plan(
    ref: CheckpointRef, destination: staging.Destination, to: Target, options: Options
) -> tuple[ConversionReport, CheckpointReader, Conversion]:
    """Opens and checks the source; returns the report so far, its reader and the conversion."""
    original = open_checkpoint(ref)
    if options.slots:
        check_optimizer(original)
    reader, notes = prepare(original, to, options)
    family = check_checkpoint(reader)
    # The run's files speak of the vocabulary before it was padded or cut.
    shapes = {key: info.shape for key, info in original.tensors.items()}
    trained = dataclasses.replace(family, vocab_size=recognize(shapes).vocab_size)
    check_run_files(ref, trained)
    _check_form_exists(family, to, ref, options.scan)
    if options.gin_file is not None:
        notes += [
            f"{name}, which the gin file includes, is missing; what it binds is not checked."
            for name in model_gin.check_gin_file(options.gin_file, trained)
        ]
    check_step(reader, ref)
    check_slots_step(reader)
    step = int(reader.read(naming.STEP))
    # Mesh TensorFlow's global step is an int64.
    if not 0 <= step <= np.iinfo(np.int32).max:
        raise UserError(
            f"The global step {step} does not fit T5X's int32.",
            where=ref.path,
            fix="Convert a checkpoint of another step.",
        )
    destination.check_space(total_bytes(reader.tensors))
    target = _target(destination.path, to, step)
    conversion = make_conversion(reader, target, family, options)
    # Asked of the original: `prepare` may have wrapped the reader in WithoutSlots.
    slots = "none" if not has_slots(original) else "kept" if options.slots else "dropped"
    report = dataclasses.replace(
        _report(ref, target, family, conversion, slots),
        notes=(
            *notes,
            *_list_left_behind(original),
            *conversion.notes,
            *_list_beside(destination.path, target),
        ),
        merged=original.note if isinstance(original, MergedReader) else None,
    )
    return report, reader, conversion


def _list_beside(directory: str, target: CheckpointRef) -> list[str]:
    """Notes on checkpoints of the same step, or a later one, in the folder that is written into."""
    beside = [] if storage.is_address(directory) else list_checkpoints(directory)
    last = beside[-1] if beside else target
    later = (last.step or 0) > (target.step or 0)
    return [
        f"The folder stands for its latest step, {last.path}: name the new one, {target.path}."
    ] * later + [
        f"{other.path}, of the same step, stays: name the one of the two that you mean, since the"
        " folder stands for one. `checkpoint verify` knows the new one's checksums only."
        for other in beside
        if other.step == target.step and other.format != target.format
    ]


def _plan_adapter(
    ref: CheckpointRef, destination: staging.Destination, to: Target, options: Options
) -> tuple[ConversionReport, CheckpointReader, Conversion]:
    """`_plan` for an adapter that is written alone."""
    check_is_adapter(ref)
    merged = open_checkpoint(ref)
    assert isinstance(merged, MergedReader)
    adapter = merged.adapter
    check_step(adapter, ref)
    target = _target(destination.path, to, int(merged.read(naming.STEP)))
    conversion = adapter_conversion(adapter, merged.note, merged.shape, to)
    # PEFT's file has no place for slots.
    slots = "none" if not has_slots(adapter) else "kept" if to == "adapter" else "dropped"
    return _report(ref, target, merged.shape, conversion, slots), adapter, conversion


def _is_counted(output: Output) -> bool:
    """Whether messages count an output: not the step, nor T5X's dummies, made of no tensor."""
    return bool({*output.keys} - {naming.STEP})


def _report(
    ref: CheckpointRef,
    target: CheckpointRef,
    family: ModelShape,
    conversion: Conversion,
    slots: str,
) -> ConversionReport:
    """The report of a conversion that has not written yet."""
    return ConversionReport(
        source=dataclasses.replace(ref, step=target.step),
        target=target,
        family=family,
        tensors=sum(map(_is_counted, conversion.outputs)),
        bytes=sum(output.info.nbytes for output in conversion.outputs),
        slots=slots,
        notes=conversion.notes,
        resumed=0,
        dry_run=False,
    )


def prepare(
    reader: CheckpointReader, to: Target, options: Options
) -> tuple[CheckpointReader, list[str]]:
    """Wraps a reader in what a conversion changes; returns it and a note per change."""
    # Drop slots first: Resized refuses a vocabulary size that would rename factored slots.
    notes = []
    trees, before = ("t5x", "jax"), reader
    if not options.slots:
        reader = WithoutSlots(reader)
    if options.t5x_importer_slots:
        if reader.ref.format not in trees and to not in trees:
            raise UserError(
                "--t5x_importer_slots concerns T5X's checkpoints; neither side is one.",
                fix="Remove the flag.",
            )
        reader = ExchangedSlots(reader)
        side = "The source's" if reader.ref.format in trees else "The target's"
        notes.append(f"{side} slots of square matrices are as T5X's importer leaves them.")
    dtype, asked_by = _dtype(to, options)
    parameter_types = {
        info.dtype.name for key, info in reader.tensors.items() if key.startswith(naming.PARAMETERS)
    }
    if dtype is None and to == "mtf" and parameter_types == {"bfloat16", "float32"}:
        # For instance a bfloat16 model whose wo transformers kept in float32.
        dtype = "float32"
        notes.append(
            "The bfloat16 parameters are widened to the others' float32: Mesh TensorFlow restores"
            " parameters of one type only."
        )
    reader = cast = Cast(reader, dtype)
    if dtype and cast.lossy:
        count = counted(len(cast.lossy), "parameter is", "parameters are")
        notes.append(f"{count} rounded to {dtype}, as {asked_by} asks.")
    size = recognize({key: info.shape for key, info in before.tensors.items()}).vocab_size
    new_size = options.vocab_size
    if new_size is None and to != "hf" and size > VOCAB_DIVISOR:
        # transformers does not pad vocabularies; the other formats expect padding.
        if arithmetic_source(reader.ref).format == "hf":
            # Rounded up to a whole multiple.
            new_size = -(-size // VOCAB_DIVISOR) * VOCAB_DIVISOR
    if new_size is not None and new_size != size:
        reader = Resized(reader, new_size)
        how = "padded with zeros" if new_size > size else "cut, its last rows lost,"
        notes.append(f"The vocabulary is {how} from {size} to {new_size}.")
    return reader, notes


def _dtype(to: Target, options: Options) -> tuple[str | None, str]:
    """The dtype for the target's parameters (None keeps the source's) and which option set it."""
    if options.dtype:
        return options.dtype, "--dtype"
    if options.master_dtype:
        return options.master_dtype, "--master_dtype"
    if to == "mtf" and options.gin_file is not None:
        return model_gin.master_dtype(options.gin_file), f"master_dtype in {options.gin_file}"
    return None, ""


def _list_left_behind(reader: CheckpointReader) -> list[str]:
    """Notes about the parts of a T5X checkpoint that no other format can store."""
    if not isinstance(reader, JaxReader):
        return []
    notes = [
        f"T5X's place in its training data ({storage.base_name(file)}) is left out: it is one of"
        " tf.data's iterators, which only the same SeqIO pipeline can take up again."
        # Each host has a file of its own; one stands for all.
        for file in jax_tree.dataset_state(reader.ref.path)[:1]
    ]
    if reader.other_state:
        notes.append(
            f"State that neither Adafactor nor Adam has is left out: {some(reader.other_state)}."
        )
    return notes


def _target(directory: str, to: Target, step: int) -> CheckpointRef:
    # A run saves its adapter in the layout and under the folder name of a model's checkpoint.
    if to == "adapter":
        to = "jax"
    if to in ("hf", "peft"):
        return CheckpointRef(to, directory, step)
    # tf.train.Saver and T5X find a directory's checkpoints by these names.
    name = f"model.ckpt-{step}" if to == "mtf" else f"checkpoint_{step}"
    return CheckpointRef(to, storage.join(directory, name), step)


def _check_request(to: Target, options: Options) -> None:
    known = [*get_args(Format), "adapter"]
    if to not in known:
        raise UserError(
            f"There is no format {to!r}.",
            where="--to (in Python to)",
            fix=f"Give one of {', '.join(known)}; hf is Hugging Face's.",
        )
    changed = [
        field.name
        for field in dataclasses.fields(Options)
        if getattr(options, field.name) != field.default
    ]
    if to in ("peft", "adapter") and changed:
        raise UserError(
            f"An adapter alone is written as it is, so {changed[0]} changes nothing.",
            where=_name_option(changed[0]),
            fix="Leave it out, or write the whole model, to jax, t5x, mtf or hf.",
        )
    if options.scan and to != "t5x":
        raise UserError(
            "Layers are stacked in T5X's checkpoints only.",
            where=_name_option("scan"),
            fix="Convert to t5x, or leave it out.",
        )
    if options.master_dtype and to != "mtf":
        raise UserError(
            "Only Mesh TensorFlow has masters.",
            where=_name_option("master_dtype"),
            fix=f"Give {_name_option('dtype')} for other formats.",
        )
    if options.master_dtype and options.dtype not in (None, options.master_dtype):
        raise UserError(
            f"One type is {options.dtype}, and that of masters {options.master_dtype}.",
            where=f"{_name_option('dtype')}, {_name_option('master_dtype')}",
            fix="Give one of them.",
        )
    if options.layout and to != "t5x":
        raise UserError(
            "Only T5X's checkpoints have layouts.",
            where=_name_option("layout"),
            fix="Convert to t5x, or leave it out.",
        )


def _name_option(option: str) -> str:
    """An option of the command and of the function."""
    return f"--{option} (in Python {option})"


def _check_form_exists(shape: ModelShape, to: Target, ref: CheckpointRef, scan: bool) -> None:
    """Raises UserError if the target's own software cannot represent the model."""
    if shape.encoder_only and to != "hf":
        peer = {"mtf": "Mesh TensorFlow", "t5x": "T5X"}.get(to, "a training run here")
        raise UserError(
            f"The model is an encoder alone; {peer} reads only models with a decoder.",
            where=ref.path,
            fix="Convert to hf, or compute embeddings with `t0repro encode`.",
        )
    if shape.position_bias_per_layer and to == "t5x" and not scan:
        raise UserError(
            "A position bias in each layer (umT5) needs T5X's scanned layout.",
            where=ref.path,
            fix="Add --scan.",
        )
    if shape.decoder_only and to == "hf":
        raise UserError(
            "transformers has no decoder-only T5.",
            where=ref.path,
            fix="Convert to mtf, t5x or jax.",
        )
    if shape.shared_towers and to in ("t5x", "hf"):
        peer = "T5X" if to == "t5x" else "transformers"
        raise UserError(
            f"{peer} has no T5 whose encoder has the decoder's parameters (bi_v1_shared).",
            where=ref.path,
            fix="Convert to mtf or jax.",
        )


def _write(
    reader: CheckpointReader,
    report: ConversionReport,
    conversion: Conversion,
    destination: staging.Destination,
    files: dict[str, Any],
) -> ConversionReport:
    """Writes the tensors and small files, then what makes them a checkpoint, then the manifest."""
    # transformers and PEFT load nothing without this file, so it comes after all others.
    last = {
        name: text
        for name, text in conversion.small_files.items()
        if name in (hf.CONFIG, adapter_files.PEFT_CONFIG)
    }
    # Everything that decides the output's content. A staged directory is resumed only if its
    # request equals this one, so omitting a setting here could mix two different conversions.
    request = {
        "source": [
            report.source.format,
            remove_passwords(storage.absolute(report.source.path)),
            report.source.step,
        ],
        "files": files,
        "target": [report.target.format, report.target.step],
        "tensors": [
            [o.name, o.file, list(o.info.shape), o.info.dtype.name] for o in conversion.outputs
        ],
        # Only the small files' names: a resumed conversion writes all of them again.
        "extra": [conversion.norm_names, sorted(conversion.small_files), list(conversion.notes)],
    }
    with _explain_full_disk(destination.path), destination.stage(request) as staged:
        writer = conversion.open_writer(staged.path)
        try:
            resumed = _write_tensors(reader, report, conversion, writer, staged)
            # A training run may have overwritten the source during reading.
            if fingerprint(report.source) != files:
                raise UserError(
                    "The source was written to while it was read.",
                    where=report.source.path,
                    fix="Wait until its writer has finished, then convert again.",
                )
            for name in conversion.small_files.keys() - last:
                storage.write_atomically(
                    storage.join(staged.path, name), conversion.small_files[name]
                )
            writer.close()
        finally:
            writer.abandon()
        manifest = _manifest(report, conversion.norm_names, staged.digests)
        destination.publish(staged, report.target, manifest, last)
    return dataclasses.replace(report, resumed=resumed)


@contextlib.contextmanager
def _explain_full_disk(directory: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        # EDQUOT: the user's quota is used up, though the disk may have space left.
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError(
            "No space left for the checkpoint.",
            where=directory,
            fix="Free some space and start the same command again: it continues where it stopped.",
        ) from error


def _write_tensors(
    reader: CheckpointReader,
    report: ConversionReport,
    conversion: Conversion,
    writer: Writer,
    staged: staging.Staged,
) -> int:
    """Writes the missing tensors; returns how many were already there."""
    description = f"Converting step {report.target.step} to {report.target.format}"
    resumed = 0
    noted = set(staged.digests)
    with (
        byte_progress(description, report.bytes) as done,
        staged.log() as enter,
        ThreadPoolExecutor(1) as pool,
    ):

        def build(output: Output) -> np.ndarray:
            return output.build(map(reader.read, output.keys))

        new = [output for output in conversion.outputs if output.name not in noted]
        # Read the next tensor while the current one is written, so at most two are in memory. Large
        # ones (a scanned tree stacks all layers into gigabytes) are read one at a time.
        ahead = {output.name: pool.submit(build, output) for output in new[:1]}
        following = dict(zip((output.name for output in new), new[1:], strict=False))
        for output in conversion.outputs:
            if output.name in noted and _keep_stored(writer, output, staged):
                resumed += _is_counted(output)
            else:
                array = (ahead.pop(output.name, None) or pool.submit(build, output)).result()
                after = following.get(output.name)
                if after and output.info.nbytes + after.info.nbytes <= _BYTES_AHEAD:
                    ahead[after.name] = pool.submit(build, after)
                enter(output, array, functools.partial(writer.add, output, array))
                del array  # free its memory before the next one is read
            done(output.info.nbytes)
    return resumed


def _keep_stored(writer: Writer, output: Output, staged: staging.Staged) -> bool:
    """Keeps a tensor from an interrupted conversion if its bytes match the recorded digest."""
    expected = staged.digests.get(output.name)
    if expected is None or (array := writer.read_back(output)) is None:
        return False
    if staging.describe(array) != expected:
        return False
    writer.keep(output, array)
    return True


def _manifest(
    report: ConversionReport, norm_names: naming.NormNames, digests: Mapping[str, Any]
) -> str:
    """Returns the manifest's JSON: the source, what changed, and each tensor's digest."""
    base = report.merged and {
        "path": remove_passwords(report.merged.base),
        "hash": report.merged.digest,
    }
    return json.dumps(
        {
            "source": {
                "path": remove_passwords(storage.absolute(report.source.path)),
                "format": report.source.format,
                "step": report.source.step,
                # What `merging.unmerge` needs.
                **({"base": base} if base else {}),
            },
            "target": {"format": report.target.format, "step": report.target.step},
            "model": dataclasses.asdict(report.family),
            "slots": report.slots,
            "changes": list(report.notes),
            "mtf_norm_names": norm_names,
            "versions": versions(),
            "tensors": digests,
        },
        indent=1,
    )
