"""Examples of a report that are read, rendered and scored again."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from t0repro.evaluation.outputs import read_line_of
from t0repro.progress import say

if TYPE_CHECKING:
    from t0repro.evaluation.opened import Checkpoint

PER_TOKEN = 1e-4
"""Largest accepted difference of a score, per target token, if the device is another one."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """The outcome of one recomputation.

    Attributes:
      what: what was recomputed, with the task and example of a cell.
      agrees: whether it equals the record.
      details: how the two differ, or how closely they agree.
      is_cell: whether it is an example of the sample.
    """

    what: str
    agrees: bool
    details: str = ""
    is_cell: bool = False


def choose_cells(
    records: Mapping[str, Mapping[str, Any]], sample: int, seed: int | None
) -> dict[str, list[int]]:
    """A random sample without repetition of all tasks' inputs: task -> numbers of its inputs."""
    # Sorted, so that a seed chooses the same cells in whatever order tasks were evaluated.
    names = sorted(records)
    ends = np.cumsum([int(records[name]["inputs"]) for name in names])
    sampled = np.random.default_rng(seed).choice(ends[-1], min(sample, ends[-1]), replace=False)
    cells: dict[str, list[int]] = {}
    for at in np.sort(sampled):
        task = int(np.searchsorted(ends, at, side="right"))
        first = int(ends[task - 1]) if task else 0
        cells.setdefault(names[task], []).append(int(at) - first)
    return cells


def recompute_cells(
    checkpoint: Checkpoint,
    eval_dir: Path,
    record: Mapping[str, Any],
    cells: Sequence[int],
    exact: bool,
) -> Iterator[Finding]:
    """Reads a task again, scores the cells, and compares line by line."""
    from t0repro.evaluation.engine import score_examples
    from t0repro.evaluation.reading import TaskReader, group_by_input

    key = record["key"]
    name, step, lengths = key["task"], key["step"], key["lengths"]
    reader = TaskReader(name, key["split"], lengths, key["limit"], "cache" in (key["data"] or {}))
    say(f"recomputing {len(cells)} of {name}")
    # A cell is its input's number, counted over the task's inputs in order.
    wanted, line = set(cells), 0
    found: list[tuple[int, list[dict[str, Any]]]] = []
    for number, (_, choices) in enumerate(group_by_input(reader.examples())):
        if number in wanted:
            found.append((line, choices))
            wanted.remove(number)
        line += len(choices)
    examples = [example for _, choices in found for example in choices]
    scores = iter(score_examples(checkpoint.params, checkpoint.model, examples, lengths))
    for line, choices in found:
        own = list(itertools.islice(scores, len(choices)))
        yield _compare_cell(reader, name, choices, line, own, eval_dir, step, exact)
    for at in sorted(wanted):
        yield Finding(f"{name}, input {at}", False, "the rows no longer have it", True)


def _compare_cell(
    reader: Any,
    task: str,
    choices: Sequence[Mapping[str, Any]],
    start: int,
    scores: Sequence[np.float32],
    eval_dir: Path,
    step: int,
    exact: bool,
) -> Finding:
    """Compares one cell's lines in the three files with recomputed ones."""
    what = f"{task}, line {start + 1}"
    worst = 0.0
    for line, (example, computed_score) in enumerate(zip(choices, scores, strict=True), start):
        text = example.get("inputs_pretokenized", b"")
        text = text.decode("utf-8") if isinstance(text, bytes) else str(text)
        again = {
            f"{task}_inputs": text,
            f"{task}_targets": str(reader.judge.target(example)),
        }
        for file, computed in again.items():
            recorded = read_line_of(eval_dir / file, line)
            # The files hold one line per example, with newlines replaced.
            if recorded != computed.replace("\n", " "):
                return Finding(what, False, f"{file} has another line than the rows give", True)
        score = reader.judge.postprocess(computed_score, example=example)
        recorded = read_line_of(eval_dir / f"{task}_{step}_predictions", line)
        if recorded == str(score):
            continue
        length = max(np.count_nonzero(example["targets"]), 1)
        difference = abs(float(recorded or "nan") - float(score)) / length
        # Not `>`, which is false for the NaN of a missing line.
        if exact or not difference <= PER_TOKEN:
            return Finding(what, False, f"its score is {recorded}, recomputed {score}", True)
        worst = max(worst, difference)
    closely = "to the last bit" if not worst else f"within {worst:.0e} per target token"
    return Finding(what, True, closely, True)
