"""Finds and opens checkpoints of any format by the paths that users give."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import json
import os
import re
import shlex
from typing import Any

import numpy as np

from t0repro import storage
from t0repro.adapters import Adapter
from t0repro.converters import adapter_files, hf, jax_tree, mtf, released, t5x_msgpack
from t0repro.converters.adapter_files import (
    AdapterNote,
    MergedReader,
    check_is_adapter,
    is_adapter,
    note_of,
    open_adapter,
)
from t0repro.converters.peft_config import PEFT_CONFIG
from t0repro.converters.tensors import (
    CheckpointReader,
    CheckpointRef,
    FlatTree,
    Format,
    StoredTensor,
    TensorInfo,
    check_types,
)
from t0repro.converters.witnesses import MANIFEST, parameters_digest, read_manifest
from t0repro.errors import UserError, similar_names
from t0repro.parameters import naming
from t0repro.parameters.shape import ModelShape, check_parameters
from t0repro.progress import say
from t0repro.words import counted, some

_NO_SLOTS = "Convert without slots: --no_slots, in Python slots=False."


def find_checkpoint(
    path: str | os.PathLike[str], step: int | None = None, source: Format | None = None
) -> CheckpointRef:
    """Finds the checkpoint at a path.

    Args:
      path: One of
        - a directory of checkpoints: the latest one. If it has several formats, the highest step
          wins, and JAX or T5X wins over Mesh TensorFlow at the same step;
        - a `checkpoint_<step>` directory;
        - a Mesh TensorFlow prefix (`model.ckpt-<step>`, with or without `.index`);
        - a directory that transformers loads.
        Any of them may be remote, at an address that fsspec opens (gs://...).
      step: Take this step instead of the latest. If `path` already names one checkpoint, its step
        must be this one.
      source: Accept only this format ("t5x" and "jax" are interchangeable); defaults to any.

    Raises:
      UserError: If there is no such checkpoint, or a Mesh TensorFlow state file names one that is
        gone.
    """
    path = storage.local_path(path)
    if not isinstance(step, int | np.integer | None):
        raise UserError(
            f"The step is {step!r}, not a whole number.", where="step", fix="Give a number."
        )
    try:
        return _find(path, step, source)
    except CheckpointNotFound:
        # s3fs takes a response cut off before its first byte for an empty listing. On a second
        # request, the store lists its contents, or its library reports the error.
        if not storage.refresh(path):
            raise
    return _find(path, step, source)


def find_adapter(path: str | os.PathLike[str]) -> CheckpointRef:
    """Finds an adapter's checkpoint, or a folder of PEFT's; see `find_checkpoint`.

    Raises:
      UserError: If there is none, or it is a whole model's.
    """
    ref = find_checkpoint(path)
    check_is_adapter(ref)
    return ref


class CheckpointNotFound(UserError):
    """There is no such checkpoint at a path."""


def _find(path: str, step: int | None, source: Format | None) -> CheckpointRef:
    if (ref := checkpoint_at(path)) and _is_of(ref, source):
        if step not in (None, ref.step):
            folder = os.path.dirname(str(path).rstrip("/")) or "."
            beside = step in [other.step for other in list_checkpoints(folder)]
            raise UserError(
                f"The path names step {ref.step}, but step {step} was requested.",
                where=path,
                fix=f"Leave the step out{f', or give the folder, {folder}' if beside else ''}.",
            )
        return ref
    if not storage.is_directory(path):
        if storage.is_file(path):
            _refuse_file(path)
        raise _not_found(absence(path), path)
    refs = [ref for ref in list_checkpoints(path) if _is_of(ref, source)]
    if not refs:
        if source in (None, "mtf"):
            # Raises if a state file names a missing checkpoint: a more useful message.
            mtf.latest_mtf_prefix(path)
        what = f"The directory holds no checkpoint{f' of the format {source}' if source else ''}."
        if re.fullmatch(r"checkpoint_\d+", storage.base_name(path)):
            why = _describe_list_missing(path)
        else:
            below = _describe_below(path)
            if not below:
                _refuse_formats(path, storage.list_names(path))
            why = _describe_partial(path) or below or _describe_folder(path)
        raise _not_found(what + why, path)
    if step is None:
        return _latest(path, refs, source)
    chosen = [ref for ref in refs if ref.step == step]
    if not chosen:
        raise CheckpointNotFound(
            f"The directory has no checkpoint of step {step}; it has {_steps(refs)}.",
            where=path,
            fix="Choose one of these, or leave the step out for the latest.",
        )
    return chosen[-1]


def absence(path: str) -> str:
    """Explains why there is no checkpoint at a path that is not a directory.

    If the name looks like a checkpoint's, the explanation lists the existing steps.
    """
    if storage.is_file(path):
        return "This file is not a checkpoint."
    named = re.fullmatch(r"(?:checkpoint_|model\.ckpt-)(\d+)(?:\.index)?", storage.base_name(path))
    refs = list_checkpoints(os.path.dirname(path.rstrip("/")) or ".") if named else []
    there = f"; its directory has {_steps(refs)}" if refs else ""
    # A name such as model.ckpt-1 is of several files.
    if not named and not storage.exists(path):
        directory, name = os.path.split(path.rstrip("/"))
        beside = [] if storage.is_address(path) else storage.list_names(directory or ".")
        near = [os.path.join(directory, each) for each in similar_names(name, beside, 3)]
        if beside and not near and (checkpoint_at(directory) or list_checkpoints(directory)):
            near = [directory or "."]
        return f"There is no such file or folder.{f' Nearest: {some(near)}.' if near else ''}"
    return f"Checkpoint not found{there}."


def _steps(refs: list[CheckpointRef]) -> str:
    steps = sorted({ref.step or 0 for ref in refs})
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps))}"


def list_checkpoints(directory: str | os.PathLike[str]) -> list[CheckpointRef]:
    """Lists a directory's complete checkpoints by ascending step, JAX's last within a step."""
    path = storage.local_path(directory)
    refs = [
        CheckpointRef("mtf", storage.join(path, f"model.ckpt-{step}"), step)
        for step in mtf.mtf_steps(path)
    ]
    # A stable sort keeps JAX's behind Mesh TensorFlow's of the same step.
    refs += jax_tree.jax_refs(path)
    return sorted(refs, key=lambda ref: ref.step or 0)


def _is_of(ref: CheckpointRef, source: Format | None) -> bool:
    # Both have T5X's tree, and one reader reads both, so either name may be requested.
    trees = ("jax", "t5x")
    return source in (None, ref.format) or (source in trees and ref.format in trees)


def checkpoint_at(path: str) -> CheckpointRef | None:
    """The checkpoint that the path names directly; None if it names none."""
    prefix = path.removesuffix(".index")
    if storage.is_file(f"{prefix}.index"):
        # A prefix may have any name; tf.train.Saver adds the step only if it is given one.
        match = re.search(r"-(\d+)$", prefix)
        return CheckpointRef("mtf", prefix, int(match[1]) if match else None)
    directory = storage.normal(path)
    if os.path.basename(directory) in jax_tree.ITEMS:
        directory = os.path.dirname(directory)  # an item inside T5X's Orbax checkpoint
    match = re.fullmatch(r"checkpoint_(\d+)", os.path.basename(directory))
    if match and storage.is_directory(directory):
        return jax_tree.jax_ref(directory, int(match[1]))
    # A renamed checkpoint, or one item copied out of it.
    return (
        hf.hf_ref(path)
        or adapter_files.peft_ref(path)
        or (jax_tree.orbax_ref(path) if storage.is_directory(path) else None)
    )


def _latest(path: str, refs: list[CheckpointRef], source: Format | None) -> CheckpointRef:
    """The checkpoint with the highest step; of Mesh TensorFlow's, the one its state file names."""
    # tf.train.Saver restores the checkpoint in its state file, even if a higher step is beside it.
    candidates = [ref for ref in refs if ref.format != "mtf"][-1:]
    prefix = mtf.latest_mtf_prefix(path) if source in (None, "mtf") else None
    if prefix is not None and (named := checkpoint_at(prefix)):
        candidates.insert(0, named)
    # Reversed: among equal steps `max` returns the first, which is then JAX's.
    return max(reversed(candidates), key=lambda ref: ref.step if ref.step is not None else -1)


def _describe_partial(path: str) -> str:
    """A sentence about a checkpoint that is still being written, or ""."""
    names = storage.list_names(path)
    # Incomplete checkpoints: tf.train.Saver's parts before it merges them, T5X's and Orbax's
    # folders before they are renamed.
    partial = [
        name
        for name in names
        if re.match(r"model\.ckpt-\d+(_temp|\.data-|\.tempstate)", name)
        or re.match(r"\.?checkpoint_\d+\.(tmp|orbax-checkpoint-tmp)", name)
    ]
    if partial:
        return f" {partial[0]} is being written, or its writing was interrupted."
    complete = (storage.join(path, each) for each in names if re.fullmatch(r"checkpoint_\d+", each))
    return next(filter(None, map(_describe_list_missing, complete)), "")


def _describe_list_missing(checkpoint: str) -> str:
    """A sentence about a T5X checkpoint of which only the arrays were copied, or ""."""
    if not any(name.startswith("target.") for name in storage.list_names(checkpoint)):
        return ""
    name = storage.base_name(checkpoint)
    return f" {name} has arrays, but not the file that lists them: {t5x_msgpack.FILE}."


def _describe_below(path: str) -> str:
    """A sentence about the checkpoints in a folder's folders, or ""."""
    if storage.is_address(path):
        return ""
    # Of the hub's cache, models--<owner>--<name>/snapshots/<commit>.
    parents = [path, os.path.join(path, "snapshots")]
    entries = [each for parent in parents if os.path.isdir(parent) for each in os.scandir(parent)]
    folders = sorted(each.path for each in entries if each.is_dir())[:100]
    found = [each for each in folders if list_checkpoints(each) or checkpoint_at(each)]
    return f" There are some in {some(found, 3)}." if found else ""


def _describe_folder(path: str) -> str:
    """A sentence about an evaluation's folder, or a run's before its first checkpoint, or ""."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        report = json.loads(storage.read(storage.join(path, "report.json")))
        return f" It is an evaluation, of {report['provenance']['checkpoint']}."
    if storage.is_file(storage.join(path, "run_state.json")):
        return " A training run has begun here, and has saved no checkpoint yet."
    return ""


def _refuse_file(path: str) -> None:
    """Raises UserError if a path names a checkpoint's file instead of its directory."""
    directory = os.path.dirname(path) or "."
    if ref := checkpoint_at(directory):
        raise UserError(
            f"This is a file of a checkpoint of the format {ref.format}.",
            where=path,
            fix=f"Give its directory: {directory}.",
        )
    # A Mesh TensorFlow checkpoint is of several files, which its directory's state file names.
    part = re.fullmatch(r"(.+)\.(?:data-\d{5}-of-\d{5}|meta)", path)
    is_state = storage.base_name(path) == mtf.STATE_FILE and list_checkpoints(directory)
    if (part and checkpoint_at(part[1])) or is_state:
        raise UserError(
            "This is a file of a checkpoint of the format mtf.",
            where=path,
            fix=f"Give its prefix: {part[1]}." if part else f"Give its directory: {directory}.",
        )
    _refuse_formats(directory, [storage.base_name(path)])


# Converts any model exactly, and runs no code from the file.
_UNPICKLE = (
    "import glob, torch; from safetensors.torch import save_file;"
    ' files = [torch.load(f, map_location="cpu", weights_only=True)'
    " for f in sorted(glob.glob({pattern}))];"
    " save_file({{n: t.clone().contiguous() for f in files for n, t in f.items()}}, {out},"
    ' {{"format": "pt"}})'
)


# Names of files and folders -> what they are, and how to get a checkpoint that is read.
_OTHER_LAYOUTS = (
    (
        r".+\.(incomplete|crdownload|part|partial|download|aria2)",
        "is of a download that did not finish",
        "Download it again.",
    ),
    (
        r".+\.(tar|tgz|tar\.\w+|zip)",
        "is an archive",
        "Unpack it, and give the folder that was in it.",
    ),
    (
        r".+-\d{5}-of-\d{5}(\.\w+)?\.safetensors",
        f"is one of a model's files, but {hf.INDEX}, which lists them, is missing",
        f"Copy {hf.INDEX} there too. If there is a variant's list, as of fp16, give it that name.",
    ),
    (
        rf"{hf.WEIGHTS}|{hf.INDEX}",
        "is a link to a file that is not there",
        "Download the model again, or copy the file in the link's place.",
    ),
    (
        r"zero_to_fp32\.py|global_step\d+",
        "is DeepSpeed's, whose shards are not read",
        "In the directory, run python zero_to_fp32.py . OUT --safe_serialization, and copy"
        f" {hf.CONFIG} to OUT.",
    ),
    (
        r"latest_checkpointed_iteration\.txt",
        "is Megatron's, whose checkpoints are not read",
        "Convert the model with Megatron's or NeMo's own tools to transformers' format.",
    ),
    (
        r"saved_model\.pb",
        "is TensorFlow's SavedModel, which is not read",
        "Give the checkpoint that it was exported from (model.ckpt-<step>).",
    ),
    (
        r".+\.distcp|pytorch_model_fsdp_\d+",
        "is PyTorch's distributed checkpoint (FSDP), whose shards are not read",
        f"Merge them with accelerate merge-weights FOLDER OUT, and copy {hf.CONFIG} to OUT.",
    ),
    (
        r"target\..+",
        "is an array of T5X's, but the directory is not named checkpoint_<step>",
        "Rename the directory to checkpoint_ and its step, unless it is named .tmp-: T5X did not"
        " finish such a checkpoint.",
    ),
    (
        r"(?!adapter_model|optimizer_slots).+\.safetensors",
        f"is not named {hf.WEIGHTS}, as transformers names a model's weights",
        f"Rename it if it is the whole model; {hf.CONFIG} belongs beside it.",
    ),
)


# Weights of other programs: Keras, llama.cpp, ONNX (mostly in a folder), Rust, PyTorch, NeMo,
# CTranslate2 and OpenVINO; but not what transformers' Trainer saves beside them.
_NOT_READ = (
    r"(?!optimizer|scheduler|scaler|rng_state).+\.(h5|gguf|onnx|ot|pt|pth|ckpt|nemo)"
    r"|onnx|model\.bin|openvino_.+\.(bin|xml)"
)
_PICKLED_INDEX = "pytorch_model.bin.index.json"


def _refuse_formats(directory: str, names: list[str]) -> None:
    """Raises UserError for a file of weights in a format that is not read."""
    for pattern, what, fix in _OTHER_LAYOUTS:
        if name := next((each for each in sorted(names) if re.fullmatch(pattern, each)), None):
            raise UserError(f"{name} {what}.", where=storage.join(directory, name), fix=fix)
    fix = f"Get the same model as {hf.WEIGHTS}, in Mesh TensorFlow's format or in T5X's."
    for name in names:
        what = f"{name} is in a format that is not read."
        if re.fullmatch(r"pytorch_model.*\.bin", name):
            what = f"{name} is PyTorch's pickle of the weights, which is not read."
            pattern = os.path.join(glob.escape(directory), "pytorch_model*.bin")
            out = os.path.join(directory, hf.WEIGHTS)
            code = _UNPICKLE.format(pattern=json.dumps(pattern), out=json.dumps(out))
            fix = (
                f"With the extra hf, and the directory on a disk, run python -c {shlex.quote(code)}"
            )
        elif not re.fullmatch(_NOT_READ, name):
            continue
        raise UserError(what, where=storage.join(directory, name), fix=fix)
    if name := next((each for each in (hf.CONFIG, _PICKLED_INDEX) if each in names), None):
        raise UserError(
            f"There is {name}, but no weights.",
            where=directory,
            fix=f"Copy {hf.WEIGHTS} there too, or all of the files that {hf.INDEX} lists.",
        )


def _not_found(what: str, path: str) -> CheckpointNotFound:
    # In a folder, as in runs/t5-small, it is not a released checkpoint's name that is missing.
    name = path.removeprefix("https://huggingface.co/").strip("/")
    names = [name] if "/" in path else released.names_like(path)
    if name := next((each for each in names if each in released.catalog()), None):
        return CheckpointNotFound(
            f"{name} is the name of a released checkpoint, which is not on this machine.",
            where=path,
            fix=f"Download it to DIR: {released.OPT_IN}=1 t0repro checkpoint fetch {name} --to DIR",
        )
    return CheckpointNotFound(
        what,
        where=path,
        fix="Give a directory with model.ckpt-<step>.index or checkpoint_<step>/, the path of"
        " one checkpoint (.../model.ckpt-<step> or .../checkpoint_<step>), or a directory with"
        " model.safetensors or flax_model.msgpack.",
    )


def open_checkpoint(ref: CheckpointRef) -> CheckpointReader:
    """Opens a checkpoint; checks its files, names and shapes, but not yet its values.

    An adapter's is read as its base with the adapter merged into it. The base's values are read
    once more for that, to compare their hash.

    Raises:
      UserError: If it is damaged or holds an unknown variable; if it is an adapter's, and its base
        is gone or another one.
    """
    if is_adapter(ref):
        return _open_merged(ref)
    if ref.base is not None:
        raise UserError(
            "A base is given, but the checkpoint is not an adapter's.",
            where=ref.path,
            fix="Leave out --base (in Python base).",
        )
    manifest = read_manifest(ref.folder)
    norm_names = manifest.norm_names if manifest else None
    if manifest and not manifest.is_of(ref):
        manifest = None  # it describes another checkpoint of this directory
    if ref.format == "mtf":
        return mtf.MtfReader(ref.path, manifest)
    if ref.format == "hf":
        if adapter_files.peft_ref(ref.path):
            raise UserError(
                "The folder has a whole model and an adapter. transformers reads the model alone,"
                " or, with PEFT installed, the adapter and its own base.",
                where=storage.join(ref.path, PEFT_CONFIG),
                fix="Move the adapter's files to a folder of their own.",
            )
        return hf.HfReader(ref, norm_names, manifest)
    return jax_tree.JaxReader(ref, norm_names, manifest)


def _open_merged(ref: CheckpointRef) -> MergedReader:
    adapter = open_adapter(ref)
    base = open_checkpoint(base_of(ref))
    shape = check_checkpoint(base)
    digest = parameters_digest(base.tensors, base.read)
    check_base(adapter.note, digest, base.ref.path)
    where = storage.absolute(base.ref.path)
    note = dataclasses.replace(adapter.note, base=where, digest=digest)
    return MergedReader(adapter, base, shape, note)


def check_base(note: AdapterNote, digest: str, path: str) -> None:
    """Checks that a base is the one that an adapter was trained on.

    A folder that PEFT wrote has the base's name alone: if a checkpoint is there, its hash counts.

    Args:
      note: What the adapter's checkpoint says.
      digest: The hash of the base's parameters.
      path: Where the base is.

    Raises:
      UserError: With both hashes, if it is another.
    """
    named = storage.absolute(note.base) if note.base else None
    if note.digest is None and named not in (None, storage.absolute(path)):
        # The name is often the hub's (google/t5-v1_1-xl), with nothing here to compare with.
        with contextlib.suppress(CheckpointNotFound):
            base = open_checkpoint(find_checkpoint(note.base))
            note = dataclasses.replace(note, digest=parameters_digest(base.tensors, base.read))
    note.check_base(digest, path)


def read_adapter(
    path: str, adapter: Adapter, shape: ModelShape, digest: str, base: str
) -> FlatTree:
    """The parameters of another run's adapter, without its slots and step, to train on.

    Args:
      path: See `find_adapter`.
      adapter: The adapter that is about to be trained.
      shape: The shape of the base.
      digest: The hash of the base's parameters.
      base: Where the base is.

    Raises:
      UserError: If it has other sizes or another scale, or was trained on another base.
    """
    reader = open_adapter(find_adapter(path))
    reader.check_continues(adapter, shape)
    check_base(reader.note, digest, base)
    say(f"restore: {reader.ref.path}")
    return {key: reader.read(key) for key in reader.tensors if key.startswith(naming.PARAMETERS)}


def base_of(ref: CheckpointRef) -> CheckpointRef:
    """The base of an adapter's checkpoint."""
    base = ref.base or note_of(ref).base
    if not base:
        raise UserError(
            "The adapter does not name its base.",
            where=ref.path,
            fix="Write the base's path into base_model_name_or_path. Or name the base: `t0repro"
            " convert` and `t0repro adapters merge` take --base, `t0repro rank-eval` takes"
            f" --checkpoint BASE --adapter {ref.path}.",
        )
    try:
        return find_checkpoint(base)
    except CheckpointNotFound as error:
        raise UserError(
            f"The base of the adapter in {ref.path} is not there.",
            where=base,
            fix="Put it back, or a link to where it is now; `t0repro convert` and `t0repro adapters"
            " merge` also take --base.",
        ) from error


def files_of(ref: CheckpointRef) -> list[str]:
    """Lists the files that a checkpoint is read from; of an adapter's, those of its base too."""
    if is_adapter(ref):
        return [*sorted(storage.list_files(ref.path)), *files_of(base_of(ref))]
    if ref.format == "mtf":
        directory, _, prefix = ref.path.rpartition("/")
        directory = directory or "."
        names = [n for n in storage.list_names(directory) if n.startswith(f"{prefix}.")]
        return [storage.join(directory, name) for name in names]
    if ref.format == "hf":
        ends = (".safetensors", ".msgpack", ".index.json")
        names = [n for n in storage.list_names(ref.path) if n == hf.CONFIG or n.endswith(ends)]
        return [storage.join(ref.path, name) for name in names]
    return sorted(storage.list_files(ref.path))


def fingerprint(ref: CheckpointRef) -> dict[str, Any]:
    """Sizes and modification times of a checkpoint's files, to detect changes to it."""
    # Remote file systems cache listings, which would hide the change.
    storage.refresh(ref.path)
    files = files_of(ref)
    return dict(zip(files, storage.call_at_once(storage.stamp, files), strict=True))


def check_checkpoint(reader: CheckpointReader) -> ModelShape:
    """Checks that a checkpoint contains one complete T5, with all of its slots if it has any.

    Returns:
      The model's shape.

    Raises:
      UserError: Naming what is missing or has the wrong shape.
    """
    where = reader.ref.path
    keys = (key for key in reader.tensors if key.startswith(naming.PARAMETERS))
    shapes = {naming.split_key(key)[0]: reader.tensors[key].shape for key in keys}
    family = check_parameters(
        shapes, where, lambda path: reader.native_name(naming.PARAMETERS + path)
    )
    if naming.STEP not in reader.tensors:
        raise UserError(
            f"1 variable is missing: {reader.native_name(naming.STEP)}.",
            where=where,
            fix="The checkpoint is incomplete; get it again from where it came from.",
        )
    if family.encoder_only and reader.ref.format != "hf":
        norm = f"{naming.PARAMETERS}decoder/layers_0/pre_self_attention_layer_norm/scale"
        raise UserError(
            f"All variables of the decoder are missing, for instance {reader.native_name(norm)}.",
            where=where,
            fix="The checkpoint is incomplete; get it again from where it came from.",
        )
    check_types(reader)
    _check_slots(reader, shapes)
    return family


def check_step(reader: CheckpointReader, ref: CheckpointRef) -> None:
    """Checks that a checkpoint's step is the one in its name.

    Training may continue from a renamed checkpoint (--allow_changed); a conversion may not, because
    one of the two steps would name its output.

    Args:
      reader: A reader of the checkpoint.
      ref: The checkpoint as found; `reader.ref` may have the step in its content.

    Raises:
      UserError: If the two differ.
    """
    step = int(reader.read(naming.STEP))
    if ref.step not in (None, step):
        raise UserError(
            f"The name says step {ref.step}, but the checkpoint's own step is {step}.",
            where=ref.path,
            fix="Rename the checkpoint to the step that it holds.",
        )


def check_slots_step(reader: CheckpointReader) -> None:
    """Checks that the step of a Hugging Face model's slots is known; only the manifest has it.

    Raises:
      UserError: If there are slots but no manifest: they would count as those of step 0, where
        Adafactor discards what it has accumulated.
    """
    record = reader.ref.beside(MANIFEST)
    if reader.ref.format == "hf" and has_slots(reader) and not storage.is_file(record):
        slots = storage.join(reader.ref.path, hf.SLOTS_FILE)
        raise UserError(
            f"There are optimizer slots, but no {MANIFEST}, which holds their step.",
            where=slots,
            fix=f"Copy {MANIFEST} too. If the model was changed on purpose since it was converted,"
            f" remove {hf.SLOTS_FILE}; the step then counts as 0.",
        )


def check_optimizer(reader: CheckpointReader) -> None:
    """Checks that a T5X checkpoint has the state of an optimizer known here, and no other.

    Raises:
      UserError: If it has another's, or variables that are not trained, or if it was not copied.
    """
    if not isinstance(reader, jax_tree.JaxReader):
        return
    for names, what in (
        (reader.other_state, "has state that neither Adafactor nor Adam has"),
        (reader.lost_state, "names its optimizer's state, which is not there"),
    ):
        if names:
            raise UserError(
                f"The checkpoint {what}: {counted(len(names), 'variable')}, {some(names)}.",
                where=reader.ref.path,
                fix=f"{_NO_SLOTS} Training goes on from the result.",
            )


def _check_slots(reader: CheckpointReader, shapes: dict[str, tuple[int, ...]]) -> None:
    slots: dict[str, dict[str, TensorInfo]] = {path: {} for path in shapes}
    for key, info in reader.tensors.items():
        if key.startswith(naming.SLOTS):
            path, slot = naming.split_key(key)
            slots[path][slot or ""] = info
    if not has_slots(reader):
        return
    present_slots = {slot for present in slots.values() for slot in present}
    whole = next((each for each in naming.WHOLE_SLOTS if present_slots & {*each}), None)
    momentum = ("m",) if "m" in present_slots else ()
    # A matrix without any slot was excluded from training (utils.run.variable_filter), and vectors
    # without one are then fine too. If every matrix has its slots, a vector without one lost it.
    partly_trained = any(len(shapes[path]) > 1 and not slots[path] for path in shapes)
    for path, shape in shapes.items():
        present = slots[path]
        if partly_trained and not present:
            continue
        if len(shape) < 2 and (factored := sorted({"v_row", "v_col"} & present.keys())):
            name = reader.native_name(naming.slot_key(path, factored[0]))
            raise UserError(
                f"The slot {name} has the shape {list(present[factored[0]].shape)}, but only"
                f" matrices have such a slot, and its variable has the shape {list(shape)}.",
                where=reader.ref.path,
                fix=f"{_NO_SLOTS} Or get the whole checkpoint.",
            )
        # A parameter has both factored slots, or one unfactored second moment.
        adafactor = ("v_row", "v_col") if {"v_row", "v_col"} & present.keys() else ("v",)
        for slot in (*(whole or adafactor), *momentum):
            name = reader.native_name(naming.slot_key(path, slot))
            if slot not in present:
                raise UserError(
                    f"A slot is missing: {name}. Other variables have theirs.",
                    where=reader.ref.path,
                    fix=f"{_NO_SLOTS} Or get the whole checkpoint.",
                )
            expected = naming.slot_shape(slot, shape)
            if present[slot].shape != expected:
                raise UserError(
                    f"The slot {name} has the shape {present[slot].shape} where {expected} fits its"
                    f" variable of shape {shape}.",
                    where=reader.ref.path,
                    fix=_NO_SLOTS,
                )


def has_slots(reader: CheckpointReader) -> bool:
    """Returns whether a checkpoint holds optimizer slots."""
    return any(key.startswith(naming.SLOTS) for key in reader.tensors)


def load_any(
    path: str | os.PathLike[str], step: int | None = None, *, slots: bool = True
) -> dict[str, np.ndarray]:
    """Reads a whole checkpoint of any format into memory as T5X's flat tree.

    Args:
      path: See `find_checkpoint`.
      step: See `find_checkpoint`.
      slots: False omits the optimizer slots.

    Returns:
      Flat key -> array: `target/...`, `state/step` (int32) and, if the checkpoint has Adafactor
      slots, `state/param_states/...` with zeros of shape (1,) for unused slots, as T5X has them.
      Other dtypes are as stored.

    Raises:
      UserError: If there is no checkpoint, or it is damaged, incomplete or not a T5.
    """
    tree = {key: np.asarray(tensor) for key, tensor in open_any(path, step, slots=slots).items()}
    # Mesh TensorFlow's step is an int64, T5X's an int32.
    tree[naming.STEP] = tree[naming.STEP].astype(np.int32)
    return jax_tree.add_dummies(tree)


def open_any(
    path: str | os.PathLike[str], step: int | None = None, *, slots: bool = True
) -> dict[str, StoredTensor]:
    """Opens a checkpoint of any format as T5X's flat tree, whose tensors are read when used.

    Args:
      path: See `find_checkpoint`.
      step: See `find_checkpoint`.
      slots: False omits the optimizer slots.

    Returns:
      Flat key -> tensor, as `load_any` returns them, but without zeros for unused slots.

    Raises:
      UserError: If there is no checkpoint, or it is incomplete or not a T5.
    """
    return open_tree(find_checkpoint(path, step), slots=slots)


def open_tree(
    ref: CheckpointRef, *, slots: bool = True, encoder_only: bool = False
) -> dict[str, StoredTensor]:
    """Opens a checkpoint that was found, even an encoder alone if asked; see `open_any`."""
    reader = open_checkpoint(ref)
    family = check_checkpoint(reader)
    if family.encoder_only and not encoder_only:
        raise UserError(
            "The model is an encoder alone, which can neither score nor generate.",
            where=ref.path,
            fix="Compute its embeddings with `t0repro encode`, or give a model with a decoder.",
        )
    if slots:
        check_optimizer(reader)
        check_slots_step(reader)
    return {
        key: StoredTensor.open(reader, key)
        for key in reader.tensors
        if slots or not key.startswith(naming.SLOTS)
    }
