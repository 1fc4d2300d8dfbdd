"""T5X's partitioner: compiles a trainer's functions and places their arguments on devices."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from t0repro.partitioning.devices import DATA, MODEL, Partitioning


@dataclasses.dataclass(frozen=True)
class DataLayout:
    """Which part of the data a process reads.

    Attributes:
      batch_size: rows of a batch, over all processes.
      shard_id, num_shards: the part, and out of how many.
      is_first_host_in_replica_set: whether no process before this one reads the same part.
    """

    batch_size: int
    shard_id: int
    num_shards: int
    is_first_host_in_replica_set: bool


class Partitioner:
    """Shards train states and batches across devices, or leaves them on the default one.

    Args:
      partitioning: the devices, from t0repro.partitioning.devices; None, or one device, for one.
    """

    data_partition_spec = PartitionSpec(DATA)

    def __init__(self, partitioning: Partitioning | None = None):
        # On one device, run what would run without any partitioning, hence no device mesh.
        several = partitioning is not None and partitioning.mesh.size > 1
        self.partitioning = partitioning if several else None

    @property
    def mesh(self) -> Mesh:
        """The device mesh, with the axes `data` and `model`; for one device, a mesh of size 1."""
        if self.partitioning is not None:
            return self.partitioning.mesh
        return Mesh(np.array(jax.devices()[:1]).reshape(1, 1), (DATA, MODEL))

    def get_data_layout(
        self, batch_size: int | None = None, host_index: int | None = None
    ) -> DataLayout:
        """Which part of the data this process reads: all of it, since each builds full batches.

        Args:
          batch_size: rows of a batch; None for one row per shard of the mesh axis `data`.
          host_index: the process, for `is_first_host_in_replica_set`; None for this one.

        Raises:
          ValueError: if the rows do not divide evenly among those shards.
        """
        parts = self.mesh.shape[DATA]
        size = parts if batch_size is None else batch_size
        if size % parts:
            raise ValueError(f"A batch of {size} rows does not divide evenly across {parts} parts.")
        index = jax.process_index() if host_index is None else host_index
        return DataLayout(size, 0, 1, index == 0)

    def get_logical_axes(self, train_state: Any) -> Any:
        """The state with the logical axes of each array in its place."""
        return train_state.as_logical_axes()

    def move_params_to_devices(self, train_state: Any, train_state_axes: Any = None) -> Any:
        """The state with each array on its devices.

        Args:
          train_state: the state, on the host or on devices.
          train_state_axes: what `get_mesh_axes` returned; None calls it.
        """
        axes = self.get_mesh_axes(train_state) if train_state_axes is None else train_state_axes
        return jax.device_put(train_state) if axes is None else jax.device_put(train_state, axes)

    def get_mesh_axes(self, train_state: Any) -> Any:
        """The sharding of each array of a train state, or of its shapes; None on one device."""
        return None if self.partitioning is None else self.partitioning.shardings(train_state)

    def put_batch(self, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """Sends a batch to the devices, sharded by rows."""
        if self.partitioning is None:
            return jax.device_put(dict(batch))
        return self.partitioning.put_batch(batch)

    def partition(
        self,
        fn: Any,
        in_axis_resources: Any = None,
        out_axis_resources: Any = None,
        static_argnums: int | tuple[int, ...] = (),
        donate_argnums: int | tuple[int, ...] = (),
    ) -> Any:
        """The function under jit. Call or lower it in the `active` context.

        Args:
          fn: the function.
          in_axis_resources: accepted for T5X's sake and ignored: arguments stay as they are placed.
          out_axis_resources: a prefix of the result's tree: what `get_mesh_axes` returns, or None
            for results replicated on every device.
          static_argnums: as for jax.jit.
          donate_argnums: as for jax.jit.
        """
        del in_axis_resources
        options: dict[str, Any] = {
            "static_argnums": static_argnums,
            "donate_argnums": donate_argnums,
        }
        if self.partitioning is None:
            return jax.jit(fn, **options)
        # Give results a sharding: a donated buffer is reused only for an array sharded as it was.
        whole = NamedSharding(self.partitioning.mesh, PartitionSpec())
        out = jax.tree.map(
            lambda sharding: whole if sharding is None else sharding,
            out_axis_resources,
            is_leaf=lambda x: x is None,
        )
        return jax.jit(fn, out_shardings=out, **options)

    def compile(self, partitioned_fn: Any, *args: Any) -> Any:
        """A function from `partition`, compiled for arguments of these shapes."""
        with self.active():
            return partitioned_fn.lower(*args).compile()

    def active(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which what is traced is sharded across the devices."""
        return contextlib.nullcontext() if self.partitioning is None else self.partitioning.active()
