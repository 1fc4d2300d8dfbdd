"""An index of held-out rows by the runs of words in them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from t0repro.tasks.source import PromptedRows

SHORTEST = 5
"""Words that a field needs to count as the same text: 'yes' occurs everywhere."""


_BYTES_A_RUN = 40  # key and owner, and their copies while they are sorted


_ROWS_AT_ONCE = 2000  # training rows whose words are hashed together


_WORD = re.compile(r"\w+")


_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, so that multiplication is invertible


Rows = Iterator[tuple[int, Mapping[str, Any]]]


@dataclasses.dataclass(frozen=True)
class Match:
    """The first training text that a held-out row shares.

    Attributes:
      field: The held-out row's field.
      train: The training dataset.
      train_row: The row's number there, from 0.
      text: The shared words.
      whole: Whether the entire field is equal, rather than a run of words.
    """

    field: str
    train: str
    train_row: int
    text: str
    whole: bool


@dataclasses.dataclass
class IndexPart:
    """Held-out rows whose runs are in memory together.

    Attributes:
      ngram: Words of a run.
      owners: (dataset, row, field) of each field.
      rows: Dataset -> the number of its rows in this part.
      keys: Sorted hashes of runs and of whole fields, uint64 [runs].
      owner: The field of each, int32 [runs].
      matches: Candidate of each row, by (dataset, row).
    """

    ngram: int
    owners: list[tuple[str, int, str]]
    rows: dict[str, int]
    keys: np.ndarray
    owner: np.ndarray
    matches: dict[tuple[str, int], Match]

    def pass_over(self, train: str, rows: Rows, advance: Callable[[int], None]) -> int:
        """Searches the training rows; returns their number."""
        count = 0
        for block in _blocks(rows):
            fields = [(number, words) for number, row in block for _, words in _fields(row)]
            for key, at, start, whole in _runs([words for _, words in fields], self.ngram):
                self._look_up(key, at, start, whole, train, fields)
            count += len(block)
            advance(len(block))
        return count

    def _look_up(
        self,
        keys: np.ndarray,
        fields_of: np.ndarray,
        starts: np.ndarray,
        whole: bool,
        train: str,
        fields: Sequence[tuple[int, list[str]]],
    ) -> None:
        place = np.searchsorted(self.keys, keys)
        hits = np.flatnonzero(self.keys[np.minimum(place, len(self.keys) - 1)] == keys)
        for hit in hits:
            number, words = fields[fields_of[hit]]
            start = int(starts[hit])
            text = " ".join(words if whole else words[start : start + self.ngram])
            at = int(place[hit])
            # Many held-out rows may contain the same run.
            while at < len(self.keys) and self.keys[at] == keys[hit]:
                name, row, field = self.owners[self.owner[at]]
                match = Match(field, train, number, text, whole)
                self.matches.setdefault((name, row), match)
                at += 1

    def verify(
        self, sources: Mapping[str, PromptedRows], split: str
    ) -> dict[tuple[str, int], Match]:
        """The matches whose words the held-out row actually has."""
        found = {}
        # Different words may have equal hashes, so the texts decide.
        for name in dict.fromkeys(name for name, _ in self.matches):
            for row, content in sources[name].rows(split):
                match = self.matches.get((name, row))
                if match is None:
                    continue
                # With spaces around, so that only whole words match.
                texts = [
                    f" {' '.join(words)} "
                    for field, words in _fields(content)
                    if field == match.field
                ]
                if any(f" {match.text} " in text for text in texts):
                    found[name, row] = match
        return found


def split_into_parts(
    sources: Mapping[str, PromptedRows], split: str, ngram: int, memory: int
) -> Iterator[IndexPart]:
    """Yields the index of held-out rows, as many rows at a time as fit into `memory` MiB."""
    room = max(1, memory * 2**20 // _BYTES_A_RUN)
    owners: list[tuple[str, int, str]] = []
    words_of: list[list[str]] = []
    rows: dict[str, int] = {}
    held = 0
    for name, source in sources.items():
        rows.setdefault(name, 0)
        for number, row in source.rows(split):
            fields = list(_fields(row))
            # A field of n words has n - ngram + 1 runs, and counts once more as a whole.
            runs = sum(max(1, len(words) - ngram + 2) for _, words in fields)
            if held and held + runs > room:
                yield _part(ngram, owners, words_of, rows)
                owners, words_of, rows, held = [], [], {}, 0
            for field, words in fields:
                owners.append((name, number, field))
                words_of.append(words)
            rows[name] = rows.get(name, 0) + 1
            held += runs
    yield _part(ngram, owners, words_of, rows)


def _part(
    ngram: int, owners: list[tuple[str, int, str]], words_of: list[list[str]], rows: dict[str, int]
) -> IndexPart:
    found = list(_runs(words_of, ngram))
    keys = np.concatenate([keys for keys, *_ in found])
    owner = np.concatenate([fields for _, fields, *_ in found])
    # Add a key that matches nothing, so that a part without any run can be searched.
    keys, owner = np.append(keys, ~np.uint64(0)), np.append(owner, 0)
    order = np.argsort(keys, kind="stable")
    return IndexPart(ngram, owners, rows, keys[order], owner[order].astype(np.int32), {})


def _runs(
    fields: Sequence[Sequence[str]], ngram: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, bool]]:
    """(hashes, field of each, first word of each, whether whole): of runs, then of whole fields."""
    lengths = np.array([len(words) for words in fields], np.int64)
    # Python's own hash of a text: fast, 64 bits, and the same throughout this process.
    words = np.array([hash(word) for of in fields for word in of], np.int64).astype(np.uint64)
    words = (words ^ (words >> np.uint64(29))) * _FACTOR
    ends = np.cumsum(lengths)
    begins = ends - lengths
    number = len(words) - ngram + 1
    if number > 0:
        # uint64 wraps around, so a run's hash is a polynomial of its words modulo 2**64.
        powers = np.cumprod(np.full(ngram, _FACTOR, np.uint64))
        runs = np.zeros(number, np.uint64)
        for offset, power in enumerate(powers):
            runs += words[offset : offset + number] * power
        of = np.searchsorted(ends, np.arange(number), side="right")
        # The words of all fields are in one array, and a run must not cross from one field into
        # another.
        inside = np.arange(number) + ngram <= ends[of]
        yield runs[inside], of[inside], (np.arange(number) - begins[of])[inside], False
    # A longer field need not be compared as a whole: if it is equal, its runs are too.
    whole = np.flatnonzero((lengths >= SHORTEST) & (lengths < ngram))
    keys = np.zeros(len(whole), np.uint64)
    for at, field in enumerate(whole):
        part = words[begins[field] : ends[field]]
        powers = np.cumprod(np.full(len(part), _FACTOR, np.uint64))
        # Include the length, to distinguish a whole field from a run at the start of another.
        keys[at] = (part * powers).sum(dtype=np.uint64) ^ np.uint64(len(part))
    yield keys, whole, np.zeros(len(whole), np.int64), True


def _blocks(rows: Rows) -> Iterator[list[tuple[int, Mapping[str, Any]]]]:
    block: list[tuple[int, Mapping[str, Any]]] = []
    for entry in rows:
        block.append(entry)
        if len(block) == _ROWS_AT_ONCE:
            yield block
            block = []
    if block:
        yield block


def _fields(row: Any, name: str = "") -> Iterator[tuple[str, list[str]]]:
    """(field, words) of every text in a row, including those in lists and objects."""
    if isinstance(row, str):
        words = _WORD.findall(row.casefold())
        if len(words) >= SHORTEST:
            yield name, words
    elif isinstance(row, Mapping):
        for key, value in row.items():
            yield from _fields(value, f"{name}.{key}" if name else str(key))
    elif isinstance(row, Iterable) and not isinstance(row, bytes):
        for value in row:
            yield from _fields(value, name)
