"""SeqIO's own Evaluator on JAX: the model functions that it calls, and its files."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from t0repro.config.decoding import DecodingPlan
from t0repro.config.training_plan import EvaluatorConfig, LoggerConfig, SeqioDataConfig
from t0repro.errors import UserError
from t0repro.evaluation.engine import score_examples
from t0repro.log_records import only_records
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
      plan: The decoding options.
      batch_size: Examples decoded together; the last batch is padded with copies of its first
        example, whose outputs are dropped.
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
        # The limit is in tokens: those of batch_size examples of the greatest length.
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
        """Each batch's example indices and decodes; padding rows come after the indexed ones."""
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
        predict = jax.jit(self.model.predict_batch)
        return [
            pair for pair, _ in self._done(dataset, lambda b, k: (predict(self.params, b, k), {}))
        ]

    def predict_with_aux(self, dataset: Any) -> tuple[Indexed, Aux]:
        """Token ids of each example's output, and the model's other results by name."""
        predict = jax.jit(self.model.predict_batch_with_aux)
        rows = list(self._done(dataset, lambda b, k: predict(self.params, b, k)))
        names = rows[0][1] if rows else ()
        return [pair for pair, _ in rows], {name: [aux[name] for _, aux in rows] for name in names}

    def score(self, dataset: Any) -> Indexed:
        """The model's `score_batch` of each example's targets."""
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
    """The functions of a network, decoded by a plan, or of a user's model."""
    if isinstance(model, T5):
        return ModelFunctions(model, params, plan, batch_size, seed)
    return UserModelFunctions(model, params, batch_size, seed)


def _batches(
    dataset: Any, params: Any, batch_size: int, seed: int
) -> Iterator[tuple[list[int], dict[str, np.ndarray], jax.Array]]:
    """Indices, features and PRNG key of each batch; padding rows come after the indexed ones."""
    key = jax.random.PRNGKey(seed)
    pairs, numbers = _pairs(dataset), itertools.count()
    while batch := list(itertools.islice(pairs, batch_size)):
        examples = [example for _, example in batch]
        # Round up to what shards evenly across the devices.
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


# ---- The Evaluator and the files that its loggers write ------------------------------------------

FOLDER = "inference_eval"


class TaskEvaluator:
    """The tasks of an evaluation, whose examples are read once for all steps.

    Args:
      data: The examples; if its lengths are None, those of the longest example are used.
      evaluator: The number of examples, and the loggers.
      folder: Where the loggers write, under `inference_eval`.
      decoding: The decoding options.
    """

    def __init__(
        self,
        data: SeqioDataConfig,
        evaluator: EvaluatorConfig,
        folder: str | os.PathLike[str],
        decoding: DecodingPlan,
    ):
        # compat has to be installed before anything imports t5 or seqio.
        from t0repro import compat

        compat.install()
        import seqio

        self._data, self._decoding = data, decoding
        self._num_examples = evaluator.num_examples
        self._evaluator = seqio.Evaluator(
            data.mixture_or_task_name,
            seqio.EncDecFeatureConverter(pack=False),
            eval_split=data.split,
            use_cached=data.use_cached,
            seed=data.seed,
            sequence_length=None if data.sequence_length is None else dict(data.sequence_length),
            num_examples=evaluator.num_examples,
            logger_cls=[_logger_class(logger) for logger in evaluator.loggers],
            log_dir=os.path.join(os.fspath(folder), FOLDER),
            use_memory_cache=data.use_memory_cache and evaluator.use_memory_cache,
            async_compute_metrics=False,  # an error in a metric must stop the run where it occurs
        )

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks that are evaluated."""
        return [task.name for task in self._evaluator.eval_tasks]

    def evaluate(self, model: Any, params: Any, step: int) -> dict[str, dict[str, float]]:
        """Evaluates a model, lets the loggers write, and returns each task's metrics by name.

        Args:
          model: the network, or a user's model with methods that generate and score.
          params: its parameters.
          step: their step, for the loggers.
        """
        # SeqIO's types declare a second argument, which it never passes.
        functions: Any = functions_of(model, params, self._decoding, self._data.batch_size)
        with warnings.catch_warnings(), only_records("absl", _is_worth_logging):
            # sklearn warns about metrics that are undefined for few examples.
            warnings.filterwarnings("ignore", module=r"sklearn\.")
            try:
                metrics, _ = self._evaluator.evaluate(
                    compute_metrics=True,
                    step=step,
                    predict_fn=functions.predict,
                    predict_with_aux_fn=functions.predict_with_aux,
                    score_fn=functions.score,
                )
            except ValueError as error:
                # Without a limit the error is not about the number of examples.
                if self._num_examples is None:
                    raise
                raise UserError(
                    f"{error}.",
                    where=f"seqio.Evaluator.num_examples = {self._num_examples}",
                    fix="It counts pairs of an input and a choice: take a multiple of the numbers"
                    " of choices, or None for all.",
                ) from error
        return {task: _numbers(values) for task, values in metrics.result().items()}


def _is_worth_logging(record: logging.LogRecord) -> bool:
    # SeqIO both logs a metric's failure and raises it.
    return not str(record.msg).startswith("Failed to evaluate task")


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """The metrics that are single numbers."""
    # SeqIO wraps metrics in objects with a `value`; others are plain.
    plain = {name: getattr(value, "value", value) for name, value in values.items()}
    return {name: float(value) for name, value in plain.items() if _is_number(value)}


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def _logger_class(logger: LoggerConfig) -> Any:
    """A factory that SeqIO's Evaluator calls with its output_dir; that overrides a logger's own."""
    import seqio

    if logger.name == "py":
        return seqio.PyLoggingLogger
    if logger.name == "tensorboard":
        return seqio.TensorBoardLogger
    return functools.partial(seqio.JSONLogger, write_n_results=logger.write_n_results)
