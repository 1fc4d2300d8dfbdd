"""Compares evaluations of the same tasks: two runs, or the checkpoints of one.

Differences of scores are per (example, choice) pair, in natural-logarithm units, and also per
target token, the unit in which the two stacks must agree (1e-4 absolute per token in float32).
Differences of accuracy are paired: they compare only the tasks and examples that both runs have,
with the same prompts and rows, under the same weightings of examples. An example under several
prompts is one observation, because its outcomes are not independent.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from t0repro.errors import UserError
from t0repro.evaluation.outputs import input_digests, latest_step, read_inputs_of, read_task_scores
from t0repro.evaluation.rank import RankResult, rank_classification
from t0repro.evaluation.records import read_records
from t0repro.evaluation.task_scores import TaskScores
from t0repro.reports.prompts import PromptInfo, choice_text, fixed_classes, tasks_by_dataset
from t0repro.reports.provenance import recorded_facts
from t0repro.reports.ranking import add_rows
from t0repro.reports.run import Run
from t0repro.reports.statistics import (
    Bootstrap,
    Interval,
    Outcomes,
    detectable_difference,
    mcnemar,
    reweighted,
    root_of_squares,
)
from t0repro.words import rename_for_reader, shortened

MAX_FLIPS = 200
_INPUT_SHOWN = 600  # characters
# What may differ between two evaluations of one prompt on the same rows, by its name in records.
SETTINGS = {
    "activation": "dtype of activations",
    "lengths": "lengths",
    "calibrated": "calibration",
    "vocabulary": "vocabulary",
    "rendering": "code that renders",
    "code": "code that scores",
}


@dataclasses.dataclass(frozen=True)
class RunFacts:
    """Where a compared run is from.

    Attributes:
      folder: its `<split>_eval` folder.
      checkpoint: what was evaluated; None if not recorded.
      written: when its scores were written, by the file's time; UTC.
    """

    label: str
    step: int
    folder: str
    checkpoint: str | None
    written: str


def read_run_facts(run: Run) -> RunFacts:
    """A run's step, folder, checkpoint and time."""
    step, folder = step_of(run), Path(run.eval_dir)
    times = [path.stat().st_mtime for path in folder.glob(f"*_{step}_predictions")]
    written = datetime.datetime.fromtimestamp(max(times), datetime.UTC)
    # provenance.json has the path of the checkpoint that was evaluated last alone.
    digest = _checkpoint_hash(run.eval_dir, step, read_records(run.eval_dir, step))
    return RunFacts(
        run.label,
        step,
        rename_for_reader(str(run.eval_dir)),
        recorded_facts(run.eval_dir, step).get("checkpoint") or (digest and f"of hash {digest}"),
        written.strftime("%Y-%m-%d %H:%M"),
    )


@dataclasses.dataclass(frozen=True)
class TaskComparison:
    """One task in two runs.

    Attributes:
      pairs: (example, choice) pairs whose scores were compared.
      max_difference: largest absolute difference between a pair's scores.
      max_difference_per_token: largest absolute difference divided by the pair's target tokens.
      at: the (example, choice) with the largest difference per token.
      flipped: examples whose predicted choice differs.
      metrics_a: the first run's metrics, in percent.
      metrics_b: the second run's metrics, in percent.
      unpaired: pairs that only one run has, or whose targets have different lengths.
    """

    task: str
    pairs: int
    max_difference: float
    max_difference_per_token: float
    at: tuple[int, int]
    flipped: int
    metrics_a: dict[str, float]
    metrics_b: dict[str, float]
    unpaired: int = 0


@dataclasses.dataclass(frozen=True)
class DatasetDifference:
    """Two runs on one dataset; accuracies and differences in percent, `b` minus `a`.

    Attributes:
      prompts: tasks that both runs have.
      examples: distinct examples that both have.
      accuracy_a: the first run's mean over prompts; accuracy_b the second's.
      interval: of the difference; equal runs have one too, since other examples could differ.
      only_a: (example, prompt) outcomes that only the first run gets right; only_b the second.
      p_value: of McNemar's test with examples as clusters (statistics.mcnemar).
      agreement: percentage of (example, prompt) outcomes on which both predictions agree.
      p_adjusted: the p-value with Holm's correction over all datasets of all compared runs; None
        for two seeds of one model.
      detectable: the smallest difference, in points, that these examples reveal with a power of
        80%.
    """

    dataset: str
    prompts: int
    examples: int
    accuracy_a: float
    accuracy_b: float
    interval: Interval
    only_a: int
    only_b: int
    p_value: float
    agreement: float
    detectable: float | None
    p_adjusted: float | None = None

    @property
    def difference(self) -> float:
        """Percentage points by which the second run is better."""
        return self.accuracy_b - self.accuracy_a


@dataclasses.dataclass(frozen=True)
class Flip:
    """An example on which the runs' predictions differ.

    Attributes:
      margin_a: best score minus the second best in the first run; None where there is one choice.
      margin_b: the same in the second run.
      right_a: whether the first run is right.
      choice_a: the first run's choice, as its text where the prompt's choices are fixed.
      choice_b: the second's.
      input: the rendered input, shortened; None if inputs were not written.
      right_b: whether the second run is right.
    """

    task: str
    example: int
    predicted_a: int
    predicted_b: int
    margin_a: float | None
    margin_b: float | None
    right_a: bool
    right_b: bool
    choice_a: str
    choice_b: str
    input: str | None = None


@dataclasses.dataclass(frozen=True)
class RunComparison:
    """A second run (`b`) compared with a first one (`a`), on the tasks that both have.

    Attributes:
      label_a: what to call the first run; label_b the second.
      step_a: the first run's step; step_b the second's.
      only_a: tasks that the second run lacks; only_b those that the first lacks.
      flips: the first MAX_FLIPS examples whose predictions differ.
      datasets: accuracies.
      bootstrap: the options of the intervals.
      checkpoint_a: hash of the first run's checkpoint, None if not recorded; checkpoint_b of the
        second's.
      left_out: dataset -> which of its tasks have other prompts or rows in the two runs; these are
        not compared.
      settings: setting -> the runs' values, for those that differ in some task that is compared.
    """

    label_a: str
    label_b: str
    step_a: int
    step_b: int
    tasks: tuple[TaskComparison, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    flips: tuple[Flip, ...]
    datasets: tuple[DatasetDifference, ...]
    bootstrap: Bootstrap
    checkpoint_a: str | None
    checkpoint_b: str | None
    left_out: dict[str, str]
    settings: dict[str, tuple[Any, Any]] = dataclasses.field(default_factory=dict)

    @property
    def same_checkpoint(self) -> bool | None:
        """Whether both runs scored the same parameters; None if unknown."""
        if not (self.checkpoint_a and self.checkpoint_b):
            return None
        return self.checkpoint_a == self.checkpoint_b

    @property
    def alike(self) -> tuple[str, ...] | None:
        """Datasets without a significant difference; None for two seeds of one model."""
        if any(entry.p_adjusted is None for entry in self.datasets):
            return None
        limit = 1 - self.bootstrap.confidence
        return tuple(entry.dataset for entry in self.datasets if (entry.p_adjusted or 0.0) > limit)

    @property
    def pairs(self) -> int:
        """(example, choice) pairs whose scores were compared."""
        return sum(task.pairs for task in self.tasks)

    @property
    def unpaired(self) -> int:
        """Pairs of the shared tasks whose scores cannot be compared."""
        return sum(task.unpaired for task in self.tasks)

    @property
    def flipped(self) -> int:
        """Examples whose predicted choice differs."""
        return sum(task.flipped for task in self.tasks)

    @property
    def max_difference(self) -> float:
        """Largest absolute difference between a pair's scores."""
        return max(task.max_difference for task in self.tasks)

    @property
    def worst(self) -> TaskComparison:
        """The task with the largest difference per target token."""
        return max(self.tasks, key=lambda task: task.max_difference_per_token)

    @property
    def worst_metric(self) -> tuple[float, str, str]:
        """Largest absolute difference between metrics, in percentage points; its task and name."""
        return max(
            (abs(task.metrics_a[name] - task.metrics_b[name]), task.task, name)
            for task in self.tasks
            for name in task.metrics_a.keys() & task.metrics_b.keys()
        )

    def within(self, tolerance: float) -> bool:
        """Whether scores differ by at most `tolerance` per token, and all predictions agree."""
        return self.worst.max_difference_per_token <= tolerance and self.flipped == 0


def compare_runs(
    a: Run,
    b: Run,
    prompts: Mapping[str, PromptInfo] | None = None,
    bootstrap: Bootstrap | None = None,
    *,
    same_pairs: bool = False,
) -> RunComparison:
    """Compares two evaluations on the tasks that both have.

    Args:
      a: the first run.
      b: the second run.
      prompts: task name -> its prompt, to group tasks by dataset; may be empty.
      bootstrap: the options of the intervals.
      same_pairs: whether to refuse tasks whose (example, choice) pairs differ between the runs;
        needed to compare scores, not only accuracies.

    Raises:
      UserError: if the runs share no task with the same prompt and rows, a shared task has no
        common example, or a task's examples have different answers.
    """
    prompts, bootstrap = prompts or {}, bootstrap or Bootstrap()
    a, b = (dataclasses.replace(run, step=step_of(run)) for run in (a, b))
    scores_a = {scores.task: scores for scores in read_task_scores(a.eval_dir, a.step)}
    scores_b = {scores.task: scores for scores in read_task_scores(b.eval_dir, b.step)}
    # A task in only one run cannot be paired, so list it instead.
    shared = sorted(scores_a.keys() & scores_b.keys())
    if not shared:
        raise UserError(
            f"The two evaluations, {a.label} and {b.label}, have no task in common.",
            where=f"{a.eval_dir} and {b.eval_dir}",
            fix="Evaluate the same mixture on both.",
        )
    unlike = unlike_tasks(a, b, shared)
    left_out = _describe_unlike(unlike, prompts)
    shared = [task for task in shared if task not in unlike]
    if not shared or (unlike and same_pairs):
        raise UserError(
            f"The two evaluations, {a.label} and {b.label}, have different data:"
            f" {'; '.join(f'{dataset}: {what}' for dataset, what in left_out.items())}.",
            where=f"{a.eval_dir} and {b.eval_dir}",
            fix="Evaluate both with the same prompts and rows.",
        )
    if same_pairs:
        for task in shared:
            _check_same_pairs(scores_a[task], scores_b[task])
    # The number of classes decides between t5's two definitions of the metric (see rank.py).
    classes = fixed_classes(prompts)
    ranked = {
        task: _rank_shared(scores_a[task], scores_b[task], classes.get(task)) for task in shared
    }
    step_a, step_b = scores_a[shared[0]].step, scores_b[shared[0]].step
    records, records_b = read_records(a.eval_dir, step_a), read_records(b.eval_dir, step_b)
    # The same rows in both, as just checked.
    ranked = {
        task: (add_rows(ours, records.get(task)), add_rows(theirs, records.get(task)))
        for task, (ours, theirs) in ranked.items()
    }
    flips = [flip for task in shared for flip in _flips(*ranked[task], prompts.get(task))]
    return RunComparison(
        label_a=a.label,
        label_b=b.label,
        step_a=step_a,
        step_b=step_b,
        tasks=tuple(
            _compare_task(scores_a[task], scores_b[task], *ranked[task]) for task in shared
        ),
        only_a=tuple(sorted(scores_a.keys() - scores_b.keys())),
        only_b=tuple(sorted(scores_b.keys() - scores_a.keys())),
        flips=_add_inputs(flips[:MAX_FLIPS], a.eval_dir),
        datasets=tuple(
            _difference(dataset, [ranked[task] for task in tasks], bootstrap)
            for dataset, tasks in tasks_by_dataset(shared, prompts).items()
        ),
        bootstrap=bootstrap,
        checkpoint_a=_checkpoint_hash(a.eval_dir, step_a, records),
        checkpoint_b=_checkpoint_hash(b.eval_dir, step_b, records_b),
        left_out=left_out,
        settings={
            name: (ours[name], theirs[name])
            for ours, theirs in (
                (records[task]["key"], records_b[task]["key"])
                for task in shared
                if task in records and task in records_b
            )
            for name in SETTINGS
            # Another program's record may lack some.
            if name in ours and name in theirs and ours[name] != theirs[name]
        },
    )


def _checkpoint_hash(
    eval_dir: str | os.PathLike[str], step: int, records: Mapping[str, Mapping[str, Any]]
) -> str | None:
    # provenance.json describes the step that was evaluated last, and each record its own.
    of_tasks = (record["key"].get("checkpoint") for record in records.values())
    return recorded_facts(eval_dir, step).get("checkpoint_hash") or next(
        filter(None, of_tasks), None
    )


def step_of(run: Run) -> int:
    """The run's step, or the latest in its folder."""
    return latest_step(run.eval_dir) if run.step is None else run.step


def unlike_tasks(a: Run, b: Run, tasks: Sequence[str]) -> dict[str, str]:
    """The tasks that the runs scored under other prompts or on other rows: task -> which of these.

    Records tell it where both runs have them, and otherwise the rendered inputs.
    """
    records_a, records_b = (read_records(run.eval_dir, step_of(run)) for run in (a, b))
    found = {}
    for task in tasks:
        ours, theirs = records_a.get(task), records_b.get(task)
        what = _recorded_difference(ours, theirs) if ours and theirs else None
        if what is None and not (ours and theirs and ours["rows"] == theirs["rows"]):
            inputs_a, inputs_b = (input_digests(run.eval_dir, task) for run in (a, b))
            if any(inputs_a[at] != inputs_b[at] for at in inputs_a.keys() & inputs_b.keys()):
                what = "inputs"
        if what is not None:
            found[task] = what
    return found


def _recorded_difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> str | None:
    """What differs by two records of a task: prompts, rows, or nothing that they tell."""
    a, b = a["key"], b["key"]
    if a["prompt"] != b["prompt"]:
        return "prompts"
    data = (a["data"], b["data"])
    # A cache's digest covers its shards, and tells nothing about rows that were read without it.
    told = all(each and "cache" not in each for each in data)
    return "rows" if a["split"] != b["split"] or (told and data[0] != data[1]) else None


def _describe_unlike(
    unlike: Mapping[str, str], prompts: Mapping[str, PromptInfo]
) -> dict[str, str]:
    """Dataset -> a clause that names its tasks that are not compared, and what differs."""
    found = {}
    for dataset, tasks in tasks_by_dataset(sorted(unlike), prompts).items():
        kinds = dict.fromkeys(unlike[task] for task in tasks)
        found[dataset] = " and ".join(
            f"other {kind} ({', '.join(task for task in tasks if unlike[task] == kind)})"
            for kind in kinds
        )
    return found


def _check_same_pairs(a: TaskScores, b: TaskScores) -> None:
    """Refuses a task unless both runs scored the same choices of the same examples."""
    if not _equal(a, b, "input_index", "choice_index", "is_correct", "target_length"):
        raise UserError(
            f"Task {a.task!r}: the two evaluations scored different pairs ({len(a)} and {len(b)}"
            " pairs, or other answers or target lengths).",
            fix="Evaluate the same cached task, with the same vocabulary and sequence lengths. In"
            " files that Mesh TensorFlow alone wrote, lengths count padding: evaluate again.",
        )


def _compare_task(
    a: TaskScores, b: TaskScores, ranked_a: RankResult, ranked_b: RankResult
) -> TaskComparison:
    at_a, at_b = _find_shared_pairs(a, b)
    score_a, score_b, length = a.score[at_a], b.score[at_b], a.target_length[at_a]
    # Equal infinities do not differ; subtracting them would give NaN
    same = score_a == score_b
    difference = np.zeros(len(at_a))
    difference[~same] = np.abs(score_a[~same] - score_b[~same])
    per_token = difference / np.maximum(length, 1)
    worst = at_a[per_token.argmax()] if len(at_a) else 0
    return TaskComparison(
        task=a.task,
        pairs=len(at_a),
        max_difference=float(difference.max(initial=0.0)),
        max_difference_per_token=float(per_token.max(initial=0.0)),
        at=(int(a.input_index[worst]), int(a.choice_index[worst])),
        flipped=int((ranked_a.predicted != ranked_b.predicted).sum()),
        metrics_a=ranked_a.metrics,
        metrics_b=ranked_b.metrics,
        unpaired=len(a) + len(b) - 2 * len(at_a),
    )


def _find_shared_pairs(a: TaskScores, b: TaskScores) -> tuple[np.ndarray, np.ndarray]:
    """Each run's indices of the pairs that both scored with targets of equal length."""
    # One number per pair, with the example's index and the choice's as digits.
    choices = 1 + max(a.choice_index.max(), b.choice_index.max())
    keys_a, keys_b = (s.input_index * choices + s.choice_index for s in (a, b))
    _, at_a, at_b = np.intersect1d(keys_a, keys_b, assume_unique=True, return_indices=True)
    alike = a.target_length[at_a] == b.target_length[at_b]
    return at_a[alike], at_b[alike]


def _rank_shared(
    a: TaskScores, b: TaskScores, num_classes: int | None
) -> tuple[RankResult, RankResult]:
    """Both runs' predictions on their common examples."""
    shared = np.intersect1d(a.input_index, b.input_index)
    kept_a, kept_b = _select_examples(a, shared), _select_examples(b, shared)
    # Paired figures make sense only if both runs answered the same examples.
    if not shared.size:
        raise UserError(
            f"Task {a.task!r}: no example was scored by both runs.",
            fix="Evaluate both on all examples, or on the same ones: `rank-eval --limit` samples"
            " them, and the harness's `--limit` takes the first.",
        )
    if not _equal(kept_a, kept_b, "input_index", "choice_index", "is_correct"):
        raise UserError(
            f"Task {a.task!r}: an example that both runs scored has other answers in one of them.",
            fix="Compare evaluations of the same rendered data.",
        )
    return (
        rank_classification(kept_a, num_classes=num_classes),
        rank_classification(kept_b, num_classes=num_classes),
    )


def _select_examples(scores: TaskScores, examples: np.ndarray) -> TaskScores:
    keep = np.isin(scores.input_index, examples)
    # Nothing to drop: return the same arrays without a copy.
    if keep.all():
        return scores
    names = (
        "input_index", "choice_index", "is_correct", "weight", "target_length", "score"
    )  # fmt: skip
    kept = {name: getattr(scores, name)[keep] for name in names}
    return dataclasses.replace(scores, inputs=None, **kept)


def _equal(a: TaskScores, b: TaskScores, *names: str) -> bool:
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in names)


def _flips(a: RankResult, b: RankResult, info: PromptInfo | None) -> list[Flip]:
    return [
        Flip(
            task=a.task,
            example=int(a.example[at]),
            predicted_a=int(a.predicted[at]),
            predicted_b=int(b.predicted[at]),
            margin_a=_finite_or_none(a.margin[at]),
            margin_b=_finite_or_none(b.margin[at]),
            right_a=bool(a.correct[at]),
            right_b=bool(b.correct[at]),
            choice_a=choice_text(info, int(a.predicted[at])),
            choice_b=choice_text(info, int(b.predicted[at])),
        )
        for at in np.flatnonzero(a.predicted != b.predicted)
    ]


def _add_inputs(flips: Sequence[Flip], eval_dir: str | os.PathLike[str]) -> tuple[Flip, ...]:
    """The flips with their rendered inputs; both runs have the same."""
    examples: dict[str, list[int]] = {}
    for flip in flips:
        examples.setdefault(flip.task, []).append(flip.example)
    texts = {task: read_inputs_of(eval_dir, task, found) for task, found in examples.items()}
    return tuple(
        dataclasses.replace(flip, input=shortened(text, _INPUT_SHOWN))
        if (text := texts[flip.task].get(flip.example)) is not None
        else flip
        for flip in flips
    )


def _finite_or_none(value: float) -> float | None:
    # JSON has no infinities.
    return float(value) if math.isfinite(value) else None


def _difference(
    dataset: str, tasks: Sequence[tuple[RankResult, RankResult]], bootstrap: Bootstrap
) -> DatasetDifference:
    first, second = (Outcomes.of(results) for results in zip(*tasks, strict=True))
    # Both runs get the same weightings, since name and examples are the same.
    found_a, found_b = (reweighted(outcomes, dataset, bootstrap) for outcomes in (first, second))
    # 1 where only the second run is right, -1 where only the first is, 0 where they agree.
    gain = (second.right - first.right).astype(np.int64)
    alike = sum(int((a.predicted == b.predicted).sum()) for a, b in tasks)
    # A prompt's shares add up to 1, so the difference of means is the sum of these over examples.
    moves = (second.share * second.right - first.share * first.right).mean(-1)
    error = root_of_squares(100 * (moves - moves.mean()), first.examples, axis=-1)
    return DatasetDifference(
        dataset=dataset,
        prompts=len(tasks),
        examples=first.examples,
        accuracy_a=float(first.accuracy.mean()),
        accuracy_b=float(second.accuracy.mean()),
        interval=found_b.minus(found_a).each(lambda values: values.mean(-1)).interval(bootstrap),
        only_a=int((gain < 0).sum()),
        only_b=int((gain > 0).sum()),
        p_value=mcnemar(gain.sum(-1)),
        agreement=100 * alike / sum(len(a.example) for a, _ in tasks),
        detectable=detectable_difference(float(error), bootstrap),
    )
