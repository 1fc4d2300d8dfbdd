"""Scores distinct (input, choice) pairs on the device: each input is encoded once for all choices.

A model without an encoder reads each pair as one text, so it reads an input once for each choice.

A pair's score is the one that Mesh TensorFlow's mode "score" gives: the sum over the choice's
tokens, EOS included, of log p given the input. In float32 the two agree to rounding. The lengths of
input and choice alone decide the programs that compute it (see `grouping`), so on one kind of
machine its bits do not depend on other pairs, their order or the number of devices.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from t0repro.errors import UserError
from t0repro.evaluation.grouping import (
    DecoderBatch,
    Microbatch,
    Plan,
    Sizes,
    TextBatch,
    make_plan,
)
from t0repro.evaluation.pairs import Pairs, collect_pairs
from t0repro.model.layers import KeysAndValues
from t0repro.model.matmuls import FIXED_KERNELS
from t0repro.model.shapes import Array, Float, Int
from t0repro.model.t5 import T5, make_cross_attention_cache
from t0repro.model.towers import CrossAttentionCache
from t0repro.partitioning.devices import (
    MODEL,
    constrain,
    count_data_shards,
    device_to_trace_for,
    fetch,
    find_mesh,
    use_devices_of,
)
from t0repro.progress import say
from t0repro.training.token_losses import cross_entropy, map_targets

_IN_FLIGHT = 2  # batches dispatched before the oldest one's scores are waited for
# Keys and values of a decoder batch: bytes, and tokens at least and, by platform, at most. A CPU
# gains nothing from more.
_MEMORY_BYTES, _LEAST_MEMORY, _MOST_MEMORY = 1 << 32, 2048, {"cpu": 8192}


@dataclasses.dataclass(frozen=True)
class Scored:
    """A batch's pairs.

    Attributes:
      pairs: The pairs' numbers.
      scores: Their log-likelihoods, natural log.
      misses: How many of a pair's targets are not the most likely token at their position; None
        unless the engine was asked for them.
    """

    pairs: Int[np.ndarray, " pairs"]
    scores: Float[np.ndarray, " pairs"]
    misses: Float[np.ndarray, " pairs"] | None = None


class Engine:
    """Scores the batches of a plan, in the plan's order.

    Args:
      params: the model's parameters, a nested dictionary.
      model: the model; its dtype policy governs activations, the log-softmax is float32.
      misses: whether to count the targets that greedy decoding would not have chosen.
      tokens_per_batch: input tokens whose scores are under way on a device at once, rounded to
        whole microbatches; None for two. It changes no score.
      note_rounding: called with what changes the last bits of the scores that follow, so that
        another run's may differ.
    """

    def __init__(
        self,
        params: dict,
        model: T5,
        *,
        misses: bool = False,
        tokens_per_batch: int | None = None,
        note_rounding: Callable[[str], object] = lambda by: None,
    ):
        self.params, self.model, self.misses = params, model, misses
        self._tokens, self._note_rounding = tokens_per_batch, note_rounding
        self._sizes = choose_sizes(model, jax.default_backend())
        # Room for keys and values: of the last microbatches, and of what decoder batches read, by
        # shape. It is overwritten in place, since a CPU takes longer for fresh memory than to copy.
        self._rooms: dict[tuple[int, ...] | str, CrossAttentionCache] = {}
        self._room_for = 0

    def plan(self, pairs: Pairs, todo: Int[np.ndarray, " todo"] | None = None) -> Plan:
        """The batches that score pairs, all by default, on the parameters' devices."""
        return make_plan(
            pairs,
            self._sizes,
            count_data_shards(self.params),
            todo,
            decoder_only=self.model.config.decoder_only,
        )

    def run(self, pairs: Pairs, plan: Plan) -> Iterator[Scored]:
        """Yields each batch's scores, in the plan's order.

        While the device works on one batch, the host prepares the next. If a batch does not fit in
        the device's memory, it and all that follow are planned again, half as large.

        Raises:
          UserError: if not even one row fits.
        """
        mesh = find_mesh(self.params)
        if plan.batches and mesh is not None and mesh.shape[MODEL] > 1:
            self._note_rounding(f"{mesh.shape[MODEL]} devices that share each layer")
        encoded: set[Microbatch] = set()
        waiting: deque[tuple[DecoderBatch | TextBatch, Any]] = deque()
        most = max(1, self._tokens // plan.sizes.inputs) if self._tokens else _IN_FLIGHT
        left, finished = iter(plan.batches), 0
        try:
            while True:
                for batch in itertools.islice(left, most - len(waiting)):
                    waiting.append((batch, self._dispatch(batch, pairs, encoded)))
                if not waiting:
                    return
                scored = self._finish(*waiting.popleft())
                finished += 1
                yield scored
        except jax.errors.JaxRuntimeError as error:
            self._halve(plan, plan.batches[finished], error)
        waiting.clear()
        self._rooms.clear()
        unscored = [batch.pairs for batch in plan.batches[finished:]]
        todo = np.concatenate([rows[rows >= 0] for rows in unscored])
        yield from self.run(pairs, self.plan(pairs, todo))

    def _halve(self, plan: Plan, batch: DecoderBatch | TextBatch, error: Exception) -> None:
        """Halves the sizes of later plans after running out of memory; re-raises other errors."""
        if not is_out_of_memory(error):
            raise error
        sizes = plan.sizes.halve()
        if not sizes.inputs:
            length = max(each.length for each in batch.microbatches or (batch,))
            raise UserError(
                f"Not even one input of {length} tokens fits into the device's memory.",
                fix="Evaluate on a larger device, or shorten the inputs.",
            ) from error
        self._note_rounding("batches that were split to fit the memory")
        self._sizes = sizes
        say(
            f"Out of memory with {plan.sizes.inputs} input tokens at once: continuing with"
            f" {sizes.inputs}."
        )

    def _dispatch(
        self,
        batch: DecoderBatch | TextBatch,
        pairs: Pairs,
        encoded: set[Microbatch],
    ) -> dict[str, jax.Array]:
        """Queues a batch on the device and returns without waiting for it."""
        model, params, misses = self.model, self.params, self.misses
        with use_devices_of(params):
            if isinstance(batch, TextBatch):
                return read_texts(model, params, *batch.arrays(pairs), misses=misses)
            if self._room_for != batch.memory:
                self._rooms.clear()
                self._room_for = batch.memory
            kept = self._rooms.pop("kept", None) or make_room(
                model, len(batch.pairs), batch.kept + batch.memory
            )
            for each in batch.microbatches:
                if each not in encoded:
                    kept = encode(model, params, kept, *each.arrays(pairs), np.int32(each.start))
                    encoded.add(each)
            read = self._rooms.pop(batch.shape, None) or make_room(
                model, batch.pairs.size, batch.memory
            )
            targets, starts, lengths = batch.arrays(pairs)
            values, read = decode(
                model, params, read, kept, starts, lengths, targets, misses=misses
            )
            self._rooms |= {"kept": kept, batch.shape: read}
            return values

    def _finish(self, batch: DecoderBatch | TextBatch, started: Mapping[str, jax.Array]) -> Scored:
        """Waits for a started batch's values, and sums them for each pair, in float64."""
        real = batch.pairs >= 0
        # Dispatch is asynchronous: running out of memory may surface only at this fetch.
        sums = {
            name: fetch(values).astype(np.float64).sum(-1)[real] for name, values in started.items()
        }
        return Scored(batch.pairs[real], sums["log_p"], sums.get("misses"))


def choose_sizes(model: T5, platform: str) -> Sizes:
    """How much a device computes at once: follows from the model and the platform alone."""
    memory = min(count_kept(model), _MOST_MEMORY.get(platform, 1 << 17))
    return Sizes(max(512, memory // 16), memory)


def count_kept(model: T5) -> int:
    """For how many tokens a device keeps the decoder's keys and values: a power of two."""
    config = model.config
    width = 2 * config.num_decoder_layers * config.num_heads * config.d_kv
    fits = _MEMORY_BYTES // (width * jnp.dtype(model.dtypes.activation).itemsize)
    return max(1 << fits.bit_length() - 1, _LEAST_MEMORY)


def is_out_of_memory(error: Exception) -> bool:
    """Whether a device ran out of memory, by XLA's status; some backends only mention it."""
    return "RESOURCE_EXHAUSTED" in str(error) or "out of memory" in str(error).lower()


def score_pairs(params: dict, model: T5, pairs: Pairs) -> Float[np.ndarray, " pairs"]:
    """Log-likelihood of every pair: float64 [pairs], natural logarithm, not divided by length.

    Args:
      params: the model's parameters.
      model: the model.
      pairs: what to score.
    """
    engine, scores = Engine(params, model), np.zeros(len(pairs))
    for scored in engine.run(pairs, engine.plan(pairs)):
        scores[scored.pairs] = scored.scores
    return scores


def score_examples(
    params: dict,
    model: T5,
    examples: Sequence[Mapping[str, Any]],
    lengths: Mapping[str, int] | None,
) -> Float[np.ndarray, " examples"]:
    """Log-likelihood of each example's target given its input: float32 [examples], natural log.

    Args:
      params: the model's parameters.
      model: the model.
      examples: token ids under `inputs` and `targets`; of any number of tasks.
      lengths: maximum tokens per feature; longer ones are truncated. None keeps all.
    """
    pairs = collect_pairs(examples, lengths)
    return pairs.expand_to_examples(score_pairs(params, model, pairs)).astype(np.float32)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def make_room(model: T5, rows: int, tokens: int) -> CrossAttentionCache:
    """Zeros in place of the keys and values of so many rows and tokens."""
    config = model.config
    zeros = jnp.zeros((rows, config.num_heads, tokens, config.d_kv), model.dtypes.activation)
    zeros = constrain(zeros, "batch", "heads", None, None)
    return (KeysAndValues(zeros, zeros),) * config.num_decoder_layers


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2, compiler_options=FIXED_KERNELS)
def encode(
    model: T5,
    params: dict,
    kept: CrossAttentionCache,
    inputs: Int[Array, "parts rows length"],
    lengths: Int[Array, "parts rows"],
    start: Int[Array, ""],
) -> CrossAttentionCache:
    """Encodes inputs, and puts the decoder's keys and values for them among those that are kept.

    Args:
      model: the model.
      params: its parameters.
      kept: [parts, heads, tokens, d_kv] each; they are overwritten.
      inputs: token ids.
      lengths: tokens of each input.
      start: where in `kept` each device's go, one row after the other.
    """
    parts, rows, length = inputs.shape
    ids = jnp.reshape(jnp.asarray(inputs), (-1, length))
    segments = _mark_first(lengths, length)
    encoded = model.apply({"params": params}, ids, segments, method=T5.encode)
    assert isinstance(encoded, jax.Array)
    encoded = constrain(encoded.reshape(parts, rows * length, -1), "batch", None, None)
    found = make_cross_attention_cache(model, params, encoded)
    return jax.tree.map(functools.partial(_put, start=start), kept, found)


def _put(room: Array, new: Array, start: Array) -> Array:
    at = (0, 0, start, 0)
    if room.dtype != jnp.bfloat16 or device_to_trace_for().platform != "cpu":
        return jax.lax.dynamic_update_slice(room, new, at)
    # XLA on CPU updates bfloat16 in float32: it would convert all that is kept, and back.
    bits = jax.lax.dynamic_update_slice(room.view(jnp.uint16), new.view(jnp.uint16), at)
    return bits.view(room.dtype)


@functools.partial(
    jax.jit,
    static_argnums=0,
    static_argnames="misses",
    donate_argnums=2,
    compiler_options=FIXED_KERNELS,
)
def decode(
    model: T5,
    params: dict,
    read: CrossAttentionCache,
    kept: CrossAttentionCache,
    starts: Int[Array, "parts rows"],
    lengths: Int[Array, "parts rows"],
    targets: Int[Array, "parts rows length"],
    misses: bool = False,
) -> tuple[dict[str, Float[Array, "parts rows length"]], CrossAttentionCache]:
    """Values of each target given its input and the targets before it, 0 at padding; and `read`.

    `log_p` is its log-probability; `misses` is 1 where another token is more likely, else 0.

    Args:
      model: the model.
      params: its parameters.
      read: [all rows, heads, memory, d_kv] each; overwritten by the keys and values of each row's
        input, with zeros behind them.
      kept: what `encode` returned.
      starts: where in `kept` those of each row's input begin, on its device.
      lengths: tokens of each row's input.
      targets: token ids of a choice in each row; 0 at padding.
      misses: whether to return `misses` too.
    """

    def gather(room: Array, kept: Array) -> Array:
        def slice_of(kept: Array, start: Array) -> Array:
            return jax.lax.dynamic_slice(kept, (0, start, 0), room.shape[1:])

        slices = jax.vmap(jax.vmap(slice_of, (None, 0)))(kept, jnp.asarray(starts))
        # Masked keys count too if they are NaN, as those of the next row's input may be.
        found = jnp.where(is_own[:, None, :, None] > 0, slices.reshape(room.shape), 0)
        found = constrain(found, "batch", "heads", None, None)
        return jax.lax.dynamic_update_slice(room, found, (0, 0, 0, 0))

    is_own = _mark_first(lengths, read[0].key.shape[2])
    read = jax.tree.map(gather, read, kept)
    rows = jnp.reshape(jnp.asarray(targets), (-1, targets.shape[-1]))
    segments = jnp.minimum(rows, 1)
    hidden = model.apply(
        {"params": params},
        read,
        is_own,
        rows,
        segments,
        # Also at padding, which then reads what its row does.
        segments_read=jnp.ones_like(rows),
        hidden=True,
        method=T5.decode,
    )
    return _token_values(model, params, hidden, rows, segments, targets.shape, misses), read


@functools.partial(
    jax.jit, static_argnums=0, static_argnames="misses", compiler_options=FIXED_KERNELS
)
def read_texts(
    model: T5,
    params: dict,
    texts: Int[Array, "parts rows length"],
    lengths: Int[Array, "parts rows"],
    read: Int[Array, "parts rows"],
    misses: bool = False,
) -> dict[str, Float[Array, "parts rows length"]]:
    """The values of `decode` for each choice's tokens in the texts of a model without an encoder.

    Args:
      model: the model.
      params: its parameters.
      texts: token ids of an input and a choice in each row; 0 at padding.
      lengths: tokens of each text.
      read: tokens of its input. A prefix LM attends in both directions there, and at the position
        that reads its last token (T5X's decoder_causal_attention).
      misses: whether to return `misses` too.

    Source: t5x.models.DecoderOnlyModel.score_batch.
    """
    rows = jnp.reshape(jnp.asarray(texts), (-1, texts.shape[-1]))
    segments, inputs = (_mark_first(each, rows.shape[1]) for each in (lengths, read))
    batch = {
        "targets": rows,
        "targets_segmentation": segments,
        "full_attention": _mark_first(jnp.asarray(read) + 1, rows.shape[1]),
    }
    hidden = model.apply({"params": params}, batch, hidden=True)
    return _token_values(model, params, hidden, rows, segments - inputs, texts.shape, misses)


def _mark_first(lengths: Int[Array, "parts rows"], length: int) -> Int[Array, "all_rows length"]:
    """1 at as many positions of each row, then 0."""
    return (jnp.arange(length) < jnp.reshape(jnp.asarray(lengths), (-1, 1))).astype(jnp.int32)


def _token_values(
    model: T5,
    params: dict,
    hidden: Any,
    targets: Int[Array, "rows length"],
    scored: Int[Array, "rows length"],
    shape: tuple[int, ...],
    misses: bool,
) -> dict[str, Float[Array, "parts rows length"]]:
    assert isinstance(hidden, jax.Array)

    def token_values(logits: Array, targets: Array) -> dict[str, Array]:
        values = {"log_p": -cross_entropy(logits, targets)}
        if misses:
            values["misses"] = (jnp.argmax(logits, -1) != targets).astype(jnp.float32)
        return values

    values = map_targets(model, params, hidden, targets, token_values)
    return {name: jnp.where(scored > 0, x, 0).reshape(shape) for name, x in values.items()}
