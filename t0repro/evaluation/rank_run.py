"""Scores the pairs of an evaluation's tasks, those that the journal does not have."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from t0repro.data.batches import EvalTask
from t0repro.evaluation import score_eval
from t0repro.evaluation.energy import EnergyMeter
from t0repro.evaluation.grouping import Plan, make_plan
from t0repro.evaluation.journal import Entry, Journal
from t0repro.evaluation.opened import Checkpoint
from t0repro.evaluation.pairs import Pairs, distinct_pairs
from t0repro.progress import count_progress

_SECONDS_BETWEEN_RECORDS = 2.0


class RankRun:
    """Scores the pairs of tasks and hands out each task as soon as all of its pairs are known.

    Args:
      checkpoint: to score with.
      tasks: with their examples.
      lengths: tokens per feature.
      journal: of scores that are known, and of those to come.
      tokens_per_batch: see grouping.make_plan; None is what suits the device.
      content_free: tokens of an input after which every choice is scored too.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        tasks: Sequence[EvalTask],
        lengths: Mapping[str, int],
        journal: Journal,
        *,
        tokens_per_batch: int | None = None,
        content_free: np.ndarray | None = None,
    ):
        self.checkpoint, self.tasks, self.journal = checkpoint, tasks, journal
        self.calibrated = content_free is not None
        examples = [example for task in tasks for example in task.examples]
        if content_free is not None:
            examples += [{**example, "inputs": content_free} for example in examples]
        self.pairs: Pairs = distinct_pairs(examples, lengths)
        self.digests = [self.pairs.digest(pair) for pair in range(len(self.pairs))]
        nothing = Entry(np.nan, 0.0, 0.0)
        known = [journal.entries.get(digest, nothing) for digest in self.digests]
        self.scores = np.array([entry.score for entry in known])
        self.seconds = np.array([entry.seconds for entry in known])
        self.joules = np.array([entry.joules for entry in known])
        # Known scores are finite: a NaN stops the run before it is written
        unknown = np.flatnonzero(np.isnan(self.scores))
        self.plan: Plan = make_plan(self.pairs, tokens_per_batch or suited_tokens(), unknown)
        without = [pair for pair in unknown if not len(self.pairs.targets[pair])]
        self.scores[np.array(without, np.int64)] = 0.0
        self.scored = 0
        self._meter = EnergyMeter()

    def score(
        self, say: Callable[[str], None], done: Callable[[EvalTask, score_eval.TaskResult], None]
    ) -> float:
        """Scores everything; `done` writes a task. Returns the seconds that it took."""
        from t0repro.evaluation.engine import Engine

        total = sum(len(batch.pairs) for batch in self.plan.batches)
        say(
            f"{len(self.pairs.index)} pairs, {len(self.pairs)} distinct, {total} to score;"
            f" {len(self.plan.batches)} batches of {len(self.plan.shapes)} shapes,"
            f" {100 * self.plan.padding:.1f}% padding"
        )
        engine = Engine(self.checkpoint.params, self.checkpoint.model, say)
        self._meter.joules()
        started = last = handed_out = time.monotonic()
        waiting = list(self._examples())
        waiting = self._hand_out(waiting, done)
        with count_progress(total, "scoring", "pairs", "scored") as advance:
            for found in engine.run(self.pairs, self.plan):
                self._check(found.pairs, found.scores)
                now = time.monotonic()
                self._keep(found.pairs, found.scores, now - last)
                last = now
                advance(len(found.pairs))
                if now - handed_out >= _SECONDS_BETWEEN_RECORDS:
                    waiting, handed_out = self._hand_out(waiting, done), now
        self._hand_out(waiting, done)
        return time.monotonic() - started

    def _keep(self, pairs: np.ndarray, scores: np.ndarray, seconds: float) -> None:
        """Notes the scores of a batch's pairs, which shared its seconds and its joules evenly."""
        joules = self._meter.joules()
        each = None if joules is None else joules / len(pairs)
        self.journal.add([self.digests[p] for p in pairs], scores, seconds / len(pairs), each)
        self.scores[pairs] = scores
        self.seconds[pairs] = seconds / len(pairs)
        self.joules[pairs] = np.nan if each is None else each
        self.scored += len(pairs)

    def _examples(self) -> Iterator[tuple[EvalTask, np.ndarray, np.ndarray]]:
        """Each task with its examples' pairs, and those after the content-free input."""
        start, half = 0, len(self.pairs.index) // 2
        for task in self.tasks:
            place = slice(start, start := start + len(task.examples))
            free = np.zeros(0, np.int64)
            if self.calibrated:
                free = self.pairs.index[place.start + half : place.stop + half]
            yield task, self.pairs.index[place], free

    def _hand_out(self, waiting: list, done: Callable) -> list:
        """Writes the tasks whose pairs are all known; returns the others."""
        left = []
        for task, index, free in waiting:
            if np.isnan(self.scores[index]).any() or np.isnan(self.scores[free]).any():
                left.append((task, index, free))
                continue
            scores = self.scores[index].astype(np.float32)
            done(task, score_eval.TaskResult(task.name, self.checkpoint.step, scores, {}))
        return left

    def content_free(self, name: str) -> np.ndarray | None:
        """Scores of a task's choices after the content-free input; None if not asked for."""
        if not self.calibrated:
            return None
        return next(self.scores[free] for task, _, free in self._examples() if task.name == name)

    def cost_of(self, name: str) -> dict[str, Any]:
        """Seconds, and joules if they are told, of a task's pairs.

        A pair of several tasks counts for each.
        """
        index = next(index for task, index, _ in self._examples() if task.name == name)
        pairs, source = np.unique(index), self._meter.source
        cost: dict[str, Any] = {"seconds": float(self.seconds[pairs].sum())}
        joules = float(self.joules[pairs].sum())
        if source and np.isfinite(joules):
            cost |= {"joules": joules, "energy_source": source}
        return cost

    def _check(self, pairs: np.ndarray, scores: np.ndarray) -> None:
        """Stops at a score that is not finite, naming a task and an example that has it."""
        broken = pairs[~np.isfinite(scores)]
        if not broken.size:
            return
        for task, index, free in self._examples():
            for found in (index, free):
                at = np.flatnonzero(np.isin(found, broken))
                if at.size:
                    values = dict(zip(pairs.tolist(), scores.tolist(), strict=True))
                    row = np.zeros(len(task.examples))
                    row[at] = [values[int(pair)] for pair in found[at]]
                    score_eval.check_finite(row, task.name, self.checkpoint.step)


def suited_tokens() -> int:
    """Tokens of a batch that suit the device."""
    import jax

    from t0repro.evaluation.engine import TOKENS_PER_BATCH

    return TOKENS_PER_BATCH.get(jax.default_backend(), 4096)
