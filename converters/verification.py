"""Checking that a checkpoint is whole and sound, tensor by tensor."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any

import numpy as np

from t0repro.converters import hf, storage
from t0repro.converters.sources import MANIFEST, check_checkpoint, find_checkpoint, open_checkpoint
from t0repro.converters.staging import describe
from t0repro.converters.tensors import CheckpointReader, CheckpointRef, total_bytes
from t0repro.parameters.shape import ModelShape
from t0repro.progress import byte_progress


@dataclasses.dataclass(frozen=True)
class Verification:
    """What was found.

    Attributes:
      checkpoint: what was checked.
      family: the model that it holds.
      tensors: how many were read.
      checks: what was checked, in words.
      problems: what is wrong, a sentence each.
    """

    checkpoint: CheckpointRef
    family: ModelShape
    tensors: int
    checks: tuple[str, ...]
    problems: tuple[str, ...]


def verify(path: str | os.PathLike[str], step: int | None = None) -> Verification:
    """Reads all of a checkpoint.

    Files, their sizes, the tensors' names and shapes, the checksums that the format has, NaN and
    infinity are checked; and each tensor's SHA-256 where a conversion's manifest has it.

    Args:
      path: see `sources.find_checkpoint`.
      step: see `sources.find_checkpoint`.

    Raises:
      UserError: if a file is missing or damaged, or the checkpoint is incomplete or no T5.
    """
    reader = open_checkpoint(find_checkpoint(path, step))
    family = check_checkpoint(reader)
    manifest = _manifest(reader.ref)
    problems, compared = [], 0
    with byte_progress("Verifying", total_bytes(reader.tensors)) as done:
        for key, info in reader.tensors.items():
            array = reader.read(key)
            name = reader.native_name(key)
            problems += _values(name, array)
            expected = manifest.get(name)
            if expected:
                compared += 1
                problems += _digest(name, key, reader, array, expected)
            done(info.nbytes)
    checks = ["files and sizes", "names and shapes", _CHECKSUMS[reader.ref.format], "NaN and Inf"]
    if compared:
        checks.append(f"SHA-256 of {compared} tensors in {MANIFEST}")
    return Verification(reader.ref, family, len(reader.tensors), tuple(checks), tuple(problems))


_CHECKSUMS = {
    "mtf": "CRC-32C of every tensor",
    "jax": "CRC-32 of every file that integrity.json lists",
    "t5x": "CRC-32 of every file that integrity.json lists",
    "hf": "no checksums (safetensors has none)",
}


def _manifest(ref: CheckpointRef) -> dict[str, Any]:
    """Digests by the target's names, where a conversion wrote this very checkpoint."""
    directory = ref.path if ref.format == "hf" else os.path.dirname(ref.path)
    try:
        manifest = json.loads(storage.read(storage.join(directory, MANIFEST)))
        same = manifest["target"] == {"format": ref.format, "step": ref.step}
        return manifest["tensors"] if same else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _values(name: str, array: np.ndarray) -> list[str]:
    if np.issubdtype(array.dtype, np.integer):
        return []
    # A sum is finite only if all of its terms are, and takes no memory; most often that decides.
    with np.errstate(all="ignore"):
        if np.isfinite(array.sum(dtype=np.float64)):
            return []
    bad = int(np.count_nonzero(~np.isfinite(array)))
    return [f"{name} has {bad} values that are NaN or infinite."] if bad else []


def _digest(
    name: str, key: str, reader: CheckpointReader, array: np.ndarray, expected: dict[str, Any]
) -> list[str]:
    stored = array.T if reader.ref.format == "hf" and hf.is_transposed(key) else array
    if describe(np.asarray(stored, order="C")) == expected:
        return []
    return [f"{name} is not what the conversion wrote (its SHA-256 differs)."]
