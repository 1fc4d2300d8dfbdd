"""Scores one read buffer of an evaluation, except for pairs whose scores are in the journal."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Int

from t0repro.evaluation.pairs import collect_pairs
from t0repro.evaluation.score_journal import DIGEST, ScoreJournal
from t0repro.evaluation.task_output import check_finite
from t0repro.progress import count_progress, say
from t0repro.words import counted

if TYPE_CHECKING:
    from t0repro.evaluation.opened import Checkpoint
    from t0repro.evaluation.reading import Chunk

# Finding finished chunks scans all waiting chunks' scores: too costly to do after each batch.
_SECONDS_BETWEEN_CHUNKS = 2.0


@dataclasses.dataclass(frozen=True, eq=False)
class ScoredChunk:
    """A chunk with its scores.

    Attributes:
      scores: log-likelihood of each example's choice, float32, natural log.
      content_free: float64 scores of the same choices given the content-free input, or None.
      seconds: of scoring its pairs; a pair that several tasks share counts for each of them.
    """

    chunk: Chunk
    scores: Float[np.ndarray, " examples"]
    content_free: Float[np.ndarray, " examples"] | None
    seconds: float


@dataclasses.dataclass(frozen=True, eq=False)
class _ChunkPairs:
    """Maps a chunk's examples to pairs: with their own input, and with the content-free one."""

    chunk: Chunk
    index: Int[np.ndarray, " examples"]
    free: Int[np.ndarray, " free"]


class RankRun:
    """Scores the pairs of chunks, and returns each chunk once all of its pairs are scored.

    Args:
      checkpoint: the checkpoint to score with.
      chunks: chunks of any number of tasks.
      lengths: maximum tokens per feature; None truncates nothing.
      journal: known scores are read from it and new ones appended; None keeps no journal.
      tokens_per_batch: see engine.Engine.
      content_free: tokens of a content-free input, with which every choice is scored as well.
      note_rounding: see engine.Engine.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        chunks: Sequence[Chunk],
        lengths: Mapping[str, int] | None,
        journal: ScoreJournal | None = None,
        *,
        tokens_per_batch: int | None = None,
        content_free: np.ndarray | None = None,
        note_rounding: Callable[[str], object],
    ):
        from t0repro.evaluation.engine import Engine

        self.checkpoint, self.journal = checkpoint, journal
        self.engine = Engine(
            checkpoint.params,
            checkpoint.model,
            tokens_per_batch=tokens_per_batch,
            note_rounding=note_rounding,
        )
        examples = (
            example
            for chunk in chunks
            for section in _chunk_sections(chunk, content_free)
            for example in section
        )
        self.pairs = collect_pairs(examples, lengths)
        self._chunk_pairs = _locate_chunks(chunks, self.pairs.index, content_free is not None)
        self._load_known_scores()
        self.plan = self.engine.plan(self.pairs, np.flatnonzero(np.isnan(self.scores)))
        self.scored = 0

    def score(self, done: Callable[[ScoredChunk], None]) -> float:
        """Scores all pairs, calling `done` with each finished chunk; returns the seconds taken."""
        plan = self.plan
        total = int(np.isnan(self.scores).sum())
        known = f"{len(self.pairs) - total:,} scored already, " if total < len(self.pairs) else ""
        say(
            f"{counted(len(self.pairs.index), 'pair')}, {len(self.pairs):,} distinct, {known}"
            f"{total:,} to score; {counted(len(plan.batches), 'batch', 'batches')} of"
            f" {counted(len(plan.programs), 'program')}, {100 * plan.padding:.1f}% padding"
        )
        waiting = self._hand_out_finished(self._chunk_pairs, done)
        with count_progress(total, "scoring", "pair", "scored") as advance:
            # The same seconds as in the lines of progress.
            started = last = handed_out = time.monotonic()
            for batch in self.engine.run(self.pairs, plan):
                self._check(batch.pairs, batch.scores)
                now = time.monotonic()
                self._store_scores(batch.pairs, batch.scores, now - last)
                last = now
                advance(len(batch.pairs))
                if now - handed_out >= _SECONDS_BETWEEN_CHUNKS:
                    waiting, handed_out = self._hand_out_finished(waiting, done), now
        seconds = last - started
        self._hand_out_finished(waiting, done)
        return seconds

    def _load_known_scores(self) -> None:
        """Loads known scores from the journal; the others are NaN."""
        self._digests = np.array([self.pairs.digest(n) for n in range(len(self.pairs))], DIGEST)
        known = np.zeros((2, len(self.pairs)))
        known[0] = np.nan
        if self.journal is not None:
            known = self.journal.look_up(self._digests)
        # The log-likelihood of a choice without tokens is the empty sum.
        known[0, [not len(target) for target in self.pairs.targets]] = 0.0
        self.scores, self._seconds = known

    def _store_scores(self, pairs: np.ndarray, scores: np.ndarray, seconds: float) -> None:
        """Stores a batch's scores; its seconds are split evenly among its pairs."""
        if self.journal is not None:
            self.journal.add(self._digests[pairs], scores, seconds / len(pairs))
        self.scores[pairs] = scores
        self._seconds[pairs] = seconds / len(pairs)
        self.scored += len(pairs)

    def _hand_out_finished(
        self, waiting: Sequence[_ChunkPairs], done: Callable[[ScoredChunk], None]
    ) -> list[_ChunkPairs]:
        """Calls `done` for each chunk whose pairs are all scored; returns the other chunks."""
        left = []
        for place in waiting:
            # NaN means that a later batch still has to score one of its pairs.
            if np.isnan(self.scores[place.index]).any() or np.isnan(self.scores[place.free]).any():
                left.append(place)
            else:
                done(self._score_chunk(place))
        return left

    def _score_chunk(self, place: _ChunkPairs) -> ScoredChunk:
        # Charge a pair once, even if several of the chunk's examples share it.
        pairs = np.unique(place.index)
        return ScoredChunk(
            place.chunk,
            self.scores[place.index].astype(np.float32),
            self.scores[place.free] if len(place.free) else None,
            float(self._seconds[pairs].sum()),
        )

    def _check(self, pairs: np.ndarray, scores: np.ndarray) -> None:
        """Raises UserError for a non-finite score, naming a task and an example that has it."""
        broken = pairs[~np.isfinite(scores)]
        if not broken.size:
            return
        values = dict(zip(pairs.tolist(), scores.tolist(), strict=True))
        for place in self._chunk_pairs:
            for index in (place.index, place.free):
                at = np.flatnonzero(np.isin(index, broken))
                if at.size:
                    row = np.zeros(len(index))
                    row[at] = [values[int(pair)] for pair in index[at]]
                    check_finite(row, place.chunk.task, self.checkpoint.step)


def _locate_chunks(
    chunks: Sequence[Chunk], index: Int[np.ndarray, " examples"], with_free: bool
) -> list[_ChunkPairs]:
    """Each chunk's pairs; those with the content-free input follow its own."""
    start, located = 0, []
    for chunk in chunks:
        end = start + len(chunk.examples)
        after = end + len(chunk.examples) if with_free else end
        located.append(_ChunkPairs(chunk, index[start:end], index[end:after]))
        start = after
    return located


def _chunk_sections(
    chunk: Chunk, content_free: np.ndarray | None
) -> list[Sequence[Mapping[str, Any]]]:
    """A chunk's examples and, on request, the same choices with the content-free input."""
    if content_free is None:
        return [chunk.examples]
    return [chunk.examples, [{**each, "inputs": content_free} for each in chunk.examples]]
