"""Checks that a checkpoint is complete and undamaged, tensor by tensor."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Iterator

import numpy as np

from t0repro.converters.integrity import INTEGRITY
from t0repro.converters.jax_tree import JaxReader
from t0repro.converters.manifest import MANIFEST, Manifest, Mismatch, manifest_path, read_manifest
from t0repro.converters.mtf import MtfReader
from t0repro.converters.run_files import check_run_files
from t0repro.converters.sources import (
    check_checkpoint,
    check_slots_step,
    check_step,
    find_checkpoint,
    open_checkpoint,
)
from t0repro.converters.tensors import CheckpointReader, CheckpointRef, total_bytes
from t0repro.errors import UserError
from t0repro.parameters.shape import ModelShape
from t0repro.progress import byte_progress


@dataclasses.dataclass(frozen=True)
class Verification:
    """The result of a verification.

    Attributes:
      checkpoint: The checkpoint.
      family: Shape of the model that it holds.
      tensors: Number of tensors read.
      checks: What was checked, in words.
      unchecked: What could not be checked, one phrase each.
      problems: What is wrong, one sentence each.
    """

    checkpoint: CheckpointRef
    family: ModelShape
    tensors: int
    checks: tuple[str, ...]
    unchecked: tuple[str, ...]
    problems: tuple[str, ...]


def verify(path: str | os.PathLike[str], step: int | None = None) -> Verification:
    """Reads a whole checkpoint and checks everything in it that can be checked.

    That is: files and their sizes, tensor names and shapes, the format's own checksums, NaN and
    infinity, and each tensor's SHA-256 if a conversion's manifest has it. The result also lists
    what could not be checked.

    Args:
      path: See `sources.find_checkpoint`.
      step: See `sources.find_checkpoint`.

    Raises:
      UserError: If a file is missing or damaged, or the checkpoint is incomplete or not a T5.
    """
    reader = open_checkpoint(ref := find_checkpoint(path, step))
    family = check_checkpoint(reader)
    check_slots_step(reader)
    check_run_files(reader.ref, family)
    manifest = read_manifest(os.path.dirname(manifest_path(reader.ref)))
    if manifest and not manifest.is_of(reader.ref):
        manifest = None  # it describes another checkpoint of this directory
    problems: list[str] = []
    try:
        check_step(reader, ref)
    except UserError as error:  # the values can be checked all the same
        problems.append(error.what)
    compared: set[str] = set()
    with byte_progress("Verifying", total_bytes(reader.tensors)) as done:
        for key, info in reader.tensors.items():
            name = reader.native_name(key)
            if manifest and name in manifest.tensors:
                compared.add(name)
            try:
                array = reader.read(key)  # hf's reader compares with the manifest itself
                if manifest and reader.ref.format != "hf":
                    stored = (
                        reader.as_stored(key, array) if isinstance(reader, MtfReader) else array
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
        checks.append(f"SHA-256 of {len(compared)} tensors in {MANIFEST}")
    return Verification(
        reader.ref,
        family,
        len(reader.tensors),
        tuple(checks),
        ()
        if manifest and compared >= manifest.tensors.keys()
        else tuple(_unchecked(reader, compared)),
        tuple(problems),
    )


def _compare_stored(reader: JaxReader, manifest: Manifest, compared: set[str]) -> list[str]:
    """Compares the arrays that are stored otherwise than they are read; returns what is wrong.

    Those are the arrays of a scanned tree, which hold a tensor for each layer, T5X's placeholders
    for unused slots, and what optax names in its own way.
    """
    problems = []
    names = [name for name in reader.stored.tensors if name in manifest.tensors]
    for name in names:
        if name not in compared:
            compared.add(name)
            try:
                manifest.check(name, reader.stored.read(name), reader.ref.path)
            except Mismatch as error:
                problems.append(error.what)
    return problems


def _checksums(reader: CheckpointReader) -> list[str]:
    """The checkpoint's own checksums, which the reader compares on every read."""
    if reader.ref.format == "mtf":
        return ["CRC-32C of every tensor"]
    if isinstance(reader, JaxReader):
        if reader.has_integrity:
            return [f"CRC-32 of every file that {INTEGRITY} lists"]
        return ["that no chunk is missing"] if not reader.unchecked else []
    return []


def _unchecked(reader: CheckpointReader, compared: Collection[str]) -> Iterator[str]:
    """Yields the kinds of damage that nothing in the checkpoint would reveal."""
    if reader.ref.format == "hf" and not compared:
        yield f"flipped bits: safetensors has no checksums, and there is no {MANIFEST}."
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
    # A finite sum means that every term is finite, and a sum needs no memory for a mask; so the
    # exact count below is needed only for tensors that look bad.
    with np.errstate(all="ignore"):
        if np.isfinite(array.sum(dtype=np.float64)):
            return []
    bad = int(np.count_nonzero(~np.isfinite(array)))
    return [f"{name} has {bad} values that are NaN or infinite."] if bad else []
