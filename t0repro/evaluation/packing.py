"""Packs inputs of different lengths, with their choices, in rows of one length.

Each input is packed with all of its choices. An encoder row holds several inputs, one segment
each. The decoder row below it holds their choices, each its own segment that attends only to its
input's segment:

    inputs     the premise ... ? is it so ? 0 0         one row of the encoder
    segments   1   1       1   1 2  2  2  2 0 0
    targets    yes </s> no </s> may be </s> true </s>   the row of the decoder below it
    segments   1   1    2  2    3   3  3    4    4
    reads      1   1    1  1    1   1  1    2    2

Attention stays within a segment, so scores do not depend on what shares a row (as when T5 trains
on packed batches), and little padding remains.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

# Maximum target tokens per row. An input with more gets further decoder rows, which attend to the
# same encoding.
MAX_ROW = 1024


@dataclasses.dataclass(frozen=True)
class Item:
    """An input to be packed.

    Attributes:
      number: the input's index in Pairs.inputs.
      length: its number of tokens; 1 if it is empty.
      pieces: its pairs, split into rows of at most MAX_ROW target tokens; nearly always one row.
      targets: target tokens of the longest piece.
      alone: whether it must not share its row with another input.
    """

    number: int
    length: int
    pieces: tuple[tuple[int, ...], ...]
    targets: int
    alone: bool


@dataclasses.dataclass(frozen=True)
class Row:
    """The inputs encoded in one row, and the pairs of each decoder row for them.

    Attributes:
      inputs: the inputs' numbers in row order; the first is segment 1.
      pieces: the pairs of each decoder row; more than one row only for a single input.
      length: total tokens of the inputs.
      targets: tokens of the longest piece.
    """

    inputs: tuple[int, ...]
    pieces: tuple[tuple[int, ...], ...]
    length: int
    targets: int


def split_into_pieces(
    lengths: Sequence[int], members: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """Splits an input's pairs into rows of at most MAX_ROW tokens; a longer choice gets its own.

    Args:
      lengths: target tokens of each pair.
      members: the input's pairs.
    """
    pieces: list[list[int]] = []
    room = 0
    for pair in members:
        if lengths[pair] > room:
            pieces.append([])
            # A choice longer than MAX_ROW gets a row of its own length.
            room = max(MAX_ROW, lengths[pair])
        pieces[-1].append(pair)
        room -= lengths[pair]
    return tuple(map(tuple, pieces))


def pack(
    own: Sequence[Item], fillers: Sequence[Item], length: int, targets: int
) -> tuple[list[Row], list[Item]]:
    """Packs items into rows that hold `length` input tokens and `targets` target tokens.

    Greedy: each row starts with the largest item left, then repeatedly takes the item that best
      fits the free room in both dimensions. Inputs with many choices and inputs with few thus fill
      each other's rows.

    Args:
      own: items that must all be packed.
      fillers: items that only fill free room; none of them is `alone`.
      length: input tokens per row, at least those of any item.
      targets: target tokens per row, at least those of any item.

    Returns:
      The rows, and the fillers that did not fit.
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
    """Items grouped by (length, targets), so that items of equal size are compared only once."""

    def __init__(self, own: Sequence[Item], fillers: Sequence[Item], length: int, targets: int):
        kinds: dict[tuple[int, int, bool], list[Item]] = {}
        for items, is_own in ((own, True), (fillers, False)):
            for item in items:
                if not item.alone:
                    kinds.setdefault((item.length, item.targets, is_own), []).append(item)
        # The largest first: argmax takes the first of equals
        share = {kind: max(kind[0] / length, kind[1] / targets) for kind in kinds}
        # Own items before fillers, so that `largest` ends where the fillers begin.
        order = sorted(kinds, key=lambda kind: (not kind[2], -share[kind], kind))
        self._items = [kinds[kind] for kind in order]
        self._own = sum(kind[2] for kind in order)
        self._next = 0
        # A size without items left becomes the maximum, so that it never fits (see _take).
        self._length = np.array([kind[0] for kind in order], np.int64)
        self._targets = np.array([kind[1] for kind in order], np.int64)
        self._scale = length, targets

    def largest(self) -> Item | None:
        """Removes and returns the largest item that is not a filler; None if there is none."""
        # Sizes in descending order; `_next` moves on when a size is used up.
        while self._next < self._own:
            if self._items[self._next]:
                return self._take(self._next)
            self._next += 1
        return None

    def best(self, length: int, targets: int) -> Item | None:
        """Removes and returns the item that best fits the free room; None if nothing fits."""
        fits = (self._length <= length) & (self._targets <= targets)
        if not fits.any():
            return None
        # The dot product of an item's size and the free room, each as a share of a row: a row with
        # much room for inputs takes long inputs, one with much room for targets many choices.
        weights = length / self._scale[0] ** 2, targets / self._scale[1] ** 2
        value = np.where(fits, self._length * weights[0] + self._targets * weights[1], -1)
        return self._take(int(value.argmax()))

    def left(self) -> list[Item]:
        """The items that were not taken."""
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
