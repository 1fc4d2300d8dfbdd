"""What evaluates tasks with their own metrics: SeqIO's Evaluator or, of described tasks, this one.

Both write the same files: TensorBoard's events in `<task>/`, and for each task
`<task>-metrics.jsonl` and `<task>-<step>.jsonl` with every prediction.
"""

from __future__ import annotations

import abc
import contextlib
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

import numpy as np

from t0repro.config.data import (
    Converter,
    EvaluatorConfig,
    LoggerConfig,
    SeqioDataConfig,
)
from t0repro.config.decoding import DecodingPlan
from t0repro.config.run import TrainRun
from t0repro.data.eval_examples import eval_examples, find_tasks_with_metrics
from t0repro.data.mixing import FEATURES
from t0repro.data.train_data import make_seqio_converter
from t0repro.errors import UserError
from t0repro.evaluation.judge import make_task_judge
from t0repro.evaluation.model_functions import make_functions
from t0repro.evaluation.task_output import numbers
from t0repro.event_files import EventWriter, event_writer
from t0repro.model.layer_stacks import count_stacked_layers, unstack
from t0repro.model.t5 import T5
from t0repro.progress import only_records, say
from t0repro.storage import make_folder, write_atomically
from t0repro.tasks.registry import DescribedTask, is_described

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
) -> TaskEvaluator:
    """The evaluator of a task or mixture; see `TaskEvaluator` for the arguments."""
    described = is_described(data.mixture_or_task_name)
    return (DescribedEvaluator if described else SeqioEvaluator)(data, evaluator, folder, decoding)


def infer_eval(
    config: TrainRun, folder: str | os.PathLike[str]
) -> Callable[[TrainingLoop], Mapping[str, Mapping[str, float]]] | None:
    """Makes what evaluates the tasks' own metrics in a training run; None if there is nothing.

    Args:
      config: The run.
      folder: See `TaskEvaluator`.
    """
    plan = config.plan
    data, evaluator, decoding = plan.infer_eval_data, plan.evaluator, plan.decoding
    if data is None or evaluator is None or decoding is None:
        return None
    # Every process evaluates, since they share the devices, but only the first keeps results.
    evaluated = open_evaluator(data, evaluator, folder, decoding)
    if not evaluated.tasks:
        say(f"infer_eval: no task of {data.mixture_or_task_name} has {data.split} and a metric")
        return None
    model, users = T5(config.model, config.dtypes), "model" in plan.user_classes

    def evaluate(loop: TrainingLoop) -> Mapping[str, Mapping[str, float]]:
        params = loop.stacked_state.parameters_of(config.model)
        # This project's own model generates by its network; a user's, by its methods.
        trained = loop.trainer.model if users else model
        return evaluated.evaluate(trained, unstack(params, count_stacked_layers(params)), loop.step)

    return evaluate


class TaskEvaluator(abc.ABC):
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
        self._data, self._config, self._decoding = data, evaluator, decoding
        self._folder = Path(folder) / FOLDER
        self._open()

    def evaluate(self, model: Any, params: Any, step: int) -> dict[str, dict[str, float]]:
        """Evaluates a model, lets the loggers write, and returns each task's metrics by name.

        Args:
          model: the network, or a user's model with methods that generate and score.
          params: its parameters.
          step: their step, for the loggers.
        """
        return self._evaluate(make_functions(model, params, self._decoding, self._data), step)

    @property
    @abc.abstractmethod
    def tasks(self) -> list[str]:
        """Names of the tasks that are evaluated."""

    @abc.abstractmethod
    def _open(self) -> None:
        """Finds the tasks and reads their examples."""

    @abc.abstractmethod
    def _evaluate(self, functions: Any, step: int) -> dict[str, dict[str, float]]:
        """Each task's metrics, by the functions of a model; also adds them to its files."""

    @contextlib.contextmanager
    def _limit_explained(self, kind: type[Exception]) -> Iterator[None]:
        """Explains a metric's error under a limit; without one it is not about their number."""
        try:
            yield
        except kind as error:
            if (count := self._config.num_examples) is None:
                raise
            raise UserError(
                error.what if isinstance(error, UserError) else f"{error}.",
                where=f"seqio.Evaluator.num_examples = {count}",
                fix="It counts pairs of an input and a choice: take a multiple of the numbers of"
                " choices, or None for all.",
            ) from error


def _write_each_once(path: Path, *added: str) -> None:
    """Adds rows to a file, and removes repeated ones."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    # An evaluation that was killed after it wrote its row writes an equal one again.
    each_once = "".join(dict.fromkeys([*text.splitlines(keepends=True), *added]))
    if each_once != text:
        write_atomically(path, each_once)


class SeqioEvaluator(TaskEvaluator):
    """Evaluates tasks of SeqIO's registry, by SeqIO's own Evaluator."""

    def _open(self) -> None:
        data, evaluator = self._data, self._config
        # Not packed: a row would have the outputs of several examples.
        converter = make_seqio_converter(data.converter)
        import seqio

        self._evaluator = seqio.Evaluator(
            data.mixture_or_task_name,
            converter,
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

    def _evaluate(self, functions: Any, step: int) -> dict[str, dict[str, float]]:
        make_folder(self._folder)  # of SeqIO's loggers, only TensorBoardLogger does
        with (
            warnings.catch_warnings(),
            only_records("absl", _is_worth_logging),
            self._limit_explained(ValueError),
        ):
            # sklearn warns about metrics that are undefined for few examples.
            warnings.filterwarnings("ignore", module=r"sklearn\.")
            metrics, _ = self._evaluator.evaluate(
                compute_metrics=True,
                step=step,
                predict_fn=functions.predict,
                predict_with_aux_fn=functions.predict_with_aux,
                score_fn=functions.score,
            )
        for task in self.tasks:
            # SeqIO's JSONLogger keeps earlier rows, also that of a step which is evaluated again.
            _write_each_once(self._folder / f"{task}-metrics.jsonl")
        # SeqIO wraps metrics in objects with a `value`; others are plain.
        return {
            task: dict(numbers((name, getattr(x, "value", x)) for name, x in values.items()))
            for task, values in metrics.result().items()
        }


def _is_worth_logging(record: logging.LogRecord) -> bool:
    # SeqIO both logs a metric's failure and raises it.
    return not str(record.msg).startswith("Failed to evaluate task")


def _logger_class(logger: LoggerConfig) -> Any:
    """A factory that SeqIO's Evaluator calls with its output_dir; that overrides a logger's own."""
    import seqio

    if logger.name == "py":
        return seqio.PyLoggingLogger
    if logger.name == "tensorboard":
        return seqio.TensorBoardLogger
    return functools.partial(seqio.JSONLogger, write_n_results=logger.write_n_results)


class DescribedEvaluator(TaskEvaluator):
    """Evaluates described tasks, without SeqIO."""

    def _open(self) -> None:
        data = self._data
        self._tasks = find_tasks_with_metrics(data.mixture_or_task_name, data.split)
        self._examples = {task.name: self._read(task) for task in self._tasks}
        self._lengths = data.sequence_length or self._longest()
        self._writers: dict[str, EventWriter] = {}
        # Nothing else closes them: a training run keeps its evaluator until it ends.
        closing = contextlib.ExitStack()
        self._close_later, _ = closing.callback, weakref.finalize(self, closing.close)

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks that are evaluated."""
        return [task.name for task in self._tasks]

    def _evaluate(self, functions: Any, step: int) -> dict[str, dict[str, float]]:
        return {task.name: self._evaluate_task(task, functions, step) for task in self._tasks}

    def _read(self, task: DescribedTask) -> Sequence[Example]:
        data = self._data
        read = eval_examples(task, data.split, data.sequence_length, use_cached=data.use_cached)
        examples = list(itertools.islice(read, self._config.num_examples))
        if not examples:
            raise UserError(
                f"{task.name!r} has no example to evaluate.",
                where=f"split {data.split!r}",
                fix="Choose another split, or remove the task from the mixture.",
            )
        return examples

    def _longest(self) -> dict[str, int]:
        examples = list(itertools.chain.from_iterable(self._examples.values()))
        # There is no example where no task has a metric.
        return {name: max((len(each[name]) for each in examples), default=0) for name in FEATURES}

    def _evaluate_task(self, task: DescribedTask, functions: Any, step: int) -> dict[str, float]:
        examples, judge = self._examples[task.name], make_task_judge(task)
        made = (model_features(each, self._lengths, self._data.converter) for each in examples)
        pairs = enumerate(made)
        inferred: dict[str, Sequence[Any]]
        if judge.ranks:
            outputs = _sort_by_index(functions.score(pairs))
            inferred = {"score": outputs}
        else:
            vocabulary = task.output_features["targets"].vocabulary
            texts = [
                vocabulary.decode(tokens) for tokens in _sort_by_index(functions.predict(pairs))
            ]
            outputs = [
                judge.postprocess(text, example=example)
                for text, example in zip(texts, examples, strict=True)
            ]
            inferred = {"output": texts, "prediction": outputs}
        targets = [judge.target(example) for example in examples]
        with self._limit_explained(UserError):
            metrics = judge.metrics(targets, outputs)
        for logger in self._config.loggers:
            self._log(logger, task.name, step, metrics, {"target": targets, **inferred})
        return metrics

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
            # SeqIO's logger prefixes the tags so.
            values = {f"eval/{name}": value for name, value in metrics.items()}
            self._writers[task].write_scalars(step, values)
        else:
            row = json.dumps({"step": step, **metrics}) + "\n"
            _write_each_once(self._folder / f"{task}-metrics.jsonl", row)
            if logger.write_n_results != 0:
                # None takes all lines, as in SeqIO's JSONLogger.
                lines = itertools.islice(self._lines(task, columns), logger.write_n_results)
                path = self._folder / f"{task}-{step:06}.jsonl"
                write_atomically(path, "".join(lines))

    def _lines(self, task: str, columns: Mapping[str, Sequence[Any]]) -> Iterator[str]:
        for example, *values in zip(self._examples[task], *columns.values(), strict=True):
            line = {"input": example, **dict(zip(columns, values, strict=True))}
            yield json.dumps(line, default=_plain) + "\n"


def _sort_by_index(indexed: Sequence[tuple[int, Any]]) -> list[Any]:
    return [output for _, output in sorted(indexed, key=lambda pair: pair[0])]


def model_features(
    example: Example, lengths: Mapping[str, int], converter: Converter
) -> dict[str, np.ndarray]:
    """An example as SeqIO's converter makes it, where the model's functions read it.

    Args:
      example: Its `inputs` and `targets`, at most as long as `lengths`.
      lengths: Tokens that each is padded to; together, where they are one sequence.
      converter: EncDecFeatureConverter's name, or DecoderFeatureConverter's.
    """
    if converter == "decoder":
        inputs, text = len(example["inputs"]), np.concatenate([example[name] for name in FEATURES])
        places = np.arange(lengths["inputs"] + lengths["targets"])
        target_tokens = np.pad(text, (0, len(places) - len(text)))
        return {
            "decoder_target_tokens": target_tokens,
            "decoder_input_tokens": np.pad(target_tokens[:-1], (1, 0)),
            "decoder_causal_attention": (places <= inputs).astype(np.int32),
            "decoder_loss_weights": ((places >= inputs) & (places < len(text))).astype(np.int32),
        }
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
