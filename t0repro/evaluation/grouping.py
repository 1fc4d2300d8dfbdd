"""Groups pairs into batches of few shapes with little padding, chosen from the data.

A batch has encoder rows of packed inputs (see below), all of one length, and decoder rows of
their choices, all of another, so that each input is encoded once for all its choices. Row lengths
minimize the estimated cost on the available data. They come from a small set shared by all plans,
so that plans made one by one compile few shapes in total.

One device computes one batch at a time. Equal batches give bitwise equal scores, so plans do not
depend on the number of devices or on what was scored before.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from t0repro.evaluation.packing import Item, Row, pack, split_into_pieces
from t0repro.evaluation.pairs import Pairs
from t0repro.model.shapes import Int

# Row lengths are powers of two times these, and for targets half as much again: 16, 24, 32, 48.
SHORTEST_INPUTS, SHORTEST_TARGETS = 32, 16
# Cost of one more shape, in encoder tokens: about what a CPU computes with a small T5 while XLA
# compiles it.
TOKENS_PER_SHAPE = 4096
# A decoder token costs this many encoder tokens (attention to the inputs, logits), and a token in a
# row of length n costs 1 + n / ATTENTION_LENGTH. Measured with T5 1.1 small on a CPU: 1.9, and
# 257, 281, 309, 363 microseconds at n = 64, 128, 256, 512.
TARGET_COST = 2.0
ATTENTION_LENGTH = 1100
MAX_INPUT_LEVELS, MAX_TARGET_LEVELS = 8, 4
# Shortest rows to try; each further length is twice the one before.
_SHORTEST_ROWS = (32, 64, 128, 256, 512)
_MOST_CUTS = 64  # candidate boundaries between groups; bounds the search's quadratic cost
_FILLED = 0.95  # assumed fill of packed rows when estimating costs
_MORE = (1, 1.15, 1.3, 1.5, 1.75, 2.0)  # multiples of the estimated target tokens per row, to try
_SAMPLE = 1500  # about how many inputs to try them on


# eq=False: a generated __eq__ fails, since comparing arrays gives an array, not a bool.
@dataclasses.dataclass(frozen=True, eq=False)
class DecoderRows:
    """The decoder's rows of a batch: one row of choices for each row of inputs.

    Attributes:
      targets: token ids, 0 at padding.
      segments: segment ids, 1, 2, ... by choice; 0 at padding.
      reads: the input segment that each token's choice belongs to; 0 at padding.
      pair: the pair that each token belongs to; -1 at padding.
    """

    targets: Int[np.ndarray, "batch length"]
    segments: Int[np.ndarray, "batch length"]
    reads: Int[np.ndarray, "batch length"]
    pair: Int[np.ndarray, "batch length"]


@dataclasses.dataclass(frozen=True, eq=False)
class TextRows:
    """Rows of a model without an encoder, which reads a pair's input and choice as one text.

    Attributes:
      texts: token ids, 0 at padding.
      segments: segment ids, 1, 2, ... by text; 0 at padding.
      full_attention: 1 where a prefix LM attends in both directions (T5X's
        decoder_causal_attention): at an input and at the position that reads its last token.
      pair: the pair that each choice's token belongs to; -1 at inputs and padding.
    """

    texts: Int[np.ndarray, "batch length"]
    segments: Int[np.ndarray, "batch length"]
    full_attention: Int[np.ndarray, "batch length"]
    pair: Int[np.ndarray, "batch length"]


@dataclasses.dataclass(frozen=True, eq=False)
class PlannedBatch:
    """Rows of inputs to encode together, with the choices to decode for each.

    Attributes:
      rows: the packed rows, at most `size`.
      size: number of rows of the arrays; rows beyond `rows` are padding.
      inputs_length: tokens in a row of inputs, padding included.
      targets_length: tokens in a row of targets, padding included.
    """

    rows: tuple[Row, ...]
    size: int
    inputs_length: int
    targets_length: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Rows, input tokens of a row and target tokens of a row."""
        return self.size, self.inputs_length, self.targets_length

    def digest(self, pairs: Pairs) -> bytes:
        """16-byte digest of everything that determines the batch's scores but model and device."""
        digest = hashlib.blake2b(repr(self.shape).encode(), digest_size=16)
        for row in self.rows:
            for piece in row.pieces:
                digest.update(b"".join(pairs.digest(pair) for pair in piece) + b";")
        return digest.digest()

    @property
    def pairs(self) -> Int[np.ndarray, " pairs"]:
        """The pairs that the batch scores."""
        return np.array([p for row in self.rows for piece in row.pieces for p in piece], np.int64)

    def halves(self) -> tuple[PlannedBatch, PlannedBatch]:
        """Splits the rows into two batches of half the size, rounded up."""
        size = (self.size + 1) // 2
        first, second = self.rows[:size], self.rows[size:]
        return dataclasses.replace(self, rows=first, size=size), dataclasses.replace(
            self, rows=second, size=size
        )

    def inputs(
        self, pairs: Pairs
    ) -> tuple[Int[np.ndarray, "batch length"], Int[np.ndarray, "batch length"]]:
        """Token ids and segment ids of the inputs: int32 [size, inputs_length] each."""
        ids = np.zeros((self.size, self.inputs_length), np.int32)
        segments = np.zeros_like(ids)
        for at, row in enumerate(self.rows):
            start = 0
            # Segments count from 1; 0 is padding.
            for segment, number in enumerate(row.inputs, 1):
                tokens = pairs.inputs[number]
                place = slice(start, start := start + len(tokens))
                ids[at, place], segments[at, place] = tokens, segment
        return ids, segments

    def decoder_rows(self, pairs: Pairs) -> list[DecoderRows]:
        """The rows of choices; nearly always one element, more if an input has very many."""
        count = max(len(row.pieces) for row in self.rows)
        return [self._piece(pairs, piece) for piece in range(count)]

    def text_rows(self, pairs: Pairs) -> list[TextRows]:
        """Rows of a model without an encoder: every pair's input, repeated, and choice.

        Each planned row becomes rows of one length, of which each array has one.
        """
        length = self.inputs_length + self.targets_length
        split = [_split_texts(pairs, row, length) for row in self.rows]
        count = max(map(len, split))
        return [
            self._texts(pairs, [texts[at] if at < len(texts) else () for texts in split])
            for at in range(count)
        ]

    def _texts(self, pairs: Pairs, members: Sequence[Sequence[int]]) -> TextRows:
        shape = (self.size, self.inputs_length + self.targets_length)
        ids, segments, full_attention = (np.zeros(shape, np.int32) for _ in range(3))
        owner = np.full(shape, -1, np.int64)
        for at, row in enumerate(members):
            start = 0
            for segment, pair in enumerate(row, 1):
                source, target = pairs.inputs[pairs.input_of[pair]], pairs.targets[pair]
                choice = start + len(source)
                end = choice + len(target)
                ids[at, start:choice], ids[at, choice:end] = source, target
                segments[at, start:end], owner[at, choice:end] = segment, pair
                full_attention[at, start : choice + 1] = 1
                start = end
        return TextRows(ids, segments, full_attention, owner)

    def _piece(self, pairs: Pairs, piece: int) -> DecoderRows:
        shape = (self.size, self.targets_length)
        targets, segments, reads = (np.zeros(shape, np.int32) for _ in range(3))
        owner = np.full(shape, -1, np.int64)
        for at, row in enumerate(self.rows):
            source = {number: segment for segment, number in enumerate(row.inputs, 1)}
            start = 0
            for segment, pair in enumerate(row.pieces[piece] if piece < len(row.pieces) else (), 1):
                tokens = pairs.targets[pair]
                place = slice(start, start := start + len(tokens))
                targets[at, place], segments[at, place] = tokens, segment
                reads[at, place] = source[int(pairs.input_of[pair])]
                owner[at, place] = pair
        return DecoderRows(targets, segments, reads, owner)


def _split_texts(pairs: Pairs, row: Row, length: int) -> list[list[int]]:
    """A row's pairs, by rows of at most `length` tokens of inputs and choices."""
    rows: list[list[int]] = []
    room = 0
    for pair in (pair for piece in row.pieces for pair in piece):
        tokens = len(pairs.inputs[pairs.input_of[pair]]) + len(pairs.targets[pair])
        if not rows or tokens > room:
            rows.append([])
            room = length
        rows[-1].append(pair)
        room -= tokens
    return rows


@dataclasses.dataclass(frozen=True, eq=False)
class Batching:
    """The batches of a window, largest first, so that memory runs out early or never.

    Attributes:
      batches: the batches, in the order to run them.
      input_tokens: tokens of the distinct inputs, without padding.
      target_tokens: tokens of the choices, without padding.
      padded_inputs: entries of all input arrays, padding included.
      padded_targets: entries of all target arrays, padding included.
    """

    batches: tuple[PlannedBatch, ...]
    input_tokens: int
    target_tokens: int
    padded_inputs: int
    padded_targets: int

    @property
    def shapes(self) -> set[tuple[int, int, int]]:
        """The distinct shapes to compile: (size, inputs_length, targets_length)."""
        return {batch.shape for batch in self.batches}

    @property
    def padding(self) -> float:
        """Fraction of all entries that are padding, in [0, 1]."""
        entries = self.padded_inputs + self.padded_targets
        return 1 - (self.input_tokens + self.target_tokens) / entries if entries else 0.0


def make_batching(
    pairs: Pairs, tokens_per_batch: int, todo: Int[np.ndarray, " todo"] | None = None
) -> Batching:
    """Groups pairs into batches of few shapes.

    Args:
      pairs: the distinct pairs.
      tokens_per_batch: maximum input entries of a batch, padding included, as one device computes
        it; targets get a quarter of that, since each target's logits have the vocabulary's size. A
        batch has at least one row, whatever the limit.
      todo: the pairs to score; None for all. Pairs with an empty target are left out (their score
        is 0).
    """
    items = _items(pairs, np.arange(len(pairs)) if todo is None else todo)
    batches: list[PlannedBatch] = []
    waiting = {item.number: item for item in items}
    for shape in reversed(choose_shapes(items)):  # long rows first: short inputs fill them up
        # Some items are packed already: they filled up rows of a longer shape.
        own = [waiting.pop(n) for n in (items[at].number for at in shape.members) if n in waiting]
        fillers = [item for item in waiting.values() if shape.holds(item)]
        targets = _best_targets(own, shape)
        rows, left = pack(own, fillers, shape.length, targets)
        for number in {item.number for item in fillers} - {item.number for item in left}:
            del waiting[number]
        batches += _batches(rows, tokens_per_batch, shape.length)
    batches.sort(key=lambda batch: (-_cost(batch), batch.shape))
    return Batching(
        batches=tuple(batches),
        input_tokens=sum(len(pairs.inputs[item.number]) for item in items),
        target_tokens=sum(
            len(pairs.targets[p]) for item in items for piece in item.pieces for p in piece
        ),
        padded_inputs=sum(batch.size * batch.inputs_length for batch in batches),
        padded_targets=sum(
            batch.size * batch.targets_length * max(len(row.pieces) for row in batch.rows)
            for batch in batches
        ),
    )


def join_batchings(plans: Sequence[Batching]) -> Batching:
    """Merges plans of different pairs into one, grouping batches by shape."""
    batches = [batch for plan in plans for batch in plan.batches]
    return Batching(
        # Batches with the most computation first; equal shapes stay in the plans' order.
        tuple(sorted(batches, key=lambda batch: (-_cost(batch), batch.shape))),
        *(
            sum(getattr(plan, name) for plan in plans)
            for name in ("input_tokens", "target_tokens", "padded_inputs", "padded_targets")
        ),
    )


def side_by_side(batches: Iterable[PlannedBatch], parts: int) -> Iterator[PlannedBatch]:
    """Merges consecutive batches of one shape, so that each of `parts` devices gets one.

    Each device then computes arrays of the planned shape, however many devices there are.
    """
    empty = Row((), ((),), 0, 0)
    for _, alike in itertools.groupby(batches, lambda batch: batch.shape):
        while together := list(itertools.islice(alike, parts)):
            rows = [(*b.rows, *[empty] * (b.size - len(b.rows))) for b in together]
            whole = dataclasses.replace(
                together[0], rows=tuple(itertools.chain(*rows)), size=parts * together[0].size
            )
            yield whole if parts > 1 else together[0]


def _cost(batch: PlannedBatch) -> int:
    # A target counts as four inputs, as in the limits of `make_batching`.
    return batch.size * (batch.inputs_length + 4 * batch.targets_length)


def _items(pairs: Pairs, todo: Int[np.ndarray, " todo"]) -> list[Item]:
    """The items to pack: each input with pairs to score, and those pairs."""
    lengths = [len(target) for target in pairs.targets]
    group_by_input: dict[int, list[int]] = {}
    for pair in todo:
        if lengths[pair]:
            group_by_input.setdefault(int(pairs.input_of[pair]), []).append(int(pair))
    items = []
    for number, members in group_by_input.items():
        # Nearly always one piece; only inputs with very many choices have more.
        pieces = split_into_pieces(lengths, members)
        length = len(pairs.inputs[number])
        targets = max(sum(lengths[pair] for pair in piece) for piece in pieces)
        # An empty input has no segment for its choices to attend to if it shares a row.
        alone = len(pieces) > 1 or length == 0
        items.append(Item(number, max(length, 1), pieces, targets, alone))
    return items


@dataclasses.dataclass(frozen=True, eq=False)
class Shape:
    """A row shape and the items assigned to it.

    Attributes:
      length: input tokens per row.
      targets: target tokens per row.
      members: indices of the items.
    """

    length: int
    targets: int
    members: Int[np.ndarray, " members"]

    def holds(self, item: Item) -> bool:
        """Whether an item fits in a row and leaves room for another."""
        return not item.alone and item.length < self.length and item.targets < self.targets


def choose_shapes(items: Sequence[Item]) -> list[Shape]:
    """Chooses the cheapest row shapes for the available data, shortest rows first.

    Long rows pack more tightly and need fewer shapes; short ones spend less on attention. Costs are
    estimated from sums, without packing.
    """
    if not items:
        return []
    length = np.array([item.length for item in items])
    targets = np.array([item.targets for item in items])
    found = (_shapes(length, targets, rows) for rows in _row_lengths(int(length.max())))
    return min(found, key=lambda found: found[0])[1]


def _row_lengths(longest: int) -> Iterator[list[int]]:
    """Yields sets of row lengths to try, ascending, each with room for the longest input."""
    last = int(2 ** np.ceil(np.log2(max(longest, SHORTEST_INPUTS))))
    yield [last]
    for shortest in _SHORTEST_ROWS:
        found = []
        while shortest < last and len(found) < MAX_INPUT_LEVELS - 1:
            found.append(shortest)
            shortest *= 2
        if found:
            yield [*found, last]
        if shortest <= 2 * last:  # longer than needed, but packs better
            yield [*found, shortest]


def _shapes(
    length: Int[np.ndarray, " items"],
    targets: Int[np.ndarray, " items"],
    row_lengths: Sequence[int],
) -> tuple[float, list[Shape]]:
    """Estimated cost, in encoder tokens, and shapes for these row lengths."""
    level = np.searchsorted(row_lengths, length)
    cost, shapes = 0.0, []
    for at, row_length in enumerate(row_lengths):
        members = np.flatnonzero(level == at)
        if members.size:
            members = members[np.argsort(targets[members], kind="stable")]
            more, found = _split(length[members], targets[members], row_length)
            cost += more
            shapes += [Shape(row_length, n, members[start:end]) for n, start, end in found]
    return cost, shapes


def _split(
    length: Int[np.ndarray, " items"], targets: Int[np.ndarray, " items"], row_length: int
) -> tuple[float, list[tuple[int, int, int]]]:
    """Splits items, ascending by targets, into the cheapest groups.

    Returns:
      The cost in encoder tokens, and for each group (target tokens per row, first item, end).
    """
    # Dynamic programming: best[k, end] is the least cost of the items before cuts[end] in k groups.
    # Cuts lie where the number of targets changes; if there are too many, keep every n-th.
    cuts = np.flatnonzero(np.diff(targets, prepend=-1))
    cuts = np.append(cuts[:: -(-len(cuts) // _MOST_CUTS)], len(targets))
    # Prefix sums: a group's total is the difference of two entries.
    sums = [np.concatenate([[0], np.cumsum(x)]) for x in (length, targets, 2 * length > row_length)]
    inputs, outputs, halves = (total[cuts] for total in sums)
    attention = 1 + row_length / ATTENTION_LENGTH
    n = len(cuts) - 1
    best = np.full((MAX_TARGET_LEVELS + 1, n + 1), np.inf)
    best[0, 0] = 0
    cut = np.zeros((MAX_TARGET_LEVELS + 1, n + 1), np.int64)
    size = np.zeros((n + 1, n + 1), np.int64)
    for end in range(1, n + 1):
        used, filled = inputs[end] - inputs[:end], outputs[end] - outputs[:end]
        # At least the most target tokens of any item; above that, in proportion to the inputs.
        size[:end, end] = _round_up_targets(
            np.maximum(targets[cuts[end] - 1], row_length * filled / used)
        )
        # Two inputs longer than half a row cannot share one, however full rows are on average.
        rows = np.maximum(used / (_FILLED * row_length), halves[end] - halves[:end])
        rows = np.maximum(rows, filled / (_FILLED * size[:end, end]))
        cost = rows * (row_length + TARGET_COST * size[:end, end]) * attention + TOKENS_PER_SHAPE
        for level in range(1, MAX_TARGET_LEVELS + 1):
            total = best[level - 1, :end] + cost
            cut[level, end] = int(total.argmin())
            best[level, end] = total[cut[level, end]]
    # Trace back from the last item to the first, along the cuts of least cost.
    level, end, found = int(best[:, n].argmin()), n, []
    cost = float(best[level, n])
    while end:
        start = int(cut[level, end])
        found.append((int(size[start, end]), int(cuts[start]), int(cuts[end])))
        level, end = level - 1, start
    return cost, found[::-1]


def _best_targets(own: Sequence[Item], shape: Shape) -> int:
    """Target tokens per row: the estimate, or more if a sample of the items packs better then."""
    sample = [item for item in own if not item.alone][:: len(own) // _SAMPLE + 1]

    def cost(targets: int) -> float:
        rows, _ = pack(sample, (), shape.length, targets)
        return len(rows) * (shape.length + TARGET_COST * targets)

    tried = {int(_round_up_targets(np.array(shape.targets * more))) for more in _MORE}
    return min(sorted(tried), key=cost) if sample else shape.targets


def _batches(rows: Sequence[Row], tokens: int, length: int) -> list[PlannedBatch]:
    """Splits rows into batches as large as the limit allows; the last gets the smallest size."""
    if not rows:
        return []
    targets = int(_round_up_targets(np.array(max(row.targets for row in rows))))
    limit = max(min(tokens // length, tokens // (4 * targets)), 1)
    batches = []
    for start in range(0, len(rows), limit):
        part = tuple(rows[start : start + limit])
        # Few sizes: the limit, three quarters of it, half, three eighths, and so on.
        sizes = (-(-limit * share // 2**halved) for halved in range(2, 40) for share in (4, 3))
        size = min(size for size in sizes if size >= len(part))
        batches.append(PlannedBatch(part, size, length, targets))
    return batches


def _round_up_targets(targets: np.ndarray) -> Int[np.ndarray, " lengths"]:
    """Rounds numbers of target tokens up to row lengths."""
    targets = np.maximum(targets, SHORTEST_TARGETS)
    power = 2.0 ** np.ceil(np.log2(targets))
    return np.where(0.75 * power >= targets, 0.75 * power, power).astype(np.int64)
