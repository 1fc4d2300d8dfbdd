"""Checkpoints in the layout that T5X's Checkpointer wrote before it used Orbax."""

from __future__ import annotations

import numpy as np
import tensorstore as ts


def write_by_older_t5x(
    directory, tree, version=3, inline=("v_row", "v_col"), fill_value=None
) -> None:
    """What T5X's older Checkpointer leaves: gzipped Zarr in chunks, small tensors in msgpack."""
    from flax import serialization

    directory.mkdir(parents=True)
    nested: dict = {}
    for name, array in tree.items():
        *parents, leaf = name.split("/")
        node = nested
        for parent in parents:
            node = node.setdefault(parent, {})
        if leaf in (*inline, "step"):
            node[leaf] = array
            continue
        stored = array.view(np.uint16) if version == 2 and array.dtype.name == "bfloat16" else array
        spec = {
            "driver": "zarr",
            "dtype": stored.dtype.name,
            "kvstore": {"driver": "file", "path": name.replace("/", ".")},
            "metadata": {
                "shape": list(array.shape),
                "chunks": [max(1, size // 2) for size in array.shape],
                "compressor": {"id": "gzip"},
            },
        }
        if fill_value is not None:
            spec["metadata"] |= {"fill_value": fill_value, "dtype": stored.dtype.str}
        node[leaf] = spec
        place = {"driver": "file", "path": f"{directory / name.replace('/', '.')}/"}
        ts.open(spec | {"kvstore": place}, create=True).result().write(stored).result()
    content = serialization.msgpack_serialize({"version": version, "optimizer": nested})
    (directory / "checkpoint").write_bytes(content)
