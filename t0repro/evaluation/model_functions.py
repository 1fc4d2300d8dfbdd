"""The functions that SeqIO's Evaluator calls a model with: predict, predict_with_aux and score.

Each takes unpacked examples with the features of seqio.EncDecFeatureConverter, as (index, example)
pairs or as an enumerated tf.data.Dataset, and returns (index, output) pairs.

Source: t5x.utils.get_infer_fn.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from t0repro.config.decoding_plan import DecodingPlan
from t0repro.evaluation.engine import score_examples
from t0repro.model.t5 import T5
from t0repro.model.t5x_decoding import Decodes, generate
from t0repro.partitioning.devices import across_devices_of, data_parts, fetched

Indexed = list[tuple[int, Any]]
Aux = dict[str, list[Any]]


@dataclasses.dataclass(frozen=True)
class ModelFunctions:
    """A model that predicts and scores examples.

    Attributes:
      model: The model.
      params: Its parameters.
      plan: How it decodes.
      batch_size: Examples that are decoded together; the last batch is filled up with its first
        example, whose copies are dropped.
      seed: For sampling.
    """

    model: T5
    params: Any
    plan: DecodingPlan
    batch_size: int
    seed: int = 0

    def predict(self, dataset: Any) -> Indexed:
        """Token ids of each example's output; lists of them with `return_all_decodes`."""
        return self.predict_with_aux(dataset)[0]

    def predict_with_aux(self, dataset: Any) -> tuple[Indexed, Aux]:
        """Token ids of each example's output, and its score under "scores"."""
        outputs: Indexed = []
        scores: list[Any] = []
        for indices, decodes in self._decoded(dataset):
            for index, tokens, score in zip(indices, *map(fetched, decodes), strict=False):
                # Decodes ascend by score, so the best one is the last.
                if not self.plan.return_all_decodes:
                    tokens, score = tokens[-1], score[-1]
                outputs.append((index, tokens.tolist()))
                scores.append(score.tolist())
        return outputs, {"scores": scores}

    def score(self, dataset: Any) -> Indexed:
        """Log-likelihood of each example's targets, EOS included: natural log, not normalised."""
        indices, examples = [], []
        for index, example in _pairs(dataset):
            indices.append(int(index))
            examples.append(_tokens(example))
        if not examples:
            return []
        # The limit is in tokens: a batch_size of the longest examples.
        longest = max(len(row) for example in examples for row in example.values())
        scores = score_examples(
            self.params,
            self.model,
            examples,
            None,
            tokens_per_batch=self.batch_size * longest,
        )
        return [(index, float(score)) for index, score in zip(indices, scores, strict=True)]

    def _decoded(self, dataset: Any) -> Iterator[tuple[list[int], Decodes]]:
        """Each batch's indices and decodes; of the rows, the first are the indexed ones."""
        batches = _batches(dataset, self.params, self.batch_size, self.seed)
        for indices, batch, key in batches:
            own = _tokens(batch)
            with across_devices_of(self.params):
                decodes = generate(
                    self.model, self.params, own["inputs"], own["targets"], self.plan, key
                )
            yield indices, decodes


@dataclasses.dataclass(frozen=True)
class UserModelFunctions:
    """The same of a model of the user's, by its own `predict_batch`, `score_batch` and so on.

    Attributes:
      model: an EncoderDecoderModel; batches have T5X's feature names.
      params: Its parameters.
      batch_size: Examples that are done together.
      seed: For sampling.
    """

    model: Any
    params: Any
    batch_size: int
    seed: int = 0

    def predict(self, dataset: Any) -> Indexed:
        """Token ids of each example's output."""
        predict = jax.jit(self.model.predict_batch)
        return [
            pair for pair, _ in self._done(dataset, lambda b, k: (predict(self.params, b, k), {}))
        ]

    def predict_with_aux(self, dataset: Any) -> tuple[Indexed, Aux]:
        """Token ids of each example's output, and what else the model returns, by name."""
        predict = jax.jit(self.model.predict_batch_with_aux)
        rows = list(self._done(dataset, lambda b, k: predict(self.params, b, k)))
        names = rows[0][1] if rows else ()
        return [pair for pair, _ in rows], {name: [aux[name] for _, aux in rows] for name in names}

    def score(self, dataset: Any) -> Indexed:
        """What the model's `score_batch` says of each example's targets."""
        score = jax.jit(self.model.score_batch)
        return [pair for pair, _ in self._done(dataset, lambda b, _: (score(self.params, b), {}))]

    def _done(
        self, dataset: Any, function: Callable[[Any, jax.Array], tuple[Any, Mapping[str, Any]]]
    ) -> Iterator[tuple[tuple[int, Any], dict[str, Any]]]:
        """((index, output), {name: value}) of each example."""
        for indices, batch, key in _batches(dataset, self.params, self.batch_size, self.seed):
            with across_devices_of(self.params):
                outputs, aux = function(batch, key)
            outputs, aux = fetched(outputs), {name: fetched(x) for name, x in aux.items()}
            for row, index in enumerate(indices):
                yield (
                    (index, outputs[row].tolist()),
                    {name: x[row].tolist() for name, x in aux.items()},
                )


def functions_of(
    model: Any, params: Any, plan: DecodingPlan, batch_size: int, seed: int = 0
) -> ModelFunctions | UserModelFunctions:
    """The functions of a network, decoded by a plan, or of a model of the user's."""
    if isinstance(model, T5):
        return ModelFunctions(model, params, plan, batch_size, seed)
    return UserModelFunctions(model, params, batch_size, seed)


def _batches(
    dataset: Any, params: Any, batch_size: int, seed: int
) -> Iterator[tuple[list[int], dict[str, np.ndarray], jax.Array]]:
    """Indices, features and PRNG key of each batch; of the rows, the first are the indexed ones."""
    key = jax.random.PRNGKey(seed)
    pairs, numbers = _pairs(dataset), itertools.count()
    while batch := list(itertools.islice(pairs, batch_size)):
        examples = [example for _, example in batch]
        # As many as several devices need to share them evenly.
        size = batch_size + -batch_size % data_parts(params)
        examples += examples[:1] * (size - len(examples))
        features = {
            name: np.stack([np.asarray(example[name]) for example in examples])
            for name in examples[0]
        }
        yield [int(i) for i, _ in batch], features, jax.random.fold_in(key, next(numbers))


def _tokens(example: Any) -> dict[str, np.ndarray]:
    return {
        "inputs": np.asarray(example["encoder_input_tokens"], np.int32),
        "targets": np.asarray(example["decoder_target_tokens"], np.int32),
    }


def _pairs(dataset: Any) -> Iterator[tuple[Any, Any]]:
    return dataset.as_numpy_iterator() if hasattr(dataset, "as_numpy_iterator") else iter(dataset)
