"""Examples of a report that are read, rendered and scored again."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from t0repro.evaluation.outputs import read_line_of
from t0repro.progress import say

if TYPE_CHECKING:
    from t0repro.evaluation.opened import Checkpoint
    from t0repro.evaluation.reading import Chunk

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


def chosen_cells(
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
    """Reads a task again, scores the batches that hold the cells, and compares line by line."""
    from t0repro.evaluation.reading import TaskReader, split_into_chunks
    from t0repro.runs.rank_eval import chunk_size

    key = record["key"]
    name, step = key["task"], key["step"]
    reader = TaskReader(
        name, key["split"], key["lengths"], key["limit"], "cache" in (key["data"] or {})
    )
    say(f"recomputing {len(cells)} of {name}")
    # A cell is its input's number, counted over the task's inputs in order.
    wanted, start, inputs = set(cells), 0, 0
    missing = set(wanted)
    for chunk in split_into_chunks(name, reader.examples(), chunk_size()):
        numbers = _input_numbers(chunk, inputs)
        inside = wanted & set(numbers)
        if inside:
            missing -= inside
            scores = _scores(checkpoint, chunk, record, inside, numbers)
            for at in sorted(inside):
                rows = [row for row, number in enumerate(numbers) if number == at]
                yield _compared(reader, chunk, rows, start, scores, eval_dir, step, exact)
        start += len(chunk.examples)
        inputs = (numbers[-1] + 1) if numbers else inputs
    for at in sorted(missing):
        yield Finding(f"{name}, input {at}", False, "the rows no longer have it", True)


def _input_numbers(chunk: Chunk, first: int) -> list[int]:
    """For each example of a chunk, the number of its input among the task's inputs."""
    from t0repro.evaluation.reading import group_by_input

    inputs = enumerate(group_by_input(chunk.examples), first)
    return [number for number, (_, choices) in inputs for _ in choices]


def _scores(
    checkpoint: Checkpoint,
    chunk: Chunk,
    record: Mapping[str, Any],
    inside: Collection[int],
    numbers: Sequence[int],
) -> np.ndarray:
    """Scores of the chunk's examples, float32; NaN if their batch was not needed."""
    from t0repro.evaluation.engine import Engine
    from t0repro.evaluation.grouping import make_batching
    from t0repro.evaluation.pairs import collect_pairs

    pairs = collect_pairs(chunk.examples, record["key"]["lengths"])
    plan = make_batching(pairs, record["tokens_per_batch"])
    own = {int(pairs.index[row]) for row, number in enumerate(numbers) if number in inside}
    needed = tuple(batch for batch in plan.batches if own & set(batch.pairs.tolist()))
    scores = np.full(len(pairs), np.nan)
    # No batch has an empty target, whose log-likelihood is that of nothing.
    scores[[not len(target) for target in pairs.targets]] = 0.0
    engine = Engine(checkpoint.params, checkpoint.model)
    for found in engine.run(pairs, dataclasses.replace(plan, batches=needed)):
        scores[found.pairs] = found.scores
    return pairs.expand_to_examples(scores).astype(np.float32)


def _compared(
    reader: Any,
    chunk: Chunk,
    rows: Sequence[int],
    start: int,
    scores: np.ndarray,
    eval_dir: Path,
    step: int,
    exact: bool,
) -> Finding:
    """Compares one cell's lines in the three files with recomputed ones."""
    what = f"{chunk.task}, line {start + rows[0] + 1}"
    worst = 0.0
    for row in rows:
        example, line = chunk.examples[row], start + row
        text = example.get("inputs_pretokenized", b"")
        text = text.decode("utf-8") if isinstance(text, bytes) else str(text)
        again = {
            f"{chunk.task}_inputs": text,
            f"{chunk.task}_targets": str(reader.judge.target(example)),
        }
        for file, computed in again.items():
            recorded = read_line_of(eval_dir / file, line)
            # The files hold one line per example, with newlines replaced.
            if recorded != computed.replace("\n", " "):
                return Finding(what, False, f"{file} has another line than the rows give", True)
        score = reader.judge.postprocess(scores[row], example=example)
        recorded = read_line_of(eval_dir / f"{chunk.task}_{step}_predictions", line)
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
