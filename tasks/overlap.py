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
from collections.abc import Iterator, Mapping
from pathlib import Path

from t0repro.errors import UserError
from t0repro.progress import count_progress
from t0repro.storage import write_atomically
from t0repro.tasks.availability import missing_rows
from t0repro.tasks.catalog import label
from t0repro.tasks.registry import task_descriptions, tasks_of_mixture
from t0repro.tasks.run_index import Match, split_into_parts
from t0repro.tasks.source import PromptedRows
from t0repro.tasks.templates import Drop
from t0repro.words import counted


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
    for part in split_into_parts(evaluated, split, ngram, memory):
        for name, number in part.rows.items():
            rows[name] = rows.get(name, 0) + number
        with count_progress(total, "reading", "training row", "read") as advance:
            for name, source in learned.items():
                read[name] = part.pass_over(name, source.rows("train"), advance)
        for (name, row), match in part.verify(evaluated, split).items():
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
