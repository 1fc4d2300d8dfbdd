"""The functions that SeqIO's Evaluator calls a model with: predict, predict_with_aux and score.

Each takes unpacked examples with the features of seqio.EncDecFeatureConverter, as (index, example)
pairs or as an enumerated tf.data.Dataset, and returns (index, output) pairs.

Source: t5x.utils.get_infer_fn.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
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
        key = jax.random.PRNGKey(self.seed)
        pairs, numbers = _pairs(dataset), itertools.count()
        while batch := list(itertools.islice(pairs, self.batch_size)):
            examples = [_tokens(example) for _, example in batch]
            # As many as several devices need to share them evenly.
            size = self.batch_size + -self.batch_size % data_parts(self.params)
            examples += examples[:1] * (size - len(examples))
            inputs, targets = (
                np.stack([example[name] for example in examples]) for name in ("inputs", "targets")
            )
            batch_key = jax.random.fold_in(key, next(numbers))
            with across_devices_of(self.params):
                decodes = generate(self.model, self.params, inputs, targets, self.plan, batch_key)
            yield [int(index) for index, _ in batch], decodes


def _tokens(example: Any) -> dict[str, np.ndarray]:
    return {
        "inputs": np.asarray(example["encoder_input_tokens"], np.int32),
        "targets": np.asarray(example["decoder_target_tokens"], np.int32),
    }


def _pairs(dataset: Any) -> Iterator[tuple[Any, Any]]:
    return dataset.as_numpy_iterator() if hasattr(dataset, "as_numpy_iterator") else iter(dataset)
