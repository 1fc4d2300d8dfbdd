"""tf.data's random order, without TensorFlow.

Shuffle buffers, and sampling from weighted datasets. Each function samples the numbers that
TensorFlow 2.21 samples for the same seed on the CPU, so the order is the same, example by example
(tests/data/test_tf_order.py compares them). All of it uses Philox, a generator that encrypts a
counter and yields four words of 32 bits at a time.

Sources: tensorflow/core/kernels/data/{shuffle,random,directed_interleave}_dataset_op.cc,
multinomial_op.cc, stateless_random_ops.cc; tsl/lib/random/philox_random.h; Eigen's plog_float.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np

Item = TypeVar("Item")


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


def _operation_words(seed: int) -> Iterator[int]:
    """The words for a dataset with a seed of its own only, which TensorFlow takes mod 2**31 - 1."""
    return _stream(_DEFAULT_GRAPH_SEED, seed % (2**31 - 1))


class ShuffleSeeds:
    """The seeds of a dataset that is reshuffled at each iteration."""

    def __init__(self, seed: int):
        self._words = _operation_words(seed)

    def __next__(self) -> tuple[int, int]:
        return next(self._words), next(self._words)


def shuffle_like_tf(items: Iterator[Item], buffer_size: int, seeds: ShuffleSeeds) -> Iterator[Item]:
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
    words = _operation_words(seed)
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
