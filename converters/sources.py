"""Finding and opening checkpoints of any format by the paths that people give."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import get_args

import numpy as np
from t0repro.converters import jax_tree, layout, mtf
from t0repro.converters.family import Family, check_parameters
from t0repro.converters.tensors import CheckpointReader, CheckpointRef, TensorInfo

from t0repro.errors import UserError

MANIFEST = "conversion.json"


def find_checkpoint(path: str | os.PathLike[str], step: int | None = None) -> CheckpointRef:
    """The checkpoint that a path means.

    Args:
      path: a directory with checkpoints of either format (the latest step counts; a directory that
        holds both formats gives the higher step, and JAX's at the same step), a `checkpoint_<step>`
        directory, or a Mesh TensorFlow prefix (`model.ckpt-<step>`, with or without `.index`).
      step: this step instead of the latest; only with a directory of checkpoints.

    Raises:
      UserError: if there is no such checkpoint; the message says what is there.
    """
    path = os.fspath(path)
    if ref := _exact(path):
        if step not in (None, ref.step):
            raise UserError(
                f"The path names step {ref.step}, but step {step} is asked for.", where=path
            )
        return ref
    directory = Path(path)
    if not directory.is_dir():
        raise _not_found("There is no checkpoint of this name.", path)
    refs = list_checkpoints(directory)
    if not refs:
        # Raises where a state file names a checkpoint that is gone, which says more.
        mtf.latest_mtf_prefix(directory)
        raise _not_found("The directory holds no checkpoint.", path)
    if step is None:
        return _latest(directory, refs)
    chosen = [ref for ref in refs if ref.step == step]
    if not chosen:
        steps = ", ".join(str(known) for known in sorted({ref.step or 0 for ref in refs}))
        raise _not_found(f"The directory has no checkpoint of step {step}; it has {steps}.", path)
    return chosen[-1]


def list_checkpoints(directory: str | os.PathLike[str]) -> list[CheckpointRef]:
    """All whole checkpoints of a directory by ascending step; at the same step JAX's comes last."""
    directory = Path(directory)
    refs = [
        CheckpointRef("mtf", str(directory / f"model.ckpt-{step}"), step)
        for step in mtf.mtf_steps(directory)
    ] + [
        CheckpointRef("jax", str(directory / f"checkpoint_{step}"), step)
        for step in jax_tree.jax_steps(directory)
    ]
    return sorted(refs, key=lambda ref: ref.step or 0)


def _exact(path: str) -> CheckpointRef | None:
    """The checkpoint of which this is the very name, if it is one's."""
    prefix = path.removesuffix(".index")
    if os.path.isfile(f"{prefix}.index"):
        match = re.search(r"-(\d+)$", prefix)
        return CheckpointRef("mtf", prefix, int(match[1]) if match else None)
    name = os.path.basename(os.path.normpath(path))
    if (match := re.fullmatch(r"checkpoint_(\d+)", name)) and os.path.isdir(path):
        return CheckpointRef("jax", os.path.normpath(path), int(match[1]))
    return None


def _latest(directory: Path, refs: list[CheckpointRef]) -> CheckpointRef:
    """The latest checkpoint; among Mesh TensorFlow's the one that the state file names."""
    jax = [ref for ref in refs if ref.format == "jax"]
    prefix = mtf.latest_mtf_prefix(directory)
    candidates = jax[-1:]
    if prefix is not None and (named := _exact(prefix)):
        candidates.insert(0, named)
    return max(reversed(candidates), key=lambda ref: ref.step if ref.step is not None else -1)


def _not_found(what: str, path: str) -> UserError:
    return UserError(
        what,
        where=path,
        fix="Give a directory with model.ckpt-<step>.index or checkpoint_<step>/, or the path of"
        " one checkpoint (.../model.ckpt-<step> or .../checkpoint_<step>).",
    )


def open_checkpoint(ref: CheckpointRef) -> CheckpointReader:
    """Opens a checkpoint; names, shapes and files are checked, values not yet.

    Raises:
      UserError: if it is damaged or holds an unknown variable.
    """
    if ref.format == "mtf":
        return mtf.MtfReader(ref.path)
    return jax_tree.JaxReader(ref.path, _norm_names_of_manifest(Path(ref.path)))


def _norm_names_of_manifest(checkpoint: Path) -> layout.NormNames | None:
    """How the Mesh TensorFlow checkpoint that a model came from spelled its norms, or None."""
    try:
        manifest = json.loads((checkpoint.parent / MANIFEST).read_text())
    except (OSError, ValueError):
        return None
    known = {name: name for name in get_args(layout.NormNames)}
    return known.get(manifest.get("mtf_norm_names"))


def check_checkpoint(reader: CheckpointReader) -> Family:
    """Checks that a checkpoint is one whole T5 and, if it has slots, that it has all of them.

    Raises:
      UserError: naming what is missing or of another shape.
    """
    where = reader.ref.path
    keys = (key for key in reader.tensors if key.startswith(layout.PARAMETERS))
    shapes = {layout.split_key(key)[0]: reader.tensors[key].shape for key in keys}
    family = check_parameters(
        shapes, where, lambda path: reader.native_name(layout.PARAMETERS + path)
    )
    if layout.STEP not in reader.tensors:
        raise UserError(
            f"1 variable is missing: {reader.native_name(layout.STEP)}.",
            where=where,
            fix="The checkpoint is incomplete; get it again from where it came from.",
        )
    _check_slots(reader, shapes)
    return family


def _check_slots(reader: CheckpointReader, shapes: dict[str, tuple[int, ...]]) -> None:
    slots: dict[str, dict[str, TensorInfo]] = {path: {} for path in shapes}
    for key, info in reader.tensors.items():
        if key.startswith(layout.SLOTS):
            path, slot = layout.split_key(key)
            slots[path][slot or ""] = info
    if not has_slots(reader):
        return
    momentum = any("m" in present for present in slots.values())
    for path, shape in shapes.items():
        present = slots[path]
        needed = ["v_row", "v_col"] if {"v_row", "v_col"} & present.keys() else ["v"]
        for slot in needed + (["m"] if momentum else []):
            name = reader.native_name(layout.slot_key(path, slot))
            if slot not in present:
                raise UserError(
                    f"A slot is missing: {name}. Other variables have theirs.",
                    where=reader.ref.path,
                    fix="Convert without slots (--no-slots), or get the whole checkpoint.",
                )
            expected = layout.slot_shape(slot, shape)
            if present[slot].shape != expected:
                raise UserError(
                    f"The slot {name} has the shape {present[slot].shape} where {expected} fits its"
                    f" variable of shape {shape}.",
                    where=reader.ref.path,
                )


def has_slots(reader: CheckpointReader) -> bool:
    """Whether a checkpoint holds optimizer slots."""
    return any(key.startswith(layout.SLOTS) for key in reader.tensors)


def load_any(
    path: str | os.PathLike[str], step: int | None = None, *, slots: bool = True
) -> dict[str, np.ndarray]:
    """Reads a checkpoint of either format as T5X's flat tree, types as stored (the step as int32).

    Args:
      path: see `find_checkpoint`.
      step: see `find_checkpoint`.
      slots: False leaves the optimizer's slots out.

    Returns:
      `target/...`, `state/step` and, if the checkpoint has slots, `state/param_states/...` with
      zeros of shape (1,) for those that are not used.

    Raises:
      UserError: if there is no checkpoint, or it is damaged, incomplete or no T5.
    """
    reader = open_checkpoint(find_checkpoint(path, step))
    check_checkpoint(reader)
    tree = {
        key: reader.read(key) for key in reader.tensors if slots or not key.startswith(layout.SLOTS)
    }
    tree[layout.STEP] = tree[layout.STEP].astype(np.int32)
    return jax_tree.with_dummies(tree)
