"""Plans which fixed program scores each pair, so that its score has the same bits in any company.

A program computes a row alike in any place and beside any others, and only its shape changes bits.
So each input and each choice has a row of its own, and its length alone decides the shape:

    microbatch      inputs of one length class, always as many rows as the class has
    decoder batch   choices of one class, always as many rows as it has with these keys and values;
                    each row reads those of its input, in any of the last microbatches

Lengths are padded to few classes, and the last batch of a class with empty rows. On several devices
each computes batches of these same shapes. A model without an encoder reads an input and a choice
as one text, which is then all that has a length.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from t0repro.evaluation.pairs import Pairs
from t0repro.model.shapes import Int

SHORTEST_INPUT, SHORTEST_CHOICE, SHORTEST_MEMORY = 32, 2, 64


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How much one device computes at once, which decides the programs' numbers of rows.

    Attributes:
      inputs: tokens of a microbatch, padding included; an input that is longer is alone.
      memory: tokens of keys and values in a decoder batch, over all of its rows.
    """

    inputs: int = 512
    memory: int = 8192

    def input_rows(self, length: int) -> int:
        """Rows of a microbatch of this length, or of a batch of texts."""
        return max(1, self.inputs // length)

    def page(self, memory: int) -> int:
        """Tokens of keys and values that a microbatch may give."""
        return max(self.inputs, memory)

    def pages(self, memory: int) -> int:
        """Microbatches whose keys and values are on the device, for choices to read."""
        return max(1, self.memory // self.page(memory))

    def choice_rows(self, length: int, memory: int) -> int:
        """Rows of a decoder batch of this length that read inputs of up to `memory` tokens."""
        return max(1, min(self.memory // 32 // length, self.memory // memory))

    def halve(self) -> Sizes:
        """Sizes of half as much at once."""
        return Sizes(self.inputs // 2, self.memory // 2)


def input_class(tokens: int) -> int:
    """The padded length of an input: 32, 48, 64, 80, ..., 128, 160, ..., 256, 320 and so on."""
    return _round_up(max(tokens, SHORTEST_INPUT), max(16, _power_below(tokens) // 4))


def choice_class(tokens: int) -> int:
    """The padded length of a choice: 2, 4, 8, 16, 24, 32, 48, 64, 96 and so on."""
    if tokens <= 2 * SHORTEST_CHOICE:
        return _round_up(max(tokens, 1), SHORTEST_CHOICE)
    return _round_up(tokens, max(8, _power_below(tokens) // 2))


def memory_class(length: int) -> int:
    """The number of keys and values that choices of an input of this length read: 64, 128, ..."""
    return max(SHORTEST_MEMORY, 2 * _power_below(length))


def _power_below(number: int) -> int:
    """The largest power of two that is smaller, at least 1."""
    return 1 << max(0, (number - 1).bit_length() - 1)


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step


# eq=False: a generated __eq__ fails, since comparing arrays gives an array, not a bool.
@dataclasses.dataclass(frozen=True, eq=False)
class Microbatch:
    """Inputs that are encoded together, a row for each, on each device as many rows.

    Attributes:
      inputs: the inputs' numbers, by device and row; -1 at empty rows.
      length: tokens of a row, padding included.
      start: where the keys and values of its rows are kept on each device, in tokens.
    """

    inputs: Int[np.ndarray, "parts rows"]
    length: int
    start: int

    @property
    def shape(self) -> tuple[int, int]:
        """Rows on a device, and tokens of a row."""
        return self.inputs.shape[1], self.length

    def arrays(self, pairs: Pairs) -> tuple[np.ndarray, np.ndarray]:
        """Token ids [parts, rows, length], and each row's number of tokens [parts, rows]."""
        return _pad([pairs.inputs[n] if n >= 0 else () for n in self.inputs.flat],
                    self.inputs.shape, self.length)  # fmt: skip


@dataclasses.dataclass(frozen=True, eq=False)
class DecoderBatch:
    """Choices that are scored together, a row for each, on each device as many rows.

    Attributes:
      pairs: their numbers, by device and row; -1 at empty rows.
      length: tokens of a row, padding included.
      memory: keys and values that a row reads, padding included.
      microbatches: where the inputs are. No batch reads one after another was kept in its place.
      kept: tokens of keys and values that are kept on a device.
      starts: where those of each row begin. Behind all is zero, which an empty input reads.
    """

    pairs: Int[np.ndarray, "parts rows"]
    length: int
    memory: int
    microbatches: tuple[Microbatch, ...]
    kept: int
    starts: Int[np.ndarray, "parts rows"]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Rows on a device, tokens of a row, and keys and values that it reads."""
        return self.pairs.shape[1], self.length, self.memory

    def arrays(self, pairs: Pairs) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Token ids [parts, rows, length], `starts`, and each input's number of tokens."""
        targets, _ = _pad([pairs.targets[n] if n >= 0 else () for n in self.pairs.flat],
                          self.pairs.shape, self.length)  # fmt: skip
        read = [len(pairs.inputs[pairs.input_of[n]]) if n >= 0 else 0 for n in self.pairs.flat]
        return targets, self.starts, np.array(read, np.int32).reshape(self.pairs.shape)


@dataclasses.dataclass(frozen=True, eq=False)
class TextBatch:
    """Pairs that a model without an encoder reads together, each in a row of its own.

    Attributes:
      pairs: their numbers, by device and row; -1 at empty rows.
      length: tokens of a row, padding included.
      microbatches: none.
    """

    pairs: Int[np.ndarray, "parts rows"]
    length: int
    microbatches: tuple[Microbatch, ...] = ()

    @property
    def shape(self) -> tuple[int, int]:
        """Rows on a device, and tokens of a row."""
        return self.pairs.shape[1], self.length

    def arrays(self, pairs: Pairs) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Token ids [parts, rows, length], and each row's number of tokens and of the input's."""
        texts = [
            np.concatenate([pairs.inputs[pairs.input_of[n]], pairs.targets[n]]) if n >= 0 else ()
            for n in self.pairs.flat
        ]
        ids, lengths = _pad(texts, self.pairs.shape, self.length)
        read = [len(pairs.inputs[pairs.input_of[n]]) if n >= 0 else 0 for n in self.pairs.flat]
        return ids, lengths, np.array(read, np.int32).reshape(self.pairs.shape)


def _pad(texts: Sequence, rows: tuple[int, ...], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Token ids in rows of one length, and how many each has."""
    ids = np.zeros((len(texts), length), np.int32)
    for row, text in zip(ids, texts, strict=True):
        row[: len(text)] = text
    lengths = np.array([len(text) for text in texts], np.int32)
    return ids.reshape(*rows, length), lengths.reshape(rows)


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """What scores some pairs.

    Attributes:
      sizes: how much a device computes at once.
      batches: in the order to run them, the longest inputs first, so that memory runs out early or
        never.
      input_tokens: tokens of the distinct inputs, without padding; of a model without an encoder,
        one for each pair.
      target_tokens: tokens of the choices, without padding.
      padded_inputs: entries of all arrays of inputs, padding included.
      padded_targets: entries of all arrays of choices, likewise.
      programs: what is compiled: the shapes of microbatches, and of the other batches.
    """

    sizes: Sizes
    batches: tuple[DecoderBatch | TextBatch, ...]
    input_tokens: int
    target_tokens: int
    padded_inputs: int
    padded_targets: int
    programs: frozenset[tuple[int, ...]]

    @property
    def padding(self) -> float:
        """Fraction of all entries that are padding, in [0, 1]."""
        entries = self.padded_inputs + self.padded_targets
        return 1 - (self.input_tokens + self.target_tokens) / entries if entries else 0.0


def make_plan(
    pairs: Pairs,
    sizes: Sizes,
    parts: int = 1,
    todo: Int[np.ndarray, " todo"] | None = None,
    *,
    decoder_only: bool = False,
) -> Plan:
    """Groups pairs into batches of the programs that their lengths decide.

    Args:
      pairs: the distinct pairs.
      sizes: how much a device computes at once.
      parts: number of devices that share the rows.
      todo: the pairs to score; None for all. Pairs with an empty target are left out (their score
        is 0).
      decoder_only: whether the model has no encoder.
    """
    numbers = range(len(pairs)) if todo is None else todo.tolist()
    numbers = [number for number in numbers if len(pairs.targets[number])]
    batches: list[DecoderBatch | TextBatch]
    if decoder_only:
        batches = list(_text_batches(pairs, numbers, sizes, parts))
        read = [int(pairs.input_of[number]) for number in numbers]
    else:
        batches = list(_decoder_batches(pairs, numbers, sizes, parts))
        read = list({int(pairs.input_of[number]) for number in numbers})
    microbatches = {each for batch in batches for each in batch.microbatches}
    arrays = [(each.inputs, each.length) for each in microbatches]
    arrays += [(each.pairs, each.length) for each in batches if decoder_only]
    choices = [(each.pairs, each.length) for each in batches if not decoder_only]
    return Plan(
        sizes,
        tuple(batches),
        input_tokens=sum(len(pairs.inputs[number]) for number in read),
        target_tokens=sum(len(pairs.targets[number]) for number in numbers),
        padded_inputs=sum(rows.size * length for rows, length in arrays),
        padded_targets=sum(rows.size * length for rows, length in choices),
        programs=frozenset(each.shape for each in (*microbatches, *batches)),
    )


def _text_batches(
    pairs: Pairs, numbers: Sequence[int], sizes: Sizes, parts: int
) -> Iterator[TextBatch]:
    classes: dict[int, list[int]] = {}
    for number in numbers:
        tokens = len(pairs.inputs[pairs.input_of[number]]) + len(pairs.targets[number])
        classes.setdefault(input_class(tokens), []).append(number)
    for length, members in sorted(classes.items(), reverse=True):
        for rows in _split(members, parts, sizes.input_rows(length)):
            yield TextBatch(rows, length)


Choices = dict[int, dict[int, list[int]]]
"""The pairs of each input, by the class of their choices."""


def _decoder_batches(
    pairs: Pairs, numbers: Sequence[int], sizes: Sizes, parts: int
) -> Iterator[DecoderBatch]:
    choices: Choices = {}
    for number in numbers:
        length = choice_class(len(pairs.targets[number]))
        of_input = choices.setdefault(int(pairs.input_of[number]), {})
        of_input.setdefault(length, []).append(number)
    classes: dict[int, list[int]] = {}
    for number in choices:
        classes.setdefault(input_class(len(pairs.inputs[number])), []).append(number)
    for memory, lengths in itertools.groupby(sorted(classes, reverse=True), memory_class):
        rows_of_inputs = (
            (rows, length)
            for length in lengths
            # Inputs with choices of the same classes side by side, which then come together.
            for rows in _split(
                sorted(classes[length], key=lambda number: sorted(choices[number])),
                parts,
                sizes.input_rows(length),
            )
        )
        page, pages = sizes.page(memory), sizes.pages(memory)
        microbatches = [
            Microbatch(rows, length, at % pages * page)
            for at, (rows, length) in enumerate(rows_of_inputs)
        ]
        yield from _group_choices(pairs, microbatches, choices, sizes, memory)


def _split(numbers: Sequence[int], parts: int, rows: int) -> Iterator[np.ndarray]:
    """Arrays [parts, rows] of numbers, with -1 in the last one's empty rows."""
    for start in range(0, len(numbers), parts * rows):
        found = np.full(parts * rows, -1)
        some = numbers[start : start + parts * rows]
        found[: len(some)] = some
        yield found.reshape(parts, rows)


def _group_choices(
    pairs: Pairs,
    microbatches: Sequence[Microbatch],
    choices: Choices,
    sizes: Sizes,
    memory: int,
) -> Iterator[DecoderBatch]:
    """The choices of inputs that have as many keys and values, in the order of the microbatches."""
    filling: dict[int, _Filling] = {}
    pages = sizes.pages(memory)
    kept = pages * sizes.page(memory)
    for at, microbatch in enumerate(microbatches):
        parts = len(microbatch.inputs)
        for (part, row), number in np.ndenumerate(microbatch.inputs):
            start = microbatch.start + row * microbatch.length
            if number >= 0 and not len(pairs.inputs[number]):
                start = kept
            for length, members in choices.get(int(number), {}).items():
                for pair in members:
                    rows = sizes.choice_rows(length, memory)
                    batch = filling.setdefault(length, _Filling(at, rows, parts))
                    if not batch.has_room(part):
                        yield batch.batch(length, memory, kept)
                        batch = filling[length] = _Filling(at, rows, parts)
                    batch.add(part, pair, start, microbatch)
        # The next microbatch takes the place of the first one of these.
        for length in [each for each, batch in filling.items() if at - batch.first >= pages - 1]:
            yield filling.pop(length).batch(length, memory, kept)
    for length, batch in filling.items():
        yield batch.batch(length, memory, kept)


class _Filling:
    """A decoder batch that has room left.

    Args:
      first: the place of its first microbatch.
      rows: rows on each device.
      parts: number of devices.
    """

    def __init__(self, first: int, rows: int, parts: int):
        self.first = first
        self._microbatches: dict[Microbatch, None] = {}  # a set in order
        self._taken = [0] * parts
        self._pairs, self._starts = np.full((parts, rows), -1), np.zeros((parts, rows), np.int32)

    def has_room(self, part: int) -> bool:
        """Whether a device has an empty row."""
        return self._taken[part] < self._pairs.shape[1]

    def add(self, part: int, pair: int, start: int, microbatch: Microbatch) -> None:
        """Puts a pair into a device's next row."""
        row = self._taken[part]
        self._pairs[part, row], self._starts[part, row] = pair, start
        self._taken[part] += 1
        self._microbatches[microbatch] = None

    def batch(self, length: int, memory: int, kept: int) -> DecoderBatch:
        """The batch, with empty rows where there is room left."""
        return DecoderBatch(
            self._pairs, length, memory, tuple(self._microbatches), kept, self._starts
        )
