"""Checkpoints of adapters, ours and PEFT's: the adapter alone, with a note of its base.

A run that trains an adapter saves it as T5X's tree, with the note in a file beside it.
`sources.open_checkpoint` reads such a checkpoint as the base with the adapter merged into it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import numpy as np

from t0repro.adapters import (
    IA3_INPUT,
    IA3_OUTPUT,
    LORA_A,
    LORA_B,
    NAMES,
    Adapter,
    shapes_of,
)
from t0repro.converters import peft, storage
from t0repro.converters.jax_tree import Renamed
from t0repro.converters.orbax_dir import OrbaxArrays
from t0repro.converters.tensors import (
    CheckpointReader,
    CheckpointRef,
    TensorInfo,
    differing_shapes,
)
from t0repro.converters.witnesses import ADAPTER
from t0repro.errors import UserError
from t0repro.files import write_atomically
from t0repro.parameters import naming
from t0repro.parameters.shape import ModelShape


@dataclasses.dataclass(frozen=True)
class AdapterNote:
    """The content of ADAPTER.

    Attributes:
      adapter: Its settings.
      base: The path of the base's checkpoint.
      digest: Hash of the base's parameters (`ParametersDigest`); None in a folder that PEFT wrote.
    """

    adapter: Adapter
    base: str
    digest: str | None

    def write(self, folder: Path) -> None:
        """Writes ADAPTER into a folder."""
        write_atomically(folder / ADAPTER, self.to_json())

    def to_json(self) -> str:
        """The content of ADAPTER."""
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"

    def check_base(self, digest: str, path: str) -> None:
        """Raises a UserError, with both hashes, unless the base here is the adapter's."""
        if self.digest not in (None, digest):
            raise UserError(
                f"The adapter was trained on another base: the hash of its parameters is"
                f" {self.digest} ({self.base}), and here it is {digest}.",
                where=path,
                fix="Give the base that the adapter was trained on.",
            )


def is_adapter(ref: CheckpointRef) -> bool:
    """Whether a checkpoint is an adapter's."""
    # A run saves an adapter in a model's format; only the note in its folder tells them apart.
    return ref.format == "peft" or storage.is_file(storage.join(ref.path, ADAPTER))


def check_is_adapter(ref: CheckpointRef) -> None:
    """Raises a UserError unless a checkpoint is an adapter's."""
    if not is_adapter(ref):
        raise UserError(
            "The checkpoint is a whole model's, not an adapter's.",
            where=ref.path,
            fix="Name a checkpoint of a run that trains an adapter, or a folder of PEFT's.",
        )


def read_note(folder: str | os.PathLike[str]) -> AdapterNote:
    """Reads ADAPTER.

    Raises:
      UserError: If it is missing or damaged.
    """
    path = storage.join(os.fspath(folder), ADAPTER)
    if not storage.is_file(path):
        raise UserError(
            "This is not an adapter's checkpoint.",
            where=os.fspath(folder),
            fix="Name a checkpoint of a run that trains an adapter.",
        )
    try:
        found = json.loads(storage.read(path))
        # JSON gives a list, which would not equal the tuple of a run's own Adapter.
        adapter = {**found["adapter"], "targets": tuple(found["adapter"]["targets"])}
        return AdapterNote(Adapter(**adapter), found["base"], found["digest"])
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"The adapter's description cannot be read: {error}.",
            where=path,
            fix="Copy the whole checkpoint again.",
        ) from error


class AdapterCheckpoint(CheckpointReader, Protocol):
    """An adapter's open checkpoint; its tensors are named as those of a model, `target/...`.

    It has no norms, so its `norm_names` are None.
    """

    @property
    def note(self) -> AdapterNote:
        """The note of the adapter and its base."""
        ...


def open_adapter(ref: CheckpointRef) -> AdapterCheckpoint:
    """Opens an adapter's checkpoint.

    Raises:
      UserError: If it is damaged, or has an option or a tensor that is not supported.
    """
    return _PeftReader(ref) if ref.format == "peft" else AdapterReader(ref)


def note_of(ref: CheckpointRef) -> AdapterNote:
    """The note in an adapter's checkpoint.

    Raises:
      UserError: See `open_adapter`.
    """
    return _PeftReader(ref).note if ref.format == "peft" else read_note(ref.path)


class AdapterReader:
    """Reads an adapter's checkpoint that a run saved.

    Args:
      ref: The checkpoint.

    Raises:
      UserError: If it is damaged.
    """

    norm_names: naming.NormNames | None = None

    def __init__(self, ref: CheckpointRef):
        self.ref, self.note = ref, read_note(ref.path)
        self._arrays = Renamed(OrbaxArrays(ref.path))
        self.tensors: Mapping[str, TensorInfo] = self._arrays.tensors

    def read(self, key: str) -> np.ndarray:
        """Reads one tensor."""
        return self._arrays.read(key)

    def native_name(self, key: str) -> str:
        """The key itself."""
        return key


class _PeftReader:
    """Reads a folder that PEFT loads; its parameters are read in float32."""

    norm_names: naming.NormNames | None = None

    def __init__(self, ref: CheckpointRef):
        self.ref, self._folder = ref, peft.Folder(ref.path)
        found = self._folder
        self.note = AdapterNote(found.adapter, found.base, found.digest)
        self.tensors: Mapping[str, TensorInfo] = {
            **{naming.PARAMETERS + path: info for path, info in found.tensors.items()},
            # PEFT has no step: `Folder.step` is 0 unless a conversion noted one in the file.
            naming.STEP: TensorInfo((), np.dtype(np.int32)),
        }

    def read(self, key: str) -> np.ndarray:
        """Reads one tensor."""
        if key == naming.STEP:
            return np.asarray(self._folder.step, np.int32)
        return self._folder.read(key.removeprefix(naming.PARAMETERS))

    def native_name(self, key: str) -> str:
        """PEFT's name of a tensor."""
        return self._folder.names.get(key.removeprefix(naming.PARAMETERS), key)


def check_shape(own: AdapterCheckpoint, adapter: Adapter, shape: ModelShape) -> None:
    """Raises a UserError unless a checkpoint's parameters are those of an adapter of a model."""
    found = {
        key.removeprefix(naming.PARAMETERS): info.shape
        for key, info in own.tensors.items()
        if key.startswith(naming.PARAMETERS)
    }
    for path, then, now in differing_shapes(found, shapes_of(adapter, shape, own.ref.path)):
        raise UserError(
            f"The checkpoint is of another adapter, or for another model: {path} is {then} in"
            f" the checkpoint and {now} in the run.",
            where=own.ref.path,
            fix="Give the model and the adapter as they were.",
        )


def check_continues(own: AdapterCheckpoint, adapter: Adapter, shape: ModelShape) -> None:
    """Raises a UserError unless an adapter's training can start from a checkpoint's adapter."""
    check_shape(own, adapter, shape)
    then, now = own.note.adapter.scale, adapter.scale
    # The shapes do not show the scale, and the same parameters change the kernels by it.
    if not math.isclose(then, now, rel_tol=1e-6):
        raise UserError(
            f"The adapter was trained with alpha / rank = {then:g}, and here it is {now:g}.",
            where=own.ref.path,
            fix=f"Bind adapters.lora.alpha = {then * adapter.rank:g}.",
        )


# ---- Merging ------------------------------------------------------------------------------------


class MergedReader:
    """Reads a base with an adapter merged into it: parameters in float32, without slots.

    Args:
      own: The adapter's checkpoint, whose step the merged model has.
      base: The base.
      shape: The base's shape.
      note: The adapter, and its base's path and hash.

    Raises:
      UserError: If the adapter's checkpoint is not for a model of this shape.
    """

    def __init__(
        self,
        own: AdapterCheckpoint,
        base: CheckpointReader,
        shape: ModelShape,
        note: AdapterNote,
    ):
        check_shape(own, note.adapter, shape)
        self.ref, self.note, self.shape = own.ref, note, shape
        self.norm_names: naming.NormNames | None = base.norm_names
        # The base's slots are left out: they are statistics of the base's own updates.
        self.base, self.own = base, own
        parameters = {
            key: TensorInfo(info.shape, np.dtype(np.float32))
            for key, info in base.tensors.items()
            if key.startswith(naming.PARAMETERS)
        }
        self.tensors: Mapping[str, TensorInfo] = {
            **parameters,
            naming.STEP: own.tensors[naming.STEP],
        }

    def read(self, key: str) -> np.ndarray:
        """Reads one tensor; a kernel that has an adapter is merged."""
        if key == naming.STEP:
            return self.own.read(key)
        # The adapter was trained on values of this type.
        value = (
            self.base.read(key).astype(np.dtype(self.note.adapter.base_dtype)).astype(np.float32)
        )
        owner, _, name = key.rpartition("/")
        beside = {
            each: self.own.read(f"{owner}/{each}")
            for each in NAMES
            if name == "kernel" and f"{owner}/{each}" in self.own.tensors
        }
        return merged(value, beside, self.note.adapter.scale) if beside else value

    def native_name(self, key: str) -> str:
        """The name of a tensor in the base's format."""
        return self.base.native_name(key)


def merged(kernel: np.ndarray, beside: Mapping[str, np.ndarray], scale: float) -> np.ndarray:
    """A kernel plus an adapter's change, computed in float64 and rounded once, to float32.

    Args:
      kernel: [in, out].
      beside: The adapter's parameters for it, by their names.
      scale: `Adapter.scale`.
    """
    found = kernel.astype(np.float64)
    if LORA_A in beside:
        first = beside[LORA_A].astype(np.float64) * scale
        second = beside[LORA_B].astype(np.float64)
        # One column at a time: how a matmul orders its sums depends on the machine.
        for column in range(first.shape[1]):
            found += first[:, column, None] * second[None, column]
    if IA3_INPUT in beside:
        found *= beside[IA3_INPUT].astype(np.float64)[:, None]
    if IA3_OUTPUT in beside:
        found *= beside[IA3_OUTPUT].astype(np.float64)
    return found.astype(np.float32)
