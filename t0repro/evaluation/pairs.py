"""The distinct (input, choice) pairs of an evaluation, each scored only once; a journal of scores.

Examples of all tasks come in as token ids. Prompts that render alike share their inputs, and all
choices of an example share its input, so that there are far fewer distinct inputs than pairs:

    examples   (A, yes) (A, no) (B, yes) (B, no) (A, yes)
    inputs     A  B
    pairs      A-yes  A-no  B-yes  B-no                       index  0 1 2 3 0
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from t0repro.files import make_folder, naming
from t0repro.model.shapes import Float, Int

Tokens = Int[np.ndarray, " length"]


@dataclasses.dataclass(frozen=True, eq=False)
class Pairs:
    """Distinct pairs in the order of their first appearance.

    Attributes:
      inputs: tokens of each distinct input, padding removed.
      targets: tokens of each pair's choice, EOS included, padding removed.
      input_of: index of each pair's input.
      index: index of each example's pair.
    """

    inputs: tuple[Tokens, ...]
    targets: tuple[Tokens, ...]
    input_of: Int[np.ndarray, " pairs"]
    index: Int[np.ndarray, " examples"]

    def __len__(self) -> int:
        return len(self.targets)

    def of_examples(self, scores: Float[np.ndarray, " pairs"]) -> Float[np.ndarray, " examples"]:
        """Expands scores of pairs to scores of examples."""
        return scores[self.index]

    def digest(self, pair: int) -> bytes:
        """16-byte digest of the pair's tokens, the same in every process."""
        target, source = self.targets[pair], self.inputs[self.input_of[pair]]
        # The length keeps apart pairs whose concatenated tokens are equal.
        text = len(source).to_bytes(4, "little") + source.tobytes() + target.tobytes()
        return hashlib.blake2b(text, digest_size=16).digest()


def concatenated(parts: Sequence[Pairs]) -> Pairs:
    """Concatenates parts' pairs with continued numbering; equal pairs of two parts stay two."""
    # Where each part starts; the last entry, the end, is why `zip` is not strict below.
    inputs = np.cumsum([0, *(len(part.inputs) for part in parts)])
    pairs = np.cumsum([0, *map(len, parts)])
    return Pairs(
        inputs=tuple(tokens for part in parts for tokens in part.inputs),
        targets=tuple(tokens for part in parts for tokens in part.targets),
        input_of=np.concatenate([p.input_of + at for p, at in zip(parts, inputs, strict=False)]),
        index=np.concatenate([p.index + at for p, at in zip(parts, pairs, strict=False)]),
    )


def distinct_pairs(
    examples: Iterable[Mapping[str, Any]], lengths: Mapping[str, int] | None = None
) -> Pairs:
    """Finds the distinct inputs and pairs.

    Args:
      examples: token ids under `inputs` and `targets`; zeros at the end are padding.
      lengths: maximum tokens per feature; longer ones are truncated as in Mesh TensorFlow. None
        keeps all.

    Raises:
      ValueError: if a target has an id below 1 before its last token, so that its log-likelihood
        would not be a sum over consecutive tokens.
    """
    lengths = lengths or {}
    inputs: dict[bytes, int] = {}
    pairs: dict[tuple[int, bytes], int] = {}
    index: list[int] = []
    for number, example in enumerate(examples):
        source, target = (
            _unpadded(example[name], lengths.get(name)) for name in ("inputs", "targets")
        )
        if (target <= 0).any():
            raise ValueError(f"Example {number}: a target holds an id below 1 before its end.")
        # Number entries in order of first appearance: the dictionaries are then sets with an index.
        at = inputs.setdefault(source.tobytes(), len(inputs))
        index.append(pairs.setdefault((at, target.tobytes()), len(pairs)))
    return Pairs(
        inputs=tuple(np.frombuffer(tokens, np.int32) for tokens in inputs),
        targets=tuple(np.frombuffer(tokens, np.int32) for _, tokens in pairs),
        input_of=np.array([at for at, _ in pairs], np.int64),
        index=np.array(index, np.int64),
    )


def _unpadded(tokens: Any, length: int | None) -> Tokens:
    """Tokens up to the last one that is not zero."""
    tokens = np.asarray(tokens, np.int32)[:length]
    present = np.flatnonzero(tokens)
    return np.ascontiguousarray(tokens[: present[-1] + 1 if present.size else 0])


# ---- The journal of scores -----------------------------------------------------------------------
#
# Scores are written as they are computed: a killed evaluation loses seconds of work. A journal is
# an append-only file of 36-byte records:
#
#     digest    of the pair's tokens, 16 bytes
#     score     float64, little-endian, natural log
#     seconds   float32; time spent scoring the pair
#     joules    float32; NaN if the hardware does not report it
#     checksum  CRC-32 of the bytes before it
#
# Its folder is named after everything else that determines a score: checkpoint, activation dtype
# and code. A truncated, edited or non-finite record is ignored, and its pair is scored again.

# Byte strings rather than V16, which numpy cannot sort.
DIGEST = np.dtype("S16")
_RECORD = np.dtype(
    [
        ("digest", DIGEST),
        ("score", "<f8"),
        ("seconds", "<f4"),
        ("joules", "<f4"),
        ("checksum", "<u4"),
    ]
)
# The bytes that the checksum covers: all but its own.
_CHECKED = _RECORD.itemsize - 4
_SECONDS_BETWEEN_SYNCS = 5.0
_RECORDS_AT_ONCE = 1 << 16  # so that memory does not grow with the journal


class ScoreJournal:
    """One checkpoint's scores by pair, open for reading and appending.

    Args:
      path: the file; created with its folder if missing.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self._path = Path(path)
        make_folder(self._path.parent)
        self._file = open(self._path, "ab")  # noqa: SIM115 (closed by close())
        # A record that a killed run left half-written would misalign all that follow it.
        self._file.truncate(self._file.tell() // _RECORD.itemsize * _RECORD.itemsize)
        self._synced = time.monotonic()

    def look_up(self, digests: np.ndarray) -> Float[np.ndarray, "3 pairs"]:
        """Looks up score, seconds and joules of each pair; the score is NaN if the pair is unknown.

        Args:
          digests: the pairs' digests, of dtype DIGEST.
        """
        found = np.zeros((3, len(digests)))
        found[0] = np.nan
        order = np.argsort(digests)
        for records in self._blocks() if len(digests) else ():
            # For each record, where its digest would sort; the comparison below decides if it is
            # there.
            place = np.searchsorted(digests, records["digest"], sorter=order)
            place = order[np.minimum(place, len(digests) - 1)]
            known = digests[place] == records["digest"]
            for row, name in zip(found, ("score", "seconds", "joules"), strict=True):
                # Of several records of a pair, the last one in the file wins.
                row[place[known]] = records[name][known]
        return found

    def add(
        self,
        digests: np.ndarray,
        scores: np.ndarray,
        seconds: float = 0.0,
        joules: float | None = None,
    ) -> None:
        """Appends scores; they are synced to the disk every few seconds.

        Args:
          digests: the pairs' digests, of dtype DIGEST.
          scores: the pairs' log-likelihoods, natural log.
          seconds: time that each pair took.
          joules: energy that each pair took; None if unknown.
        """
        records = np.zeros(len(digests), _RECORD)
        records["digest"] = digests
        records["score"] = scores
        records["seconds"] = seconds
        records["joules"] = np.nan if joules is None else joules
        records["checksum"] = _checksums(records)
        # Flush at once, so that a killed process loses only batches that were still being computed.
        with naming(self._path):
            self._file.write(records.tobytes())
            self._file.flush()
            if time.monotonic() - self._synced >= _SECONDS_BETWEEN_SYNCS:
                os.fsync(self._file.fileno())
                self._synced = time.monotonic()

    def close(self) -> None:
        """Syncs and closes the file."""
        with naming(self._path):
            with self._file:
                self._file.flush()
                os.fsync(self._file.fileno())

    def _blocks(self) -> Iterator[np.ndarray]:
        """Yields blocks of intact records, in file order."""
        with open(self._path, "rb") as file:
            while True:
                data = file.read(_RECORDS_AT_ONCE * _RECORD.itemsize)
                whole = len(data) // _RECORD.itemsize
                if not whole:
                    return
                records = np.frombuffer(data, _RECORD, whole)
                intact = (records["checksum"] == _checksums(records)) & np.isfinite(
                    records["score"]
                )
                yield records[intact]


def _checksums(records: np.ndarray) -> np.ndarray:
    data, size = records.tobytes(), _RECORD.itemsize
    starts = range(0, len(data), size)
    return np.array([zlib.crc32(data[at : at + _CHECKED]) for at in starts], np.uint32)
