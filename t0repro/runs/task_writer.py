"""Read buffers of examples of several tasks, and the files of each task."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from t0repro.config.data import EvalDataConfig
from t0repro.config.run import MeshEvalRun
from t0repro.data.batches import eval_tasks
from t0repro.data.eval_examples import iterate_eval_tasks
from t0repro.errors import UserError
from t0repro.evaluation.evaluation_folder import EvaluationFolder, EvaluationSettings
from t0repro.evaluation.judge import Judge, make_judge, make_task_judge
from t0repro.evaluation.opened import Checkpoint
from t0repro.evaluation.rank_run import RankRun, ScoredChunk
from t0repro.evaluation.reading import Chunk, read_buffers
from t0repro.evaluation.task_output import (
    TaskOutput,
    TaskResult,
    TruncationCounter,
    explain_incomplete_inputs,
)
from t0repro.storage import output_path
from t0repro.tasks.registry import find_task, is_described


class TaskBuffers:
    """A run's tasks, a read buffer at a time; a large task is split across several.

    Iterating again, for another checkpoint, rereads the tasks unless all fit in one read buffer.

    Args:
      config: the run's configuration, with evaluation data.

    Attributes:
      judges: the judge of each task read so far, by name.
    """

    def __init__(self, config: MeshEvalRun):
        self._config = config
        self.judges: dict[str, Judge] = {}
        self._kept: list[Chunk] | None = None
        self._all_read = False

    def __iter__(self) -> Iterator[list[Chunk]]:
        if self._kept is not None:
            yield self._kept
            return
        first, self._all_read = True, False
        for read_buffer in read_buffers(self._tasks(), EXAMPLES_IN_MEMORY):
            # Everything fits in one read buffer, so keep it for the next checkpoint.
            if first and self._all_read:
                self._kept = read_buffer
            first = False
            yield read_buffer
            del read_buffer  # free its memory before the next one is read

    def _tasks(self) -> Iterator[tuple[str, Iterable[dict[str, Any]]]]:
        data, lengths = self._config.eval_data, self._config.sequence_length
        assert isinstance(data, EvalDataConfig)
        if is_described(data.mixture_or_task_name):
            for task, examples in iterate_eval_tasks(data, lengths):
                self.judges[task.name] = make_task_judge(task)
                yield task.name, examples
            self._all_read = True
            return
        for task in eval_tasks(data, lengths):
            self.judges[task.name] = make_judge(task)
            yield task.name, task.examples
        self._all_read = True

    @functools.cached_property
    def lengths(self) -> Mapping[str, int]:
        """Maximum tokens per feature; without run.sequence_length, the longest over all tasks."""
        if self._config.sequence_length is not None:
            return self._config.sequence_length
        longest = {"inputs": 1, "targets": 1}
        for chunks in self:
            for example in (example for chunk in chunks for example in chunk.examples):
                longest = {name: max(size, len(example[name])) for name, size in longest.items()}
            del chunks
        return longest


@dataclasses.dataclass(frozen=True)
class Outputs:
    """A model's outputs for a chunk's examples.

    Attributes:
      values: a score or a decoded text for each example.
      seconds: the time that they took.
    """

    values: Sequence[Any] | np.ndarray
    seconds: float


def scored(
    checkpoint: Checkpoint,
    chunks: Sequence[Chunk],
    lengths: Mapping[str, int],
    note_rounding: Callable[[str], object],
) -> list[Outputs]:
    """Scores the targets of a read buffer; pairs that its chunks share are scored once.

    Args:
      checkpoint: the checkpoint to score with.
      chunks: the read buffer.
      lengths: maximum tokens per feature.
      note_rounding: see engine.Engine.

    Raises:
      UserError: if a score is NaN or Inf, naming task, example and step.
    """
    found: dict[int, ScoredChunk] = {}
    run = RankRun(checkpoint, chunks, lengths, note_rounding=note_rounding)
    # Key by identity: equal chunks of two tasks are still two chunks.
    run.score(lambda chunk: found.update({id(chunk.chunk): chunk}))
    return [Outputs(each.scores, each.seconds) for each in (found[id(chunk)] for chunk in chunks)]


def generated(chunks: Sequence[Chunk], texts: Sequence[str], seconds: float) -> list[Outputs]:
    """Splits decoded texts by chunk.

    Args:
      chunks: in the order of the texts.
      texts: one text per example.
      seconds: total decoding time, split among chunks by their number of examples.
    """
    found, start = [], 0
    for chunk in chunks:
        end = start + len(chunk.examples)
        share = seconds * len(chunk.examples) / max(len(texts), 1)
        found.append(Outputs(texts[start:end], share))
        start = end
    return found


class TaskWriter:
    """Writes each task's files and record, and computes its metrics, once it has all its chunks.

    Args:
      config: the run's configuration.
      checkpoint: the checkpoint being evaluated.
      judges: the judge of each task, by name.
    """

    def __init__(self, config: MeshEvalRun, checkpoint: Checkpoint, judges: Mapping[str, Judge]):
        self._config, self._checkpoint, self._judges = config, checkpoint, judges
        self._path, self._settings = evaluation_folder(config), _settings(config)
        self._open: dict[str, tuple[TaskOutput, float]] = {}

    def __enter__(self) -> TaskWriter:
        return self

    def __exit__(self, *error: object) -> None:
        # Only tasks that lack chunks are still open here, because a failure ended the evaluation.
        for output, _ in self._open.values():
            output.discard()

    def add(self, chunks: Sequence[Chunk], outputs: Sequence[Outputs]) -> list[TaskResult]:
        """Adds a read buffer's outputs; returns the results of the tasks that this completes.

        Raises:
          UserError: if a task has no examples, or `num_eval_examples` ends between the choices of
            an input.
        """
        results = []
        for chunk, found in zip(chunks, outputs, strict=True):
            output, seconds = self._open.get(chunk.task) or (self._output(chunk.task), 0.0)
            self._open[chunk.task] = output, seconds + found.seconds
            output.add(chunk.examples, found.values)
            if chunk.last:
                results.append(self._finish(chunk.task))
        return results

    def _output(self, name: str) -> TaskOutput:
        truncation = TruncationCounter(
            find_task(name).output_features, self._config.sequence_length
        )
        folder = self._path if self._config.output_eval_examples else None
        return TaskOutput(self._judges[name], self._checkpoint.step, folder, truncation)

    def _finish(self, name: str) -> TaskResult:
        output, seconds = self._open[name]
        if not output.examples:
            raise UserError(
                f"The split {self._settings.split!r} of {name} has no examples.",
                fix="Check whether the data is there, and whether the templates drop every row.",
            )
        with explain_incomplete_inputs(self._settings.limit):
            result = output.finish()
        del self._open[name]
        if self._config.output_eval_examples:
            self._record(result, output.examples, seconds)
        return result

    def _record(self, result: TaskResult, examples: int, seconds: float) -> None:
        ranks, mode = self._config.mode == "score_eval", self._config.mode
        generated_tasks = () if ranks else (result.task,)
        # The mode identifies the command, since commands choose examples differently.
        folder = EvaluationFolder(
            self._path, self._checkpoint, self._settings, generated_tasks, mode
        )
        # The size of the split is known only without a limit.
        available = result.statistics["inputs"] if self._settings.limit is None else None
        counts = {"pairs" if ranks else "examples": examples, "available": available}
        folder.record(result, {**counts, "seconds": seconds})


def _settings(config: MeshEvalRun) -> EvaluationSettings:
    data = config.eval_data
    assert isinstance(data, EvalDataConfig)
    return EvaluationSettings(
        split=data.split,
        # Mesh TensorFlow counts (input, choice) pairs and takes the first ones.
        limit=data.limit,
        lengths=config.sequence_length or {},
        activation=config.dtypes.activation,
        use_cached=data.use_cached,
    )


def evaluation_folder(config: MeshEvalRun) -> Path:
    """The folder of the evaluation's files, with Mesh TensorFlow's default and suffix."""
    split = config.eval_data.split if config.eval_data else "validation"
    folder = config.eval_summary_dir or f"{config.model_dir}/{split}_eval"
    suffix = config.eval_dir_suffix
    return output_path(folder if suffix is None else f"{folder}_{suffix}")


# As in rank_eval: memory for texts and tokens stops growing beyond this read buffer.
EXAMPLES_IN_MEMORY = 131_072
