"""Scores a window of an evaluation: the pairs of parts of tasks, except those that are known."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Int

from t0repro.evaluation.energy import EnergyMeter
from t0repro.evaluation.grouping import Plan, make_plan
from t0repro.evaluation.journal import DIGEST, Journal
from t0repro.evaluation.pairs import Pairs, distinct_pairs
from t0repro.evaluation.task_output import check_finite
from t0repro.progress import count_progress

if TYPE_CHECKING:
    from t0repro.evaluation.opened import Checkpoint
    from t0repro.evaluation.reading import Part

_SECONDS_BETWEEN_PARTS = 2.0

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True, eq=False)
class ScoredPart:
    """A part with its scores.

    Attributes:
      scores: of the examples, float32, natural logarithm.
      content_free: float64 scores of the same choices after the content-free input, or None.
      seconds: that scoring its pairs took; a pair of several tasks counts for each.
      joules: likewise; None where the device does not tell.
      energy_source: what the joules are counted by; empty where nothing counts them.
    """

    part: Part
    scores: Float[np.ndarray, " examples"]
    content_free: Float[np.ndarray, " examples"] | None
    seconds: float
    joules: float | None
    energy_source: str

    @property
    def cost(self) -> dict[str, Any]:
        """Seconds, and joules with their source where they are known, as a record holds them."""
        found: dict[str, Any] = {"seconds": self.seconds}
        if self.joules is not None:
            found |= {"joules": self.joules, "energy_source": self.energy_source}
        return found


@dataclasses.dataclass(frozen=True, eq=False)
class _Place:
    """Which pairs a part's examples are, and which they are after the content-free input."""

    part: Part
    index: Int[np.ndarray, " examples"]
    free: Int[np.ndarray, " free"]


class RankRun:
    """Scores the pairs of parts and hands out each part as soon as all of its pairs are known.

    Args:
      checkpoint: to score with.
      parts: of any number of tasks.
      lengths: tokens per feature; None cuts nothing.
      journal: of scores that are known, and of those to come; None keeps none.
      tokens_per_batch: see grouping.make_plan; None is what suits the device.
      content_free: tokens of an input after which every choice is scored too.
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
            examples += [{**example, "inputs": content_free} for example in examples]
        self.pairs: Pairs = distinct_pairs(examples, lengths)
        self._places = _places(parts, self.pairs.index, content_free is not None)
        self._recall()
        unknown = np.flatnonzero(np.isnan(self.scores))
        self.plan: Plan = make_plan(self.pairs, tokens_per_batch or suited_tokens(), unknown)
        without = [pair for pair in unknown if not len(self.pairs.targets[pair])]
        self.scores[np.array(without, np.int64)] = 0.0
        self.scored = 0
        self._meter = EnergyMeter()

    def score(self, say: Say, done: Callable[[ScoredPart], None]) -> float:
        """Scores everything; `done` gets each part. Returns the seconds that it took."""
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
        waiting = self._hand_out(self._places, done)
        with count_progress(total, "scoring", "pairs", "scored") as advance:
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
        """Takes from the journal what it knows; other scores are NaN."""
        count = len(self.pairs)
        self._digests = np.array([self.pairs.digest(pair) for pair in range(count)], DIGEST)
        known = np.zeros((3, count))
        known[0] = np.nan
        if self.journal is not None:
            known = self.journal.look_up(self._digests)
        self.scores, self._seconds, self._joules = known

    def _keep(self, pairs: np.ndarray, scores: np.ndarray, seconds: float) -> None:
        """Notes the scores of a batch's pairs, which shared its seconds and its joules evenly."""
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
        """Hands out the parts whose pairs are all known; returns the others."""
        left = []
        for place in waiting:
            if np.isnan(self.scores[place.index]).any() or np.isnan(self.scores[place.free]).any():
                left.append(place)
            else:
                done(self._scored(place))
        return left

    def _scored(self, place: _Place) -> ScoredPart:
        pairs = np.unique(place.index)
        joules = float(self._joules[pairs].sum())
        return ScoredPart(
            place.part,
            self.scores[place.index].astype(np.float32),
            self.scores[place.free] if len(place.free) else None,
            float(self._seconds[pairs].sum()),
            joules if self._meter.source and np.isfinite(joules) else None,
            self._meter.source,
        )

    def _check(self, pairs: np.ndarray, scores: np.ndarray) -> None:
        """Stops at a score that is not finite, naming a task and an example that has it."""
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


def print_to_stderr(text: str) -> None:
    """Prints a line to standard error at once."""
    print(text, file=sys.stderr, flush=True)


def _places(
    parts: Sequence[Part], index: Int[np.ndarray, " examples"], with_free: bool
) -> list[_Place]:
    """Where each part's pairs are; the second half of `index` is after the content-free input."""
    half, start, found = len(index) // 2, 0, []
    for part in parts:
        end = start + len(part.examples)
        free = index[start + half : end + half] if with_free else index[:0]
        found.append(_Place(part, index[start:end], free))
        start = end
    return found


def suited_tokens() -> int:
    """Tokens of a batch that suit the device."""
    import jax

    from t0repro.evaluation.engine import TOKENS_PER_BATCH

    return TOKENS_PER_BATCH.get(jax.default_backend(), 4096)
