"""Mesh TensorFlow's arithmetic of mesh shapes, layout rules, batches and microbatches.

A shape is written `batch:16,model:8`, layout rules `batch:batch,d_ff:model`: a rule names the mesh
dimension that shards a tensor's dimension. The functions here take either as gin binds it: as text,
as pairs, or as Mesh TensorFlow's own objects.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple


class Dimension(NamedTuple):
    """A dimension of a mesh."""

    name: str
    size: int


def mesh_dimensions(shape: Any) -> tuple[Dimension, ...]:
    """The dimensions of a mesh.

    Raises:
      ValueError: If it is not a shape.
    """
    if isinstance(shape, str):
        dimensions = tuple(Dimension(name, int(size)) for name, size in _pairs(shape))
    else:
        # Mesh TensorFlow's own Shape holds its dimensions as `dims`, with `name` and `size`.
        dimensions = tuple(_dimension(each) for each in getattr(shape, "dims", shape))
    if len({each.name for each in dimensions}) < len(dimensions):
        raise ValueError("a dimension is repeated")
    return dimensions


def _dimension(value: Any) -> Dimension:
    name, size = (value.name, value.size) if hasattr(value, "size") else value
    if not isinstance(name, str) or type(size) is not int:
        raise ValueError(f"{value!r} is not a name and a size")
    return Dimension(name, size)


def layout_pairs(rules: Any) -> frozenset[tuple[str, str]]:
    """Pairs of a tensor's dimension and the mesh's dimension that shards it.

    Raises:
      ValueError: If they are not layout rules.
    """
    pairs = _pairs(rules) if isinstance(rules, str) else getattr(rules, "_pairs", rules)
    return frozenset((tensor, mesh) for tensor, mesh in pairs)


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    for part in filter(None, re.split("[,;]", text.replace(" ", ""))):
        first, _, second = part.partition(":")
        if not first or not second or ":" in second:
            raise ValueError(f"{part!r} is not a pair A:B")
        yield first, second


def mesh_axes(dimension: str, shape: Any, rules: Any) -> list[Dimension]:
    """The dimensions of a mesh that shard a tensor's dimension: one, or none.

    Raises:
      ValueError: If several do, or the shape or the rules are none.
    """
    pairs = layout_pairs(rules)
    axes = [each for each in mesh_dimensions(shape) if (dimension, each.name) in pairs]
    if len(axes) > 1:
        raise ValueError(f"{dimension} is divided along {' and '.join(x.name for x in axes)}")
    return axes


def count_shards(dimension: str, shape: Any, rules: Any) -> int:
    """How many shards a tensor's dimension has; raises as `mesh_axes` does."""
    return math.prod(axis.size for axis in mesh_axes(dimension, shape, rules))


def batch_size(
    method: str, amount: int, sequence_length: Mapping[str, int] | None, shape: Any, rules: Any
) -> int:
    """Sequences in a global batch.

    Args:
      method: `tokens_per_batch`, `sequences_per_replica` and so on.
      amount: Tokens or sequences.
      sequence_length: Tokens per feature; tokens are counted by the longest.
      shape: Of the mesh.
      rules: The layout.
    """
    # The longest feature alone: T0's tokens_per_batch of 2**20 at 1,024 inputs is 1,024 sequences.
    if method.startswith("tokens"):
        amount //= max((sequence_length or {}).values())
    if method.endswith("per_batch"):
        return amount
    # Mesh TensorFlow counts replicas along both of these dimensions.
    return amount * math.prod(count_shards(x, shape, rules) for x in ("batch", "outer_batch"))


def count_microbatches(rows: int, sequence_length: Mapping[str, int], tokens: int | None) -> int:
    """The fewest microbatches of at most so many tokens a replica.

    Args:
      rows: Sequences in a replica's part of a batch.
      sequence_length: Tokens per feature.
      tokens: `tokens_per_microbatch_per_replica`; None or 0 for a single microbatch.
    """
    if not tokens:
        return 1
    # As in Mesh TensorFlow, a microbatch has at least one sequence, however long, and its size
    # divides the replica's rows.
    most = max(1, tokens // max(sequence_length.values()))
    return rows // next(size for size in range(most, 0, -1) if rows % size == 0)


class TpuMesh(NamedTuple):
    """The mesh that `tpu_mesh_shape` derives from a TPU's topology."""

    dims: tuple[Dimension, ...]


def tpu_mesh_shape(
    tpu_topology: str, model_parallelism: int, ensemble_parallelism: int | None
) -> TpuMesh:
    """Mesh TensorFlow's function of this name.

    Raises:
      ValueError: For a topology that is not written `v3-256`, or no number of shards.
    """
    # How other spellings of a topology are read depends on a flag of TensorFlow's.
    version, _, cores = str(tpu_topology).partition("-")
    if not (version.startswith("v") and cores.isdigit()) or type(model_parallelism) is not int:
        raise ValueError(
            f"tpu_mesh_shape reads a topology such as 'v3-256' and a number of shards, not"
            f" {tpu_topology!r} and {model_parallelism!r}"
        )
    ensemble = ensemble_parallelism or 1
    sizes = {
        "ensemble": ensemble,
        "batch": int(cores) // model_parallelism // ensemble,
        "model": model_parallelism,
    }
    # Mesh TensorFlow leaves dimensions of size 1 out of the mesh.
    return TpuMesh(tuple(Dimension(name, size) for name, size in sizes.items() if size > 1))
