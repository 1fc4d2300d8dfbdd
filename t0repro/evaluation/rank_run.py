"""Scores one window of an evaluation, skipping pairs whose scores are already in the journal."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Int

from t0repro.evaluation.energy import Cost, EnergyMeter
from t0repro.evaluation.grouping import Batching, joined, make_batching
from t0repro.evaluation.pairs import DIGEST, Pairs, ScoreJournal, concatenated, distinct_pairs
from t0repro.evaluation.task_output import check_finite
from t0repro.progress import count_progress, say
from t0repro.words import counted

if TYPE_CHECKING:
    from t0repro.evaluation.opened import Checkpoint
    from t0repro.evaluation.reading import Part

# Finding finished parts scans all waiting parts' scores: too costly to do after each batch.
_SECONDS_BETWEEN_PARTS = 2.0


@dataclasses.dataclass(frozen=True, eq=False)
class ScoredPart:
    """A part with its scores.

    Attributes:
      scores: log-likelihood of each example's choice, float32, natural log.
      content_free: float64 scores of the same choices given the content-free input, or None.
      cost: of scoring its pairs; a pair that several tasks share counts for each of them.
      tokens_per_batch: the limit that the batches were planned with.
    """

    part: Part
    scores: Float[np.ndarray, " examples"]
    content_free: Float[np.ndarray, " examples"] | None
    cost: Cost
    tokens_per_batch: int


@dataclasses.dataclass(frozen=True, eq=False)
class _Place:
    """Maps a part's examples to pairs: with their own input, and with the content-free one."""

    part: Part
    index: Int[np.ndarray, " examples"]
    free: Int[np.ndarray, " free"]


class RankRun:
    """Scores the pairs of parts, and returns each part once all of its pairs are scored.

    Args:
      checkpoint: the checkpoint to score with.
      parts: parts of any number of tasks.
      lengths: maximum tokens per feature; None truncates nothing.
      journal: known scores are read from it and new ones appended; None keeps no journal.
      tokens_per_batch: see grouping.make_batching; defaults to a size for the device.
      content_free: tokens of a content-free input, with which every choice is scored as well.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        parts: Sequence[Part],
        lengths: Mapping[str, int] | None,
        journal: ScoreJournal | None = None,
        *,
        tokens_per_batch: int | None = None,
        content_free: np.ndarray | None = None,
    ):
        self.checkpoint, self.journal = checkpoint, journal
        # Plan each part's pairs and batches separately: then no batch, and so no score, depends on
        # the rest of the window, on earlier runs' scores or on the number of devices.
        own = [
            distinct_pairs(examples, lengths)
            for part in parts
            for examples in _sections(part, content_free)
        ]
        self.pairs: Pairs = concatenated(own)
        self._places = _places(parts, self.pairs.index, content_free is not None)
        if tokens_per_batch is None:
            from t0repro.evaluation.engine import suited_tokens

            tokens_per_batch = suited_tokens()
        self._tokens_per_batch = tokens_per_batch
        ends = np.cumsum([len(pairs) for pairs in own])
        self.plan: Batching = joined(
            [
                make_batching(self.pairs, tokens_per_batch, np.arange(end - len(pairs), end))
                for pairs, end in zip(own, ends, strict=True)
            ]
        )
        self._recall()
        self.scored = 0
        self._meter = EnergyMeter()

    def score(self, done: Callable[[ScoredPart], None]) -> float:
        """Scores all pairs, calling `done` with each finished part; returns the seconds taken."""
        from t0repro.evaluation.engine import Engine

        plan = self._left()
        total = sum(len(batch.pairs) for batch in plan.batches)
        say(
            f"{counted(len(self.pairs.index), 'pair')}, {len(self.pairs):,} distinct, {total:,} to"
            f" score; {counted(len(plan.batches), 'batch', 'batches')} of"
            f" {counted(len(plan.shapes), 'shape')},"
            f" {100 * self.plan.padding:.1f}% padding"
        )
        engine = Engine(self.checkpoint.params, self.checkpoint.model)
        self._meter.joules()  # starts the count: energy used until now was not spent on scoring
        started = last = handed_out = time.monotonic()
        waiting = self._hand_out(self._places, done)
        with count_progress(total, "scoring", "pair", "scored") as advance:
            for found in engine.run(self.pairs, plan):
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
        # A choice without tokens is in no batch; its score is the empty sum, 0.
        known = np.zeros((3, len(self.pairs)))
        self._digests = np.zeros(len(self.pairs), DIGEST)
        planned = np.zeros(len(self.pairs), bool)
        for batch in self.plan.batches:
            planned[batch.pairs] = True
            # Scores are reused only for the same pair in the same batch.
            key = batch.digest(self.pairs)
            self._digests[batch.pairs] = [
                hashlib.blake2b(key + self.pairs.digest(pair), digest_size=16).digest()
                for pair in batch.pairs
            ]
        known[0, planned] = np.nan
        if self.journal is not None:
            known[:, planned] = self.journal.look_up(self._digests[planned])
        self.scores, self._seconds, self._joules = known

    def _left(self) -> Batching:
        """The plan, less the batches whose scores are all known."""
        return dataclasses.replace(
            self.plan,
            batches=tuple(
                batch for batch in self.plan.batches if np.isnan(self.scores[batch.pairs]).any()
            ),
        )

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
            # NaN means that a later batch still has to score one of its pairs.
            if np.isnan(self.scores[place.index]).any() or np.isnan(self.scores[place.free]).any():
                left.append(place)
            else:
                done(self._scored(place))
        return left

    def _scored(self, place: _Place) -> ScoredPart:
        # Charge a pair once, even if several of the part's examples share it.
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
            self._tokens_per_batch,
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
    """Each part's pairs; those with the content-free input follow its own."""
    start, found = 0, []
    for part in parts:
        end = start + len(part.examples)
        after = end + len(part.examples) if with_free else end
        found.append(_Place(part, index[start:end], index[end:after]))
        start = after
    return found


def _sections(part: Part, content_free: np.ndarray | None) -> list[Sequence[Mapping[str, Any]]]:
    """A part's examples and, on request, the same choices with the content-free input."""
    if content_free is None:
        return [part.examples]
    return [part.examples, [{**each, "inputs": content_free} for each in part.examples]]
