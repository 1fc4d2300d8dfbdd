"""Mesh TensorFlow's checkpoints: tf.train.Saver files under the variable names of the layout
table.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from t0repro.converters import layout
from t0repro.converters.family import unknown_variable
from t0repro.converters.tensor_bundle import BundleReader, BundleWriter
from t0repro.converters.tensors import CheckpointRef, TensorInfo

from t0repro.errors import UserError
from t0repro.files import write_atomically

STATE_FILE = "checkpoint"  # names the latest checkpoint of a directory


class MtfReader:
    """Reads a Mesh TensorFlow checkpoint as T5X's tree.

    Args:
      prefix: for instance `model_dir/model.ckpt-1000`.

    Raises:
      UserError: if a file is missing or cut, or a variable is in no row of the layout table.
    """

    def __init__(self, prefix: str):
        self._bundle = BundleReader(prefix)
        self._names = _flat_keys(self._bundle, prefix)
        self.tensors: Mapping[str, TensorInfo] = {
            key: TensorInfo(entry.shape, entry.dtype)
            for key, name in self._names.items()
            if (entry := self._bundle.entries[name]).dtype is not None
        }
        self.norm_names: layout.NormNames = "rms_norm"
        if any(layout.modern_norm_name(name) != name for name in self._bundle.entries):
            self.norm_names = "layer_norm"
        step = int(self._bundle.read(layout.MTF_STEP)) if layout.STEP in self._names else None
        self.ref = CheckpointRef("mtf", prefix, step)

    def read(self, key: str) -> np.ndarray:
        """Reads one tensor as it is stored; the step too, an int64."""
        return self._bundle.read(self._names[key])

    def native_name(self, key: str) -> str:
        """Mesh TensorFlow's name of a flat key."""
        return self._names.get(key) or mtf_name(key, self.tensors, self.norm_names)


def _flat_keys(bundle: BundleReader, prefix: str) -> dict[str, str]:
    """Flat key -> variable name, for every variable."""
    names: dict[str, str] = {}
    unknown = []
    for name, entry in bundle.entries.items():
        key = _flat_key(name, bundle)
        if key is None or entry.dtype is None:
            unknown.append(name)
        else:
            names[key] = name
    if unknown:
        raise unknown_variable(unknown, _known_names(bundle), prefix)
    return names


def _flat_key(name: str, bundle: BundleReader) -> str | None:
    if name == layout.MTF_STEP:
        return layout.STEP
    variable, slot = layout.split_mtf_slot(name)
    path = layout.mtf_to_path(variable)
    if path is None:
        return None
    if slot is None:
        return layout.PARAMETERS + path
    if variable not in bundle.entries:
        return None  # a slot of a parameter that is not there
    shape = bundle.entries[variable].shape
    if slot in ("vr", "vc") and len(shape) < 2:
        return None
    return layout.slot_key(path, layout.slot_from_mtf(slot, shape))


def _known_names(bundle: BundleReader) -> list[str]:
    """Names that such a checkpoint may have, for unknown ones to be compared with."""
    numbers = {int(n) for name in bundle.entries for n in re.findall(r"/block_(\d+)/", name)} | {0}
    known = [
        layout.name_of(row, layer, "mtf")
        for row in layout.TABLE
        for layer in (sorted(numbers) if row.tower else [None])
    ]
    slots = [f"{name}_slot_{slot}" for name in known for slot in ("v", "vr", "vc", "m")]
    return [*known, *slots, layout.MTF_STEP]


def mtf_name(
    key: str, tensors: Mapping[str, TensorInfo], norm_names: layout.NormNames = "rms_norm"
) -> str:
    """Mesh TensorFlow's name of a flat key.

    Args:
      key: the flat key of a parameter, a slot or the step.
      tensors: the checkpoint's tensors; a factored slot's name depends on its parameter's shape.
      norm_names: whether norms have today's names or those of T5 1.0's released checkpoints.

    Raises:
      KeyError: if the path is in no row of the layout table.
    """
    if key == layout.STEP:
        return layout.MTF_STEP
    path, slot = layout.split_key(key)
    name = layout.path_to_mtf(path, norm_names)
    if name is None:
        raise KeyError(key)
    if slot is None:
        return name
    parameter = tensors.get(layout.PARAMETERS + path)
    shape = parameter.shape if parameter else ()
    return f"{name}_slot_{layout.slot_to_mtf(slot, shape) if len(shape) > 1 else slot}"


def write_mtf(
    directory: Path,
    step: int,
    tensors: Mapping[str, TensorInfo],
    arrays: Iterable[tuple[str, np.ndarray]],
    norm_names: layout.NormNames,
) -> None:
    """Writes `model.ckpt-<step>.*` and the state file into a directory, one tensor at a time.

    Args:
      directory: an existing directory that nobody reads yet.
      step: the global step, for the files' names.
      tensors: shapes and types of what `arrays` yields.
      arrays: flat key and value of each tensor.
      norm_names: see `mtf_name`.
    """
    writer = BundleWriter(directory / f"model.ckpt-{step}")
    try:
        for key, array in arrays:
            # Mesh TensorFlow's global step is an int64, T5X's an int32.
            stored = array.astype(np.int64) if key == layout.STEP else array
            writer.add(mtf_name(key, tensors, norm_names), stored)
        writer.close()
    finally:
        writer.abandon()
    write_atomically(directory / STATE_FILE, _state_text([step]))


def publish_mtf(staged: Path, directory: Path, step: int) -> None:
    """Moves a checkpoint that `write_mtf` wrote into a directory that others read.

    The index goes first when it is replaced and comes last: without it the data is no checkpoint.
    """
    (directory / f"model.ckpt-{step}.index").unlink(missing_ok=True)
    for stale in directory.glob(f"model.ckpt-{step}.*"):
        stale.unlink()
    for name in (f"model.ckpt-{step}.data-00000-of-00001", f"model.ckpt-{step}.index"):
        os.replace(staged / name, directory / name)
    steps = {*mtf_steps(directory), step}
    write_atomically(directory / STATE_FILE, _state_text(sorted(steps)))


def mtf_steps(directory: Path) -> list[int]:
    """Steps of the checkpoints in a directory that have an index, ascending."""
    matches = (re.fullmatch(r"model\.ckpt-(\d+)\.index", item.name) for item in directory.iterdir())
    return sorted(int(match[1]) for match in matches if match)


def _state_text(steps: list[int]) -> str:
    lines = [f'model_checkpoint_path: "model.ckpt-{steps[-1]}"']
    lines += [f'all_model_checkpoint_paths: "model.ckpt-{step}"' for step in steps]
    return "\n".join(lines) + "\n"


def latest_mtf_prefix(directory: Path) -> str | None:
    """The prefix that a directory's state file names, else that of the highest step, else None.

    Raises:
      UserError: if the checkpoint that the state file names is not there.
    """
    state_file = directory / STATE_FILE
    if state_file.is_file():
        match = re.search(r'^model_checkpoint_path:\s*"(.*)"', state_file.read_text(), re.MULTILINE)
        if match:
            prefix = directory / match[1]  # an absolute path replaces the directory
            if not prefix.with_name(prefix.name + ".index").exists():
                raise UserError(
                    f"The checkpoint {match[1]} that this file names is not there.",
                    where=str(state_file),
                    fix="Restore its files, or name the checkpoint itself (.../model.ckpt-<step>).",
                )
            return str(prefix)
    steps = mtf_steps(directory)
    return str(directory / f"model.ckpt-{steps[-1]}") if steps else None
