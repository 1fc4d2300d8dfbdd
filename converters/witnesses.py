"""Witnesses: files in a checkpoint's folder that record what must be there."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, TypedDict, get_args

import numpy as np

from t0repro import storage
from t0repro.converters.tensors import CheckpointRef, Format, bytes_of
from t0repro.errors import UserError
from t0repro.parameters import naming
from t0repro.storage.names import is_inside
from t0repro.words import counted

INTEGRITY = "integrity.json"


class Written(TypedDict):
    """The length and checksum written to a file."""

    bytes: int
    crc32: int


def damage_error(path: os.PathLike[str] | str, reason: str) -> UserError:
    """Returns the error for a file that differs from what was written."""
    return UserError(
        f"A file of the checkpoint is damaged: {reason}.",
        where=os.fspath(path),
        fix="Copy the file again, or choose another checkpoint.",
    )


def lost_file_error(path: str) -> UserError:
    """Returns the error for a file that should be there."""
    return UserError(
        "A file of the checkpoint is missing.",
        where=path,
        fix="Copy all of its files again, or choose another checkpoint.",
    )


ADAPTER = "adapter.json"
"""In a checkpoint of an adapter: what it is, and which base it is for."""


class ParametersDigest:
    """Digest, 32 hex digits, of parameters' names, types, shapes and values, in the order added."""

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=16)

    def add(self, name: str, array: np.ndarray) -> None:
        """Adds a parameter."""
        self._digest.update(f"{name} {array.dtype} {array.shape}".encode())
        self._digest.update(np.ascontiguousarray(array).view(np.uint8).data)

    def hexdigest(self) -> str:
        """The digest of all that was added."""
        return self._digest.hexdigest()


def parameters_digest(names: Iterable[str], read: Callable[[str], np.ndarray]) -> str:
    """Digest, 32 hex digits, of the parameters' names, dtypes, shapes and values.

    Args:
      names: Names of a checkpoint's tensors; those that are not parameters are skipped.
      read: Returns a tensor by name; called for one at a time.
    """
    digest = ParametersDigest()
    # Sort, so that the digest does not depend on the order in which the tree was read.
    for name in sorted(names):
        if name.startswith(naming.PARAMETERS):
            digest.add(name, read(name))
    return digest.hexdigest()


def describe_files(directory: Path) -> dict[str, Written]:
    """Returns length and CRC-32 of every file below a directory, by relative path."""
    root = os.fspath(directory)
    sizes = dict(sorted(storage.file_sizes(root).items()))
    sums = storage.call_at_once(lambda name: _crc32(storage.join(root, name)), sizes)
    return {
        name: {"bytes": size, "crc32": crc32}
        for (name, size), crc32 in zip(sizes.items(), sums, strict=True)
    }


def write_integrity(directory: str | os.PathLike[str], files: dict[str, Written]) -> None:
    """Writes the list of a directory's files, which marks the checkpoint as complete."""
    listing = json.dumps({"files": dict(sorted(files.items()))}, indent=1)
    storage.write_atomically(storage.join(os.fspath(directory), INTEGRITY), listing)


def read_integrity(directory: str) -> dict[str, Written]:
    """Reads a directory's list, empty if it has none, and checks for truncated or missing files.

    Raises:
      UserError: Naming a file that is missing or has the wrong length, or a damaged list.
    """
    listing = storage.join(directory, INTEGRITY)
    if not storage.is_file(listing):
        return {}
    files, sizes = _parse(listing), storage.file_sizes(directory)
    for name, written in files.items():
        file = storage.join(directory, name)
        if name not in sizes and not storage.is_file(file):  # a listing may lag behind
            raise lost_file_error(file)
        if (size := sizes.get(name) or storage.file_size(file)) != written["bytes"]:
            raise damage_error(
                file, f"it has {size:,} bytes, but {written['bytes']:,} were written"
            )
    return files


def read_checked(directory: str, name: str, files: Mapping[str, Written]) -> bytes:
    """Reads a small file, and compares it with its CRC-32 if it is listed.

    Raises:
      UserError: If it differs.
    """
    content = storage.read(file := storage.join(directory, name))
    if name in files and zlib.crc32(content) != files[name]["crc32"]:
        raise damage_error(file, "its CRC-32 differs from what was written")
    return content


def check_contents(directory: str | os.PathLike[str], files: dict[str, Written]) -> None:
    """Compares every listed file of a directory with its CRC-32.

    Raises:
      UserError: Naming the file that differs.
    """

    def check(name: str) -> None:
        file = storage.join(os.fspath(directory), name)
        if _crc32(file) != files[name]["crc32"]:
            raise damage_error(file, "its CRC-32 differs from what was written")

    # `at_once` is a generator: without the loop, it would check nothing.
    for _ in storage.call_at_once(check, files):
        pass


def _parse(listing: str) -> dict[str, Written]:
    try:
        files = json.loads(storage.read(listing))["files"]
        parsed: dict[str, Written] = {
            name: {"bytes": int(written["bytes"]), "crc32": int(written["crc32"])}
            for name, written in files.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise damage_error(listing, "it is not a list of files") from None
    # A listing never refers to files outside its own directory.
    if outside := [name for name in parsed if not is_inside(name)]:
        raise damage_error(listing, f"it names {outside[0]!r}, which is not in the checkpoint")
    return parsed


def _crc32(file: str) -> int:
    value = 0
    for block in storage.read_blocks(file):
        value = zlib.crc32(block, value)
    return value


# It is beside a checkpoint, never inside: T5X, Orbax and Mesh TensorFlow read `checkpoint_<step>`
# and, one level up, only their own names. A Hugging Face directory is the checkpoint itself; there
# the manifest also has the global step, which no other file has.


MANIFEST = "conversion.json"


class Mismatch(UserError):
    """A tensor differs from the one that the conversion wrote."""


@dataclasses.dataclass(frozen=True)
class Manifest:
    """A conversion's record of the checkpoint that it wrote.

    Attributes:
      format: The checkpoint's format.
      step: Its global step.
      norm_names: Mesh TensorFlow's spelling of the model's norms.
      tensors: Name in the checkpoint -> shape, dtype and SHA-256.
      source: What it was converted from, as written; not checked.
    """

    format: Format
    step: int
    norm_names: naming.NormNames | None
    tensors: Mapping[str, Mapping[str, Any]]
    source: Any

    def is_of(self, ref: CheckpointRef) -> bool:
        """Returns whether the manifest describes this checkpoint, not another in its folder."""
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
    """Returns a tensor's manifest entry: shape, dtype and SHA-256 of its bytes."""
    return {
        "shape": list(array.shape),
        "dtype": array.dtype.name,
        "sha256": hashlib.sha256(bytes_of(array)).hexdigest(),
    }


def manifest_of(ref: CheckpointRef) -> Manifest | None:
    """A checkpoint's manifest; None if it has none. For errors, see `read_manifest`."""
    # A directory has one manifest, which may describe another of its checkpoints.
    manifest = read_manifest(ref.folder)
    return manifest if manifest and manifest.is_of(ref) else None


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
        norm_names = {name: name for name in get_args(naming.NormNames)}
        formats: dict[str, Format] = {name: name for name in get_args(Format)}
        return Manifest(
            format=formats[content["target"]["format"]],
            step=int(content["target"]["step"]),
            # A manifest that is older or was edited may have an unknown spelling.
            norm_names=norm_names.get(content.get("mtf_norm_names")),
            tensors={name: dict(expected) for name, expected in content["tensors"].items()},
            source=content.get("source"),
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise UserError(
            "The conversion's record is damaged; it holds the step and each tensor's digest.",
            where=path,
            fix="Copy the file again, or remove it: a Hugging Face model without it counts as step"
            " 0, and nothing is compared.",
        ) from None


# A partially copied checkpoint may look like a complete one of another model: without
# `target.decoder.logits_dense.kernel` a T5 1.1 looks tied, without its last layer it looks
# shallower. The remaining arrays cannot reveal this; the files beside them can. If a file
# contradicts the arrays, that is an error.


def check_names(
    there: Collection[str], named: Collection[str], witness: str, place: Callable[[str], str]
) -> None:
    """Checks that a checkpoint has exactly the arrays that one of its files names.

    Args:
      there: The names of its arrays.
      named: The names in the file.
      witness: The file.
      place: Maps a name to where its array is, or should be.

    Raises:
      UserError: Naming an array and the file.
    """
    there, named = set(there), set(named)
    if missing := sorted(named - there):
        count = counted(len(missing), "array is", "arrays are")
        example = missing[0] if len(missing) == 1 else f"for instance {missing[0]}"
        raise UserError(
            f"{count} missing: {example}. {storage.base_name(witness)} names it.",
            where=f"{place(missing[0])}; {witness}",
            fix="Copy the whole checkpoint again, or choose another one.",
        )
    if surplus := sorted(there - named):
        raise UserError(
            f"{surplus[0]} is here, but {storage.base_name(witness)} does not name it.",
            where=f"{place(surplus[0])}; {witness}",
            fix="The files of two checkpoints are mixed, or one is damaged: copy the whole"
            " checkpoint again, into an empty directory.",
        )


@dataclasses.dataclass(frozen=True)
class OrbaxTree:
    """The content of `_METADATA`.

    Attributes:
      file: Its path.
      arrays: The arrays' paths in the tree ("target/a/kernel").
      is_ocdbt: Whether they are in an OCDBT store; False if it does not say.
      has_every_chunk: Whether chunks with only the fill value were also written.
    """

    file: str
    arrays: frozenset[str]
    is_ocdbt: bool
    has_every_chunk: bool


def orbax_tree(file: str, content: bytes) -> OrbaxTree:
    """Reads `_METADATA`.

    Raises:
      UserError: If it does not describe a tree.
    """
    try:
        metadata = json.loads(content)
        arrays = frozenset(
            "/".join(str(key["key"]).replace(".", "/") for key in entry["key_metadata"])
            for entry in metadata["tree_metadata"].values()
            # An empty dictionary or None is not stored, and strings are in a separate file.
            if not entry["value_metadata"]["skip_deserialize"]
            and entry["value_metadata"]["value_type"] != "string"
        )
        return OrbaxTree(
            file,
            arrays,
            metadata.get("use_ocdbt") is True,
            metadata.get("store_array_data_equal_to_fill_value") is True,
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise damage_error(file, "it is not Orbax's description of a tree") from None


def check_manifest(
    manifest: Manifest, there: Collection[str], directory: str, place: Callable[[str], str]
) -> None:
    """Checks that a checkpoint has exactly the tensors that the conversion wrote.

    Raises:
      UserError: Naming a tensor.
    """
    check_names(there, manifest.tensors, storage.join(directory, MANIFEST), place)
