"""What training carries from step to step, and its form in a checkpoint.

A checkpoint is a flat mapping from T5X's names to arrays:

    target/<path of a parameter>                     float32
    state/step                                       int32, the global step
    state/param_states/<path>/{v_row,v_col,v,m}      float32, (1,) of zeros where a slot is not used

Optimizers other than Adafactor have, in place of the last line,

    state/param_states/0/{mu,nu}/<path>              Adam's moments, where optax's adam has them
    state/param_states/0/count                       int32, the global step again, as there
    state/param_states/<path>/momentum_v             the velocity of the momentum optimizer
    state/param_states/<n>/...                       state of a chain of optax, as flax names it

A model with variables that are not trained, such as running means, has them too:

    flax_mutables/<collection>/<path>
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Container, Mapping
from typing import Any, Protocol

import flax.linen.partitioning
import flax.serialization
import flax.struct
import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from t0repro.adapters import join_adapter
from t0repro.config.model import ModelConfig
from t0repro.converters.tensors import StoredTensor
from t0repro.converters.witnesses import ParametersDigest
from t0repro.errors import UserError
from t0repro.model.layer_stacks import (
    Split,
    can_stack,
    count_stacked_layers,
    split_rows,
    stack_donating,
    stack_layers,
    unstack,
)
from t0repro.model.t5 import T5, adapter_shapes, frozen_shapes, parameter_shapes
from t0repro.model.towers import count_scanned_layers
from t0repro.parameters import naming
from t0repro.parameters.shape import both_sizes
from t0repro.partitioning.devices import parameter_axes, put, slot_spec
from t0repro.partitioning.processes import is_first
from t0repro.training.formulas import Slots
from t0repro.training.optimizers import Optimizer, StackingOptimizer
from t0repro.words import counted, printable

# Tensors in memory or on devices, or still in their checkpoint until each is used.
OpenTree = Mapping[str, np.ndarray | jax.Array | StoredTensor]

_MUTABLES = "flax_mutables/"


@flax.struct.dataclass
class TrainState:
    """Parameters, optimizer slots and the number of updates done.

    Attributes:
      step: int32 scalar, the global step.
      params: nested dictionary of float32 arrays with T5X's names.
      slots: the optimizer's state, the same dictionary with a Slots per array.
      flax_mutables: the model's other variables, {collection: tree}; None if it has none.
      params_axes: the logical names of the parameters' axes, as flax's partitioning keeps them, of
        a model that has them; the names of T5's own are in t0repro.partitioning.devices.
      frozen: the base's parameters where `params` are an adapter's; no part of a checkpoint.
      optimizer: made the slots and updates them; not part of the pytree or of a checkpoint.
    """

    step: jax.Array
    params: Any
    slots: Any
    flax_mutables: Any = None
    params_axes: Any = None
    frozen: Any = None
    optimizer: Optimizer | None = flax.struct.field(pytree_node=False, default=None)

    @classmethod
    def create(
        cls, optimizer_def: optax.GradientTransformation, model_variables: Mapping[str, Any]
    ) -> TrainState:
        """The state of step 0 for what a model's `get_initial_variables` returns.

        Args:
          optimizer_def: from t0repro.training.optimizers, or any of optax's, which then applies a
            learning rate of its own.
          model_variables: `params`, and the collections of the model's other variables. Of these,
            `params_axes` holds the logical axes for Adafactor's factor rules; axes of other
            collections are left out.

        Raises:
          ValueError: if `params_axes` and `params` have different parameters.
        """
        params, axes = model_variables["params"], model_variables.get("params_axes")
        named = {f"{name}_axes" for name in model_variables}
        others = {k: x for k, x in model_variables.items() if k != "params" and k not in named}
        if axes is not None:
            names = _axis_names(axes, params)
            take_axes = getattr(optimizer_def, "set_param_axes", None)
            if take_axes is not None:
                take_axes(names)
        # A bare optax transformation would not accept the step and the learning rate.
        optimizer = optax.with_extra_args_support(optimizer_def)
        return new_train_state(params, optimizer).replace(
            flax_mutables=others or None, params_axes=axes
        )

    def parameters_of(self, config: ModelConfig) -> Any:
        """What the model of a configuration is applied to: an adapter's joined to the base's."""
        if config.adapter is None:
            return self.params
        return join_adapter(self.frozen, self.params, config.adapter.scale)

    @property
    def param_states(self) -> Any:
        """The optimizer's state, under T5X's name."""
        return self.slots

    def state_dict(self) -> dict[str, Any]:
        """The state as nested dictionaries with the names of a checkpoint: target, state, ...

        Without stacked layers, the arrays are the state's own, on the devices.
        """
        return flax.traverse_util.unflatten_dict(flat_arrays(self), sep="/")

    def restore_state(self, state_dict: Mapping[str, Any]) -> TrainState:
        """This state with the values of a `state_dict`; slots that it lacks start at zero.

        Raises:
          UserError: if a parameter or a mutable is missing, or of another shape.
        """
        flat: Any = flax.traverse_util.flatten_dict(state_dict, sep="/")
        return from_flat_tree(flat, self, where="the state dictionary")

    def replace_params(self, params: Any) -> TrainState:
        """This state with other parameters; slots and step stay."""
        return self.replace(params=params)

    def replace_step(self, step: Any) -> TrainState:
        """This state at another step."""
        return self.replace(step=step)

    def replace_flax_mutables(self, flax_mutables: Any) -> TrainState:
        """This state with other variables of the model's that are not trained."""
        return self.replace(flax_mutables=flax_mutables or None)

    def as_logical_axes(self) -> TrainState:
        """This state with a PartitionSpec of logical axes in place of each array.

        They come from `params_axes`, else from t0repro.partitioning.devices; an array in neither
        has none.
        """
        return _logical_axes(unstack_state(self))

    def apply_gradient(
        self, grads: Any, learning_rate: Any, flax_mutables: Any = None
    ) -> TrainState:
        """The state after one update.

        Args:
          grads: gradients of all parameters, float32.
          learning_rate: learning rate of this update.
          flax_mutables: the model's other variables after the step; None leaves them.
        """
        assert self.optimizer is not None
        updates, slots = self.optimizer.update(
            grads, self.slots, self.params, step=self.step, learning_rate=learning_rate
        )
        return self.replace(
            step=self.step + 1,
            params=optax.apply_updates(self.params, updates),
            slots=slots,
            flax_mutables=self.flax_mutables if flax_mutables is None else flax_mutables,
        )


def new_train_state(params: Any, optimizer: Optimizer, step: int = 0) -> TrainState:
    """A state whose slots are all zero."""
    step_count = jnp.asarray(step, jnp.int32)
    # One compiled program for all slots; outside jit there would be one per shape.
    slots = jax.jit(optimizer.init)(params)
    return TrainState(step=step_count, params=params, slots=slots, optimizer=optimizer)


def unstack_state(state: TrainState, split: Split = split_rows) -> TrainState:
    """The state with each layer unstacked; a state without stacks is returned as it is.

    Args:
      state: by layer or stacked.
      split: turns a stack into the arrays of its layers.
    """
    towers, base_towers = count_stacked_layers(state.params), count_stacked_layers(state.frozen)
    if not towers and not base_towers:
        return state
    return state.replace(
        params=unstack(state.params, towers, split),
        slots=unstack(state.slots, towers, split),
        frozen=unstack(state.frozen, base_towers, split),
    )


def stack_state(model: ModelConfig, state: TrainState) -> TrainState:
    """The inverse of `unstack_state`: each scanned tower's layers stacked, where that is possible.

    Leaves alone a user's own optimizer, which may read parameters by name, and an optimizer whose
    slots differ between layers, as they do if one is frozen.

    Args:
      model: the model's configuration.
      state: by layer, with its values or their shapes; arrays that get stacked are deleted.
    """
    towers = count_scanned_layers(model)
    if not towers or not isinstance(state.optimizer, StackingOptimizer):
        return state
    if count_stacked_layers(state.params) or count_stacked_layers(state.frozen):
        return state
    # An adapter may leave a tower as it is.
    layers_to_stack = {tower: count for tower, count in towers.items() if tower in state.params}
    if not can_stack(state.slots, layers_to_stack):
        return state
    frozen = None if state.frozen is None else stack_layers(state.frozen, towers, stack_donating)
    return state.replace(
        params=stack_layers(state.params, layers_to_stack, stack_donating),
        slots=stack_layers(state.slots, layers_to_stack, stack_donating),
        frozen=frozen,
    )


def state_shapes(model: T5, optimizer: Optimizer) -> TrainState:
    """The shapes of a new state; nothing is allocated."""
    has_adapter = model.config.adapter is not None
    frozen = frozen_shapes(model) if has_adapter else None
    params = adapter_shapes(model) if has_adapter else parameter_shapes(model)
    state = jax.eval_shape(lambda p: new_train_state(p, optimizer), params)
    return state.replace(frozen=frozen)


def stacked_shapes(model: T5, optimizer: Optimizer) -> TrainState:
    """The shapes of a new state as a trainer stores it; nothing is allocated."""
    return stack_state(model.config, state_shapes(model, optimizer))


def base_parameters(tree: OpenTree, like: Any, where: str) -> tuple[dict, str]:
    """A base's parameters on the device, from a checkpoint's entries, and their hash.

    Args:
      tree: the entries.
      like: `frozen_shapes`, with shardings if there are several devices.
      where: the checkpoint's path.

    Raises:
      UserError: see `parameters_from_flat_tree`.
    """
    digest = ParametersDigest()
    params = parameters_from_flat_tree(tree, like, where=where, seen=digest.add)
    return params, digest.hexdigest()


def flat_slots(slots: Any) -> dict[str, Slots]:
    """An optimizer's state as a flat dictionary: parameter path -> Slots."""
    flat: Any = flax.traverse_util.flatten_dict(
        slots, is_leaf=lambda _, value: isinstance(value, Slots), sep="/"
    )
    return flat


def to_flat_tree(state: TrainState) -> dict[str, np.ndarray]:
    """Copies the state to the host, in the form of a checkpoint."""
    flat = flat_arrays(jax.device_get(state.replace(frozen=None)))
    return {name: np.asarray(value) for name, value in flat.items()}


def flat_arrays(state: TrainState) -> dict[str, Any]:
    """The state's arrays, wherever they are, under the names of a checkpoint.

    Stacked layers are copied, each to an array of its own.
    """
    state = unstack_state(state.replace(frozen=None))
    flat: dict[str, Any] = {naming.STEP: state.step}
    for path, value in flax.traverse_util.flatten_dict(state.params, sep="/").items():
        flat[naming.PARAMETERS + path] = value
    for path, value in flax.traverse_util.flatten_dict(state.flax_mutables or {}, sep="/").items():
        flat[_MUTABLES + path] = value
    if not isinstance(state.slots, dict):
        # Optax's state, with the names that flax's serialization gives its parts.
        parts = flax.serialization.to_state_dict(state.slots)
        parts = flax.traverse_util.flatten_dict(parts, sep="/")
        return flat | {naming.SLOTS + name: value for name, value in parts.items()}
    slots = flat_slots(state.slots)
    values = {
        (path, name): getattr(slot, name)
        for path, slot in slots.items()
        for name in naming.SLOT_NAMES
        if getattr(slot, name) is not None
    }
    names = {name for _, name in values}
    if names & set(naming.ADAFACTOR_SLOTS):  # T5X's Adafactor has an entry for every slot
        for path, name in itertools.product(slots, naming.ADAFACTOR_SLOTS):
            values.setdefault((path, name), np.zeros((1,), np.float32))
    flat |= {_slot_entries(path, name)[0]: value for (path, name), value in values.items()}
    if "adam_m" in names:
        # The name under which optax's adam keeps its own count.
        flat[naming.OPTAX_COUNT] = flat[naming.STEP]
    return flat


def _restore_optax_state(tree: OpenTree, like: Any) -> Any:
    """An optax state built from a checkpoint's entries; missing ones are zero, as initially."""
    # Keep the empty dictionaries that stand for transformations without state.
    like_parts = flax.traverse_util.flatten_dict(
        flax.serialization.to_state_dict(like), keep_empty_nodes=True, sep="/"
    )
    parts = {
        name: _put_like(tree.get(naming.SLOTS + name, np.zeros(part.shape)), part, part.dtype)
        if hasattr(part, "dtype")
        else part
        for name, part in like_parts.items()
    }
    nested = flax.traverse_util.unflatten_dict(parts, sep="/")
    return flax.serialization.from_state_dict(like, nested)


def _slot_entries(path: str, name: str) -> list[str]:
    """The names that a slot may have in a checkpoint; the first is the one to write."""
    key = naming.slot_key(path, name)
    # The second is where a converter puts Mesh TensorFlow's Adam slots.
    return list(dict.fromkeys([naming.to_optax(key), key]))


def from_flat_tree(
    tree: OpenTree, like: TrainState, *, where: str = "the checkpoint"
) -> TrainState:
    """Puts a checkpoint's values on the device as a state.

    Slots that the checkpoint lacks start at zero and a missing step is 0, as when Mesh TensorFlow
    starts from an init_checkpoint; other entries of the checkpoint are ignored.

    Args:
      tree: a checkpoint's entries.
      like: a state of the model and optimizer, for its shapes (one from jax.eval_shape will do)
        and, if there are several devices, for its shardings (`Partitioning.shapes_on_devices`).
      where: the checkpoint's path, for error messages.

    Raises:
      UserError: if a parameter is missing, or an entry's shape differs from the model's.
    """
    shapes = flax.traverse_util.flatten_dict(like.params, sep="/")
    check_parameters(tree, {path: tuple(value.shape) for path, value in shapes.items()}, where)
    _report_unused(tree, shapes, where)
    params = {
        path: _put_like(tree[naming.PARAMETERS + path], value) for path, value in shapes.items()
    }
    # Mesh TensorFlow's optimizers keep a dictionary of Slots; a chain keeps optax's own state.
    if not isinstance(like.slots, dict):
        return like.replace(
            step=_put_like(tree.get(naming.STEP, 0), like.step, np.int32),
            params=flax.traverse_util.unflatten_dict(params, sep="/"),
            slots=_restore_optax_state(tree, like.slots),
            flax_mutables=_mutables(tree, like.flax_mutables, where),
        )
    slots = {
        path: Slots(
            **{
                name: _slot(tree, path, name, getattr(slot, name), where)
                for name in naming.SLOT_NAMES
                if getattr(slot, name) is not None
            }
        )
        for path, slot in flat_slots(like.slots).items()
    }
    return like.replace(
        step=_put_like(tree.get(naming.STEP, 0), like.step, np.int32),
        params=flax.traverse_util.unflatten_dict(params, sep="/"),
        slots=flax.traverse_util.unflatten_dict(slots, sep="/"),
        flax_mutables=_mutables(tree, like.flax_mutables, where),
    )


def _mutables(tree: OpenTree, like: Any, where: str) -> Any:
    """A model's variables that are not trained; an error if the checkpoint lacks one."""
    if like is None:
        return None
    wanted = flax.traverse_util.flatten_dict(like, sep="/")
    missing = [path for path in wanted if _MUTABLES + path not in tree]
    if missing:
        raise UserError(
            f"The checkpoint lacks {len(missing)} of the model's {len(wanted)} variables that are"
            f" not trained, for instance {missing[0]}.",
            where=where,
            fix="Give a checkpoint that a training run of this model wrote.",
        )
    values = {
        path: _put_like(tree[_MUTABLES + path], value, value.dtype)
        for path, value in wanted.items()
    }
    return flax.traverse_util.unflatten_dict(values, sep="/")


def parameters_from_flat_tree(
    tree: OpenTree,
    like: Any | None = None,
    *,
    where: str = "the checkpoint",
    seen: Callable[[str, np.ndarray], None] = lambda name, array: None,
) -> dict:
    """Puts only a checkpoint's parameters on the device, as a nested dictionary, for evaluation.

    If entries are still stored in a checkpoint, one is in memory at a time.

    Args:
      tree: a checkpoint's entries; slots may be absent.
      like: parameters, or their shapes, that the result must match, dtypes included; None takes
        all there are, in float32. If it has shardings, the parameters are sharded accordingly.
      where: the checkpoint's path, for error messages.
      seen: receives each of the checkpoint's parameters under its name there, sorted by name.

    Raises:
      UserError: if a parameter of `like` is missing or has another shape.
    """
    if like is not None:
        shapes = flax.traverse_util.flatten_dict(like, sep="/")
        check_parameters(tree, {path: tuple(value.shape) for path, value in shapes.items()}, where)
        _report_unused(tree, shapes, where)
    else:
        shapes = flax.traverse_util.flatten_dict(checkpoint_shapes(tree), sep="/")
    params = {}
    for path in sorted(_parameter_paths(tree)):
        value = np.asarray(tree[naming.PARAMETERS + path])
        seen(naming.PARAMETERS + path, value)
        if path in shapes:
            params[path] = _put_like(value, shapes[path], shapes[path].dtype)
    # Keep the model's order, for which the programs were compiled.
    return flax.traverse_util.unflatten_dict({path: params[path] for path in shapes}, sep="/")


def _put_like(value: Any, like: Any, dtype: Any = np.float32) -> jax.Array:
    """A checkpoint's value on the device, or sharded across devices as `like` is."""
    if isinstance(value, jax.Array):  # see `load_sharded_tree`
        return value
    # float32 in memory whatever the file holds; a checkpoint in bfloat16 widens exactly.
    sharding = getattr(like, "sharding", None)
    if isinstance(sharding, NamedSharding):
        return put(np.asarray(value, dtype), sharding)
    return jnp.asarray(value, dtype)


def checkpoint_shapes(tree: OpenTree) -> dict:
    """The shapes of a checkpoint's parameters in float32, as a nested dictionary."""
    shapes = {
        path: jax.ShapeDtypeStruct(tree[naming.PARAMETERS + path].shape, jnp.float32)
        for path in _parameter_paths(tree)
    }
    return flax.traverse_util.unflatten_dict(shapes, sep="/")


def _parameter_paths(tree: Mapping[str, Any]) -> list[str]:
    return [
        name.removeprefix(naming.PARAMETERS) for name in tree if name.startswith(naming.PARAMETERS)
    ]


def _find_unused(tree: Mapping[str, Any], shapes: Container[str]) -> list[str]:
    """The paths of a checkpoint's parameters that the model lacks."""
    return [path for path in _parameter_paths(tree) if path not in shapes]


class _Shaped(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...


_GIN_FILES = (
    "Give the gin files of the model that the checkpoint was trained with: --gin_file, MODEL_GIN of"
    " scripts/train.sh. `t0repro convert` writes operative_config.gin for a model without any."
)


def check_parameters(
    tree: Mapping[str, _Shaped], shapes: Mapping[str, tuple[int, ...]], where: str
) -> None:
    """Raises a UserError unless the checkpoint has every parameter in the model's shape.

    Args:
      tree: a checkpoint's entries, or their descriptions.
      shapes: shapes of the model's parameters, by path.
      where: the checkpoint's path, for error messages.
    """
    missing = [path for path in shapes if naming.PARAMETERS + path not in tree]
    if missing:
        extra = _find_unused(tree, shapes)
        raise UserError(
            f"The checkpoint lacks {len(missing)} of the model's {len(shapes)} parameters, for"
            f" instance {missing[0]}; {len(extra)} of its own are not in the model.",
            where=where,
            fix=_GIN_FILES,
        )
    for path, shape in shapes.items():
        found = tuple(tree[naming.PARAMETERS + path].shape)
        if found != shape:
            # Another vocabulary changes one axis of these two, and has its own fix.
            axis = {"token_embedder": 0, "decoder/logits_dense": 1}.get(path.rpartition("/")[0])
            vocabulary = axis is not None and found[1 - axis] == shape[1 - axis]
            raise UserError(
                f"{path} has shape {list(found)} in the checkpoint and {list(shape)} in the model."
                + both_sizes({key: info.shape for key, info in tree.items()}, shapes),
                where=where,
                fix="Give the vocabulary that the checkpoint was trained with."
                if vocabulary
                else _GIN_FILES,
            )


def _report_unused(tree: OpenTree, shapes: Container[str], where: str) -> None:
    """Warns of parameters that the model lacks, such as the upper layers of a deeper model."""
    extra = _find_unused(tree, shapes)
    # No error: Mesh TensorFlow and T5X ignore such parameters, and say nothing.
    if extra and is_first():
        warning = (
            f"warning: {where} has {counted(len(extra), 'parameter')} that the model lacks, for"
            f" instance {extra[0]}: was it trained with the gin files of another model?"
        )
        print(printable(warning), file=sys.stderr, flush=True)


def _slot(tree: OpenTree, path: str, name: str, like: Any, where: str) -> jax.Array:
    """A slot's value; zero if the checkpoint has none, or only the dummy of an unused slot."""
    shape = tuple(like.shape)
    found = (tree.get(entry) for entry in _slot_entries(path, name))
    value = next((value for value in found if value is not None), None)
    # T5X writes (1,) for a slot that is not used; a parameter of one entry has the same shape.
    if value is None or (value.shape == (1,) and shape != (1,)):
        return _put_like(np.zeros(shape, np.float32), like)
    if tuple(value.shape) != shape:
        raise UserError(
            f"The slot {name} of {path} has shape {list(value.shape)} in the checkpoint and"
            f" {list(shape)} here.",
            where=where,
            fix="Give the optimizer options that the checkpoint was trained with.",
        )
    return _put_like(value, like)


def _axis_names(params_axes: Any, params: Any) -> Any:
    """The tree of parameters with a PartitionSpec of axis names in place of each.

    Args:
      params_axes: the collection that flax's partitioning keeps beside a model's parameters.
      params: the parameters.

    Raises:
      ValueError: if the two trees have different parameters.
    """
    names = flax.linen.partitioning.get_axis_names(params_axes)
    different = _flat(names).keys() ^ _flat(params).keys()
    if different:
        raise ValueError(f"params and params_axes differ: {', '.join(sorted(different))}.")
    return names


def _logical_axes(state: Any) -> Any:
    """See `TrainState.as_logical_axes`.

    Args:
      state: a state that holds each layer by itself.
    """
    shapes = {path: value.shape for path, value in _flat(state.params).items()}
    given = {}
    if state.params_axes is not None:
        given = _flat(_axis_names(state.params_axes, state.params))

    def axes_of(parameter: str) -> PartitionSpec:
        return PartitionSpec(*(given.get(parameter) or parameter_axes(parameter)))

    def of_array(path: Any, array: Any) -> PartitionSpec:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        kind, _, rest = name.partition("/")
        if kind == "params":
            return axes_of(rest)
        # slots/encoder/encoder_norm/scale/v: the last part names the slot.
        parameter, _, slot = rest.rpartition("/")
        if kind != "slots" or parameter not in shapes:
            return PartitionSpec()
        spec = slot_spec(axes_of(parameter), slot, shapes[parameter])
        # A slot that is not used has one entry, and no axes of its parameter.
        return spec if len(spec) == len(array.shape) else PartitionSpec()

    return jax.tree_util.tree_map_with_path(of_array, state).replace(params_axes=None)


def _flat(tree: Any) -> Any:
    return flax.traverse_util.flatten_dict(tree, sep="/")
