"""The modes score_eval and eval on JAX: evaluates tasks at one checkpoint.

The output files are in Mesh TensorFlow's format (see task_output). Beside them it writes what a
report needs to know about the evaluation: a record of each task, and provenance.json.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from t0repro.config.run_config import RunConfig
from t0repro.data.batches import EvalTask, eval_tasks
from t0repro.evaluation.evaluation_folder import EvaluationFolder, Settings
from t0repro.evaluation.opened import Checkpoint
from t0repro.evaluation.rank_run import RankRun, ScoredPart, print_to_stderr
from t0repro.evaluation.reading import Part
from t0repro.evaluation.task_output import TaskOutput, TaskResult, judge_of
from t0repro.evaluation.truncation import TruncationCounter

# As in rank_eval: memory does not grow with the number or size of tasks beyond a window.
EXAMPLES_IN_MEMORY = 131_072


class TaskWindows:
    """A run's tasks with their examples, a window of whole tasks at a time.

    Iterating again, for another checkpoint, reads the tasks again, unless all are in one window.

    Args:
      config: the run's configuration, with evaluation data.
    """

    def __init__(self, config: RunConfig):
        self._config = config
        self._kept: list[EvalTask] | None = None

    def __iter__(self) -> Iterator[list[EvalTask]]:
        if self._kept is not None:
            yield self._kept
            return
        data = self._config.eval_data
        assert data is not None
        window: list[EvalTask] = []
        windows = 0
        for task in eval_tasks(data, self._config.sequence_length):
            # Whole tasks only: a task larger than a window has one to itself.
            held = sum(len(other.examples) for other in window)
            if window and held + len(task.examples) > EXAMPLES_IN_MEMORY:
                windows += 1
                yield window
                window = []
            window.append(task)
        # Everything is in one window, so it can stay for the next checkpoint.
        if not windows:
            self._kept = window
        yield window


@dataclasses.dataclass(frozen=True)
class Outputs:
    """A model's outputs for a task's examples.

    Attributes:
      values: a score or a decoded text for each example.
      cost: seconds, and joules and energy_source if the hardware reports energy.
    """

    values: Sequence[Any] | np.ndarray
    cost: Mapping[str, Any]


def scored(
    checkpoint: Checkpoint,
    tasks: Sequence[EvalTask],
    lengths: Mapping[str, int],
    tokens_per_batch: int,
) -> list[Outputs]:
    """Scores the targets of a window's tasks; pairs that they share are scored once.

    Args:
      checkpoint: the checkpoint to score with.
      tasks: the tasks with their examples.
      lengths: maximum tokens per feature.
      tokens_per_batch: see grouping.make_plan.

    Raises:
      UserError: if a score is not finite, naming task, example and step.
    """
    parts = [Part(task.name, task.examples) for task in tasks]
    found: dict[int, ScoredPart] = {}
    run = RankRun(checkpoint, parts, lengths, tokens_per_batch=tokens_per_batch)
    # By identity: equal parts of two tasks are still two parts.
    run.score(print_to_stderr, lambda part: found.update({id(part.part): part}))
    return [Outputs(each.scores, each.cost) for each in (found[id(part)] for part in parts)]


def generated(tasks: Sequence[EvalTask], texts: Sequence[str], seconds: float) -> list[Outputs]:
    """Splits decoded texts by task.

    Args:
      tasks: in the order of the texts.
      texts: one text per example.
      seconds: total decoding time, split among tasks by their number of examples.
    """
    found, start = [], 0
    for task in tasks:
        end = start + len(task.examples)
        share = seconds * len(task.examples) / max(len(texts), 1)
        found.append(Outputs(texts[start:end], {"seconds": share}))
        start = end
    return found


def write_results(
    config: RunConfig,
    tasks: Sequence[EvalTask],
    checkpoint: Checkpoint,
    outputs: Sequence[Outputs],
) -> list[TaskResult]:
    """Writes each task's files and its record; computes the metrics.

    Args:
      config: the run's configuration.
      tasks: the tasks of a window with their examples.
      checkpoint: the checkpoint that was evaluated.
      outputs: the tasks' outputs, in the same order.
    """
    path = evaluation_folder(config)
    settings = _settings(config)
    ranks = config.mode == "score_eval"
    names = [task.name for task in tasks]
    # The mode stands for the command: it chooses examples in its own way.
    folder = EvaluationFolder(path, checkpoint, settings, () if ranks else names, config.mode)
    results = []
    for task, output in zip(tasks, outputs, strict=True):
        writer = TaskOutput(
            judge_of(task),
            checkpoint.step,
            path if config.output_eval_examples else None,
            TruncationCounter(_features(task.name), config.sequence_length),
        )
        writer.add(task.examples, output.values)
        result = writer.finish()
        if config.output_eval_examples:
            folder.record(result, {**_details(task, settings, ranks, result), **output.cost})
        results.append(result)
    return results


def _settings(config: RunConfig) -> Settings:
    data = config.eval_data
    assert data is not None
    wanted = data.num_eval_examples
    return Settings(
        split=data.split,
        # Mesh TensorFlow counts (input, choice) pairs and takes the first ones.
        limit=None if wanted is None or wanted < 0 else wanted,
        lengths=config.sequence_length or {},
        activation=config.dtypes.activation,
        use_cached=data.use_cached,
    )


def _details(task: EvalTask, settings: Settings, ranks: bool, result: TaskResult) -> dict[str, Any]:
    """A task's sizes for its record; the size of the split is known only without a limit."""
    # Under a limit the rows beyond it were never read, so the size of the split is not known.
    available = result.statistics["inputs"] if settings.limit is None else None
    counted = "pairs" if ranks else "examples"
    return {counted: len(task.examples), "available": available}


def _features(name: str) -> Mapping[str, Any]:
    import seqio

    return seqio.get_mixture_or_task(name).output_features


def evaluation_folder(config: RunConfig) -> Path:
    """The folder of the evaluation's files, with Mesh TensorFlow's default and suffix."""
    split = config.eval_data.split if config.eval_data else "validation"
    folder = config.eval_summary_dir or f"{config.model_dir}/{split}_eval"
    return Path(folder + (f"_{config.eval_dir_suffix}" if config.eval_dir_suffix else ""))


def longest(tasks: Iterable[EvalTask]) -> dict[str, int]:
    """Longest inputs and targets, in tokens: the lengths when run.sequence_length is None."""
    return {
        feature: max((len(ex[feature]) for task in tasks for ex in task.examples), default=1)
        for feature in ("inputs", "targets")
    }
