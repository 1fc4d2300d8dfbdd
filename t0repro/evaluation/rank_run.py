"""Scores one window of an evaluation, skipping pairs whose scores are already in the journal."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float, Int

from t0repro.evaluation.energy import Cost, EnergyMeter
from t0repro.evaluation.grouping import Plan, make_plan
from t0repro.evaluation.journal import DIGEST, Journal
from t0repro.evaluation.pairs import Pairs, distinct_pairs
from t0repro.evaluation.task_output import check_finite
from t0repro.progress import count_progress, say
from t0repro.words import counted

if TYPE_CHECKING:
    from t0repro.evaluation.opened import Checkpoint
    from t0repro.evaluation.reading import Part

# Looking for finished parts scans every waiting part's scores, so it is not done after each batch.
_SECONDS_BETWEEN_PARTS = 2.0


@dataclasses.dataclass(frozen=True, eq=False)
class ScoredPart:
    """A part with its scores.

    Attributes:
      scores: log-likelihood of each example's choice, float32, natural log.
      content_free: float64 scores of the same choices given the content-free input, or None.
      cost: of scoring its pairs; a pair that tasks share counts for each of them.
    """

    part: Part
    scores: Float[np.ndarray, " examples"]
    content_free: Float[np.ndarray, " examples"] | None
    cost: Cost


@dataclasses.dataclass(frozen=True, eq=False)
class _Place:
    """Maps a part's examples to pairs, with their own and with the content-free input."""

    part: Part
    index: Int[np.ndarray, " examples"]
    free: Int[np.ndarray, " free"]


class RankRun:
    """Scores the pairs of parts and hands over each part once all of its pairs are scored.

    Args:
      checkpoint: the checkpoint to score with.
      parts: parts of any number of tasks.
      lengths: maximum tokens per feature; None truncates nothing.
      journal: known scores are read from it and new ones appended; None keeps no journal.
      tokens_per_batch: see grouping.make_plan; defaults to a size for the device.
      content_free: tokens of a content-free input given which every choice is scored as well.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        parts: Sequence[Part],
        lengths: Mapping[str, int] | None,
        journal: Journal | None = None,
        *,
        tokens_per_batch: int | None = None,
        content_free: np.ndarray | None = None,
    ):
        self.checkpoint, self.journal = checkpoint, journal
        examples = [example for part in parts for example in part.examples]
        if content_free is not None:
            # The same choices again, below another input: the second half of the
            # examples.
            examples += [{**example, "inputs": content_free} for example in examples]
        self.pairs: Pairs = distinct_pairs(examples, lengths)
        self._places = _places(parts, self.pairs.index, content_free is not None)
        self._recall()
        unknown = np.flatnonzero(np.isnan(self.scores))
        if tokens_per_batch is None:
            from t0repro.evaluation.engine import suited_tokens

            tokens_per_batch = suited_tokens(checkpoint.params)
        self.plan: Plan = make_plan(self.pairs, tokens_per_batch, unknown)
        # A choice without tokens is not in the plan; its sum over no tokens is 0.
        without = [pair for pair in unknown if not len(self.pairs.targets[pair])]
        self.scores[np.array(without, np.int64)] = 0.0
        self.scored = 0
        self._meter = EnergyMeter()

    def score(self, done: Callable[[ScoredPart], None]) -> float:
        """Scores all pairs, calling `done` with each finished part; returns the seconds taken."""
        from t0repro.evaluation.engine import Engine

        total = sum(len(batch.pairs) for batch in self.plan.batches)
        say(
            f"{counted(len(self.pairs.index), 'pair')}, {len(self.pairs):,} distinct, {total:,} to"
            f" score; {counted(len(self.plan.batches), 'batch', 'batches')} of"
            f" {counted(len(self.plan.shapes), 'shape')},"
            f" {100 * self.plan.padding:.1f}% padding"
        )
        engine = Engine(self.checkpoint.params, self.checkpoint.model)
        self._meter.joules()  # Starts the count here: what was used until now is not scoring.
        started = last = handed_out = time.monotonic()
        waiting = self._hand_out(self._places, done)
        with count_progress(total, "scoring", "pair", "scored") as advance:
            for found in engine.run(self.pairs, self.plan):
                self._check(found.pairs, found.scores)
                now = time.monotonic()
                self._keep(found.pairs, found.scores, now - last)
                last = now
                advance(len(found.pairs))
                if now - handed_out >= _SECONDS_BETWEEN_PARTS:
                    waiting, handed_out = self._hand_out(waiting, done), now
        self._hand_out(waiting, done)
        return time.monotonic() - started

    def _recall(self) -> None:
        """Loads known scores from the journal; the others are NaN."""
        count = len(self.pairs)
        self._digests = np.array([self.pairs.digest(pair) for pair in range(count)], DIGEST)
        known = np.zeros((3, count))
        known[0] = np.nan
        if self.journal is not None:
            known = self.journal.look_up(self._digests)
        self.scores, self._seconds, self._joules = known

    def _keep(self, pairs: np.ndarray, scores: np.ndarray, seconds: float) -> None:
        """Stores a batch's scores; its seconds and joules are split evenly among its pairs."""
        joules = self._meter.joules()
        each = None if joules is None else joules / len(pairs)
        if self.journal is not None:
            self.journal.add(self._digests[pairs], scores, seconds / len(pairs), each)
        self.scores[pairs] = scores
        self._seconds[pairs] = seconds / len(pairs)
        self._joules[pairs] = np.nan if each is None else each
        self.scored += len(pairs)

    def _hand_out(
        self, waiting: Sequence[_Place], done: Callable[[ScoredPart], None]
    ) -> list[_Place]:
        """Calls `done` for each part whose pairs are all scored; returns the other parts."""
        left = []
        for place in waiting:
            # NaN in one of its pairs: a batch that is still to come scores it.
            if np.isnan(self.scores[place.index]).any() or np.isnan(self.scores[place.free]).any():
                left.append(place)
            else:
                done(self._scored(place))
        return left

    def _scored(self, place: _Place) -> ScoredPart:
        # A pair that several of the part's examples share was paid for once.
        pairs = np.unique(place.index)
        joules = float(self._joules[pairs].sum())
        return ScoredPart(
            place.part,
            self.scores[place.index].astype(np.float32),
            self.scores[place.free] if len(place.free) else None,
            Cost(
                float(self._seconds[pairs].sum()),
                joules if self._meter.source and np.isfinite(joules) else None,
                self._meter.source,
            ),
        )

    def _check(self, pairs: np.ndarray, scores: np.ndarray) -> None:
        """Raises UserError for a non-finite score, naming a task and an example that has it."""
        broken = pairs[~np.isfinite(scores)]
        if not broken.size:
            return
        values = dict(zip(pairs.tolist(), scores.tolist(), strict=True))
        for place in self._places:
            for found in (place.index, place.free):
                at = np.flatnonzero(np.isin(found, broken))
                if at.size:
                    row = np.zeros(len(found))
                    row[at] = [values[int(pair)] for pair in found[at]]
                    check_finite(row, place.part.task, self.checkpoint.step)


def _places(
    parts: Sequence[Part], index: Int[np.ndarray, " examples"], with_free: bool
) -> list[_Place]:
    """Each part's pairs; the second half of `index` belongs to the content-free input."""
    # Examples come twice if there is a content-free input, in the same order.
    half, start, found = len(index) // 2, 0, []
    for part in parts:
        end = start + len(part.examples)
        free = index[start + half : end + half] if with_free else index[:0]
        found.append(_Place(part, index[start:end], free))
        start = end
    return found
