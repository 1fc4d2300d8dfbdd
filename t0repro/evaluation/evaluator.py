"""What evaluates tasks with their own metrics: SeqIO's Evaluator or, of described tasks, this one.

Both write the same files: TensorBoard's events in `<task>/`, and for each task
`<task>-metrics.jsonl` and `<task>-<step>.jsonl` with every prediction.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import logging
import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from t0repro.config.decoding import DecodingPlan
from t0repro.config.run_config import RunConfig
from t0repro.config.training_plan import EvaluatorConfig, LoggerConfig, SeqioDataConfig
from t0repro.data.eval_examples import described_with_metrics, eval_examples
from t0repro.data.mixing import FEATURES
from t0repro.errors import UserError
from t0repro.evaluation.engine import score_examples
from t0repro.evaluation.task_output import judge_of_registered
from t0repro.event_files import EventWriter, event_writer
from t0repro.files import write_atomically
from t0repro.log_records import only_records
from t0repro.model.layer_stacks import by_layer, stacks_in
from t0repro.model.t5 import T5
from t0repro.model.t5x_decoding import Decodes, generate
from t0repro.partitioning.devices import across_devices_of, data_parts, fetched
from t0repro.progress import say
from t0repro.tasks.task import DescribedTask, is_described

if TYPE_CHECKING:
    from t0repro.training.loop import TrainingLoop

Example = Mapping[str, Any]
FOLDER = "inference_eval"
_SHOWN = 32  # SeqIO writes a larger array as a summary


def open_evaluator(
    data: SeqioDataConfig,
    evaluator: EvaluatorConfig,
    folder: str | os.PathLike[str],
    decoding: DecodingPlan,
) -> TaskEvaluator | DescribedEvaluator:
    """The evaluator of a task or mixture; see `TaskEvaluator` for the arguments."""
    described = is_described(data.mixture_or_task_name)
    return (DescribedEvaluator if described else TaskEvaluator)(data, evaluator, folder, decoding)


def infer_eval(
    config: RunConfig, folder: str | os.PathLike[str]
) -> Callable[[TrainingLoop], Mapping[str, Mapping[str, float]]] | None:
    """Makes what evaluates the tasks' own metrics in a training run; None if there is nothing.

    Args:
      config: The run.
      folder: See `TaskEvaluator`.
    """
    data, evaluator, decoding = (
        config.plan.infer_eval_data,
        config.plan.evaluator,
        config.plan.decoding,
    )
    if data is None or evaluator is None or decoding is None:
        return None
    # Every process evaluates, since they share the devices, but only the first keeps results.
    evaluated = open_evaluator(data, evaluator, folder, decoding)
    if not evaluated.tasks:
        say(f"infer_eval: no task of {data.mixture_or_task_name} has {data.split} and a metric")
        return None
    model, users = T5(config.model, config.dtypes), "model" in config.plan.user_classes

    def evaluate(loop: TrainingLoop) -> Mapping[str, Mapping[str, float]]:
        params = loop.held_state.parameters_of(config.model)
        # This project's own model generates by its network; a user's, by its methods.
        trained = loop.trainer.model if users else model
        return evaluated.evaluate(trained, by_layer(params, stacks_in(params)), loop.step)

    return evaluate


# ---- A model's functions, as SeqIO's Evaluator calls them ----------------------------------------

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


def _rows(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []


def _drop_repeated_rows(path: Path) -> None:
    """Drops the rows of an evaluation that was killed after it had written them, and repeated."""
    rows = _rows(path)
    different = list(dict.fromkeys(rows))
    if len(different) < len(rows):
        write_atomically(path, "".join(different))


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


# ---- SeqIO's Evaluator ---------------------------------------------------------------------------


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

        self._data, self._decoding, self._folder = data, decoding, Path(folder) / FOLDER
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
            log_dir=os.fspath(self._folder),
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
                if self._num_examples is None:
                    raise
                raise _odd_number(f"{error}.", self._num_examples) from error
        for task in self.tasks:
            _drop_repeated_rows(self._folder / f"{task}-metrics.jsonl")
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


# ---- Described tasks -----------------------------------------------------------------------------


class DescribedEvaluator:
    """The described tasks of an evaluation; takes what `TaskEvaluator` takes, and does the same."""

    def __init__(
        self,
        data: SeqioDataConfig,
        evaluator: EvaluatorConfig,
        folder: str | os.PathLike[str],
        decoding: DecodingPlan,
    ):
        self._data, self._evaluator, self._decoding = data, evaluator, decoding
        self._folder = Path(folder) / FOLDER
        self._tasks = described_with_metrics(data.mixture_or_task_name, data.split)
        self._examples = {task.name: self._read(task) for task in self._tasks}
        self._lengths = data.sequence_length or self._longest()
        self._writers: dict[str, EventWriter] = {}
        closing = contextlib.ExitStack()
        self._close_later, _ = closing.callback, weakref.finalize(self, closing.close)

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks that are evaluated."""
        return [task.name for task in self._tasks]

    def evaluate(self, model: Any, params: Any, step: int) -> dict[str, dict[str, float]]:
        """Evaluates a model and writes the files; returns each task's metrics by name.

        Args:
          model: The network, or a user's model with methods that generate and score.
          params: Its parameters.
          step: Their step, for the files.
        """
        functions = functions_of(model, params, self._decoding, self._data.batch_size)
        return {task.name: self._evaluate(task, functions, step) for task in self._tasks}

    def _read(self, task: DescribedTask) -> Sequence[Example]:
        data = self._data
        read = eval_examples(task, data.split, data.sequence_length, use_cached=data.use_cached)
        examples = list(itertools.islice(read, self._evaluator.num_examples))
        if not examples:
            raise UserError(
                f"{task.name!r} has no example to evaluate.",
                where=f"split {data.split!r}",
                fix="Choose another split, or remove the task from the mixture.",
            )
        return examples

    def _longest(self) -> dict[str, int]:
        examples = list(itertools.chain.from_iterable(self._examples.values()))
        return {name: max(len(example[name]) for example in examples) for name in FEATURES}

    def _evaluate(self, task: DescribedTask, functions: Any, step: int) -> dict[str, float]:
        examples, judge = self._examples[task.name], judge_of_registered(task)
        pairs = enumerate(model_features(example, self._lengths) for example in examples)
        inferred: dict[str, Sequence[Any]]
        if judge.ranks:
            outputs = _in_order(functions.score(pairs))
            inferred = {"score": outputs}
        else:
            vocabulary = task.output_features["targets"].vocabulary
            texts = [vocabulary.decode(tokens) for tokens in _in_order(functions.predict(pairs))]
            outputs = [
                judge.postprocess(text, example=example)
                for text, example in zip(texts, examples, strict=True)
            ]
            inferred = {"output": texts, "prediction": outputs}
        targets = [judge.target(example) for example in examples]
        metrics = self._metrics(judge, targets, outputs)
        for logger in self._evaluator.loggers:
            self._log(logger, task.name, step, metrics, {"target": targets, **inferred})
        return metrics

    def _metrics(self, judge: Any, targets: Sequence[Any], outputs: Sequence[Any]) -> dict:
        try:
            return judge.metrics(targets, outputs)
        except UserError as error:
            if (count := self._evaluator.num_examples) is None:
                raise
            raise _odd_number(error.what, count) from error

    def _log(
        self,
        logger: LoggerConfig,
        task: str,
        step: int,
        metrics: Mapping[str, float],
        columns: Mapping[str, Sequence[Any]],
    ) -> None:
        if logger.name == "py":
            for name, value in metrics.items():
                logging.getLogger("absl").info("%s/%s at step %d: %.3f", task, name, step, value)
        elif logger.name == "tensorboard":
            if task not in self._writers:
                self._writers[task] = writer = event_writer(self._folder / task)
                self._close_later(writer.close)
            values = {f"eval/{name}": value for name, value in metrics.items()}
            self._writers[task].write_scalars(step, values)
        else:
            path = self._folder / f"{task}-metrics.jsonl"
            rows = _rows(path)
            row = json.dumps({"step": step, **metrics}) + "\n"
            # It is there if an evaluation was killed after it had written it, and is repeated.
            if row not in rows:
                write_atomically(path, "".join([*rows, row]))
            if logger.write_n_results != 0:
                lines = itertools.islice(self._lines(task, columns), logger.write_n_results)
                path = self._folder / f"{task}-{step:06}.jsonl"
                path.write_text("".join(lines), encoding="utf-8")

    def _lines(self, task: str, columns: Mapping[str, Sequence[Any]]) -> Iterator[str]:
        for example, *values in zip(self._examples[task], *columns.values(), strict=True):
            line = {"input": example, **dict(zip(columns, values, strict=True))}
            yield json.dumps(line, default=_plain) + "\n"


def _in_order(indexed: Sequence[tuple[int, Any]]) -> list[Any]:
    return [output for _, output in sorted(indexed, key=lambda pair: pair[0])]


def model_features(example: Example, lengths: Mapping[str, int]) -> dict[str, np.ndarray]:
    """An example as seqio.EncDecFeatureConverter has it, where the model's functions read it.

    Args:
      example: Its `inputs` and `targets`, at most as long as `lengths`.
      lengths: Tokens that each is padded to.
    """
    padded = [np.pad(example[name], (0, lengths[name] - len(example[name]))) for name in FEATURES]
    return dict(zip(("encoder_input_tokens", "decoder_target_tokens"), padded, strict=True))


def _plain(value: Any) -> Any:
    """What JSON has no type for, as seqio.TensorAndNumpyEncoder writes it."""
    if isinstance(value, bytes):
        return value.decode("utf-8")
    if isinstance(value, np.generic):
        return value.item()
    if value.size <= _SHOWN:
        return value.tolist()
    first, last = (str(part.tolist())[1:-1] for part in (value[:5], value[-5:]))
    described = f"{type(value).__name__}(shape={value.shape}, dtype={value.dtype})"
    return f"{described}; summary: {first} ... {last}"


def _odd_number(what: str, num_examples: int) -> UserError:
    """The error of a metric under a limit; without one it is not about the number of examples."""
    return UserError(
        what,
        where=f"seqio.Evaluator.num_examples = {num_examples}",
        fix="It counts pairs of an input and a choice: take a multiple of the numbers of choices,"
        " or None for all.",
    )
