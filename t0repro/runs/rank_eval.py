"""`t0repro rank-eval`: evaluates one checkpoint on a mixture, and writes the results.

`rank_eval` puts the tasks' files into a folder (see evaluation_folder) and their metrics into
<out>/metrics.jsonl and TensorBoard event files, under T5's names `eval/<task>/accuracy`.
`write_results` then writes the report and the table of scores.

A task is skipped if its record's key (checkpoint, task, prompt text, data, split, limit, lengths,
activations, rendering and scoring code) still matches. A pair in the journal is not scored again.
Tasks are read, scored and written one read buffer at a time, so memory for texts and tokens does
not grow with the number or size of tasks. Scores are bitwise equal after a restart, on any number
of devices that share the rows, under any limit and in any mixture (see grouping).
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from t0repro.errors import UserError
from t0repro.evaluation.evaluation_facts import (
    device_kind,
    jax_device,
    operative_config,
    write_facts,
)
from t0repro.evaluation.evaluation_folder import (
    EvaluationFolder,
    EvaluationSettings,
    claim_step,
    journal_folder,
)
from t0repro.evaluation.generation import decode_examples
from t0repro.evaluation.opened import Checkpoint
from t0repro.evaluation.rank_run import RankRun, ScoredChunk
from t0repro.evaluation.reading import TaskReader, read_buffers
from t0repro.evaluation.records import read_records
from t0repro.evaluation.score_journal import ScoreJournal, add_note, read_notes
from t0repro.evaluation.selection import Selection, check_vocabulary, select_tasks
from t0repro.evaluation.task_output import TaskOutput, TaskResult
from t0repro.event_files import event_writer
from t0repro.progress import say
from t0repro.storage import output_path, write_atomically
from t0repro.training.metrics import MetricLog
from t0repro.words import counted

CONTENT_FREE = "N/A"
"""The input of contextual calibration (Zhao et al. 2021, arXiv 2102.09690)."""

# About 2.5 KB each. With smaller read buffers, more batches would have empty rows.
PAIRS_IN_MEMORY = 131_072


@dataclasses.dataclass
class Outcome:
    """Summary of what one run of `rank_eval` did.

    Attributes:
      folder: the `<split>_eval` folder.
      tasks: names of the ranked tasks.
      generated: names of the decoded tasks.
      finished: tasks that an earlier run had finished.
      empty: tasks whose split has no examples.
      left_out: tasks that lack the split or its rows, each with the reason.
      pairs: number of (input, choice) pairs in the tasks that were read.
      distinct: number of distinct pairs, summed over read buffers.
      scored: number of pairs that were not in the journal and were scored.
      padding: fraction of array entries that were padding, in [0, 1].
      programs: number of programs that were compiled.
      seconds: time spent scoring.
      decoded: number of inputs decoded.
      decoding_seconds: time spent decoding.
    """

    folder: Path
    tasks: tuple[str, ...]
    generated: tuple[str, ...] = ()
    finished: tuple[str, ...] = ()
    empty: tuple[str, ...] = ()
    left_out: Mapping[str, str] = dataclasses.field(default_factory=dict)
    pairs: int = 0
    distinct: int = 0
    scored: int = 0
    padding: float = 0.0
    programs: int = 0
    seconds: float = 0.0
    decoded: int = 0
    decoding_seconds: float = 0.0


def rank_eval(
    checkpoint: Checkpoint,
    mixture: str,
    out: str | os.PathLike[str],
    settings: EvaluationSettings,
    *,
    add_step: bool = False,
    force: bool = False,
) -> Outcome:
    """Evaluates a checkpoint on the unfinished tasks and writes their files.

    The caller must hold the folder's lock: no other evaluation may write to it meanwhile.

    Args:
      checkpoint: from `opened.open_checkpoint`.
      mixture: a registered mixture or task.
      out: the results folder.
      settings: what to evaluate.
      add_step: see evaluation_folder.claim_step.
      force: see evaluation_folder.claim_step.

    Returns:
      A summary, with the scores of the tasks that this run ranked.

    Raises:
      UserError: if a task has no answer choices and the mode is rank alone, the split is empty, the
        checkpoint has another vocabulary size, the folder holds another evaluation,
        or a score is NaN or Inf (naming task, example and step).
    """
    out = output_path(out)
    selected = select_tasks(mixture, settings)
    if selected.left_out:
        say(f"Left out: {reasons_in_words(selected.left_out)}.")
    vocabulary = check_vocabulary(selected.names, checkpoint)
    # Do this before writing, so that two evaluations cannot mix their results.
    claim_step(out, checkpoint, mixture, settings, add_step=add_step, force=force)
    metrics = MetricLog(out, writers=[event_writer(out)])
    try:
        evaluation = _Evaluation(checkpoint, out, settings, selected, vocabulary, metrics)
        outcome = evaluation.run()
    finally:
        metrics.close()
    # One task may be empty; if all are, the split is wrong.
    if len(outcome.empty) == len(selected.names):
        raise UserError(
            f"The split {settings.split!r} of {mixture!r} has no examples.",
            fix="Check whether the data is there, and whether the templates drop every row.",
        )
    others = set(read_notes(evaluation.journal, "devices")) - {device_kind()}
    device = jax_device(read_notes(evaluation.journal, "rounded_by"), sorted(others))
    write_facts(outcome.folder, checkpoint, selected.names, device)
    config = operative_config(mixture, checkpoint, settings)
    write_atomically(outcome.folder / "operative_config.gin", config)
    return outcome


def reasons_in_words(left_out: Mapping[str, str]) -> str:
    """For each reason, the number of tasks left out and the first three names."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in left_out.items():
        by_reason.setdefault(reason, []).append(name)
    return "; ".join(
        f"{counted(len(names), 'task')}"
        f" ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''}): {reason}"
        for reason, names in by_reason.items()
    )


class _Evaluation:
    """One run of rank_eval: reads, scores or decodes, and writes each unfinished task.

    Args:
      checkpoint: the checkpoint to evaluate.
      out: the results folder.
      settings: what to evaluate.
      selected: the mixture's tasks, by mode.
      vocabulary: the tasks' vocabulary.
      metrics: writer of the tasks' metrics.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        out: Path,
        settings: EvaluationSettings,
        selected: Selection,
        vocabulary: Any,
        metrics: Any,
    ):
        self.checkpoint, self.out, self.settings = checkpoint, out, settings
        self.selected, self.vocabulary, self.metrics = selected, vocabulary, metrics
        path = out / f"{settings.split}_eval"
        self.journal = journal_folder(out, checkpoint)
        self.folder = EvaluationFolder(path, checkpoint, settings, selected.generated)
        self.outcome = Outcome(
            path, selected.ranked, selected.generated, left_out=selected.left_out
        )
        self._tokens = self._entries = 0
        self._programs: set[tuple[int, ...]] = set()

    def run(self) -> Outcome:
        """Ranks and decodes the tasks that are not finished; returns the summary."""
        selected = self.selected
        finished = self.outcome.finished = self.folder.finished(selected.names)
        if finished:
            records = read_records(self.folder.path, self.checkpoint.step)
            pairs = sum(records[name].get("pairs", 0) for name in finished)
            say(
                f"Finished already: {len(finished)} of {counted(len(selected.names), 'task')},"
                f" with {counted(pairs, 'pair')}."
            )
        if len(finished) < len(selected.names):
            add_note(self.journal, "devices", device_kind())
        to_rank = [name for name in selected.ranked if name not in finished]
        self._rank(to_rank)
        for name in selected.generated:
            if name not in finished:
                self._decode(name)
        return self.outcome

    # Ranking -----------------------------------------------------------------------------------

    def _rank(self, names: Sequence[str]) -> None:
        """Scores the tasks' pairs and writes each task as soon as its last pair is scored."""
        if not names:
            return
        settings, free = self.settings, None
        if settings.calibrated:
            free = np.array(self.vocabulary.encode(CONTENT_FREE), np.int32)
        journal = ScoreJournal(self.journal / "pairs.bin")
        # Keep the readers: each one's `available` is known only once it has been read to its end.
        readers = {name: self._reader(name) for name in names}
        tasks: dict[str, _RankedTask] = {}
        try:
            for chunks in read_buffers(_report_progress(readers), PAIRS_IN_MEMORY):
                run = RankRun(
                    self.checkpoint,
                    chunks,
                    settings.lengths,
                    journal,
                    tokens_per_batch=settings.tokens_per_batch,
                    content_free=free,
                    note_rounding=functools.partial(add_note, self.journal, "rounded_by"),
                )
                seconds = run.score(lambda chunk: self._add(tasks, readers, chunk))
                self._count(run, seconds)
                del chunks, run  # free this read buffer's memory before the next one is read
        finally:
            journal.close()
            # On failure, remove the temporary files of tasks that are only partly written.
            for task in tasks.values():
                task.output.discard()

    def _reader(self, name: str) -> TaskReader:
        settings = self.settings
        return TaskReader(
            name, settings.split, settings.lengths, settings.limit, settings.use_cached
        )

    def _add(
        self,
        tasks: dict[str, _RankedTask],
        readers: Mapping[str, TaskReader],
        scored: ScoredChunk,
    ) -> None:
        """Adds a chunk's scores to its task; writes the task if this is its last chunk."""
        name = scored.chunk.task
        # Create it only for the first chunk: creation empties the task's files.
        if name not in tasks:
            tasks[name] = _RankedTask(self._output(readers[name]))
        task = tasks[name]
        task.add(scored)
        if not scored.chunk.last:
            return
        del tasks[name]
        if not task.output.examples:
            task.output.discard()
            self.outcome.empty += (name,)
            return
        result = task.output.finish()
        details = {"available": readers[name].available, "pairs": task.output.examples}
        self._record(result, {**details, **task.details()})

    def _output(self, reader: TaskReader) -> TaskOutput:
        step, path = self.checkpoint.step, self.folder.path
        return TaskOutput(reader.judge, step, path, reader.truncation())

    def _record(self, result: TaskResult, details: Mapping[str, Any]) -> None:
        """Writes a task's metrics, then its record."""
        # The record marks the task as finished, so it must be the last thing written.
        values = {f"{result.task}/{name}": value for name, value in result.metrics.items()}
        self.metrics.write("eval", result.step, values)
        self.folder.record(result, details)

    def _count(self, run: RankRun, seconds: float) -> None:
        plan, outcome = run.plan, self.outcome
        self._tokens += plan.input_tokens + plan.target_tokens
        self._entries += plan.padded_inputs + plan.padded_targets
        self._programs |= plan.programs
        outcome.pairs += len(run.pairs.index)
        outcome.distinct += len(run.pairs)
        outcome.scored += run.scored
        outcome.padding = 1 - self._tokens / self._entries if self._entries else 0.0
        outcome.programs = len(self._programs)
        outcome.seconds += seconds

    # Decoding ----------------------------------------------------------------------------------

    def _decode(self, name: str) -> None:
        """Decodes a task's inputs greedily and writes the task."""
        reader = self._reader(name)
        examples = list(reader.examples())
        if not examples:
            self.outcome.empty += (name,)
            return
        lengths = self.settings.lengths
        texts, seconds = decode_examples(self.checkpoint, examples, lengths, self.vocabulary)
        output = self._output(reader)
        output.add(examples, texts)
        details = {"examples": len(examples), "available": reader.available, "seconds": seconds}
        self._record(output.finish(), details)
        self.outcome.decoded += len(examples)
        self.outcome.decoding_seconds += seconds


class _RankedTask:
    """Accumulates a task's output and time until all of its pairs are scored.

    Args:
      output: the task's output.
    """

    def __init__(self, output: TaskOutput):
        self.output = output
        self._seconds = 0.0
        self._indices: list[np.ndarray] = []
        self._free: list[np.ndarray] = []

    def add(self, scored: ScoredChunk) -> None:
        """Adds one chunk's scores and time."""
        examples = scored.chunk.examples
        self.output.add(examples, scored.scores)
        self._seconds += scored.seconds
        if scored.content_free is not None:
            self._indices += [example["idx"] for example in examples]
            self._free.append(scored.content_free)

    def details(self) -> dict[str, Any]:
        """Seconds and content-free scores, as they go into the task's record."""
        found: dict[str, Any] = {"seconds": self._seconds, "content_free": None}
        if self._free:
            indices = np.array(self._indices)
            order = np.lexsort((indices[:, 1], indices[:, 0]))  # as in TaskScores
            found["content_free"] = np.concatenate(self._free)[order].tolist()
        return found


def _report_progress(
    readers: Mapping[str, TaskReader],
) -> Iterator[tuple[str, Iterator[dict[str, Any]]]]:
    """Yields each task's name and examples; reports every ten tasks how many have been read."""
    for count, (name, reader) in enumerate(readers.items(), 1):
        yield name, reader.examples()
        if count % 10 == 0 or count == len(readers):
            say(f"read {count} of {counted(len(readers), 'task')}")
