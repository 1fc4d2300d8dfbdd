"""`t0repro adapters`: merges an adapter into its base, and gives the base back bit for bit.

Floating-point addition cannot be undone: (kernel + change) - change is not always the kernel. So a
merged checkpoint records its adapter and its base, and unmerging reads the base from there. It
first merges again and compares, so that what it gives back is what the checkpoint was made from.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from t0repro import storage
from t0repro.converters.adapter_files import MergedReader
from t0repro.converters.conversion import Options, Target
from t0repro.converters.convert import ConversionReport, convert, prepare
from t0repro.converters.finding import find_adapter, find_checkpoint
from t0repro.converters.sources import open_checkpoint
from t0repro.converters.tensors import CheckpointReader, CheckpointRef, bytes_of
from t0repro.converters.witnesses import MANIFEST, manifest_of
from t0repro.errors import UserError
from t0repro.parameters import naming
from t0repro.progress import working


def merge(
    adapter: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    to: Target,
    *,
    base: str | os.PathLike[str] | None = None,
    force: bool = False,
) -> ConversionReport:
    """Writes a base with an adapter merged into it, as a whole checkpoint.

    Args:
      adapter: An adapter's checkpoint, or a folder of PEFT's.
      dst: See `convert`.
      to: The format to write.
      base: The base, if it is not where the adapter says.
      force: See `convert`.

    Raises:
      UserError: If the checkpoint is not an adapter's, or its base is gone or was replaced; see
        `convert`.
    """
    # Refuses a whole model, which `convert` would take and merge nothing into.
    find_adapter(adapter)
    return convert(adapter, dst, to, base=base, force=force)


def unmerge(
    merged: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    to: Target | None = None,
    *,
    base: str | os.PathLike[str] | None = None,
    force: bool = False,
) -> ConversionReport:
    """Writes the base of a merged checkpoint, slots included, with the bits that it had.

    Args:
      merged: What `merge` or `convert` made from an adapter, in any format and type.
      dst: See `convert`.
      to: The format to write; the base's by default.
      base: The base, if it is not where the merged checkpoint says.
      force: See `convert`.

    Raises:
      UserError: If the checkpoint does not say what it was merged from, its adapter or base is gone
        or another, or merging them again does not give its bits.
    """
    ref = find_checkpoint(merged)
    adapter, digest = _read_origin(ref)
    if base is not None:
        adapter = dataclasses.replace(adapter, base=storage.local_path(base))
    with working(f"merging {adapter.path} again, to compare"):
        again = open_checkpoint(adapter)
        assert isinstance(again, MergedReader)
        # An adapter of PEFT's has no hash of its base; the merged checkpoint has.
        dataclasses.replace(again.note, digest=digest).check_base(
            again.note.digest or "", again.base.ref.path
        )
        _check_bits(open_checkpoint(ref), again)
    source = again.base.ref
    return convert(source.path, dst, source.format if to is None else to, force=force)


def _read_origin(ref: CheckpointRef) -> tuple[CheckpointRef, str]:
    """The adapter that a checkpoint was merged from, its base named, and the base's hash."""
    manifest = manifest_of(ref)
    source: Any = manifest.source if manifest else None
    base: Any = source.get("base") if isinstance(source, dict) else None
    named = isinstance(base, dict) and {"path", "hash"} <= base.keys()
    if not named or not all(isinstance(each, str) for each in (source.get("path"), *base.values())):
        raise UserError(
            "The checkpoint does not say which adapter and base it was merged from.",
            where=ref.beside(MANIFEST),
            fix=f"Name what `t0repro adapters merge` wrote, with its {MANIFEST}.",
        )
    return dataclasses.replace(find_adapter(source["path"]), base=base["path"]), base["hash"]


def _check_bits(checkpoint: CheckpointReader, again: MergedReader) -> None:
    """Raises a UserError unless a checkpoint is an adapter and its base, merged."""
    key = next(key for key in checkpoint.tensors if key.endswith("token_embedder/embedding"))
    embedding = checkpoint.tensors[key]
    # The merge may also have changed the type, or the size of the vocabulary.
    options = Options(slots=False, dtype=embedding.dtype.name, vocab_size=embedding.shape[0])
    expected, _ = prepare(again, checkpoint.ref.format, options)
    for key in (key for key in expected.tensors if key.startswith(naming.PARAMETERS)):
        same = key in checkpoint.tensors and checkpoint.tensors[key] == expected.tensors[key]
        if not same or bytes_of(checkpoint.read(key)) != bytes_of(expected.read(key)):
            raise UserError(
                f"The checkpoint is not the merge of {again.ref.path} into {again.note.base}:"
                f" {checkpoint.native_name(key)} differs.",
                where=checkpoint.ref.path,
                fix="It was changed after the merge, or the adapter was. The base itself is"
                f" {again.note.base}.",
            )
