"""Scores distinct (input, choice) pairs on the device: each input is encoded once for all choices.

A model without an encoder reads each pair as one text, so it reads an input once for each choice.

A pair's score is the one that Mesh TensorFlow's mode "score" gives: the sum over the choice's
tokens, EOS included, of log p given the input. In float32 the two agree to rounding for any batch
size, grouping and order, because neither the rows of a batch nor the segments of a row (packed
inputs, and their choices) attend to each other.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from t0repro.errors import UserError
from t0repro.evaluation.grouping import (
    Batching,
    DecoderRows,
    PlannedBatch,
    TextRows,
    make_batching,
    side_by_side,
)
from t0repro.evaluation.pairs import Pairs, collect_pairs
from t0repro.model.shapes import Array, Float, Int
from t0repro.model.t5 import T5, make_cross_attention_cache
from t0repro.model.towers import CrossAttentionCache
from t0repro.partitioning.devices import (
    MODEL,
    count_data_shards,
    fetch,
    find_mesh,
    pad_rows,
    use_devices_of,
)
from t0repro.progress import say
from t0repro.training.token_losses import cross_entropy, map_targets
from t0repro.words import counted

TOKENS_PER_BATCH = {"cpu": 4096, "gpu": 65536, "tpu": 65536}
_IN_FLIGHT = 2  # batches dispatched before the oldest one's scores are waited for


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
      note_rounding: called with what changes the last bits of the scores that follow, so that
        another run's may differ.
    """

    def __init__(
        self,
        params: dict,
        model: T5,
        *,
        misses: bool = False,
        note_rounding: Callable[[str], object] = lambda by: None,
    ):
        self.params, self.model, self.misses = params, model, misses
        self._note_rounding = note_rounding
        # (inputs_length, targets_length) -> most rows that fit, for shapes of which a batch did not
        # fit.
        self._halved: dict[tuple[int, int], int] = {}

    def run(self, pairs: Pairs, plan: Batching) -> Iterator[Scored]:
        """Yields each batch's scores, in the plan's order.

        While the device works on one batch, the host prepares the next. Devices that divide the
        rows get a batch of the plan each. A batch that does not fit in the device's memory is split
        in two, and so is every later batch of that size.

        Raises:
          UserError: if not even one row fits.
        """
        mesh = find_mesh(self.params)
        if plan.batches and mesh is not None and mesh.shape[MODEL] > 1:
            self._note_rounding(f"{mesh.shape[MODEL]} devices that share each layer")
        waiting: deque[tuple[PlannedBatch, Any]] = deque()
        for batch in side_by_side(plan.batches, count_data_shards(self.params)):
            waiting.append((batch, self._attempt(batch, pairs)))
            if len(waiting) >= _IN_FLIGHT:
                yield self._finish(*waiting.popleft(), pairs)
        while waiting:
            yield self._finish(*waiting.popleft(), pairs)

    def _attempt(self, batch: PlannedBatch, pairs: Pairs) -> Any:
        """Starts a batch; None if it is known not to fit, or starting it ran out of memory."""
        limit = self._halved.get((batch.inputs_length, batch.targets_length))
        if limit is not None and batch.size > limit:
            return None
        try:
            return self._dispatch(batch, pairs)
        except jax.errors.JaxRuntimeError as error:
            self._too_large(batch, error)
            return None

    def _finish(self, batch: PlannedBatch, started: Any, pairs: Pairs) -> Scored:
        """Waits for a started batch's scores; scores it in halves if it did not fit."""
        if started is not None:
            try:
                # Dispatch is asynchronous: running out of memory may surface only at this fetch.
                return _sum_by_pair(
                    batch, [(rows, jax.tree.map(fetch, values)) for rows, values in started]
                )
            except jax.errors.JaxRuntimeError as error:
                self._too_large(batch, error)
        parts = [
            self._finish(half, self._attempt(half, pairs), pairs)
            for half in batch.halves()
            if half.rows
        ]
        misses = [part.misses for part in parts if part.misses is not None]
        return Scored(
            np.concatenate([part.pairs for part in parts]),
            np.concatenate([part.scores for part in parts]),
            np.concatenate(misses) if misses else None,
        )

    def _too_large(self, batch: PlannedBatch, error: Exception) -> None:
        """Records that a batch size does not fit; re-raises any other error."""
        # XLA's own status; some backends only mention it in the message.
        if "RESOURCE_EXHAUSTED" not in str(error) and "out of memory" not in str(error).lower():
            raise error
        where = f"{batch.inputs_length} input and {batch.targets_length} target tokens"
        if batch.size == 1:
            raise UserError(
                f"Not even one input of {where} fits into the device's memory.",
                fix="Evaluate on a larger device, or shorten the inputs.",
            ) from error
        if not self._halved:
            self._note_rounding("batches that were split to fit the memory")
        half = (batch.size + 1) // 2
        self._halved[batch.inputs_length, batch.targets_length] = half
        say(f"Out of memory with {counted(batch.size, 'row')} of {where}: continuing with {half}.")

    def _dispatch(
        self, batch: PlannedBatch, pairs: Pairs
    ) -> list[tuple[DecoderRows | TextRows, dict[str, jax.Array]]]:
        """Queues a batch on the device and returns without waiting for it."""
        if self.model.config.decoder_only:
            with use_devices_of(self.params):
                return [(rows, self._read(rows)) for rows in batch.text_rows(pairs)]
        inputs, segments = self._pad_rows(*batch.inputs(pairs))
        with use_devices_of(self.params):
            memory = encode(self.model, self.params, inputs, segments)
            return [
                (
                    rows,
                    decode(
                        self.model,
                        self.params,
                        memory,
                        segments,
                        *self._pad_rows(rows.targets, rows.segments, rows.reads),
                        misses=self.misses,
                    ),
                )
                for rows in batch.decoder_rows(pairs)
            ]

    def _read(self, rows: TextRows) -> dict[str, jax.Array]:
        arrays = self._pad_rows(rows.texts, rows.segments, rows.full_attention)
        return read_texts(self.model, self.params, *arrays, misses=self.misses)

    def _pad_rows(self, *arrays: np.ndarray) -> list[np.ndarray]:
        """Arrays padded with rows until they shard evenly across the devices."""
        return [pad_rows(x, count_data_shards(self.params)) for x in arrays]


def score_pairs(
    params: dict,
    model: T5,
    pairs: Pairs,
    tokens_per_batch: int | None = None,
) -> Float[np.ndarray, " pairs"]:
    """Log-likelihood of every pair: float64 [pairs], natural logarithm, not divided by length.

    Args:
      params: the model's parameters.
      model: the model.
      pairs: what to score.
      tokens_per_batch: see grouping.make_batching; defaults to a size for the device.
    """
    tokens = tokens_per_batch or default_tokens_per_batch()
    scores = np.zeros(len(pairs))
    for scored in Engine(params, model).run(pairs, make_batching(pairs, tokens)):
        scores[scored.pairs] = scored.scores
    return scores


def default_tokens_per_batch() -> int:
    """Default number of tokens that a device processes at once."""
    return TOKENS_PER_BATCH.get(jax.default_backend(), 4096)


def score_examples(
    params: dict,
    model: T5,
    examples: Sequence[Mapping[str, Any]],
    lengths: Mapping[str, int] | None,
    tokens_per_batch: int | None = None,
) -> Float[np.ndarray, " examples"]:
    """Log-likelihood of each example's target given its input: float32 [examples], natural log.

    Args:
      params: the model's parameters.
      model: the model.
      examples: token ids under `inputs` and `targets`; of any number of tasks.
      lengths: maximum tokens per feature; longer ones are truncated. None keeps all.
      tokens_per_batch: see grouping.make_batching.
    """
    pairs = collect_pairs(examples, lengths)
    return pairs.expand_to_examples(score_pairs(params, model, pairs, tokens_per_batch)).astype(
        np.float32
    )


def _sum_by_pair(
    batch: PlannedBatch, parts: Sequence[tuple[DecoderRows | TextRows, Mapping[str, np.ndarray]]]
) -> Scored:
    """Sums the tokens' values for each pair, in float64."""
    pairs = batch.pairs
    place = {int(pair): at for at, pair in enumerate(pairs)}
    sums = {name: np.zeros(len(pairs)) for name in parts[0][1]}
    for rows, values in parts:
        real = rows.pair >= 0
        at = np.array([place[int(pair)] for pair in rows.pair[real]], np.int64)
        for name, value in values.items():
            # Rows beyond those of `rows` are padding that lets the batch shard evenly across
            # devices.
            weights = value[: len(rows.pair)][real].astype(np.float64)
            # Packing may put a pair's tokens anywhere, so sum them by owner.
            sums[name] += np.bincount(at, weights=weights, minlength=len(pairs))
    return Scored(pairs, sums["log_p"], sums.get("misses"))


@functools.partial(jax.jit, static_argnums=0)
def encode(
    model: T5,
    params: dict,
    inputs: Int[Array, "batch length"],
    segments: Int[Array, "batch length"],
) -> CrossAttentionCache:
    """Encodes inputs: the decoder's cross-attention keys and values, on the device."""
    encoded = model.apply(
        {"params": params}, jnp.asarray(inputs), jnp.asarray(segments), method=T5.encode
    )
    assert isinstance(encoded, jax.Array)
    return make_cross_attention_cache(model, params, encoded)


@functools.partial(jax.jit, static_argnums=0, static_argnames="misses")
def decode(
    model: T5,
    params: dict,
    memory: CrossAttentionCache,
    encoded_segments: Int[Array, "batch memory"],
    targets: Int[Array, "batch length"],
    segments: Int[Array, "batch length"],
    reads: Int[Array, "batch length"],
    misses: bool = False,
) -> dict[str, Float[Array, "batch length"]]:
    """Values of each target given its input and the targets before it in its segment.

    `log_p` is its log-probability; `misses` is 1 where another token is more likely, else 0.

    Args:
      model: the model.
      params: its parameters.
      memory: what `encode` returned.
      encoded_segments: the encoder's segment ids.
      targets: token ids of the choices of the row's inputs, packed.
      segments: segment ids of the choices, from 1; 0 at padding.
      reads: the input segment that each target token attends to.
      misses: whether to return `misses` too.
    """
    hidden = model.apply(
        {"params": params},
        memory,
        encoded_segments,
        targets,
        segments,
        segments_read=reads,
        hidden=True,
        method=T5.decode,
    )
    return _token_values(model, params, hidden, targets, misses)


@functools.partial(jax.jit, static_argnums=0, static_argnames="misses")
def read_texts(
    model: T5,
    params: dict,
    texts: Int[Array, "batch length"],
    segments: Int[Array, "batch length"],
    full_attention: Int[Array, "batch length"],
    misses: bool = False,
) -> dict[str, Float[Array, "batch length"]]:
    """The values of `decode` for each token of the texts of a model without an encoder.

    Args:
      model: the model.
      params: its parameters.
      texts: see grouping.TextRows, as for the next two.
      segments: segment ids.
      full_attention: where a prefix LM attends in both directions.
      misses: whether to return `misses` too.

    Source: t5x.models.DecoderOnlyModel.score_batch.
    """
    batch = {
        "targets": texts,
        "targets_segmentation": segments,
        "full_attention": full_attention,
    }
    hidden = model.apply({"params": params}, batch, hidden=True)
    return _token_values(model, params, hidden, texts, misses)


def _token_values(
    model: T5, params: dict, hidden: Any, targets: Int[Array, "batch length"], misses: bool
) -> dict[str, Float[Array, "batch length"]]:
    assert isinstance(hidden, jax.Array)

    def token_values(logits: Array, targets: Array) -> dict[str, Array]:
        values = {"log_p": -cross_entropy(logits, targets)}
        if misses:
            values["misses"] = (jnp.argmax(logits, -1) != targets).astype(jnp.float32)
        return values

    return map_targets(model, params, hidden, targets, token_values)
