"""Finds checkpoints of any format by the paths that users give, and says why there is none."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
import shlex

import numpy as np

from t0repro import storage
from t0repro.converters import adapter_files, hf, jax_tree, mtf, released, t5x_msgpack
from t0repro.converters.adapter_files import check_is_adapter
from t0repro.converters.tensors import CheckpointRef, Format
from t0repro.errors import UserError
from t0repro.words import some


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
        directory = os.path.dirname(path.rstrip("/")) or "."
        above = ""
        if storage.is_directory(directory) and (
            checkpoint_at(directory) or list_checkpoints(directory)
        ):
            above = f" There are checkpoints in {directory}."
        return f"There is no such file or folder.{above}"
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
