"""Both stacks' quantities under the same names; the JAX side of a comparison, and known errors."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from t0repro.config.run import TrainRun
from t0repro.converters.sources import load_any
from t0repro.converters.tensors import FlatTree
from t0repro.errors import UserError
from t0repro.evaluation.engine import score_examples
from t0repro.model import layers, t5
from t0repro.model.t5 import T5, padding_mask, segments_of, text_to_self
from t0repro.parameters import naming
from t0repro.parity.mesh_jobs import MeshResult
from t0repro.training.optimizers import make_optimizer
from t0repro.training.schedules import make_schedule
from t0repro.training.t5_model import T5Model
from t0repro.training.token_losses import cross_entropy
from t0repro.training.train_state import TrainState, from_flat_tree, state_shapes, to_flat_tree
from t0repro.training.train_step import loss_and_gradients, make_train_step, stack_builtin_state

Arrays = Mapping[str, np.ndarray]
# The features that the model reads; positions are not among them (t0repro.model.t5).
FEATURES = ("inputs", "targets", "inputs_segmentation", "targets_segmentation")
# The sublayers of a layer by their module's name, in order.
ENCODER_SUBLAYERS = ("attention", "mlp")
DECODER_SUBLAYERS = ("self_attention", "encoder_decoder_attention", "mlp")


@dataclasses.dataclass(frozen=True)
class StackResult:
    """The results of one stack.

    Attributes:
      losses: float32 [steps], each with the parameters before its update.
      learning_rates: [steps].
      trees: number of steps done -> parameters, slots and step under T5X's flat names.
      activations: for the first batch, the residual stream after each sublayer, the towers' outputs
        and the logits, in the order of the computation.
      gradients: for the first batch, by the parameter's path.
      token_losses: cross entropy of the first batch in nats, [batch, length], without z_loss.
      scores: log-likelihoods in nats, [rows]; None if nothing was scored.
    """

    losses: np.ndarray
    learning_rates: np.ndarray
    trees: Mapping[int, FlatTree]
    activations: Arrays = dataclasses.field(default_factory=dict)
    gradients: Arrays = dataclasses.field(default_factory=dict)
    token_losses: np.ndarray | None = None
    scores: np.ndarray | None = None


def run_jax(
    config: TrainRun,
    batches: Sequence[Mapping[str, np.ndarray]],
    start: FlatTree,
    *,
    snapshots: Sequence[int] = (),
    tensors: bool = False,
    gradients: bool = False,
    scored: Sequence[Mapping[str, Any]] = (),
) -> StackResult:
    """Trains on the batches, one step each, from a checkpoint's tree.

    Args:
      config: gives model, optimizer, schedule, dtypes and the number of microbatches.
      batches: int32 [batch, length] by feature, one batch per step.
      start: parameters, slots and step under T5X's names.
      snapshots: numbers of steps after which to keep the state.
      tensors: whether to return activations and token losses of the first batch.
      gradients: whether to return gradients of the first batch.
      scored: examples to score with the initial parameters.

    Raises:
      UserError: if the checkpoint does not fit the model.
    """
    assert config.optimizer is not None and config.schedule is not None
    model, optimizer = T5(config.model, config.dtypes), make_optimizer(config.optimizer)
    # Shapes only: the values come from the checkpoint.
    state = from_flat_tree(start, state_shapes(model, optimizer))
    batches = [{name: b[name] for name in FEATURES if name in b} for b in batches]
    before: dict[str, Any] = {}
    if tensors:
        before["activations"], before["token_losses"] = _forward(model, state.params, batches[0])
    if gradients:
        before["gradients"] = _gradients(model, state.params, batches[0], config.num_microbatches)
    if scored:
        before["scores"] = score_examples(state.params, model, scored, config.sequence_length)
    step = make_train_step(
        model,
        optimizer,
        make_schedule(config.schedule),
        num_microbatches=config.num_microbatches,
        # Not used: a job with dropout is refused, because the stacks cannot share their noise.
        dropout_key=jax.random.key(0),
    )
    # In the trainer's form, so that the comparison covers the code that trains.
    state = stack_builtin_state(T5Model(model), state)
    return _train(jax.jit(step), state, batches, snapshots, before)


def _train(
    step: Callable[[TrainState, Arrays], tuple[TrainState, Any]],
    state: TrainState,
    batches: Sequence[Arrays],
    snapshots: Sequence[int],
    before: Mapping[str, Any],
) -> StackResult:
    """Runs the steps; `before` has the results with the initial parameters."""
    trees, values = {}, []
    for done, batch in enumerate(batches, start=1):
        state, metrics = step(state, batch)
        # Fetch at once, so that donated or replaced arrays are not read later.
        values.append(jax.device_get(metrics))
        if done in snapshots:
            trees[done] = _rename_by_parameter(to_flat_tree(state))
    return StackResult(
        losses=np.array([value["loss"] for value in values]),
        learning_rates=np.array([value["learning_rate"] for value in values]),
        trees=trees,
        **before,
    )


def _rename_by_parameter(tree: FlatTree) -> FlatTree:
    """A checkpoint's tree with Adam's moments under their parameters' paths, unlike optax's."""
    return {key: value for name, value in tree.items() if (key := naming.from_optax(name))}


def _gradients(model: T5, params: dict, batch: Arrays, num_microbatches: int) -> Arrays:
    _, gradients = jax.jit(
        lambda p, b: loss_and_gradients(model, p, b, num_microbatches=num_microbatches)
    )(params, batch)
    flat = flax.traverse_util.flatten_dict(gradients, sep="/")
    return {path: np.asarray(x) for path, x in flat.items()}


def _forward(model: T5, params: dict, batch: Arrays) -> tuple[Arrays, np.ndarray]:
    """Activations by name, float32, and the cross entropy of each target."""

    @jax.jit
    def apply(params: dict, batch: Any) -> tuple[jax.Array, Any, jax.Array]:
        logits, variables = model.apply(
            {"params": params}, batch, capture_intermediates=True, mutable=["intermediates"]
        )
        assert isinstance(logits, jax.Array)
        losses = cross_entropy(logits, jnp.asarray(batch["targets"]))
        return logits, variables["intermediates"], losses

    if model.config.decoder_only:
        batch = {name: np.asarray(x) for name, x in text_to_self(model.config, batch).items()}
    logits, inside, losses = jax.device_get(apply(params, batch))
    activations: dict[str, np.ndarray] = {}
    towers = [(name, inside[name]) for name in ("encoder", "decoder") if name in inside]
    embedder = inside.get("token_embedder") or inside["decoder"]["token_embedder"]
    # The embedder is called once per tower, in this order.
    for (tower, modules), x in zip(towers, embedder["__call__"], strict=True):
        feature = "inputs" if tower == "encoder" else "targets"
        activations |= _residual_stream(tower, modules, x)
        x = modules[f"{tower}_norm"]["__call__"][0]
        # Towers multiply by it after the norm, whose own result is what flax captured.
        activations[f"{tower}/output"] = x * _present(model, batch, feature)
    activations["logits"] = logits
    return {name: x.astype(np.float32) for name, x in activations.items()}, losses


def _present(model: T5, batch: Arrays, feature: str) -> Any:
    """The factor of a tower's output, [batch, length, 1]: 0 at padding, 1 elsewhere."""
    segmentation = batch.get(f"{feature}_segmentation")
    segments = None if segmentation is None else jnp.asarray(segmentation)
    if not model.config.decoder_only:  # an unpacked language model does not know its padding
        segments = segments_of(jnp.asarray(batch[feature]), segments)
    return np.asarray(padding_mask(segments, model.dtypes))


def _residual_stream(tower: str, modules: Mapping[str, Any], x: np.ndarray) -> Arrays:
    """The residual stream as it enters a tower and after each sublayer."""
    stream = {f"{tower}/embedded": x}
    sublayers = ENCODER_SUBLAYERS if tower == "encoder" else DECODER_SUBLAYERS
    layers = [name for name in modules if name.startswith("layers_")]
    for layer in sorted(layers, key=lambda name: int(name.removeprefix("layers_"))):
        for sublayer in sublayers:
            if sublayer in modules[layer]:
                # A sublayer's module returns only the change, which is added to the stream.
                x = x + modules[layer][sublayer]["__call__"][0]
                stream[f"{tower}/{layer}/{sublayer}"] = x
    return stream


def as_stack_result(result: MeshResult, snapshots: Sequence[int]) -> StackResult:
    """Converts a job's results to the JAX stack's form; square matrices' slots are exchanged.

    Args:
      result: the results of a job with these snapshots.
      snapshots: numbers of steps done; 0 is the start.
    """
    arrays = result.arrays
    return StackResult(
        losses=arrays["losses"],
        learning_rates=arrays["learning_rates"],
        # load_any returns T5X's names, with the slots of square matrices exchanged.
        trees={done: load_any(result.checkpoint(done)) for done in snapshots},
        activations={
            _activation_name(name): x
            for name, x in _sort_by_number(result.group("activations")).items()
        },
        gradients=_rename_by_path(result.group("gradients")),
        token_losses=arrays.get("token_losses"),
        scores=arrays.get("scores"),
    )


def _rename_by_path(gradients: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Gradients under T5X's paths instead of Mesh TensorFlow's names."""
    bias_per_layer = naming.has_bias_per_layer(map(naming.mtf_to_path, gradients))
    found = {}
    for variable, gradient in gradients.items():
        path = naming.mtf_to_path(variable, bias_per_layer)
        assert path is not None, variable
        found[path] = gradient
    return found


def _sort_by_number(activations: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Sorts by the number that each name begins with, and removes it."""
    # Numbers are padded with zeros, so that sorting restores the order of the computation.
    return {name.partition("/")[2]: activations[name] for name in sorted(activations)}


def _activation_name(name: str) -> str:
    """Turns `decoder/block_001/layer_002` into `decoder/layers_1/mlp`; keeps other names."""
    found = re.fullmatch(r"(\w+)/block_(\d+)/layer_(\d+)", name)
    if found is None:
        return name.replace("transformer/", "decoder/")
    tower, block, layer = found[1], int(found[2]), int(found[3])
    sublayers = {
        "encoder": ENCODER_SUBLAYERS,
        "decoder": DECODER_SUBLAYERS,
        # A decoder-only block has no cross attention between its two sublayers.
        "transformer": (DECODER_SUBLAYERS[0], DECODER_SUBLAYERS[-1]),
    }[tower]
    return f"{'encoder' if tower == 'encoder' else 'decoder'}/layers_{block}/{sublayers[layer]}"


# Known errors, injected to show that a comparison finds them --------------------------------------
# slot-swap         the factored slots of square matrices are not exchanged on their way between the
#                   stacks, as in T5X's importer
# bucket-eps        an epsilon inside the logarithm of the relative-position buckets; it is 0.1,
#                   because T5X's own of 1.2e-7 moves no offset up to 2048
# loss-denominator  the loss is divided by the number of real targets, padding left out
# no-shift          the decoder reads the target that it is to predict

Error = Literal["slot-swap", "bucket-eps", "loss-denominator", "no-shift"]
EPSILON = 0.1


@contextlib.contextmanager
def injected(error: Error | None) -> Iterator[None]:
    """Patches the error into the JAX model within the block, and clears JAX's caches."""
    replaced: dict[tuple[Any, str], Any] = {}
    if error == "bucket-eps":
        replaced[layers, "relative_position_bucket"] = _bucket_with_epsilon
    elif error == "no-shift":
        replaced[t5, "shift_right"] = lambda targets, segments: jnp.abs(targets)
    before = {place: getattr(*place) for place in replaced}
    _replace(replaced)
    try:
        yield
    finally:
        _replace(before)


def _replace(values: Mapping[tuple[Any, str], Any]) -> None:
    for (module, name), value in values.items():
        setattr(module, name, value)
    # Functions already compiled would continue using the old ones.
    if values:
        jax.clear_caches()


def with_error(
    error: Error | None, config: TrainRun, batches: Any, start: FlatTree
) -> tuple[TrainRun, FlatTree]:
    """Puts the error into the configuration or the starting tree, if that is where it belongs.

    Raises:
      UserError: if the error would change nothing here.
    """
    if error == "loss-denominator":
        targets = batches[0]["targets"]
        real = int(np.count_nonzero(targets))
        if real == targets.size:
            raise _changes_nothing(error, "there is no padding in the first batch's targets")
        model = dataclasses.replace(config.model, loss_denominator=float(real))
        return dataclasses.replace(config, model=model), start
    if error == "slot-swap":
        return config, exchange_square_slots(start)
    return config, start


def exchange_square_slots(tree: FlatTree) -> dict[str, np.ndarray]:
    """Swaps v_row and v_col of every parameter whose two largest axes are equally long."""
    swapped = dict(tree)
    for key in tree:
        path, slot = naming.split_key(key) if key != naming.STEP else ("", None)
        if slot != "v_row" or tree[key].shape == (1,):
            continue
        shape = tree[naming.PARAMETERS + path].shape
        other = naming.slot_key(path, "v_col")
        # A tie of the two largest axes, as in layout.factored_slots.
        if sorted(shape)[-1] == sorted(shape)[-2]:
            swapped[key], swapped[other] = tree[other], tree[key]
    if all(swapped[key] is tree[key] for key in tree):
        raise _changes_nothing("slot-swap", "no square matrix of this model has factored slots")
    return swapped


def _changes_nothing(error: str, why: str) -> UserError:
    return UserError(
        f"--inject {error} would change nothing: {why}.",
        where="--inject",
        fix="Inject another error, or compare on a model and batches in which it matters.",
    )


def _bucket_with_epsilon(
    offset: np.ndarray,
    bidirectional: bool,
    num_buckets: int = 32,
    max_distance: int = 128,
    *,
    epsilon: bool = False,
) -> np.ndarray:
    """`layers.relative_position_bucket` with EPSILON added to the logarithm's argument."""
    del epsilon  # T5X's, which is too small to change a bucket
    bucket = np.zeros_like(offset)
    distance = -offset
    if bidirectional:
        num_buckets //= 2
        bucket = bucket + (distance < 0).astype(np.int32) * num_buckets
        distance = np.abs(distance)
    distance = np.maximum(distance, 0)
    exact = num_buckets // 2
    scaled = np.log(np.maximum(distance, 1) / exact + EPSILON) / math.log(max_distance / exact)
    large = np.minimum(exact + (scaled * (num_buckets - exact)).astype(np.int32), num_buckets - 1)
    return (bucket + np.where(distance < exact, distance, large)).astype(np.int32)
