"""Training batches of several tasks made with numpy only: mixed at rates, shuffled and packed.

The batches equal SeqIO's entry by entry: examples, their truncation and packing and, with the same
seed and rates, their order. Mesh TensorFlow's batches are also the same if each
example has tokens in both features, except that it puts EOS at the end of a row whose targets it
truncates.
"""

from __future__ import annotations

import abc
import ctypes
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from t0repro.data.resuming import Batch, ResumableBatches
from t0repro.errors import UserError

FEATURES = ("inputs", "targets")
HELD = 10_000
"""SeqIO keeps a task of fewer examples than this in memory, for each shard."""
_SHUFFLED = 1000  # size of the shuffle buffer, as in SeqIO
_ORDER = "tf.data"  # earlier versions sampled with numpy's generator, and recorded no order

Example = dict[str, np.ndarray]
Item = TypeVar("Item")


class MixedBatches(ResumableBatches):
    """Endless training batches of tasks; a subclass reads their examples (`_epochs`).

    A resumed run continues after its last batch: with the checkpoint's seed, the batches before it
    are rebuilt and skipped.

    Args:
      rates: The rate of each task, in SeqIO's order of tasks.
      sequence_length: Tokens per row of `inputs` and of `targets`; longer examples are truncated.
      batch_size: Rows in a batch.
      split: The split to read.
      pack: Whether a row holds as many examples as fit.
      shuffle: Whether examples come in SeqIO's random order, or in the order of the data.
      seed: Seed for the order; None picks one, which checkpoints record.
      num_shards: Number of shards of the examples, each of which makes an equal part of the rows.
    """

    def __init__(
        self,
        rates: Mapping[str, float],
        sequence_length: Mapping[str, int],
        batch_size: int,
        *,
        split: str,
        pack: bool,
        shuffle: bool,
        seed: int | None,
        num_shards: int,
    ):
        if absent := [name for name in FEATURES if name not in sequence_length]:
            raise UserError(
                f"The lengths lack {' and '.join(absent)}.",
                where="sequence_length",
                fix="Give a length for each of inputs and targets.",
            )
        if batch_size < 1:
            raise UserError(
                f"A batch cannot have {batch_size} rows.",
                where="batch_size",
                fix="Give at least 1.",
            )
        if not all(0 <= rate < math.inf for rate in rates.values()) or not any(rates.values()):
            raise UserError(
                f"The rates are {[*rates.values()]}.",
                where="folders",
                fix="Give each task a finite rate of at least 0, and one of them more than 0.",
            )
        self._rates = dict(rates)
        self._lengths = {name: sequence_length[name] for name in FEATURES}
        self._batch_size, self._split = batch_size, split
        self._pack, self._shuffle = pack, shuffle
        super().__init__(seed, num_shards)

    @abc.abstractmethod
    def _epochs(self, task: str, seed: int, shard: int) -> Iterator[Iterator[Example]]:
        """The examples of a task's shard, of one epoch after the other without end."""

    def _position(self, saved: Any) -> dict[str, Any]:
        # Without a checkpoint there is no position to resume, and nothing to report about it.
        return {} if saved is None else super()._position(saved)

    def _to_numpy(self, element: Mapping[str, Any]) -> Batch:
        return dict(element)

    def _arguments(self) -> dict[str, Any]:
        return {
            "split": self._split,
            "sequence_length": self._lengths,
            "batch_size": self._batch_size,
            "pack": self._pack,
            "shuffle": self._shuffle,
            "num_shards": self.num_shards,
        } | ({"order": _ORDER} if self._shuffle or len(self._rates) > 1 else {})

    # ---- From examples to batches ---------------------------------------------------------------

    def dataset(self, seed: int, shard: int = 0) -> Iterator[Batch]:
        """Endless batches of a shard for a seed; see `ResumableBatches`."""
        return self._batches(self._rows(seed, shard), self._batch_size // self.num_shards)

    def first(self, count: int) -> Iterator[Batch]:
        """The first batches for an evaluation, without shuffling, as `EvalBatches` takes them.

        Each task is repeated once per row to fill. If packing leaves too few rows, all rows are
        repeated. There are fewer batches only if there is no example.
        """
        assert not self._shuffle and self._seed is not None
        epochs, seed = count * self._batch_size, self._seed
        rows = _until_empty(self._rows(seed, 0, epochs) for _ in itertools.count())
        return itertools.islice(self._batches(rows, self._batch_size), count)

    def epoch(self, seed: int) -> Iterator[Batch]:
        """The rows of one pass through each task, one row a batch."""
        return self._batches(self._rows(seed, 0, 1), 1)

    def _batches(self, in_rows: Iterator[list[Example]], size: int) -> Iterator[Batch]:
        while len(rows := list(itertools.islice(in_rows, size))) == size:
            yield _to_batch(rows, self._lengths, positions=self._pack)

    def _rows(self, seed: int, shard: int, epochs: int | None = None) -> Iterator[list[Example]]:
        """The examples of each row: endless, or of a number of epochs of each task."""
        trimmed = (
            {name: example[name][: self._lengths[name]] for name in FEATURES}
            for example in self._mixed(seed, shard, epochs)
        )
        return packed(trimmed, self._lengths) if self._pack else ([each] for each in trimmed)

    def _mixed(self, seed: int, shard: int, epochs: int | None) -> Iterator[Example]:
        """Examples of all tasks, sampled by the tasks' rates until a sampled task has no more."""
        # SeqIO uses one seed for every task and for sampling, and skips tasks with rate 0.
        rates = {task: rate for task, rate in self._rates.items() if rate}
        tasks = [self._examples(task, seed, shard, epochs) for task in rates]
        if len(tasks) == 1:
            yield from tasks[0]
            return
        for at in draws([*rates.values()], seed):
            example = next(tasks[at], None)
            if example is None:
                return
            yield example

    def _examples(self, task: str, seed: int, shard: int, epochs: int | None) -> Iterator[Example]:
        """A task's examples; if shuffled, sampled from a buffer that spans epochs."""
        examples = _until_empty(itertools.islice(self._epochs(task, seed, shard), epochs))
        # One buffer for all epochs: SeqIO repeats a task before it shuffles the examples.
        return shuffled(examples, _SHUFFLED, ShuffleSeeds(seed)) if self._shuffle else examples


def _until_empty(epochs: Iterable[Iterator[Item]]) -> Iterator[Item]:
    """The items of all epochs; ends with one that has none, as tf.data's repeat does."""
    for epoch in epochs:
        for first in epoch:
            yield first
            yield from epoch
            break
        else:
            return


def packed(examples: Iterator[Example], lengths: Mapping[str, int]) -> Iterator[list[Example]]:
    """The examples of each row: consecutive ones, until one does not fit in both features.

    SeqIO and Mesh TensorFlow pack groups of as many examples as the longer feature has tokens. They
    pack each group separately, so its last row ends with it even if the next example would fit:

        group     1  1  1  1  1  1  2  2  2 ...
        row       1  1  2  2  3  3  4  4  5 ...
                                 ^ ended with the group, not full
    """
    while group := list(itertools.islice(examples, max(lengths.values()))):
        row: list[Example] = []
        room = dict(lengths)
        for example in group:
            if any(len(example[name]) > room[name] for name in FEATURES):
                yield row
                row, room = [], dict(lengths)
            row.append(example)
            room = {name: room[name] - len(example[name]) for name in FEATURES}
        yield row


def _to_batch(
    rows: Sequence[Sequence[Example]], lengths: Mapping[str, int], *, positions: bool
) -> Batch:
    """Rows of examples as arrays, with the features of t0repro.data.batches: int32 [rows, length].

    Args:
      rows: The examples of each row, which fit it.
      lengths: Tokens per row of each feature.
      positions: Whether to add each token's position and segment, as packed rows need.
    """
    batch: Batch = {}
    for name in FEATURES:
        tokens, segments, places = (np.zeros((len(rows), lengths[name]), np.int32) for _ in "123")
        for number, row in enumerate(rows):
            start = 0
            # As SeqIO numbers segments: an example without tokens in this feature has none in it.
            for segment, example in enumerate((each for each in row if len(each[name])), start=1):
                end = start + len(example[name])
                tokens[number, start:end] = example[name]
                segments[number, start:end] = segment
                places[number, start:end] = np.arange(end - start)
                start = end
        batch[name] = tokens
        if positions:
            batch |= {f"{name}_segmentation": segments, f"{name}_position": places}
    return batch


# ---- tf.data's random order, without TensorFlow --------------------------------------------------
#
# Shuffle buffers, and sampling from weighted datasets. Each function samples the numbers that
# TensorFlow 2.21 samples for the same seed on the CPU, so the order is the same, example by example
# (tests/data/test_tf_order.py compares them). All of it uses Philox, a generator that encrypts a
# counter and yields four words of 32 bits at a time.
#
# Sources: tensorflow/core/kernels/data/{shuffle,random,directed_interleave}_dataset_op.cc,
# multinomial_op.cc, stateless_random_ops.cc; tsl/lib/random/philox_random.h; Eigen's plog_float.

_DEFAULT_GRAPH_SEED = 87654321  # TensorFlow's choice if only an operation has a seed
_ROUNDS = 10
_BLOCKS = 512  # Philox blocks per numpy call; the calls take most of the time
_MASK = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def _philox(counters: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Philox4x32-10 of each counter, uint64 [n, 4], with its key, uint64 [n, 2]: words of 32 bits.

    Words are stored in 64 bits, so that their products fit.
    """
    a, b, c, d = counters.T
    k, m = keys.T
    # The constants are Philox4x32's own (Salmon et al. 2011): two factors, and two steps of the
    # key.
    for _ in range(_ROUNDS):
        one, two = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        a, b, c, d = (two >> _SHIFT) ^ b ^ k, two & _MASK, (one >> _SHIFT) ^ d ^ m, one & _MASK
        k, m = (k + np.uint64(0x9E3779B9)) & _MASK, (m + np.uint64(0xBB67AE85)) & _MASK
    return np.stack([a, b, c, d], axis=1)


def _words(number: int) -> list[int]:
    """A 64-bit integer as two words, the lower one first."""
    return [number & 0xFFFFFFFF, (number >> 32) & 0xFFFFFFFF]


def _stream(seed: int, seed2: int) -> Iterator[int]:
    """The words that tf's PhiloxRandom(seed, seed2) yields, without end."""
    key = np.tile(np.array(_words(seed), np.uint64), (_BLOCKS, 1))
    upper = np.tile(np.array(_words(seed2), np.uint64), (_BLOCKS, 1))
    first = 0
    while True:
        places = np.arange(first, first + _BLOCKS, dtype=np.uint64)
        lower = np.stack([places & _MASK, places >> _SHIFT], axis=1)
        yield from _philox(np.concatenate([lower, upper], axis=1), key).ravel().tolist()
        first += _BLOCKS


def _of_operation(seed: int) -> Iterator[int]:
    """The words for a dataset with a seed of its own only, which TensorFlow takes mod 2**31 - 1."""
    return _stream(_DEFAULT_GRAPH_SEED, seed % (2**31 - 1))


class ShuffleSeeds:
    """The seeds of a dataset that is reshuffled at each iteration."""

    def __init__(self, seed: int):
        self._words = _of_operation(seed)

    def __next__(self) -> tuple[int, int]:
        return next(self._words), next(self._words)


def shuffled(items: Iterator[Item], buffer_size: int, seeds: ShuffleSeeds) -> Iterator[Item]:
    """The items in the order of `tf.data.Dataset.shuffle`, each sampled from a buffer.

    Args:
      items: The items; at least a full buffer is read before the first is sampled.
      buffer_size: Number of items in the buffer.
      seeds: Seeds of the dataset; this takes one pair.
    """
    words = _stream(*next(seeds))
    buffer: list[Item] = []
    for item in items:
        buffer.append(item)
        if len(buffer) == buffer_size:
            break
    # The buffer is a ring: the sampled item swaps places with the first, which then leaves.
    size, start, filled = len(buffer), 0, len(buffer)
    while filled:
        index = (start + next(words) % filled) % size
        drawn = buffer[index]
        buffer[index] = buffer[start]
        yield drawn
        try:
            buffer[start] = next(items)
        except StopIteration:
            filled -= 1
            items = iter(())
        start = (start + 1) % size


def draws(weights: Sequence[float], seed: int) -> Iterator[int]:
    """The dataset that gives each next item in `tf.data.Dataset.sample_from_datasets`, without end.

    Args:
      weights: A weight above 0 for each of at least two datasets.
      seed: The seed.
    """
    logits = _log(np.array(weights, np.float32))
    highest = logits.max()
    totals = np.cumsum([math.exp(float(logit - highest)) for logit in logits])
    words = _of_operation(seed)
    while True:
        # One stateless sample per pair of words, which form a 64-bit seed.
        pairs = np.array([[next(words), next(words)] for _ in range(_BLOCKS)], np.uint64)
        # The key by which TensorFlow scrambles the seed of a stateless operation.
        nothing = np.zeros(_BLOCKS, np.uint64)
        scramble = np.tile(np.array([0x3EC8F720, 0x02461E29], np.uint64), (_BLOCKS, 1))
        mix = _philox(np.stack([pairs[:, 0], nothing, pairs[:, 1], nothing], axis=1), scramble)
        counters = np.stack([nothing, nothing, mix[:, 2], mix[:, 3]], axis=1)
        random_words = _philox(counters, mix[:, :2])
        # TensorFlow fills a double's 52 bits with 20 bits of one word and all 32 of the next.
        mantissas = ((random_words[:, 0] & np.uint64(0xFFFFF)) << _SHIFT) | random_words[:, 1]
        uniform = mantissas.astype(np.float64) * 2.0**-52
        yield from np.searchsorted(totals, uniform * totals[-1], side="right").tolist()


def _log(x: np.ndarray) -> np.ndarray:
    """TensorFlow's logarithm of positive float32 numbers, which is not the nearest float32.

    The last bit decides one sample in millions. Eigen processes eight numbers at a time with a
    quotient of polynomials, without fused multiplications, and the rest with the C library.
    """
    one = np.float32(1)
    mantissa, exponent = np.frexp(x)
    exponent = exponent.astype(np.float32)
    low = mantissa < np.float32(0.707106781186547524)
    exponent = exponent - low.astype(np.float32)
    y = (mantissa - one) + np.where(low, mantissa, np.float32(0))
    upper = y * np.float32(0.18256296349849254) + np.float32(1.0000000190281063)
    upper = y * (y * upper + np.float32(1.0000000190281136))
    lower = y * np.float32(0.049616247954120038) + np.float32(0.59923249590823520)
    lower = y * (y * lower + np.float32(1.4999999999999927)) + one
    result = exponent * np.float32(0.6931471805599453) + upper / lower
    for index in range(len(x) // 8 * 8, len(x)):
        result[index] = _logf()(float(x[index]))
    return result


@functools.cache
def _logf() -> Callable[[float], float]:
    """The C library's float32 logarithm; numpy's and the nearest float32 sometimes differ."""
    function = ctypes.CDLL(None).logf
    function.argtypes, function.restype = [ctypes.c_float], ctypes.c_float
    return function
