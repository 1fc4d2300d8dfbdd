"""What the files around a checkpoint's arrays say that it holds.

A checkpoint that was copied in part may look like a complete one of another model: without
`target.decoder.logits_dense.kernel` a T5 1.1 looks tied, without its last layer it looks shallower.
The arrays that are left cannot tell; the files beside them can. Whatever contradicts the arrays is
an error.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection
from typing import Any

from t0repro.converters import storage
from t0repro.converters.integrity import damaged
from t0repro.converters.manifest import MANIFEST, Manifest
from t0repro.errors import UserError
from t0repro.words import counted


def check_names(
    there: Collection[str], named: Collection[str], witness: str, place: Callable[[str], str]
) -> None:
    """Checks that a checkpoint has the arrays that one of its files names, and no others.

    Args:
      there: The names of its arrays.
      named: The names in the file.
      witness: The file.
      place: Where the array of a name is, or should be.

    Raises:
      UserError: Naming an array and the file.
    """
    there, named = set(there), set(named)
    if missing := sorted(named - there):
        count = counted(len(missing), "array is", "arrays are")
        example = missing[0] if len(missing) == 1 else f"for instance {missing[0]}"
        raise UserError(
            f"{count} missing: {example}. {storage.name(witness)} names it.",
            where=f"{place(missing[0])}; {witness}",
            fix="Copy the whole checkpoint again, or choose another one.",
        )
    if surplus := sorted(there - named):
        raise UserError(
            f"{surplus[0]} is here, but {storage.name(witness)} does not name it.",
            where=f"{place(surplus[0])}; {witness}",
            fix="The files of two checkpoints are mixed, or one is damaged: copy the whole"
            " checkpoint again, into an empty directory.",
        )


# --- Orbax's description of the tree -------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class OrbaxTree:
    """What `_METADATA` says.

    Attributes:
      file: Its path.
      arrays: The arrays' paths in the tree ("target/a/kernel").
      is_ocdbt: Whether they are in OCDBT's store; False if it does not say.
      has_every_chunk: Whether chunks that hold only the fill value were written too.
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
            if _is_array(entry["value_metadata"])
        )
        return OrbaxTree(
            file,
            arrays,
            metadata.get("use_ocdbt") is True,
            metadata.get("store_array_data_equal_to_fill_value") is True,
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise damaged(file, "it is not Orbax's description of a tree") from None


def _is_array(value: dict[str, Any]) -> bool:
    # An empty dictionary or None is not stored, and strings are in a file of their own.
    return not value["skip_deserialize"] and value["value_type"] != "string"


# --- A conversion's record -----------------------------------------------------------------------


def check_manifest(
    manifest: Manifest, there: Collection[str], directory: str, place: Callable[[str], str]
) -> None:
    """Checks that a checkpoint has the tensors that the conversion wrote, and no others.

    Raises:
      UserError: Naming a tensor.
    """
    check_names(there, manifest.tensors, storage.join(directory, MANIFEST), place)
