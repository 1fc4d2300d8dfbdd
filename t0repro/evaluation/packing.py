"""Inputs of different lengths in rows of one length, each input with all of its choices.

A row of the encoder holds several inputs, a segment each; the row of the decoder below it holds
their choices, each a segment of its own that reads its input's segment and no other:

    inputs     the premise ... ? is it so ? 0 0         one row of the encoder
    segments   1   1       1   1 2  2  2  2 0 0
    targets    yes </s> no </s> may be </s> true </s>   the row of the decoder below it
    segments   1   1    2  2    3   3  3    4    4
    reads      1   1    1  1    1   1  1    2    2

Attention stays within a segment, so that scores do not depend on what is packed together (as when
T5 is trained on packed batches), and next to nothing is padding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

# The most target tokens of a row; an input with more takes further rows of the decoder, which read
# the same encoding.
MAX_ROW = 1024


@dataclasses.dataclass(frozen=True)
class Item:
    """An input to be packed.

    Attributes:
      number: of the input, in Pairs.
      length: its tokens, an empty input's taken as 1.
      pieces: its pairs, in rows of at most MAX_ROW target tokens; nearly always one row.
      targets: target tokens of the longest piece.
      alone: whether it shares its row with no other input.
    """

    number: int
    length: int
    pieces: tuple[tuple[int, ...], ...]
    targets: int
    alone: bool


@dataclasses.dataclass(frozen=True)
class Row:
    """Inputs that are encoded in one row, and the pairs of each row of the decoder below it.

    Attributes:
      inputs: their numbers, in the row's order; segment 1 is the first.
      pieces: for each row of the decoder its pairs; more than one only below a single input.
      length: tokens of the inputs.
      targets: tokens of the longest piece.
    """

    inputs: tuple[int, ...]
    pieces: tuple[tuple[int, ...], ...]
    length: int
    targets: int


def pieces_of(lengths: Sequence[int], members: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """An input's pairs in rows of at most MAX_ROW tokens; a longer choice has a row of its own.

    Args:
      lengths: target tokens of each pair.
      members: the input's pairs.
    """
    pieces: list[list[int]] = []
    room = 0
    for pair in members:
        if lengths[pair] > room:
            pieces.append([])
            room = max(MAX_ROW, lengths[pair])
        pieces[-1].append(pair)
        room -= lengths[pair]
    return tuple(map(tuple, pieces))


def pack(
    own: Sequence[Item], fillers: Sequence[Item], length: int, targets: int
) -> tuple[list[Row], list[Item]]:
    """Packs items into rows that hold `length` input tokens and `targets` target tokens.

    Row after row takes the largest item that is left and then, time and again, the one that best
    fits what is free in both dimensions: inputs with many choices and inputs with few fill up each
    other's rows.

    Args:
      own: are all packed.
      fillers: only fill what is free; none of them alone.
      length: input tokens of a row, at least those of any item.
      targets: target tokens of a row, likewise.

    Returns:
      The rows, and the fillers that found no room.
    """
    rows = [_row([item]) for item in own if item.alone]
    pool = _Pool([item for item in own if not item.alone], fillers, length, targets)
    while (first := pool.largest()) is not None:
        members = [first]
        room, targets_room = length - first.length, targets - first.targets
        while (item := pool.best(room, targets_room)) is not None:
            members.append(item)
            room, targets_room = room - item.length, targets_room - item.targets
        rows.append(_row(members))
    return rows, pool.left()


class _Pool:
    """Items by (length, targets), so that equal ones are looked at once."""

    def __init__(self, own: Sequence[Item], fillers: Sequence[Item], length: int, targets: int):
        kinds: dict[tuple[int, int, bool], list[Item]] = {}
        for items, is_own in ((own, True), (fillers, False)):
            for item in items:
                if not item.alone:
                    kinds.setdefault((item.length, item.targets, is_own), []).append(item)
        # The largest first: argmax takes the first of equals
        share = {kind: max(kind[0] / length, kind[1] / targets) for kind in kinds}
        order = sorted(kinds, key=lambda kind: (not kind[2], -share[kind], kind))
        self._items = [kinds[kind] for kind in order]
        self._own = sum(kind[2] for kind in order)
        self._next = 0
        # What is used up is larger than any room
        self._length = np.array([kind[0] for kind in order], np.int64)
        self._targets = np.array([kind[1] for kind in order], np.int64)
        self._scale = length, targets

    def largest(self) -> Item | None:
        """Takes the item, not a filler, that takes most of a row."""
        while self._next < self._own:
            if self._items[self._next]:
                return self._take(self._next)
            self._next += 1
        return None

    def best(self, length: int, targets: int) -> Item | None:
        """Takes the item that fits best into what is free; None where nothing fits."""
        fits = (self._length <= length) & (self._targets <= targets)
        if not fits.any():
            return None
        weights = length / self._scale[0] ** 2, targets / self._scale[1] ** 2
        value = np.where(fits, self._length * weights[0] + self._targets * weights[1], -1)
        return self._take(int(value.argmax()))

    def left(self) -> list[Item]:
        """What was not taken."""
        return [item for items in self._items for item in items]

    def _take(self, at: int) -> Item:
        item = self._items[at].pop()
        if not self._items[at]:
            self._length[at] = np.iinfo(np.int64).max
        return item


def _row(members: Sequence[Item]) -> Row:
    if len(members) == 1:
        pieces = members[0].pieces
    else:
        pieces = (tuple(pair for item in members for pair in item.pieces[0]),)
    return Row(
        inputs=tuple(item.number for item in members),
        pieces=pieces,
        length=sum(item.length for item in members),
        targets=sum(item.targets for item in members),
    )
