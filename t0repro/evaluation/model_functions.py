"""A model's functions, as SeqIO's Evaluator calls them: predict, predict with scores, score.

This project's own model predicts and scores in programs whose rows follow from the lengths alone,
so outputs have the same bits with any batch size, order and number of devices (see `generation`).
Samples are the exception: T5X draws them for a batch of the configured size by one key. So is a
beam search with min_log_prob, which T5X ends for all rows of a batch together. A user's model gets
batches of the configured size.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from t0repro.config.data import Converter, SeqioDataConfig
from t0repro.config.decoding import DecodingPlan
from t0repro.data.train_data import rename_seqio_features
from t0repro.errors import UserError
from t0repro.evaluation.engine import is_out_of_memory, score_examples
from t0repro.evaluation.generation import rows_decoded_together, say_halved
from t0repro.model.matmuls import FIXED_KERNELS
from t0repro.model.shapes import Array, Float
from t0repro.model.t5 import T5
from t0repro.model.t5x_decoding import MIN_TEMPERATURE, continue_prompts, generate
from t0repro.partitioning.devices import count_data_shards, fetch, use_devices_of
from t0repro.training.t5_model import check_full_attention
from t0repro.training.token_losses import cross_entropy, map_targets, token_weights

Indexed = list[tuple[int, Any]]


Aux = dict[str, list[Any]]


@dataclasses.dataclass(frozen=True)
class ModelFunctions:
    """A model that predicts and scores examples.

    Attributes:
      model: The model.
      params: Its parameters.
      plan: The decoding options.
      batch_size: Examples for which samples are drawn together.
      converter: What made the model's features of the examples.
      seed: For sampling.
    """

    model: T5
    params: Any
    plan: DecodingPlan
    batch_size: int
    converter: Converter
    seed: int = 0

    def predict(self, dataset: Any) -> Indexed:
        """Token ids of each example's output; lists of them with `return_all_decodes`."""
        return self.predict_with_aux(dataset)[0]

    def predict_with_aux(self, dataset: Any) -> tuple[Indexed, Aux]:
        """Token ids of each example's output, and its score under "scores"."""
        outputs: Indexed = []
        scores: list[Any] = []
        plan = self.plan
        draws = plan.topk != 1 and plan.temperature > MIN_TEMPERATURE
        rows = None if plan.method == "temperature_sample" and draws else self._rows
        for (index, tokens), aux in _compute_batches(self, dataset, self._decode, rows):
            # Decodes ascend by score, so the best one is the last.
            every = plan.return_all_decodes
            outputs.append((index, tokens if every else tokens[-1]))
            scores.append(aux["scores"] if every else aux["scores"][-1])
        return outputs, {"scores": scores}

    def score(self, dataset: Any) -> Indexed:
        """Log-likelihood of each example's targets, EOS included: natural log, not normalized."""
        if self.converter != "encoder_decoder":
            score = lambda batch, _: (self._score(batch), {})  # noqa: E731
            return [pair for pair, _ in _compute_batches(self, dataset, score, self._rows)]
        indices, examples = [], []
        for index, example in _pairs(dataset):
            indices.append(int(index))
            examples.append(rename_seqio_features(example))
        if not examples:
            return []
        scores = score_examples(self.params, self.model, examples, None)
        return [(index, float(score)) for index, score in zip(indices, scores, strict=True)]

    def _rows(self, example: Mapping[str, Any]) -> int:
        """Rows of the program for such examples, which all have the same lengths, on a device."""
        own = rename_seqio_features(example, self.converter)
        length = len(own["targets"]) * self.plan.num_decodes + len(own.get("inputs", ()))
        return rows_decoded_together(self.model, length, jax.default_backend())

    def _decode(self, batch: Any, key: jax.Array) -> tuple[Any, dict[str, Any]]:
        model, params, plan = self.model, self.params, self.plan
        if plan.topk == 1:
            # Greedy, but T5X draws among tokens that tie exactly: take the first, in any batch.
            plan = dataclasses.replace(plan, temperature=0.0)
        if model.config.decoder_only:
            tokens, scores = continue_prompts(model, plan, params, *_prompts(batch), key)
            return tokens, {"scores": scores}
        own = rename_seqio_features(batch, self.converter)
        targets = own["targets"]
        if (read := own.get("decoder_inputs")) is not None:
            targets = np.pad(read[:, 1:], ((0, 0), (0, 1)))
        tokens, scores = generate(model, params, own["inputs"], targets, plan, key)
        return tokens, {"scores": scores}

    def _score(self, batch: Any) -> Any:
        own = rename_seqio_features(batch, self.converter)
        if self.model.config.input_full_attention:
            check_full_attention(own)
        return score_rows(self.model, self.params, own)


@functools.partial(jax.jit, static_argnums=0, compiler_options=FIXED_KERNELS)
def score_rows(model: T5, params: Any, batch: Any) -> Float[Array, " batch"]:
    """Log-likelihood of each row's targets by their weights: natural log, not normalized.

    Args:
      model: The model.
      params: Its parameters.
      batch: What the model reads, under this project's names.

    Source: t5x.models.BaseTransformerModel.score_batch.
    """
    targets = jnp.asarray(batch["targets"])
    hidden: Any = model.apply({"params": params}, batch, hidden=True)

    def log_p(logits: Array, targets: Array) -> dict[str, Array]:
        return {"log_p": -cross_entropy(logits, targets)}

    scores = map_targets(model, params, hidden, targets, log_p)["log_p"]
    return jnp.sum(scores * token_weights(model.config, batch), axis=1)


@dataclasses.dataclass(frozen=True)
class UserModelFunctions:
    """The same for a user's model, through its `predict_batch`, `score_batch` and so on.

    Attributes:
      model: an EncoderDecoderModel; batches have T5X's feature names.
      params: Its parameters.
      batch_size: Examples processed together.
      seed: For sampling.
    """

    model: Any
    params: Any
    batch_size: int
    seed: int = 0

    def predict(self, dataset: Any) -> Indexed:
        """Token ids of each example's output."""
        predict = jax.jit(self.model.predict_batch, compiler_options=FIXED_KERNELS)
        return self._outputs(dataset, lambda batch, key: predict(self.params, batch, key))

    def predict_with_aux(self, dataset: Any) -> tuple[Indexed, Aux]:
        """Token ids of each example's output, and the model's other results by name."""
        predict = jax.jit(self.model.predict_batch_with_aux, compiler_options=FIXED_KERNELS)
        rows = list(_compute_batches(self, dataset, lambda b, key: predict(self.params, b, key)))
        names = rows[0][1] if rows else ()
        return [pair for pair, _ in rows], {name: [aux[name] for _, aux in rows] for name in names}

    def score(self, dataset: Any) -> Indexed:
        """The model's `score_batch` of each example's targets."""
        score = jax.jit(self.model.score_batch, compiler_options=FIXED_KERNELS)
        return self._outputs(dataset, lambda batch, _: score(self.params, batch))

    def _outputs(self, dataset: Any, function: Callable[[Any, jax.Array], Any]) -> Indexed:
        computed = _compute_batches(self, dataset, lambda batch, key: (function(batch, key), {}))
        return [pair for pair, _ in computed]


def _compute_batches(
    functions: ModelFunctions | UserModelFunctions,
    dataset: Any,
    function: Callable[[Any, jax.Array], tuple[Any, Mapping[str, Any]]],
    rows_of: Callable[[Mapping[str, Any]], int] | None = None,
) -> Iterator[tuple[tuple[int, Any], dict[str, Any]]]:
    """((index, output), {name: value}) of each example.

    Args:
      functions: The model's.
      dataset: Its examples.
      function: Of a batch and a key. A last batch ends in copies of its first example.
      rows_of: Given an example, how many a device computes at once; fewer if its memory does not
        hold them. None takes the batch size.
    """
    params, rows = functions.params, functions.batch_size
    key, parts = jax.random.PRNGKey(functions.seed), count_data_shards(params)
    pairs, numbers = _pairs(dataset), itertools.count()
    first = next(pairs, None)
    if first is not None:
        pairs = itertools.chain([first], pairs)
        rows = rows if rows_of is None else rows_of(first[1]) * parts
    while batch := list(itertools.islice(pairs, rows)):
        examples = [example for _, example in batch]
        # Round up to what shards evenly across the devices.
        examples += examples[:1] * (rows + -rows % parts - len(examples))
        features = {
            name: np.stack([np.asarray(example[name]) for example in examples])
            for name in examples[0]
        }
        try:
            with use_devices_of(params):
                outputs, aux = function(features, jax.random.fold_in(key, next(numbers)))
            outputs, aux = fetch(outputs), {name: fetch(x) for name, x in aux.items()}
        except jax.errors.JaxRuntimeError as error:
            if rows_of is None or not is_out_of_memory(error) or rows <= parts:
                raise
            say_halved(rows)
            rows, pairs = rows // parts // 2 * parts, itertools.chain(batch, pairs)
            continue
        for row, (index, _) in enumerate(batch):
            yield (
                (int(index), outputs[row].tolist()),
                {name: x[row].tolist() for name, x in aux.items()},
            )


def make_functions(
    model: Any, params: Any, plan: DecodingPlan, data: SeqioDataConfig, seed: int = 0
) -> ModelFunctions | UserModelFunctions:
    """The functions of a network, decoded by a plan, or of a user's model; for some data."""
    if isinstance(model, T5):
        return ModelFunctions(model, params, plan, data.batch_size, data.converter, seed)
    return UserModelFunctions(model, params, data.batch_size, seed)


def _prompts(batch: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """What the decoder reads of each example's inputs, and where: int32 [batch, length].

    Raises:
      UserError: If the batch does not say where the inputs are, or they are not each row's first.
    """
    if "decoder_causal_attention" not in batch:
        raise UserError(
            "A batch has no decoder_causal_attention, so nothing says where its inputs end.",
            where="utils.DatasetConfig.task_feature_lengths",
            fix="Outputs are generated after inputs: evaluate tasks with inputs and targets, and"
            " give lengths of both.",
        )
    both_ways = np.asarray(batch["decoder_causal_attention"], np.int32)
    check_full_attention({"full_attention": both_ways, "targets": np.ones_like(both_ways)})
    return np.asarray(batch["decoder_input_tokens"], np.int32) * both_ways, both_ways


def _pairs(dataset: Any) -> Iterator[tuple[Any, Any]]:
    return dataset.as_numpy_iterator() if hasattr(dataset, "as_numpy_iterator") else iter(dataset)
