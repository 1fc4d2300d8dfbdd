"""Evaluation of one checkpoint on a whole mixture: what `t0repro rank-eval` does.

    <out>/<split>_eval/          Mesh TensorFlow's files (see score_eval), provenance.json,
                                 operative_config.gin
    <out>/<split>_eval/results/  a record of each finished task: its key, metrics, tokens, seconds
    <out>/scores/<key>/          the journal of scored pairs
    <out>/metrics.jsonl, events  the metrics, under T5's names `eval/<task>/accuracy`

A finished task whose key (checkpoint, task, prompt text, data, split, limit, lengths, activations,
code that renders and that scores) is that of its record is not read again; a pair that the journal
has is not scored again.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from t0repro.config.run_config import DType
from t0repro.data.batches import EvalTask
from t0repro.errors import UserError
from t0repro.evaluation import code_version, records, score_eval
from t0repro.evaluation.evaluation_facts import write_facts
from t0repro.evaluation.journal import Journal
from t0repro.evaluation.opened import Checkpoint
from t0repro.evaluation.rank_run import RankRun

CONTENT_FREE = "N/A"
"""The input of contextual calibration (Zhao et al. 2021, arXiv 2102.09690)."""
MODES = ("rank", "generate")

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is evaluated.

    Attributes:
      split: of every task.
      limit: the most inputs of a task; None takes all.
      lengths: tokens per feature; T0's are 1,024 and 256. What is decoded has room
        for as many as targets have.
      activation: type of the activations.
      tokens_per_batch: see grouping.make_plan; None is what suits the device.
      use_cached: read cached tasks.
      calibrated: also score every choice after a content-free input.
      modes: of MODES: tasks with answer choices are ranked, the others decoded.
      at_hand: leave out tasks whose rows are not on this machine.
    """

    split: str = "validation"
    limit: int | None = None
    lengths: Mapping[str, int] = dataclasses.field(
        default_factory=lambda: {"inputs": 1024, "targets": 256}
    )
    activation: DType = "float32"
    tokens_per_batch: int | None = None
    use_cached: bool = False
    calibrated: bool = False
    modes: tuple[str, ...] = ("rank",)
    at_hand: bool = False


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What an evaluation did.

    Attributes:
      folder: the `<split>_eval` folder.
      tasks: those that are ranked; generated those that are decoded.
      finished: tasks that an earlier run had finished.
      empty: tasks whose split has no example.
      left_out: tasks without the split, or without its rows, each with why.
      pairs: (input, choice) pairs of the tasks that were read.
      distinct: distinct ones among them; scored those that the journal did not have.
      padding: share of padding in what was scored; shapes compiled.
      seconds: of scoring.
      decoded: inputs that were decoded, in decoding_seconds.
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
    shapes: int = 0
    seconds: float = 0.0
    decoded: int = 0
    decoding_seconds: float = 0.0


def print_to_stderr(text: str) -> None:
    """Prints a line to standard error at once."""
    print(text, file=sys.stderr, flush=True)


def rank_eval(
    checkpoint: Checkpoint,
    mixture: str,
    out: str | os.PathLike[str],
    settings: Settings,
    say: Say = print_to_stderr,
) -> Outcome:
    """Evaluates what is not evaluated yet and writes every task's files.

    Args:
      checkpoint: of `opened.open_checkpoint`.
      mixture: a registered mixture or task.
      out: the folder of the results.
      settings: what to evaluate.
      say: is told what a person should know while it runs.

    Raises:
      UserError: for a task without answer choices in mode rank alone, an empty split, a checkpoint
        of another vocabulary, or a NaN score (naming task, example and step).
    """
    from t0repro.evaluation.generate_tasks import generate_tasks
    from t0repro.evaluation.rank_tasks import check_vocabulary, select_tasks
    from t0repro.event_files import event_writer
    from t0repro.training.metrics import MetricsManager

    selected = select_tasks(
        mixture,
        settings.split,
        settings.modes,
        use_cached=settings.use_cached,
        at_hand=settings.at_hand,
    )
    generated = selected.generated
    names = (*selected.ranked, *generated)
    if selected.left_out:
        say(f"Left out: {reasons_in_words(selected.left_out)}.")
    rows = checkpoint.model.config.vocab_size
    vocabulary = check_vocabulary(names, rows, checkpoint.path)
    evaluation = _Evaluation(checkpoint, Path(out), settings, generated)
    finished = evaluation.finished(names)
    if finished:
        say(f"{len(finished)} of {len(names)} tasks are finished already.")
    tasks = evaluation.read([name for name in names if name not in finished], say)
    empty = tuple(task.name for task in tasks if not task.examples)
    if len(empty) == len(names):
        raise UserError(
            f"The split {settings.split!r} of {mixture!r} has no examples.",
            fix="See whether the data is there, and whether the templates drop every row.",
        )
    tasks = [task for task in tasks if task.examples]
    outcome = Outcome(
        evaluation.folder, selected.ranked, generated, finished, empty, selected.left_out
    )
    metrics = MetricsManager(out, writers=[event_writer(out)])
    try:
        to_rank = [task for task in tasks if task.name not in generated]
        if to_rank or not generated:
            outcome = _rank(evaluation, to_rank, vocabulary, metrics, outcome, say)
        to_decode = [task for task in tasks if task.name in generated]
        for count, seconds in generate_tasks(
            checkpoint,
            to_decode,
            settings.lengths,
            vocabulary,
            functools.partial(evaluation.record_generated, metrics),
        ):
            outcome = dataclasses.replace(
                outcome,
                decoded=outcome.decoded + count,
                decoding_seconds=outcome.decoding_seconds + seconds,
            )
    finally:
        metrics.close()
    write_facts(evaluation.folder, mixture, names, checkpoint, settings)
    return outcome


def reasons_in_words(left_out: Mapping[str, str]) -> str:
    """How many tasks were left out for each reason, and the first of them."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in left_out.items():
        by_reason.setdefault(reason, []).append(name)
    return "; ".join(
        f"{len(names)} tasks ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''}): {reason}"
        for reason, names in by_reason.items()
    )


def _rank(
    evaluation: _Evaluation,
    tasks: Sequence[EvalTask],
    vocabulary: Any,
    metrics: Any,
    outcome: Outcome,
    say: Say,
) -> Outcome:
    """Scores the tasks' pairs and writes each task when its last pair is scored."""
    settings = evaluation.settings
    free = np.array(vocabulary.encode(CONTENT_FREE), np.int32) if settings.calibrated else None
    journal = Journal(evaluation.out / "scores" / evaluation.scores_key() / "pairs.bin")
    run = RankRun(
        evaluation.checkpoint,
        tasks,
        settings.lengths,
        journal,
        tokens_per_batch=settings.tokens_per_batch,
        content_free=free,
    )
    try:
        seconds = run.score(
            say, lambda task, result: evaluation.record_ranked(run, metrics, task, result)
        )
    finally:
        journal.close()
    return dataclasses.replace(
        outcome,
        pairs=len(run.pairs.index),
        distinct=len(run.pairs),
        scored=run.scored,
        padding=run.plan.padding,
        shapes=len(run.plan.shapes),
        seconds=seconds,
    )


class _Evaluation:
    """The tasks' keys and records in the folder of results."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        out: Path,
        settings: Settings,
        generated: Sequence[str],
    ):
        self.checkpoint, self.out = checkpoint, out
        self.settings, self.generated = settings, frozenset(generated)
        self.folder = out / f"{settings.split}_eval"

    def scores_key(self) -> str:
        """What a pair's score depends on beside its tokens, as a folder's name."""
        activation = self.checkpoint.model.dtypes.activation
        text = f"{self.checkpoint.digest} {activation} {code_version.scoring_digest()}"
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def key(self, name: str) -> dict[str, Any]:
        """What a task's results depend on."""
        from t0repro.evaluation.rank_tasks import data_origin, vocabulary_digest
        from t0repro.tasks.task import prompted_tasks

        settings, prompt = self.settings, prompted_tasks().get(name)
        generates = name in self.generated
        code = code_version.generation_digest() if generates else code_version.scoring_digest()
        return {
            "checkpoint": self.checkpoint.digest,
            "step": self.checkpoint.step,
            "code": code,
            "rendering": code_version.rendering_digest(),
            "activation": settings.activation,
            "task": name,
            "prompt": records.digest_of_texts([prompt.prompt if prompt else ""]),
            "vocabulary": vocabulary_digest(name),
            "data": data_origin(name, settings.split, settings.use_cached),
            "split": settings.split,
            "limit": settings.limit,
            "lengths": dict(settings.lengths),
            "calibrated": settings.calibrated and not generates,
        }

    def finished(self, names: Sequence[str]) -> tuple[str, ...]:
        """The tasks of which a record with their key is there."""
        found = records.read_records(self.folder, self.checkpoint.step)
        return tuple(
            name
            for name in names
            if name in found and records.is_finished(self.folder, self.key(name), found[name])
        )

    def read(self, names: Sequence[str], say: Say) -> list[EvalTask]:
        """The tasks with their examples."""
        from t0repro.evaluation.rank_tasks import read_task

        settings, tasks = self.settings, []
        for count, name in enumerate(names, 1):
            tasks.append(
                read_task(
                    name, settings.split, settings.lengths, settings.limit, settings.use_cached
                )
            )
            if count % 10 == 0 or count == len(names):
                say(f"read {count} of {len(names)} tasks")
        return tasks

    def record_ranked(
        self, run: RankRun, metrics: Any, task: EvalTask, scored: score_eval.TaskResult
    ) -> None:
        """Writes a ranked task's files, its metrics and, last, its record."""
        free = run.content_free(task.name)
        if free is not None:  # in the order of outputs.TaskScores
            idx = np.array([example["idx"] for example in task.examples])
            free = free[np.lexsort((idx[:, 1], idx[:, 0]))]
        details = {
            "mode": "rank",
            "pairs": len(task.examples),
            **run.cost_of(task.name),
            "content_free": None if free is None else free.tolist(),
        }
        self._record(metrics, task, scored.scores, details)

    def record_generated(
        self, metrics: Any, task: EvalTask, texts: Sequence[str], cost: Mapping[str, Any]
    ) -> None:
        """Writes a decoded task's files, its metrics and, last, its record."""
        details = {"mode": "generate", "examples": len(task.examples), **cost}
        self._record(metrics, task, texts, details)

    def _record(
        self,
        metrics: Any,
        task: EvalTask,
        outputs: Sequence[Any] | np.ndarray,
        details: Mapping[str, Any],
    ) -> None:
        step = self.checkpoint.step
        result = score_eval.task_result(task, step, outputs, self.folder)
        values = {f"{task.name}/{name}": value for name, value in result.metrics.items()}
        metrics.write("eval", step, values)
        rows = hashlib.blake2b(digest_size=8)
        for example in task.examples:
            rows.update(example["inputs"].tobytes() + b"|" + example["targets"].tobytes())
        record = {
            "key": self.key(task.name),
            "metrics": result.metrics,
            "input_tokens": int(sum(len(example["inputs"]) for example in task.examples)),
            "target_tokens": int(sum(len(example["targets"]) for example in task.examples)),
            "longest_input": max(len(example["inputs"]) for example in task.examples),
            "rows": rows.hexdigest(),
            **details,
        }
        records.write_record(self.folder, record)
