"""Mesh TensorFlow's arithmetic of mesh shapes, layout rules and batches, without TensorFlow.

A shape is written `batch:16,model:8`, layout rules `batch:batch,d_ff:model`: a rule names the mesh
dimension that shards a tensor's dimension. Input that Mesh TensorFlow refuses is passed on to
it, so that the message is its own.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from t0repro.config.mtf.packages import NeedsPackages


class Dimension(NamedTuple):
    """A dimension of a tensor or of a mesh."""

    name: str
    size: int


@dataclasses.dataclass(frozen=True)
class Shape:
    """The dimensions of a mesh."""

    dims: tuple[Dimension, ...]

    @property
    def size(self) -> int:
        """Number of processors."""
        return math.prod(each.size for each in self.dims)

    def __iter__(self) -> Iterator[Dimension]:
        return iter(self.dims)


@dataclasses.dataclass(frozen=True)
class LayoutRules:
    """Pairs of a tensor's dimension and the mesh's dimension that divides it."""

    pairs: frozenset[tuple[str, str]]

    def tensor_dimension_to_mesh_axis(self, dimension: Dimension, mesh: Shape) -> int | None:
        """The number of the mesh's dimension that divides a tensor's; None if none does."""
        axes = [i for i, each in enumerate(mesh) if (dimension.name, each.name) in self.pairs]
        if len(axes) > 1:
            raise NeedsPackages(f"{dimension.name} is divided twice by {self.pairs}")
        return axes[0] if axes else None


def convert_to_shape(value: Any) -> Shape:
    """A mesh's shape from its text, from pairs, or as it is."""
    if isinstance(value, Shape):
        return value
    try:
        pairs: Any = _pairs(value) if isinstance(value, str) else value
        as_size = int if isinstance(value, str) else lambda size: size
        dims = tuple(Dimension(name, as_size(size)) for name, size in pairs)
    except (TypeError, ValueError) as error:
        raise NeedsPackages(f"{value!r} is no shape") from error
    if len({each.name for each in dims}) < len(dims):
        raise NeedsPackages(f"a dimension is repeated in {value!r}")
    if not all(isinstance(each.name, str) and type(each.size) is int for each in dims):
        raise NeedsPackages(f"{value!r} is no shape")
    return Shape(dims)


def convert_to_layout_rules(value: Any) -> LayoutRules:
    """Layout rules from their text, from pairs, or as they are."""
    if isinstance(value, LayoutRules):
        return value
    try:
        pairs = _pairs(value) if isinstance(value, str) else value
        return LayoutRules(frozenset((tensor, mesh) for tensor, mesh in pairs))
    except (TypeError, ValueError) as error:
        raise NeedsPackages(f"{value!r} are no layout rules") from error


def _pairs(text: str) -> list[tuple[str, str]]:
    parts = [part.split(":") for part in re.split(r"[,;]", text.replace(" ", "")) if part]
    if not all(len(part) == 2 and all(part) for part in parts):
        raise NeedsPackages(f"{text!r} is no list of pairs")
    return [(first, second) for first, second in parts]


def mesh_dim_size(layout: Any, mesh: Any, dimension: Dimension) -> int:
    """How many parts a tensor's dimension is divided into."""
    shape = convert_to_shape(mesh)
    axis = convert_to_layout_rules(layout).tensor_dimension_to_mesh_axis(dimension, shape)
    return 1 if axis is None else shape.dims[axis].size


def compute_batch_size(
    lengths: Mapping[str, int], mesh: Any, layout: Any, method_and_value: tuple[str, int]
) -> int:
    """Sequences in a batch; tokens are counted by the longest feature."""
    method, value = method_and_value
    # The longest feature alone: T0's tokens_per_batch of 2**20 at 1,024 inputs is 1,024 sequences.
    if method.startswith("tokens"):
        value, rest = divmod(value, max(lengths.values()))
        if rest:
            raise NeedsPackages(f"{method_and_value} is no whole number of sequences")
    if method.endswith("per_batch"):
        return value
    # A layout rule goes by a dimension's name alone, so a size of 0 does no harm.
    replicas = (mesh_dim_size(layout, mesh, Dimension(name, 0)) for name in _BATCH)
    return value * math.prod(replicas)


# Mesh TensorFlow counts replicas along both of these dimensions.
_BATCH = ("batch", "outer_batch")


def _tpu_mesh_shape(
    _: Any, tpu_topology: str, model_parallelism: int, ensemble_parallelism: int | None
) -> Shape:
    # How other spellings of a topology are read depends on a flag of TensorFlow's.
    version, _, cores = tpu_topology.partition("-")
    if not (version.startswith("v") and cores.isdigit()) or type(model_parallelism) is not int:
        raise NeedsPackages(f"{tpu_topology} and {model_parallelism}")
    ensemble = ensemble_parallelism or 1
    sizes = {
        "ensemble": ensemble,
        "batch": int(cores) // model_parallelism // ensemble,
        "model": model_parallelism,
    }
    # Mesh TensorFlow leaves dimensions of size 1 out of the mesh.
    return Shape(tuple(Dimension(name, size) for name, size in sizes.items() if size > 1))


def _serialize_num_microbatches(
    _: Any,
    batch_dim: Dimension,
    sequence_length: Mapping[str, int],
    mesh_shape: Any,
    layout_rules: Any,
    tokens_per_microbatch_per_replica: int | None,
) -> int:
    """The fewest microbatches of at most so many tokens a replica."""
    if not tokens_per_microbatch_per_replica:
        return 1
    rows, rest = divmod(batch_dim.size, mesh_dim_size(layout_rules, mesh_shape, batch_dim))
    if rest:
        raise NeedsPackages(f"{batch_dim} is not divided by {mesh_shape}")
    # As in Mesh TensorFlow, a microbatch has at least one sequence, however long, and its size
    # divides the replica's rows.
    most = max(1, tokens_per_microbatch_per_replica // max(sequence_length.values()))
    size = next(size for size in range(most, 0, -1) if rows % size == 0)
    return int(rows // size)


def _auto_train_steps(
    _: Any, batch_size: int, sequence_length: Mapping[str, int], train_tokens: int
) -> int:
    return train_tokens // (batch_size * max(sequence_length.values()))


FUNCTIONS: Mapping[str, Any] = {
    "Dimension": Dimension,
    "Shape": lambda dims: Shape(tuple(dims)),
    "convert_to_shape": convert_to_shape,
    "convert_to_layout_rules": convert_to_layout_rules,
    "tensor_dim_to_mesh_dim_size": mesh_dim_size,
}
"""What the reader of the configuration takes from the module mesh_tensorflow."""

CALLED: Mapping[str, Callable[..., Any]] = {
    "mesh_tensorflow.transformer.utils.tpu_mesh_shape": _tpu_mesh_shape,
    "mesh_tensorflow.transformer.utils.serialize_num_microbatches": _serialize_num_microbatches,
    "mesh_tensorflow.transformer.utils.auto_train_steps": _auto_train_steps,
}
"""Configurables that are called while a configuration is read; the first argument is not used."""
