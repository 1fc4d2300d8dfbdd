"""score_eval and eval on JAX: an evaluation's tasks judged, in Mesh TensorFlow's files.

For each task and checkpoint step, into the evaluation's folder (by default
`<model_dir>/<split>_eval`), one line for each example:

    <task>_inputs               the rendered input, newlines replaced by spaces
    <task>_targets              the postprocessed target; for rank classification
                                ((input, choice), is_correct, weight, target length)
    <task>_<step>_predictions   of score_eval the score: natural log, summed over target tokens, EOS
                                included; of eval the generated text, postprocessed

Source: mesh_tensorflow.transformer.utils, eval_model and save_scores.
"""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from t0repro.config.run_config import RunConfig
from t0repro.data.batches import EvalTask
from t0repro.errors import UserError
from t0repro.files import write_atomically

# Examples and the sequence lengths -> a log-likelihood, or a text, for each, in their order
Scorer = Callable[[Sequence[Mapping[str, Any]], Mapping[str, int]], Sequence[Any] | np.ndarray]


@dataclasses.dataclass(frozen=True)
class TaskResult:
    """One task evaluated at one step: scores (or texts) in the examples' order, and its metrics."""

    task: str
    step: int
    scores: Sequence[Any] | np.ndarray
    metrics: Mapping[str, float]


def evaluate(
    config: RunConfig, tasks: Sequence[EvalTask], step: int, score: Scorer
) -> Iterator[TaskResult]:
    """Scores all tasks, or generates for them, then writes each one's files and yields its metrics.

    Args:
      config: for the folder and the sequence lengths.
      tasks: the evaluation's tasks with their examples.
      step: the checkpoint's global step.
      score: called once, with the examples of all tasks, so that what is the same is scored once.

    Raises:
      UserError: for a score that is not a number, naming task, example and step.
    """
    folder = evaluation_folder(config)
    lengths = config.sequence_length or longest(tasks)
    all_scores = score([example for task in tasks for example in task.examples], lengths)
    start = 0
    for task in tasks:
        scores = all_scores[start : (start := start + len(task.examples))]
        if isinstance(scores, np.ndarray):
            check_finite(scores, task.name, step)
        yield task_result(task, step, scores, folder if config.output_eval_examples else None)


def task_result(
    task: EvalTask, step: int, scores: Sequence[Any] | np.ndarray, folder: Path | None
) -> TaskResult:
    """Writes a task's files into the folder, if there is one, and computes its metrics.

    Args:
      task: with its examples.
      step: of the checkpoint.
      scores: of the examples in their order; or their decoded texts.
      folder: for the files; None writes none.
    """
    predictions = [
        task.postprocess(value, example=example)
        for value, example in zip(scores, task.examples, strict=True)
    ]
    if folder is not None:
        _write_lines(folder / f"{task.name}_targets", task.targets)
        _write_lines(folder / f"{task.name}_inputs", _texts(task, "inputs"))
        _write_lines(folder / f"{task.name}_{step}_predictions", predictions)
    metrics: dict[str, float] = {}
    with warnings.catch_warnings():
        # Of metrics that few examples leave undefined; they say it by being NaN
        warnings.filterwarnings("ignore", module=r"sklearn\.")
        for metric in task.metric_fns:
            metrics |= {name: float(v) for name, v in metric(task.targets, predictions).items()}
    return TaskResult(task.name, step, scores, metrics)


def evaluation_folder(config: RunConfig) -> Path:
    """Where the evaluation's files go; Mesh TensorFlow's default and suffix."""
    split = config.eval_data.split if config.eval_data else "validation"
    folder = config.eval_summary_dir or f"{config.model_dir}/{split}_eval"
    return Path(folder + (f"_{config.eval_dir_suffix}" if config.eval_dir_suffix else ""))


def longest(tasks: Iterable[EvalTask]) -> dict[str, int]:
    """The longest inputs and targets, in tokens: what run.sequence_length = None stands for."""
    return {
        feature: max((len(ex[feature]) for task in tasks for ex in task.examples), default=1)
        for feature in ("inputs", "targets")
    }


def metrics_line(result: TaskResult, split: str) -> str:
    """One line of metrics.jsonl for a task's result."""
    head = {"split": split, "step": result.step, "task": result.task}
    return json.dumps({**head, **result.metrics})


def _texts(task: EvalTask, feature: str) -> list[str]:
    texts = [ex.get(f"{feature}_pretokenized", b"") for ex in task.examples]
    return [text.decode("utf-8") if isinstance(text, bytes) else str(text) for text in texts]


def _write_lines(path: Path, lines: Iterable[Any]) -> None:
    text = "".join(str(line).replace("\n", " ") + "\n" for line in lines)
    write_atomically(path, text)


def check_finite(scores: np.ndarray, task: str, step: int) -> None:
    """Refuses scores that cannot be ranked.

    Raises:
      UserError: naming task, example and step.
    """
    broken = np.flatnonzero(~np.isfinite(scores))
    if broken.size:
        raise UserError(
            f"{task}: the score of example {broken[0]} at step {step} is {scores[broken[0]]}"
            f" ({broken.size} of {scores.size} are not finite).",
            fix="Check the checkpoint with `t0repro checkpoint inspect`, or compute in float32.",
        )
