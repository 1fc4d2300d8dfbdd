"""Finds held-out rows whose text also occurs in training rows: `t0repro tasks overlap`.

Compares rows before any template, because a prompt's own words would match in every row. Two texts
match if they share a run of `ngram` words, or if a field of at least SHORTEST words is entirely
equal. Words are runs of letters and digits, ignoring case and punctuation.

Held-out rows are indexed by 64-bit hashes of their runs, as many rows at a time as the memory limit
allows; the training rows are streamed past each such part. A match counts only if its words are
also equal, so a hash collision never flags a row.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from t0repro.errors import UserError
from t0repro.files import write_atomically
from t0repro.progress import count_progress
from t0repro.tasks.catalogue import label
from t0repro.tasks.source import PromptedRows
from t0repro.tasks.task import missing_rows, task_descriptions, tasks_of_mixture
from t0repro.tasks.templates import Drop
from t0repro.words import counted

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


@dataclasses.dataclass(frozen=True)
class Overlap:
    """The matches, and the datasets searched.

    Attributes:
      ngram: Number of words in a run.
      train: Training dataset -> its number of rows.
      rows: Held-out dataset -> its number of rows.
      found: Held-out dataset -> row -> its first match.
      tasks: Held-out task -> indices of its examples whose rows match.
      absent: Dataset -> why it was not searched.
    """

    ngram: int
    train: dict[str, int]
    rows: dict[str, int]
    found: dict[str, dict[int, Match]]
    tasks: dict[str, list[int]]
    absent: dict[str, str]

    def to_json(self) -> str:
        """The overlap as indented JSON."""
        return json.dumps(dataclasses.asdict(self), indent=1, ensure_ascii=False) + "\n"


def find_overlap(
    train: str,
    held_out: str,
    split: str = "validation",
    *,
    ngram: int = 13,
    memory: int = 1024,
) -> Overlap:
    """Searches the training rows of one mixture for each row of another's datasets.

    Args:
      train: The training mixture; reads the split `train` of its datasets.
      held_out: The evaluation mixture.
      split: The evaluated split.
      ngram: Number of words in a run.
      memory: MiB for the index; more held-out rows need more passes over the training rows.

    Raises:
      UserError: If a mixture is unknown, or no rows of one are available.
    """
    absent: dict[str, str] = {}
    learned = _sources(train, "train", absent, "--train")
    evaluated = _sources(held_out, split, absent, "--eval")
    rows, found = {}, {}
    read: dict[str, int] = {}
    total = sum(source.row_count("train") for source in learned.values())
    for part in _parts(evaluated, split, ngram, memory):
        for name, number in part.rows.items():
            rows[name] = rows.get(name, 0) + number
        with count_progress(total, "reading", "training row", "read") as advance:
            for name, source in learned.items():
                read[name] = part.pass_over(name, source.rows("train"), advance)
        for (name, row), match in part.verified(evaluated, split).items():
            found.setdefault(name, {})[row] = match
    tasks = _examples(held_out, split, found)
    return Overlap(ngram, read, rows, {name: found.get(name, {}) for name in rows}, tasks, absent)


def write_overlap(overlap: Overlap, path: Path) -> None:
    """Writes the file that `read_overlap` reads."""
    write_atomically(path, overlap.to_json())


def read_overlap(path: Path) -> dict[str, list[int]]:
    """Held-out task -> indices of its examples whose text occurs in the training rows.

    Raises:
      UserError: If the file is not one that `t0repro tasks overlap` wrote.
    """
    try:
        tasks = json.loads(path.read_text(encoding="utf-8"))["tasks"]
        return {str(task): [int(number) for number in numbers] for task, numbers in tasks.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"This is not a file of `t0repro tasks overlap`: {error!r}.",
            where=str(path),
            fix="Name the file that its --out wrote.",
        ) from error


def _sources(
    mixture: str, split: str, absent: dict[str, str], option: str
) -> dict[str, PromptedRows]:
    """Dataset -> rows of one of its tasks, for the datasets with rows on this machine."""
    found: dict[str, PromptedRows] = {}
    for task in tasks_of_mixture(mixture, option):
        description = task_descriptions().get(task)
        # A task that only SeqIO has offers no rows to read.
        if description is None:
            absent[task] = "not a prompted task"
            continue
        source = description.rows
        name = _name(source, split)
        # All tasks of a dataset read the same rows.
        if name in found or name in absent:
            continue
        if split not in source.files_of_splits:
            absent[name] = f"no split {split!r}"
        elif missing_rows(source, split) is not None:
            absent[name] = f"rows of split {split!r} not available"
        else:
            found[name] = source
    if not found:
        raise UserError(
            f"No rows of {mixture!r} are available.",
            where=option,
            fix="Set T0REPRO_DATA_DIR to the folder of the datasets.",
        )
    return found


def _name(source: PromptedRows, split: str) -> str:
    """The dataset, with the file's name if it differs from the split's: ANLI's rounds."""
    name = label(source.dataset, source.subset)
    file = source.files_of_splits[split].file if split in source.files_of_splits else split
    return name if file == split else f"{name} ({file})"


def _examples(
    mixture: str, split: str, found: Mapping[str, Mapping[int, Match]]
) -> dict[str, list[int]]:
    """Task -> its examples with matching rows; indices only count rows that give an example."""
    flagged = {}
    for task in tasks_of_mixture(mixture, "--eval"):
        description = task_descriptions().get(task)
        if description is None or split not in description.rows.files_of_splits:
            continue
        source = description.rows
        matches = found.get(_name(source, split), {})
        if not matches:
            continue
        example, flagged[task] = 0, []
        for row, content in source.rows(split):
            if isinstance(source.render(split, row, content), Drop):
                continue
            if row in matches:
                flagged[task].append(example)
            example += 1
    return flagged


# ---- The index of held-out rows ------------------------------------------------------------------


@dataclasses.dataclass
class _Part:
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

    def verified(
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


def _parts(
    sources: Mapping[str, PromptedRows], split: str, ngram: int, memory: int
) -> Iterator[_Part]:
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
) -> _Part:
    found = list(_runs(words_of, ngram))
    keys = np.concatenate([keys for keys, *_ in found])
    owner = np.concatenate([fields for _, fields, *_ in found])
    # Add a key that matches nothing, so that a part without any run can be searched.
    keys, owner = np.append(keys, ~np.uint64(0)), np.append(owner, 0)
    order = np.argsort(keys, kind="stable")
    return _Part(ngram, owners, rows, keys[order], owner[order].astype(np.int32), {})


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


def summary(overlap: Overlap) -> Iterator[str]:
    """Lines that report the matches, with one text per dataset, and the datasets not searched."""
    trained = counted(sum(overlap.train.values()), "training row")
    yield f"{trained} of {counted(len(overlap.train), 'dataset')} were read."
    for name, rows in overlap.rows.items():
        found = overlap.found[name]
        share = f"{100 * len(found) / rows:.1f}%" if rows else "0%"
        of = f"{len(found):,} of {counted(rows, 'row')} ({share})"
        yield f"{name}: {of} share text with training."
        for row, match in list(found.items())[:1]:
            same = "the same field" if match.whole else f"{overlap.ngram} words"
            yield f"  row {row}, {match.field}, {same} as row {match.train_row} of {match.train}:"
            yield f"  {match.text!r}"
    for name, why in overlap.absent.items():
        yield f"not looked at: {name} ({why})"
