"""Computes `t0repro checkpoint` inspect, compare and verify."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np

from t0repro.converters.adapter_files import MergedReader
from t0repro.converters.finding import find_checkpoint
from t0repro.converters.jax_tree import JaxReader
from t0repro.converters.model_files import check_run_files
from t0repro.converters.mtf import MtfReader
from t0repro.converters.sources import (
    check_checkpoint,
    check_optimizer,
    check_slots_step,
    check_step,
    has_slots,
    open_checkpoint,
)
from t0repro.converters.tensors import CheckpointReader, CheckpointRef, total_bytes
from t0repro.converters.witnesses import INTEGRITY, MANIFEST, Manifest, Mismatch, manifest_of
from t0repro.errors import UserError
from t0repro.parameters import naming
from t0repro.parameters.shape import ModelShape
from t0repro.progress import byte_progress
from t0repro.words import counted


@dataclasses.dataclass(frozen=True)
class TensorSummary:
    """One tensor.

    Attributes:
      name: Its name in the checkpoint's own format.
      key: Its flat key in T5X's tree.
      norm: Euclidean norm, summed in float64.
    """

    name: str
    key: str
    shape: tuple[int, ...]
    dtype: str
    norm: float


@dataclasses.dataclass(frozen=True)
class Inspection:
    """A checkpoint's contents.

    Attributes:
      step: Its global step.
      parameters: Number of parameters, not counting slots.
      slots: Whether it has optimizer slots.
      bytes: Total size of all tensors.
      adapter: Of an adapter, which is inspected merged into its base: its `kind`, its `base`, the
        number of its own `parameters`, and whether it has `slots`; None for a whole model.
    """

    checkpoint: CheckpointRef
    family: ModelShape
    step: int
    parameters: int
    slots: bool
    bytes: int
    tensors: tuple[TensorSummary, ...]
    adapter: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns the inspection as JSON values, with the model's name added."""
        return {"name": self.family.name, **dataclasses.asdict(self)}


def inspect_checkpoint(path: str | os.PathLike[str], step: int | None = None) -> Inspection:
    """Reads every tensor of a checkpoint and summarizes it.

    Args:
      path: See `finding.find_checkpoint`.
      step: See `finding.find_checkpoint`.

    Raises:
      UserError: If the checkpoint is damaged, incomplete or not a T5.
    """
    reader = open_checkpoint(find_checkpoint(path, step))
    family = check_checkpoint(reader)
    check_run_files(reader.ref, family)
    copies = _copies_of(reader)
    tensors = {key: info for key, info in reader.tensors.items() if key not in copies}
    summaries = []
    with byte_progress("Reading", total_bytes(tensors)) as done:
        for key, info in tensors.items():
            # einsum sums in float64 without a float64 copy of the tensor.
            flat = reader.read(key).reshape(-1)
            norm = float(
                np.sqrt(np.einsum("i,i->", flat, flat, dtype=np.float64, casting="unsafe"))
            )
            name = reader.native_name(key)
            summaries.append(TensorSummary(name, key, info.shape, info.dtype.name, norm))
            done(info.nbytes)
    return Inspection(
        checkpoint=reader.ref,
        family=family,
        step=int(reader.read(naming.STEP)),
        parameters=family.parameter_count()
        - sum(math.prod(reader.tensors[key].shape) for key in copies),
        slots=has_slots(reader),
        bytes=total_bytes(tensors),
        tensors=tuple(sorted(summaries, key=lambda item: item.name)),
        adapter=_describe_adapter(reader) if isinstance(reader, MergedReader) else None,
    )


def _describe_adapter(reader: MergedReader) -> dict[str, Any]:
    own = [
        math.prod(info.shape)
        for key, info in reader.adapter.tensors.items()
        if key.startswith(naming.PARAMETERS)
    ]
    return {
        "kind": reader.note.adapter.kind,
        "base": reader.note.base,
        "parameters": sum(own),
        "slots": has_slots(reader.adapter),
    }


@dataclasses.dataclass(frozen=True)
class TensorDifference:
    """The difference of one tensor.

    Attributes:
      key: Its flat key.
      reason: "values", "shape", "type" (equal values in different types), "only in A" or "only in
        B".
      max: Largest absolute difference; NaN if the values cannot be compared.
      rms: Root mean square of the differences; NaN if the values cannot be compared.
      detail: The two shapes or types, if they differ.
    """

    key: str
    reason: str
    max: float = math.nan
    rms: float = math.nan
    detail: str = ""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The comparison of checkpoints a and b.

    Attributes:
      tensors: Number of names in a or b, without the step's.
      differences: Every tensor that is not bit-identical, and the step; the largest one first.
      tolerance: Largest absolute difference that passes.
    """

    a: CheckpointRef
    b: CheckpointRef
    tensors: int
    differences: tuple[TensorDifference, ...]
    tolerance: float

    @property
    def failures(self) -> tuple[TensorDifference, ...]:
        """The differences beyond the tolerance; with tolerance 0, all of them."""
        # NaN, for tensors that cannot be compared, passes no tolerance. Tolerance 0 asks for equal
        # types too, whose difference of values may be 0.
        if self.tolerance <= 0:
            return self.differences
        return tuple(item for item in self.differences if not item.max <= self.tolerance)


def _copies_of(reader: CheckpointReader) -> Collection[str]:
    """A tied embedding's second name: it is one tensor of the file, and two when converted."""
    return getattr(reader, "copies", ())


def compare(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    tolerance: float = 0.0,
    slots: bool = True,
) -> Comparison:
    """Compares two checkpoints.

    Args:
      a: A checkpoint; see `finding.find_checkpoint`.
      b: The other checkpoint.
      tolerance: Largest absolute difference that counts as equal; 0 requires identical bits and
        types.
      slots: False compares only parameters and the step.

    Raises:
      UserError: If either cannot be read.
    """
    readers = [open_checkpoint(find_checkpoint(path)) for path in (a, b)]
    names = [
        {key for key in reader.tensors if slots or not key.startswith(naming.SLOTS)}
        for reader in readers
    ]
    differences = [
        TensorDifference(key, "only in A" if key in names[0] else "only in B")
        for key in sorted(names[0] ^ names[1])
    ]
    with byte_progress("Comparing", total_bytes(readers[0].tensors)) as done:
        for key in sorted(names[0] & names[1]):
            if difference := _compare_tensor(key, *readers):
                differences.append(difference)
            done(readers[0].tensors[key].nbytes)
    # Tensors that cannot be compared (NaN) come first.
    differences.sort(key=lambda item: -item.max if item.max == item.max else -math.inf)
    count = len((names[0] | names[1]) - {naming.STEP})
    return Comparison(readers[0].ref, readers[1].ref, count, tuple(differences), tolerance)


def _compare_tensor(key: str, a: CheckpointReader, b: CheckpointReader) -> TensorDifference | None:
    shapes = a.tensors[key].shape, b.tensors[key].shape
    if shapes[0] != shapes[1]:
        return TensorDifference(key, "shape", detail=f"{shapes[0]} and {shapes[1]}")
    left, right = a.read(key), b.read(key)
    if key == naming.STEP:
        # Mesh TensorFlow stores an int64, T5X an int32; compare the numbers only.
        left, right = left.astype(np.int64), right.astype(np.int64)
    same_type = left.dtype == right.dtype
    # Bits, not values: NaN does not equal itself, and -0.0 equals 0.0.
    if same_type and left.tobytes() == right.tobytes():
        return None
    # Compute in float64, so that the differences themselves are not rounded.
    wide = np.subtract(left, right, dtype=np.float64)
    largest = float(np.max(np.abs(wide))) if wide.size else 0.0
    rms = float(np.sqrt(np.mean(np.square(wide)))) if wide.size else 0.0
    detail = "" if same_type else f"{left.dtype.name} and {right.dtype.name}"
    reason = "type" if not same_type and largest == 0 else "values"
    return TensorDifference(key, reason, largest, rms, detail)


@dataclasses.dataclass(frozen=True)
class Verification:
    """The result of a verification.

    Attributes:
      checkpoint: The checkpoint.
      family: Shape of the model that it holds.
      tensors: Number of tensors in the files, without the step.
      checks: The checks done, in words.
      unchecked: What could not be checked, one phrase each.
      problems: The problems found, one sentence each.
    """

    checkpoint: CheckpointRef
    family: ModelShape
    tensors: int
    checks: tuple[str, ...]
    unchecked: tuple[str, ...]
    problems: tuple[str, ...]


def verify(path: str | os.PathLike[str], step: int | None = None) -> Verification:
    """Reads a complete checkpoint and checks everything in it that can be checked.

    That is: files and their sizes, tensor names and shapes, the format's own checksums, NaN and
    infinity, and each tensor's SHA-256 if a conversion's manifest has it. The result also lists
    what could not be checked.

    Args:
      path: See `finding.find_checkpoint`.
      step: See `finding.find_checkpoint`.

    Raises:
      UserError: If a file is missing or damaged, or the checkpoint is incomplete or not a T5.
    """
    reader = open_checkpoint(ref := find_checkpoint(path, step))
    family = check_checkpoint(reader)
    check_optimizer(reader)
    check_slots_step(reader)
    check_run_files(reader.ref, family)
    manifest = manifest_of(reader.ref)
    problems: list[str] = []
    try:
        check_step(reader, ref)
    except UserError as error:  # the values can still be checked
        problems.append(error.what)
    compared: set[str] = set()
    with byte_progress("Verifying", total_bytes(reader.tensors)) as done:
        for key, info in reader.tensors.items():
            name = reader.native_name(key)
            if manifest and name in manifest.tensors:
                # Entered before the read: a tensor whose hash differs was compared too.
                compared.add(name)
            try:
                array = reader.read(key)  # hf's reader compares with the manifest itself
                if manifest and reader.ref.format != "hf":
                    stored = (
                        reader.reshape_as_stored(key, array)
                        if isinstance(reader, MtfReader)
                        else array
                    )
                    manifest.check(name, stored, reader.ref.path)
                problems += _values(name, array)
            except Mismatch as error:  # report all of them, not only the first
                problems.append(error.what)
            done(info.nbytes)
    if manifest and isinstance(reader, JaxReader):
        problems += _compare_stored(reader, manifest, compared)
    checks = ["files and sizes", "names and shapes", *_checksums(reader), "NaN and Inf"]
    if compared:
        hashed = compared - {reader.native_name(naming.STEP)}
        checks.append(f"SHA-256 of {counted(len(hashed), 'tensor')} in {MANIFEST}")
    return Verification(
        reader.ref,
        family,
        len(reader.tensors.keys() - {naming.STEP, *_copies_of(reader)}),
        tuple(checks),
        ()
        # A SHA-256 of every stored tensor leaves no damage undetected.
        if manifest and compared >= manifest.tensors.keys()
        else tuple(_list_unchecked(reader, compared)),
        tuple(problems),
    )


def _compare_stored(reader: JaxReader, manifest: Manifest, compared: set[str]) -> list[str]:
    """Compares the arrays whose stored form differs from the form read; returns the problems.

    These are the arrays of a scanned tree, which stack a tensor of each layer, T5X's placeholders
    for unused slots, and arrays under optax's own names.
    """
    problems = []
    for name in reader.stored.tensors:
        if name in manifest.tensors and name not in compared:
            compared.add(name)
            try:
                manifest.check(name, reader.stored.read(name), reader.ref.path)
            except Mismatch as error:
                problems.append(error.what)
    return problems


def _checksums(reader: CheckpointReader) -> list[str]:
    """The checkpoint's own checksums, with which the reader compares every read."""
    if reader.ref.format == "mtf":
        return ["CRC-32C of every tensor"]
    if isinstance(reader, JaxReader):
        if reader.has_integrity:
            return [f"CRC-32 of every file that {INTEGRITY} lists"]
        # TensorStore reads a missing chunk as the fill value, so an array with one hides the loss.
        return ["that no chunk is missing"] if not reader.unchecked else []
    return []


def _list_unchecked(reader: CheckpointReader, compared: Collection[str]) -> Iterator[str]:
    """Yields the kinds of damage that the checkpoint has no means to reveal."""
    if reader.ref.format == "hf" and not compared:
        yield f"flipped bits: safetensors has no checksums, and there is no {MANIFEST}."
    if reader.ref.format == "peft":
        yield "flipped bits of the adapter: safetensors has no checksums."
    if not isinstance(reader, JaxReader) or reader.has_integrity:
        return
    if reader.unchecked:
        yield (
            f"missing chunks of {len(reader.unchecked)} arrays, for instance {reader.unchecked[0]}:"
            " they have a fill value, which stands for a chunk that is gone as for one that was"
            " never written."
        )
    if not compared:
        yield (
            f"flipped bits that its compression does not notice: there is no {INTEGRITY} and no"
            f" {MANIFEST}."
        )


def _values(name: str, array: np.ndarray) -> list[str]:
    if np.issubdtype(array.dtype, np.integer):
        return []
    # A finite sum shows that every term is finite, and needs no memory for a mask. So only tensors
    # that look bad need the exact count below.
    with np.errstate(all="ignore"):
        if np.isfinite(array.sum(dtype=np.float64)):
            return []
    bad = int(np.count_nonzero(~np.isfinite(array)))
    return [f"{name} has {bad} values that are NaN or infinite."] if bad else []
