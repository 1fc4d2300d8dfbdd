"""`conversion.json`: what a conversion wrote, so that readers can compare.

It lies beside a checkpoint, never inside: T5X, Orbax and Mesh TensorFlow look into
`checkpoint_<step>` and, one level up, only at their own names. A Hugging Face directory is the
checkpoint itself; there the manifest also holds the global step, which no other file has.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any, get_args

import numpy as np

from t0repro.converters import storage
from t0repro.converters.tensors import CheckpointRef, Format, bytes_of
from t0repro.errors import UserError
from t0repro.parameters import layout

MANIFEST = "conversion.json"


class Mismatch(UserError):
    """A tensor differs from the one that the conversion wrote."""


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a conversion recorded about the checkpoint that it wrote.

    Attributes:
      format: The checkpoint's format.
      step: Its global step.
      norm_names: How Mesh TensorFlow spells the model's norms.
      tensors: Name in the checkpoint -> shape, dtype and SHA-256.
    """

    format: Format
    step: int
    norm_names: layout.NormNames | None
    tensors: Mapping[str, Mapping[str, Any]]

    def is_of(self, ref: CheckpointRef) -> bool:
        """Returns whether the manifest describes this checkpoint, not another in the directory."""
        return (self.format, self.step) == (ref.format, ref.step)

    def check(self, name: str, array: np.ndarray, where: str) -> None:
        """Compares a tensor, as stored, with what was written; unrecorded names pass.

        Raises:
          Mismatch: If they differ.
        """
        if name in self.tensors and describe(array) != self.tensors[name]:
            raise Mismatch(
                f"{name} is not what the conversion wrote (its SHA-256 differs).",
                where=where,
                fix="Copy the files again. If the model was changed on purpose since it was"
                f" converted, remove {MANIFEST}; its step then counts as 0.",
            )


def describe(array: np.ndarray) -> dict[str, Any]:
    """Returns what the manifest records of a tensor: shape, dtype and SHA-256 of its bytes."""
    return {
        "shape": list(array.shape),
        "dtype": array.dtype.name,
        "sha256": hashlib.sha256(bytes_of(array)).hexdigest(),
    }


def manifest_path(ref: CheckpointRef) -> str:
    """Returns where a checkpoint's manifest is, if it has one."""
    # A Hugging Face directory is the checkpoint; the other formats' lie in one that others
    # share.
    directory = ref.path if ref.format == "hf" else os.path.dirname(ref.path)
    return storage.join(directory, MANIFEST)


def read_manifest(directory: str) -> Manifest | None:
    """Reads the manifest in a directory; None if there is none.

    Raises:
      UserError: If it is damaged.
    """
    path = storage.join(directory, MANIFEST)
    if not storage.is_file(path):
        return None
    try:
        content = json.loads(storage.read(path))
        norm_names = {name: name for name in get_args(layout.NormNames)}
        formats: dict[str, Format] = {name: name for name in get_args(Format)}
        return Manifest(
            format=formats[content["target"]["format"]],
            step=int(content["target"]["step"]),
            # A manifest of an older version, or one edited, may name none that is
            # known.
            norm_names=norm_names.get(content.get("mtf_norm_names")),
            tensors={name: dict(expected) for name, expected in content["tensors"].items()},
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(
            "The conversion's record is damaged; it holds the step and each tensor's digest.",
            where=path,
            fix="Copy the file again, or remove it: a Hugging Face model without it counts as step"
            " 0, and nothing is compared.",
        ) from None
