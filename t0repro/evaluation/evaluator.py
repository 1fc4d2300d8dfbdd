"""What evaluates tasks with their own metrics: SeqIO's Evaluator or, of described tasks, this one.

Both write the same files: TensorBoard's events in `<task>/`, and for each task
`<task>-metrics.jsonl` and `<task>-<step>.jsonl` with every prediction.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from t0repro.config.decoding import DecodingPlan
from t0repro.config.run_config import RunConfig
from t0repro.config.training_plan import EvaluatorConfig, LoggerConfig, SeqioDataConfig
from t0repro.data.eval_examples import described_with_metrics, eval_examples
from t0repro.data.mixing import FEATURES
from t0repro.errors import UserError
from t0repro.evaluation.seqio_evaluator import FOLDER, TaskEvaluator, functions_of
from t0repro.evaluation.task_output import judge_of_registered
from t0repro.event_files import EventWriter, event_writer
from t0repro.files import make_folder
from t0repro.model.layer_stacks import by_layer, stacks_in
from t0repro.model.t5 import T5
from t0repro.progress import say
from t0repro.tasks.task import DescribedTask, is_described

if TYPE_CHECKING:
    from t0repro.training.loop import TrainingLoop

Example = Mapping[str, Any]
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
            # Without a limit the error is not about the number of examples.
            if (count := self._evaluator.num_examples) is None:
                raise
            raise UserError(
                error.what,
                where=f"seqio.Evaluator.num_examples = {count}",
                fix="It counts pairs of an input and a choice: take a multiple of the numbers of"
                " choices, or None for all.",
            ) from error

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
            make_folder(self._folder)
            with open(self._folder / f"{task}-metrics.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, **metrics}) + "\n")
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
