"""Which pairs are scored together: few shapes and little padding, chosen from the data.

A batch holds distinct inputs, each with all of its choices packed into one row of the decoder:

    inputs     [batch, inputs_length]      the premise ... ? 0 0 0
    targets    [batch, targets_length]     yes </s> no </s> may be </s> 0 0
    segments   [batch, targets_length]      1    1   2   2   3   3   3   0 0

so that an input is encoded once whatever the number of its choices, and choices of different
lengths take no padding of their own. Attention in the decoder stays within a segment.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from t0repro.evaluation.pairs import Pairs

# Lengths are rounded up to these before levels are chosen.
INPUTS_MULTIPLE, TARGETS_MULTIPLE = 8, 4
# A shape more is worth it where it saves so many padded tokens: about what a CPU computes with a
# small T5 while XLA compiles one.
TOKENS_PER_SHAPE = 8192
MAX_INPUT_LEVELS, MAX_TARGET_LEVELS = 8, 4
# The most target tokens of an input that are decoded in one row; more choices take further rows,
# which read the same encoding.
MAX_ROW = 1024


@dataclasses.dataclass(frozen=True, eq=False)
class DecoderRows:
    """One row of choices for each input of a batch.

    Attributes:
      targets: token ids, 0 where there are none.
      segments: 1, 2, ... by choice, 0 at padding.
      pair: the pair that each token belongs to, -1 at padding.
    """

    targets: Int[np.ndarray, "batch length"]
    segments: Int[np.ndarray, "batch length"]
    pair: Int[np.ndarray, "batch length"]


@dataclasses.dataclass(frozen=True, eq=False)
class PlannedBatch:
    """Inputs that are encoded together, with the choices to decode for each.

    Attributes:
      rows: for each input its number and, for each row of the decoder, its pairs.
      size: rows of the arrays; those beyond `rows` are padding.
    """

    rows: tuple[tuple[int, tuple[tuple[int, ...], ...]], ...]
    size: int
    inputs_length: int
    targets_length: int

    @property
    def pairs(self) -> Int[np.ndarray, " pairs"]:
        """All pairs that the batch scores."""
        return np.array([p for _, pieces in self.rows for piece in pieces for p in piece], np.int64)

    def halves(self) -> tuple[PlannedBatch, PlannedBatch]:
        """The same work in two batches of half the size."""
        size = (self.size + 1) // 2
        first, second = self.rows[:size], self.rows[size:]
        return dataclasses.replace(self, rows=first, size=size), dataclasses.replace(
            self, rows=second, size=size
        )

    def inputs(self, pairs: Pairs) -> Int[np.ndarray, "batch length"]:
        """The inputs' token ids, int32 [size, inputs_length]."""
        array = np.zeros((self.size, self.inputs_length), np.int32)
        for row, (number, _) in enumerate(self.rows):
            tokens = pairs.inputs[number]
            array[row, : len(tokens)] = tokens
        return array

    def decoder_rows(self, pairs: Pairs) -> list[DecoderRows]:
        """The choices; nearly always one element, more where an input has very many."""
        count = max(len(pieces) for _, pieces in self.rows)
        return [self._piece(pairs, piece) for piece in range(count)]

    def _piece(self, pairs: Pairs, piece: int) -> DecoderRows:
        shape = (self.size, self.targets_length)
        targets, segments = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        owner = np.full(shape, -1, np.int64)
        for row, (_, pieces) in enumerate(self.rows):
            start = 0
            for segment, pair in enumerate(pieces[piece] if piece < len(pieces) else (), 1):
                tokens = pairs.targets[pair]
                place = slice(start, start := start + len(tokens))
                targets[row, place], segments[row, place] = tokens, segment
                owner[row, place] = pair
        return DecoderRows(targets, segments, owner)


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """All batches of an evaluation, longest inputs first, so that memory runs out early or never.

    Attributes:
      shapes: distinct (size, inputs_length, targets_length).
      input_tokens: tokens of the distinct inputs, padding not counted.
      target_tokens: tokens of the choices, likewise.
      padded_inputs: entries of all arrays of inputs.
      padded_targets: entries of all arrays of targets.
    """

    batches: tuple[PlannedBatch, ...]
    input_tokens: int
    target_tokens: int
    padded_inputs: int
    padded_targets: int

    @property
    def shapes(self) -> set[tuple[int, int, int]]:
        """What is compiled: (size, inputs_length, targets_length)."""
        return {(b.size, b.inputs_length, b.targets_length) for b in self.batches}

    @property
    def padding(self) -> float:
        """Share of all entries that are padding, in [0, 1]."""
        entries = self.padded_inputs + self.padded_targets
        return 1 - (self.input_tokens + self.target_tokens) / entries if entries else 0.0


def make_plan(
    pairs: Pairs, tokens_per_batch: int, todo: Int[np.ndarray, " todo"] | None = None
) -> Plan:
    """Groups pairs into batches of few shapes.

    Args:
      pairs: the distinct pairs.
      tokens_per_batch: the most entries of a batch's inputs, padding included; a fourth of it for
        its targets, whose logits take the vocabulary's size each. One row always fits.
      todo: the pairs to score, all when None. A pair without tokens scores 0 and is left out.
    """
    todo = np.arange(len(pairs)) if todo is None else todo
    by_input: dict[int, list[int]] = {}
    for pair in todo:
        if len(pairs.targets[pair]):
            by_input.setdefault(int(pairs.input_of[pair]), []).append(int(pair))
    numbers = list(by_input)
    pieces = [_pieces(pairs, by_input[number]) for number in numbers]
    sources = _rounded([len(pairs.inputs[number]) for number in numbers], INPUTS_MULTIPLE)
    rows = _rounded(
        [max(sum(len(pairs.targets[p]) for p in piece) for piece in found) for found in pieces],
        TARGETS_MULTIPLE,
    )
    batches: list[PlannedBatch] = []
    for inputs_length, group in _by_level(sources, np.arange(len(numbers)), MAX_INPUT_LEVELS):
        for targets_length, members in _by_level(rows, group, MAX_TARGET_LEVELS):
            # Neighbours in length, so that a batch with long rows of choices is not many
            work = [(numbers[i], pieces[i]) for i in members]
            limit = min(tokens_per_batch // inputs_length, tokens_per_batch // 4 // targets_length)
            batches += _batches(work, max(limit, 1), inputs_length, targets_length)
    batches.sort(key=lambda batch: -batch.size * (batch.inputs_length + 4 * batch.targets_length))
    return Plan(
        batches=tuple(batches),
        input_tokens=sum(len(pairs.inputs[number]) for number in numbers),
        target_tokens=sum(len(pairs.targets[p]) for found in by_input.values() for p in found),
        padded_inputs=sum(batch.size * batch.inputs_length for batch in batches),
        padded_targets=sum(
            batch.size * batch.targets_length * max(len(found) for _, found in batch.rows)
            for batch in batches
        ),
    )


def _pieces(pairs: Pairs, members: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """An input's pairs in rows of at most MAX_ROW tokens; a longer choice has a row of its own."""
    pieces: list[list[int]] = []
    room = 0
    for pair in members:
        length = len(pairs.targets[pair])
        if length > room:
            pieces.append([])
            room = max(MAX_ROW, length)
        pieces[-1].append(pair)
        room -= length
    return tuple(map(tuple, pieces))


def _batches(
    work: Sequence[tuple[int, tuple[tuple[int, ...], ...]]],
    limit: int,
    inputs_length: int,
    targets_length: int,
) -> list[PlannedBatch]:
    """The least number of batches within the limit, of one size with the fewest empty rows."""
    count = -(-len(work) // limit)
    size = -(-len(work) // count)
    return [
        PlannedBatch(tuple(work[start : start + size]), size, inputs_length, targets_length)
        for start in range(0, len(work), size)
    ]


def _rounded(lengths: Sequence[int], multiple: int) -> Int[np.ndarray, " lengths"]:
    """Lengths rounded up to a multiple, at least one multiple."""
    return np.maximum(-(-np.array(lengths, np.int64) // multiple), 1) * multiple


def _by_level(
    lengths: Int[np.ndarray, " all"], members: Int[np.ndarray, " members"], most: int
) -> list[tuple[int, Int[np.ndarray, " group"]]]:
    """Members with the level that holds each one's length, levels ascending."""
    found = levels(lengths[members], most)
    place = np.searchsorted(found, lengths[members])
    return [(int(level), members[place == at]) for at, level in enumerate(found)]


def levels(
    lengths: Int[np.ndarray, " lengths"], most: int, tokens_per_level: int = TOKENS_PER_SHAPE
) -> Int[np.ndarray, " levels"]:
    """The lengths to pad to, ascending, the longest among them: the least padding for their number.

    Exact, by dynamic programming over the distinct lengths: the sum of all padded lengths plus
    `tokens_per_level` for each level is the least that at most `most` levels can give.
    """
    values, counts = np.unique(lengths, return_counts=True)
    before = np.concatenate([[0], np.cumsum(counts)])
    n = len(values)
    cost = np.full((most + 1, n + 1), np.inf)  # [levels, values covered]
    cut = np.zeros((most + 1, n + 1), np.int64)
    cost[0, 0] = 0
    for level in range(1, most + 1):
        for end in range(1, n + 1):
            padded = (before[end] - before[:end]) * values[end - 1] + cost[level - 1, :end]
            cut[level, end] = int(padded.argmin())
            cost[level, end] = padded[cut[level, end]] + tokens_per_level
    level, end, found = int(cost[:, n].argmin()), n, []
    while end:
        found.append(int(values[end - 1]))
        level, end = level - 1, int(cut[level, end])
    return np.array(found[::-1], np.int64)
