"""The devices of a run, and how its arrays are sharded across them.

The device mesh has two axes, `data` and `model`. Each axis of an array has a logical name, and one
table gives the mesh axis along which it is sharded:

    logical axis   of                                             sharded along
    batch          activations                                    data
    heads          attention kernels, queries, keys and values    model
    mlp            the feed-forward layer                         model
    vocab          the embedding, the logits                      model
    embed          parameters and slots, if fully sharded         data

Everything else is replicated on every device: norms, lengths, buckets of the position bias. XLA
derives the communication from this (GSPMD, https://arxiv.org/abs/2105.04663).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from t0repro.config.model import Layout, ModelConfig
from t0repro.errors import UserError
from t0repro.parameters import naming
from t0repro.partitioning.topologies import memory_of
from t0repro.words import counted

DATA, MODEL = "data", "model"
RULES = {"batch": DATA, "heads": MODEL, "mlp": MODEL, "vocab": MODEL}
FULLY_SHARDED = {**RULES, "embed": DATA}

# The logical axis of each size in the table of parameters (t0repro.parameters.naming).
_LOGICAL = {
    "d_model": "embed",
    "d_ff": "mlp",
    "joined_kv": "heads",
    "num_heads": "heads",
    "vocab_size": "vocab",
    "relative_attention_num_buckets": "buckets",
}


def parameter_axes(path: str) -> tuple[str, ...]:
    """The logical axes of the parameter at a path of T5X's tree; () if there is none."""
    row = naming.find_row(path, "t5x") or naming.find_row(path, "t5x", decoder_only=True)
    return tuple(_LOGICAL[size] for size in row[0].axes) if row else ()


def parameter_spec(path: str, *, fully_sharded: bool) -> PartitionSpec:
    """The sharding of the parameter at a path; vectors are replicated."""
    axes = parameter_axes(path)
    rules = FULLY_SHARDED if fully_sharded else RULES
    return PartitionSpec(*map(rules.get, axes)) if len(axes) > 1 else PartitionSpec()


def slot_spec(spec: PartitionSpec, slot: str, shape: Sequence[int]) -> PartitionSpec:
    """The sharding of an optimizer slot: its parameter's, without the axis it averages over.

    Args:
      spec: the parameter's sharding.
      slot: the slot's name, as in t0repro.parameters.naming.SLOT_NAMES.
      shape: the parameter's shape.
    """
    if slot not in ("v_row", "v_col"):
        return spec
    dropped = naming.t5x_dropped_axes(shape)[slot]
    return PartitionSpec(*(name for axis, name in enumerate(spec) if axis != dropped))


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Shards an array of a jitted computation by the table, across the device mesh in scope.

    Without a device mesh (`jax.set_mesh`), as on one device, it returns the array itself. An axis
    that does not divide evenly is not sharded.

    Args:
      x: an activation; or a parameter, which this gathers in a fully sharded run.
      axes: the logical name of each axis of x, or None.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    rules = _rules_in_scope()
    names = [rules.get(axis) if axis else None for axis in axes]
    divided = [
        name if name and size % mesh.shape[name] == 0 else None
        for name, size in zip(names, x.shape, strict=True)
    ]
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*divided))


def activation_spec(*axes: str) -> PartitionSpec:
    """The sharding of an activation with these axes, all of which divide evenly."""
    return PartitionSpec(*map(_rules_in_scope().get, axes))


def shard_kernel(function: Callable[..., Any], arguments: Any, results: Any) -> Callable[..., Any]:
    """Runs a function on each device's shards, which must be even: XLA cannot shard a kernel.

    Args:
      function: of arrays.
      arguments: the logical axes of each argument, the first ones of its shape.
      results: likewise of each result.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return function
    specs = [tuple(activation_spec(*axes) for axes in several) for several in (arguments, results)]
    return jax.shard_map(function, in_specs=specs[0], out_specs=specs[1], check_vma=False)


def sum_over_shards(x: jax.Array, axis: str) -> jax.Array:
    """The sum of x over the shards of a logical axis, in a `shard_map`; elsewhere x itself."""
    mesh, name = jax.sharding.get_abstract_mesh(), _rules_in_scope().get(axis)
    return jax.lax.psum(x, name) if name in mesh.manual_axes else x


def count_shards(*axes: str) -> int:
    """Number of shards of an activation with these axes on the device mesh in scope."""
    mesh, rules = jax.sharding.get_abstract_mesh(), _rules_in_scope()
    return math.prod(mesh.shape[name] for axis in axes if (name := rules.get(axis)) in mesh.shape)


def device_to_trace_for() -> Any:
    """A device like those on which the code being traced will run: the mesh's, or JAX's first."""
    return jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]


def _rules_in_scope() -> dict[str, str]:
    """The table; code traced in `sum_over_groups` sees only one group's rows."""
    # Inside `sum_over_groups`, the mesh axis `data` already shards the groups.
    return {axis: name for axis, name in RULES.items() if axis != "batch" or _groups() == 1}


_GROUP = "group"


def sum_over_groups(
    function: Callable[..., Any], params: Any, batches: Any, groups: int, specs: Any
) -> Any:
    """Sums a function over parts of a batch, with a single all-reduce across devices at the end.

    XLA would all-reduce gradients at the end of every microbatch. Here each group of devices along
    `data` temporarily has its own parameters: the same values with one more axis, sharded along
    `data`, which costs no memory and no communication. So nothing is summed across the groups until
    the function has processed all of its microbatches.

    Args:
      function: (params, batches of one group) -> a tree of sums.
      params: the parameters.
      batches: arrays [microbatches, rows, ...], sharded by rows.
      groups: the size of the mesh axis `data`.
      specs: each parameter's sharding.
    """

    def copy_for_groups(p: jax.Array, spec: PartitionSpec) -> jax.Array:
        copies = jnp.broadcast_to(p, (groups, *p.shape))
        return jax.lax.with_sharding_constraint(copies, PartitionSpec(DATA, *spec))

    def split_rows(x: jax.Array) -> jax.Array:
        x = x.reshape(x.shape[0], groups, -1, *x.shape[2:])
        return jax.lax.with_sharding_constraint(x, PartitionSpec(None, DATA))

    # Tells constraints inside the function that the new axis is the mesh axis `data`.
    mapped = jax.vmap(function, in_axes=(0, 1), axis_name=_GROUP, spmd_axis_name=DATA)
    sums = mapped(jax.tree.map(copy_for_groups, params, specs), jax.tree.map(split_rows, batches))
    return jax.tree.map(lambda x: jnp.sum(x, axis=0), sums)


def draw_for_group(
    draw: Callable[[tuple[int, ...]], jax.Array], shape: tuple[int, ...]
) -> jax.Array:
    """Random values of a shape [rows, ...], equal whether or not the rows are in groups.

    Args:
      draw: samples values of a shape.
      shape: the requested shape, that of one group's rows in `sum_over_groups`.
    """
    groups = _groups()
    if groups == 1:
        return draw(shape)
    # Sample for all rows and take this group's, so that grouping does not change the mask.
    all_rows = draw((groups * shape[0], *shape[1:])).reshape(groups, *shape)
    return _take_group(all_rows, jax.lax.axis_index(_GROUP))


@custom_vmap
def _take_group(all_rows: jax.Array, group: jax.Array) -> jax.Array:
    return all_rows[group]


@_take_group.def_vmap
def _take_all_groups(size: int, batched: Any, all_rows: jax.Array, group: jax.Array) -> Any:
    """All groups' parts together are the whole array; without this rule it would be a gather."""
    del size, batched, group
    return all_rows, True


def _groups() -> int:
    """Number of groups if traced inside `sum_over_groups`, else 1."""
    try:
        # JAX raises a NameError for an axis that no vmap around this code has.
        return jax.lax.axis_size(_GROUP)
    except NameError:
        return 1


@dataclasses.dataclass(frozen=True)
class Partitioning:
    """The devices of a run and how arrays are sharded across them.

    Attributes:
      mesh: devices by (data, model).
      fully_sharded: whether parameters and slots are sharded along `data` too.
      available: number of devices available, used or not.
      why_idle: why it does not use all of them.
    """

    mesh: Mesh
    fully_sharded: bool
    available: int
    why_idle: str = ""

    @property
    def data(self) -> int:
        """Number of shards of a batch."""
        return self.mesh.shape[DATA]

    @property
    def model(self) -> int:
        """Number of devices that share each layer."""
        return self.mesh.shape[MODEL]

    @property
    def memory(self) -> int | None:
        """Bytes that programs may use on a device; None if unknown, as on a CPU."""
        return memory_of(self.mesh.devices.flat[0])

    def __str__(self) -> str:
        kind = self.mesh.devices.flat[0].device_kind
        of = f" of {self.available}" if self.available > self.mesh.size else ""
        fully = ", fully sharded" if self.fully_sharded else ""
        why = f" ({self.why_idle})" if of and self.why_idle else ""
        sizes = f"data {self.data}, model {self.model}"
        return f"devices: {self.mesh.size}{of} x {kind}, {sizes}{fully}{why}"

    def active(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which traced code is sharded across the devices, if there are several.

        It also tells traced code of a single device that is only described, to compile for.
        """
        alone = self.mesh.size == 1 and self.mesh.devices.flat[0] in jax.devices()
        return contextlib.nullcontext() if alone else jax.set_mesh(self.mesh)

    def shardings(self, tree: Any) -> Any:
        """The sharding of every array of a tree of parameters, or of a train state.

        Args:
          tree: parameters, or a train state (its optimizer slots are found by the path of the
            parameter in theirs); shapes are enough.
        """
        flat, structure = jax.tree_util.tree_flatten_with_path(tree)
        named = [
            (jax.tree_util.keystr(path, simple=True, separator="/"), tuple(leaf.shape))
            for path, leaf in flat
        ]
        # Shard stacked layers (t0repro.model.towers) as each single layer would be.
        stacks = [f"/{naming.LAYERS}/" in name for name, _ in named]
        single = [
            (name.replace(naming.LAYERS, naming.layer_name(0)), shape[1:])
            if stack
            else (name, shape)
            for (name, shape), stack in zip(named, stacks, strict=True)
        ]
        shapes = dict(single)
        specs = [self._spec(name, shape, shapes) for name, shape in single]
        specs = [
            PartitionSpec(None, *spec) if stack and spec else spec
            for spec, stack in zip(specs, stacks, strict=True)
        ]
        return structure.unflatten([NamedSharding(self.mesh, spec) for spec in specs])

    def _spec(
        self, name: str, shape: tuple[int, ...], shapes: Mapping[str, tuple[int, ...]]
    ) -> PartitionSpec:
        """The sharding of one array by its path in the tree; replicated if its kind is unknown."""
        if not name.startswith("slots/"):
            return self._parameter(name.removeprefix("params/").removeprefix("frozen/"))
        # slots/encoder/encoder_norm/scale/v: the last part names the slot.
        path, _, slot = name.removeprefix("slots/").rpartition("/")
        if slot in naming.SLOT_NAMES:
            of = shapes.get(f"params/{path}", ())
            spec = slot_spec(self._parameter(path), slot, of) if len(of) > 1 else PartitionSpec()
            # A slot sharded like its parameter has as many axes; any other is replicated.
            return spec if len(spec) == len(shape) else PartitionSpec()
        # Optax's states contain trees of parameters at any depth: 0/mu/encoder/...
        parts = name.split("/")
        for start in range(1, len(parts)):
            path = "/".join(parts[start:])
            # An equal shape distinguishes a moment of the parameter from a counter.
            if shapes.get(f"params/{path}") == shape:
                return self._parameter(path)
        return PartitionSpec()

    def _parameter(self, path: str) -> PartitionSpec:
        return parameter_spec(path, fully_sharded=self.fully_sharded)

    def shapes_on_devices(self, tree: Any) -> Any:
        """The shapes of a tree (see `shardings`), each with its sharding.

        On one device nothing is added, so that arrays made like it stay on the default device.
        """
        return tree if self.mesh.size == 1 else self.shapes_with_shardings(tree)

    def shapes_with_shardings(self, tree: Any) -> Any:
        """The shapes of a tree (see `shardings`) with their shardings, even on one device."""
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            tree,
            self.shardings(tree),
        )

    def put_batch(self, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """Shards a batch's rows across the devices; replicates rows that do not divide evenly."""
        sharding = self.batch_sharding(len(next(iter(batch.values()))))
        return {name: put(x, sharding) for name, x in batch.items()}

    def batch_sharding(self, rows: int) -> NamedSharding:
        """The sharding of a feature with this many rows."""
        divides = rows % self.data == 0
        return NamedSharding(self.mesh, PartitionSpec(DATA) if divides else PartitionSpec())

    def rows_here(self, rows: int) -> set[int]:
        """The indices of a feature's rows that this process's devices hold."""
        parts = self.batch_sharding(rows).addressable_devices_indices_map((rows,)).values()
        return {row for part in parts if part is not None for row in range(rows)[part[0]]}


def put(x: np.ndarray | jax.Array, sharding: NamedSharding) -> jax.Array:
    """Places an array on the devices; with several processes, each places its own shards.

    `jax.device_put` would first compare the arrays of the processes, over the network.

    Args:
      x: the array; only this process's part is read. An array already sharded across the devices
        stays where it is.
      sharding: its sharding.
    """
    if is_sharded(x):
        return x
    if sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def is_sharded(x: np.ndarray | jax.Array) -> TypeGuard[jax.Array]:
    """Whether an array is on devices that include other processes'."""
    return isinstance(x, jax.Array) and not x.is_fully_addressable


def fetch(x: np.ndarray | jax.Array) -> np.ndarray:
    """An array's values; if other processes hold shards of it, all of them must make this call."""
    if isinstance(x, np.ndarray) or x.is_fully_addressable or x.is_fully_replicated:
        return np.asarray(x)
    from jax.experimental import multihost_utils

    # JAX gathers an array that spans several processes only with tiled=True.
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def find_mesh(tree: Any) -> Mesh | None:
    """The device mesh across which a tree's arrays are sharded; None if they are on one device."""
    sharding = getattr(jax.tree.leaves(tree)[0], "sharding", None)
    if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1:
        assert isinstance(sharding.mesh, Mesh)
        return sharding.mesh
    return None


@contextlib.contextmanager
def use_devices_of(tree: Any):
    """A context in which traced code is sharded across the devices that hold a tree."""
    mesh = find_mesh(tree)
    # Whose process has 64-bit types on gets the same programs, and so the same bits.
    with jax.enable_x64(False), contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        yield


def count_data_shards(tree: Any) -> int:
    """Number of shards of a batch, given where a model's parameters are."""
    mesh = find_mesh(tree)
    return 1 if mesh is None else mesh.shape[DATA]


def pad_rows(x: np.ndarray, parts: int) -> np.ndarray:
    """An array padded with rows of zeros to a multiple of this number."""
    missing = -len(x) % parts
    return np.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1)) if missing else x


def choose(
    layout: Layout,
    model: ModelConfig,
    *,
    rows: int | None = None,
    devices: Sequence[Any] | None = None,
    where: str | None = None,
) -> Partitioning:
    """Arranges the available devices according to a run's layout.

    A single device ignores the layout. A layout without `data`, or made for another TPU slice, uses
    as many devices as the batch can be sharded across.

    Args:
      layout: the run's layout.
      model: the model's shape, whose heads, d_ff and vocabulary are sharded.
      rows: rows of a microbatch when training; None if any number may be padded.
      devices: what to choose from; jax.devices() by default.
      where: where the layout was set, for messages.

    Raises:
      UserError: naming the dimension that does not divide evenly.
    """
    devices = list(jax.devices() if devices is None else devices)
    if len(devices) == 1:
        return _arrange(devices, 1, 1, False, 1)
    flexible = layout.data is None or layout.topology is not None
    data, why_idle = layout.data, "as the layout asks"
    if flexible:
        groups, left = divmod(len(devices), layout.model)
        if left or not groups:
            raise UserError(
                f"The {len(devices)} devices do not divide into groups of {layout.model} that"
                " share a model.",
                where=where,
                fix=f"Choose a model parallelism that divides {len(devices)}.",
            )
        # The number of shards must divide the batch and, if fully sharded, d_model too.
        bounds = {} if rows is None else {"rows of a microbatch": rows}
        bounds |= {"d_model": model.d_model} if layout.fully_sharded else {}
        data = math.gcd(groups, *bounds.values())
        sizes = " and ".join(f"{name} = {size:,}" for name, size in bounds.items())
        why_idle = f"{sizes} must divide evenly across data"
    assert data is not None
    if data * layout.model > len(devices):
        raise UserError(
            f"Data {data} x model {layout.model} takes {data * layout.model} devices; there"
            f" are {len(devices)}.",
            where=where,
            fix="Choose sizes whose product is at most the number of devices.",
        )
    check_divides(dataclasses.replace(layout, data=data), model, rows, where)
    _check_processes(devices, data * layout.model, where)
    chosen = _arrange(devices, data, layout.model, layout.fully_sharded, len(devices))
    return dataclasses.replace(chosen, why_idle=why_idle)


def _check_processes(devices: Sequence[Any], used: int, where: str | None) -> None:
    """Refuses to leave a process without any of its devices in use."""
    idle = {device.process_index for device in devices}
    idle -= {device.process_index for device in devices[:used]}
    if idle:
        raise UserError(
            f"This layout takes {used} of {len(devices)} devices, which leaves"
            f" {counted(len(idle), 'process', 'processes')} with none.",
            where=where,
            fix="Start fewer processes, or take a batch size that more devices can divide.",
        )


def check_divides(
    layout: Layout, model: ModelConfig, rows: int | None, where: str | None = None
) -> None:
    """Raises a UserError naming the first dimension that a layout cannot shard evenly."""
    divided = [
        ("num_heads", model.num_heads, MODEL, layout.model),
        ("d_ff", model.d_ff, MODEL, layout.model),
        ("vocab_size", model.vocab_size, MODEL, layout.model),
    ]
    if layout.data is not None and rows is not None:
        divided.append(("rows of a microbatch", rows, DATA, layout.data))
    if layout.data is not None and layout.fully_sharded:
        divided.append(("d_model", model.d_model, DATA, layout.data))
    for name, size, axis, parts in divided:
        if size % parts:
            raise UserError(
                f"{name} = {size:,} does not divide evenly across {axis} {parts}.",
                where=where,
                fix=f"Choose a size of the axis {axis} that divides {size:,}.",
            )


def describe_devices(partitioning: Partitioning, layout: Layout) -> str:
    """One line about a run's devices: "devices: 8 x cpu, data 4, model 2"."""
    if partitioning.mesh.size > 1:
        return str(partitioning)
    line = f"devices: 1 x {partitioning.mesh.devices.flat[0].device_kind}"
    asked = (layout.data or 1) * layout.model
    if asked == 1:
        return line
    sizes = f"data {layout.data or 1}, model {layout.model}"
    return f"{line} ({sizes} is for {counted(asked, 'device')})"


def _arrange(
    devices: Sequence[Any], data: int, model: int, fully_sharded: bool, available: int
) -> Partitioning:
    """The first devices as a device mesh; on TPUs, neighbors share a model."""
    chosen = list(devices)[: data * model]
    # JAX knows the topology of a whole slice; for a part of one, keep the given order.
    if chosen[0].platform == "tpu" and len(chosen) == len(devices) > 1:
        from jax.experimental import mesh_utils

        array = mesh_utils.create_device_mesh((data, model), chosen)
    else:
        array = np.array(chosen, dtype=object).reshape(data, model)
    # Auto: XLA decides whatever `constrain` leaves open.
    mesh = Mesh(array, (DATA, MODEL), axis_types=(AxisType.Auto,) * 2)
    return Partitioning(mesh, fully_sharded, available)
