"""`t0repro report verify`: recomputes a report's figures, and a sample of its scores.

Four things are checked, the cheap ones first:

    figures     every figure of report.json is recomputed from the scores in the folder, of which no
                task is left out; report.md and report.html are rendered again from report.json, and
                scores.csv and scores.parquet are written again from the scores
    hashes      the score files, the prompts, the rows and the checkpoint match their records
    cells       random examples are read from the rows or the cache, rendered, tokenized and scored
                with the checkpoint, each in its original batch

If a share f of the examples was altered, and all records and figures were changed to match, k cells
reveal it with a probability of at least 1 - (1 - f) ** k.

`not_verified` names everything else that a report's folder holds.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from t0repro.errors import UserError
from t0repro.evaluation.evaluation_facts import jax_device, package_versions, scores_sha256
from t0repro.evaluation.outputs import (
    RESULTS,
    digest_of_texts,
    find_tasks,
    read_line_of,
    read_records,
)
from t0repro.progress import say
from t0repro.reports.make_report import ReportOptions, make_report, write_tables
from t0repro.reports.page import render_html, render_markdown
from t0repro.reports.report import Report, load_report
from t0repro.reports.report_page import report_page
from t0repro.reports.run import PromptInfo, Run, find_evaluation

if TYPE_CHECKING:
    from t0repro.evaluation.opened import Checkpoint
    from t0repro.evaluation.reading import Part

PER_TOKEN = 1e-4
"""Largest accepted difference of a score, per target token, if the device is another one."""

_FIGURE = 1e-6  # percentage points; sums on other processors differ by less


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


def verify(
    path: str | os.PathLike[str],
    prompts: Mapping[str, PromptInfo],
    *,
    sample: int = 20,
    seed: int | None = None,
    checkpoint: str | None = None,
) -> Iterator[Finding]:
    """Yields a report's agreements and disagreements, as the module's docstring describes.

    The tasks must be registered with SeqIO, and the rows or the cache be where the tasks find them.

    Args:
      path: a report.json, or the folder that holds it.
      prompts: task name -> its prompt.
      sample: number of cells to recompute.
      seed: chooses the cells; by default random, so that nobody can predict them.
      checkpoint: where the checkpoint is now; by default where it was.

    Raises:
      UserError: if there is no report or no evaluation, or the evaluation recorded too little.
    """
    report = load_report(path)
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    eval_dir, step = find_evaluation(path)
    step = report.provenance.step if step is None else step
    records = {
        name: record
        for name, record in read_records(eval_dir, step).items()
        if record.get("mode") == "rank" and {"tokens_per_batch", "dropped_rows"} <= record.keys()
    }
    if not records or report.provenance.checkpoint_hash is None:
        raise UserError(
            "The evaluation did not record what is needed to compute its scores again.",
            where=str(eval_dir),
            fix="Only what this version's rank-eval wrote can be verified: evaluate again.",
        )
    yield from _tasks(report, eval_dir, step, records)
    yield from _figures(report, eval_dir, step, prompts)
    yield from _pages(report, folder)
    yield from _tables(report, folder, eval_dir, step, prompts)
    yield from _hashes(report, eval_dir, records, prompts)
    opened = _opened(report, checkpoint, records)
    if opened.digest != report.provenance.checkpoint_hash:
        yield Finding("checkpoint", False, f"its hash is {opened.digest}")
        return
    yield Finding("checkpoint", True, f"hash {opened.digest}")
    # A record determines its batches, so the same device and packages give the same bits.
    exact = (
        report.provenance.device == jax_device()
        and report.provenance.versions == package_versions()
    )
    for task, cells in chosen_cells(records, sample, seed).items():
        yield from _recomputed(opened, eval_dir, records[task], cells, exact)


# Fields whose values no record of the scores shows, so that verification takes them as they are.
_TAKEN_AS_THEY_ARE = (
    "schema_version", "title", "notes", "stacks", "losses", "loss_curve", "conversion",
    "datasets.group (what was trained on)", "datasets.prompts.extras", "tasks (sizes and times)",
    "generation (decoded texts)", "provenance.created", "provenance.label", "provenance.eval_dir",
    "provenance.git_commit",
)  # fmt: skip
# Fields that are compared with what the evaluation's own record says, and with nothing else.
_RECORDED_ALONE = (
    "provenance.checkpoint", "provenance.device", "provenance.duration_seconds",
    "provenance.versions", "provenance.operative_config", "provenance.templates_hash",
    "provenance.data_revision", "provenance.energy_joules", "provenance.energy_source",
    "provenance.data",
)  # fmt: skip
_PAGES = ("report.json", "report.md", "report.html")
_TABLES = ("scores.csv", "scores.parquet")
_SHOWN_FILES = 20


def not_verified(path: str | os.PathLike[str]) -> list[str]:
    """What `verify` does not check, a sentence for each kind: fields and files, by name."""
    report = load_report(path)
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    eval_dir, step = find_evaluation(path)
    step = report.provenance.step if step is None else step
    found = [
        f"report.json: {', '.join(_TAKEN_AS_THEY_ARE)}.",
        f"Compared with provenance.json only: {', '.join(_RECORDED_ALONE)}.",
    ]
    known = {name for record in read_records(eval_dir, step).values() for name in record["files"]}
    there = [*_other_files(folder, {*_PAGES, *_TABLES, eval_dir.name})]
    there += [f"{eval_dir.name}/{name}" for name in _other_files(eval_dir, {*known, RESULTS})]
    more = len(there) - _SHOWN_FILES
    if there:
        names = ", ".join(there[:_SHOWN_FILES]) + (f" and {more} more" if more > 0 else "")
        found.append(f"Files: {names}.")
    if missing := [name for name in (*_PAGES, *_TABLES) if not (folder / name).is_file()]:
        found.append(f"Not in the folder: {', '.join(missing)}.")
    return found


def _other_files(folder: Path, known: Collection[str]) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name not in known)


def detection_probability(share: float, cells: int) -> float:
    """Probability that a sample of cells reveals alterations in a share of all cells."""
    return 1 - (1 - share) ** cells


# ---- Figures -------------------------------------------------------------------------------------


def _tasks(
    report: Report, eval_dir: Path, step: int, records: Mapping[str, Mapping[str, Any]]
) -> Iterator[Finding]:
    """Compares the report's tasks with the folder's, and with those that have a complete record."""
    ranked = {prompt.task for dataset in report.datasets for prompt in dataset.prompts}
    decoded = {result.task for result in report.generation}
    whole = read_records(eval_dir, step)
    there = {task for task, steps in find_tasks(eval_dir).items() if step in steps}
    there |= {task for task, record in whole.items() if record.get("mode") == "generate"}
    left_out = sorted(there - ranked - decoded)
    details = f"left out of the report: {', '.join(left_out)}" if left_out else ""
    yield Finding(f"{len(there)} tasks of the folder", not left_out, details)
    without = sorted((ranked - records.keys()) | (decoded - whole.keys()))
    details = f"none, or an incomplete one: {', '.join(without)}" if without else ""
    yield Finding(f"records of {len(ranked | decoded)} tasks", not without, details)


def _figures(
    report: Report, eval_dir: Path, step: int, prompts: Mapping[str, PromptInfo]
) -> Iterator[Finding]:
    """Recomputes the report from the files; findings for its figures, provenance and notes."""
    run = Run(report.provenance.label, eval_dir, step)
    try:
        again = make_report(run, prompts, options_of(report))
    except UserError as error:
        yield Finding("figures", False, str(error))
        return
    parts = ("groups", "datasets", "generation", "tasks", "published", "synthetic")
    count, differences = 0, []
    for name in parts:
        for place, recorded, found in _leaves(getattr(report, name), getattr(again, name), name):
            count += 1
            if not _equal(recorded, found):
                differences.append(f"{place} is {recorded}, recomputed {found}")
    yield Finding(
        f"{count:,} figures of report.json",
        not differences,
        "; ".join(differences[:5]) + ("; ..." if len(differences) > 5 else ""),
    )
    differences = [
        f"{place} is {recorded}, and the evaluation's is {found}"
        for place, recorded, found in _leaves(report.provenance, again.provenance, "provenance")
        if not place.startswith(_TAKEN_AS_THEY_ARE) and not _equal(recorded, found)
    ]
    yield Finding("provenance", not differences, "; ".join(differences[:5]))
    lost = [note for note in again.notes if note not in report.notes]
    yield Finding("notes about the examples", not lost, " ".join(lost))


def options_of(report: Report) -> ReportOptions:
    """The options of a report that its figures depend on."""
    groups = {dataset.group for dataset in report.datasets}
    extras = {name for d in report.datasets for prompt in d.prompts for name in prompt.extras} - {
        "without_overlap"
    }
    return ReportOptions(
        bootstrap=report.bootstrap,
        # Only `held_out_prompts` needs a dataset's name; "datasets" stands for unknown ones.
        training_datasets=None
        if groups <= {"datasets", "trained_prompts"}
        else {d.dataset for d in report.datasets if d.group == "held_out_prompts"},
        training_tasks={
            prompt.task.removesuffix("_score_eval")
            for d in report.datasets
            if d.group == "trained_prompts"
            for prompt in d.prompts
        },
        tasks=[p.task for d in report.datasets for p in d.prompts]
        + [result.task for result in report.generation],
        extras=sorted(extras),
    )


def _leaves(recorded: Any, found: Any, place: str) -> Iterator[tuple[str, Any, Any]]:
    """Each value in a part of the report: its place, the value, and the recomputed one.

    Accuracies without overlaps, which need another file, are not compared.
    """
    if dataclasses.is_dataclass(recorded) and dataclasses.is_dataclass(found):
        for field in dataclasses.fields(recorded):
            pair = getattr(recorded, field.name), getattr(found, field.name)
            yield from _leaves(*pair, f"{place}.{field.name}")
    elif isinstance(recorded, Mapping) and isinstance(found, Mapping):
        for name in sorted((recorded.keys() | found.keys()) - {"without_overlap"}):
            yield from _leaves(recorded.get(name), found.get(name), f"{place}.{name}")
    elif isinstance(recorded, tuple | list) and isinstance(found, tuple | list):
        if len(recorded) != len(found):
            yield f"the number of {place}", len(recorded), len(found)
        for at, pair in enumerate(zip(recorded, found, strict=False)):
            yield from _leaves(*pair, f"{place}[{at}]")
    else:
        yield place, recorded, found


def _equal(recorded: Any, found: Any) -> bool:
    if isinstance(recorded, float) and isinstance(found, float):
        same = math.isclose(recorded, found, rel_tol=1e-9, abs_tol=_FIGURE)
        return same or (math.isnan(recorded) and math.isnan(found))
    return recorded == found


def _pages(report: Report, folder: Path) -> Iterator[Finding]:
    """Compares the pages beside report.json with those rendered from it."""
    page = report_page(report)
    for name, text in (
        ("report.md", render_markdown(page)),
        ("report.html", render_html(page)),
    ):
        path = folder / name
        if path.is_file():
            same = path.read_text(encoding="utf-8").strip() == text.strip()
            yield Finding(name, same, "" if same else "it does not show what report.json says")


def _tables(
    report: Report, folder: Path, eval_dir: Path, step: int, prompts: Mapping[str, PromptInfo]
) -> Iterator[Finding]:
    """Compares the tables beside report.json with those of the scores, in any order of tasks."""
    tasks = [prompt.task for dataset in report.datasets for prompt in dataset.prompts]
    there = [name for name in _TABLES if (folder / name).is_file()]
    if not there or not tasks:
        return
    with tempfile.TemporaryDirectory() as temporary:
        try:
            write_tables(eval_dir, step, prompts, temporary, tasks)
        except UserError as error:
            yield Finding("tables", False, str(error))
            return
        for name in there:
            same = _rows_of(folder / name) == _rows_of(Path(temporary, name))
            yield Finding(name, same, "" if same else "it does not have the scores of the folder")


def _rows_of(path: Path) -> Any:
    """A table's header and its sorted rows; None if it cannot be read."""
    if path.suffix == ".csv":
        header, *rows = path.read_bytes().split(b"\n")
        return header, sorted(rows)
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
        return table.sort_by([(name, "ascending") for name in ("task", "example", "choice")])
    except (pyarrow.ArrowException, OSError):
        return None


# ---- Hashes --------------------------------------------------------------------------------------


def _hashes(
    report: Report,
    eval_dir: Path,
    records: Mapping[str, Mapping[str, Any]],
    prompts: Mapping[str, PromptInfo],
) -> Iterator[Finding]:
    """Compares the files of scores, the prompts and the rows with their recorded hashes."""
    from t0repro.evaluation.reading import data_origin, dropped_rows

    source = report.provenance
    found = scores_sha256(eval_dir, read_records(eval_dir, source.step))
    yield Finding("SHA-256 of the scores", found == source.scores_sha256, found)
    templates = {name: prompts[name].prompt if name in prompts else "" for name in records}
    changed = [
        name
        for name, record in records.items()
        if digest_of_texts([templates[name] or ""]) != record["key"]["prompt"]
    ]
    yield Finding(f"{len(records)} prompts", not changed, ", ".join(changed[:5]))
    changed = []
    for name, record in records.items():
        key = record["key"]
        cached = "cache" in (key["data"] or {})
        origin = data_origin(name, key["split"], cached)
        if cached and "cache" not in (origin or {}):
            raise UserError(
                f"{name} was evaluated from a cache, and no cache here has it.",
                where=str(eval_dir),
                fix="Name the cache: --cache_dir DIR.",
            )
        # Through JSON like the record, which turned tuples into lists.
        examples = record.get("available") or record["inputs"]
        dropped = dropped_rows(name, key["split"], examples)
        if json.loads(json.dumps(origin)) != key["data"] or dropped != record["dropped_rows"]:
            changed.append(name)
    yield Finding(f"rows of {len(records)} tasks", not changed, ", ".join(changed[:5]))


def _opened(
    report: Report, checkpoint: str | None, records: Mapping[str, Mapping[str, Any]]
) -> Checkpoint:
    from t0repro.evaluation.opened import open_checkpoint

    path = checkpoint or report.provenance.checkpoint
    if path is None:
        raise UserError("The report names no checkpoint.", fix="Give it with --checkpoint.")
    activation = next(iter(records.values()))["key"]["activation"]
    # Step 0 stands for a checkpoint that has none and is found by its path alone.
    return open_checkpoint(path, report.provenance.step or None, activation)


# ---- Cells ---------------------------------------------------------------------------------------


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


def _recomputed(
    checkpoint: Checkpoint,
    eval_dir: Path,
    record: Mapping[str, Any],
    cells: Sequence[int],
    exact: bool,
) -> Iterator[Finding]:
    """Reads a task again, scores the batches that hold the cells, and compares line by line."""
    from t0repro.evaluation.reading import TaskReader, parts_of
    from t0repro.runs.rank_eval import part_size

    key = record["key"]
    name, step = key["task"], key["step"]
    reader = TaskReader(
        name, key["split"], key["lengths"], key["limit"], "cache" in (key["data"] or {})
    )
    say(f"recomputing {len(cells)} of {name}")
    # A cell is its input's number, counted over the task's inputs in order.
    wanted, start, inputs = set(cells), 0, 0
    missing = set(wanted)
    for part in parts_of(name, reader.examples(), part_size()):
        numbers = _input_numbers(part, inputs)
        inside = wanted & set(numbers)
        if inside:
            missing -= inside
            scores = _scores(checkpoint, part, record, inside, numbers)
            for at in sorted(inside):
                rows = [row for row, number in enumerate(numbers) if number == at]
                yield _compared(reader, part, rows, start, scores, eval_dir, step, exact)
        start += len(part.examples)
        inputs = (numbers[-1] + 1) if numbers else inputs
    for at in sorted(missing):
        yield Finding(f"{name}, input {at}", False, "the rows no longer have it", True)


def _input_numbers(part: Part, first: int) -> list[int]:
    """For each example of a part, the number of its input among the task's inputs."""
    from t0repro.evaluation.reading import by_input

    inputs = enumerate(by_input(part.examples), first)
    return [number for number, (_, choices) in inputs for _ in choices]


def _scores(
    checkpoint: Checkpoint,
    part: Part,
    record: Mapping[str, Any],
    inside: Collection[int],
    numbers: Sequence[int],
) -> np.ndarray:
    """Scores of the part's examples, float32; NaN if their batch was not needed."""
    from t0repro.evaluation.engine import Engine
    from t0repro.evaluation.grouping import make_batching
    from t0repro.evaluation.pairs import distinct_pairs

    pairs = distinct_pairs(part.examples, record["key"]["lengths"])
    plan = make_batching(pairs, record["tokens_per_batch"])
    own = {int(pairs.index[row]) for row, number in enumerate(numbers) if number in inside}
    needed = tuple(batch for batch in plan.batches if own & set(batch.pairs.tolist()))
    scores = np.full(len(pairs), np.nan)
    # No batch has an empty target, whose log-likelihood is that of nothing.
    scores[[not len(target) for target in pairs.targets]] = 0.0
    engine = Engine(checkpoint.params, checkpoint.model)
    for found in engine.run(pairs, dataclasses.replace(plan, batches=needed)):
        scores[found.pairs] = found.scores
    return pairs.of_examples(scores).astype(np.float32)


def _compared(
    reader: Any,
    part: Part,
    rows: Sequence[int],
    start: int,
    scores: np.ndarray,
    eval_dir: Path,
    step: int,
    exact: bool,
) -> Finding:
    """Compares one cell's lines in the three files with recomputed ones."""
    what = f"{part.task}, line {start + rows[0] + 1}"
    worst = 0.0
    for row in rows:
        example, line = part.examples[row], start + row
        text = example.get("inputs_pretokenized", b"")
        text = text.decode("utf-8") if isinstance(text, bytes) else str(text)
        again = {
            f"{part.task}_inputs": text,
            f"{part.task}_targets": str(reader.judge.target(example)),
        }
        for file, computed in again.items():
            recorded = read_line_of(eval_dir / file, line)
            # The files hold one line per example, with newlines replaced.
            if recorded != computed.replace("\n", " "):
                return Finding(what, False, f"{file} has another line than the rows give", True)
        score = reader.judge.postprocess(scores[row], example=example)
        recorded = read_line_of(eval_dir / f"{part.task}_{step}_predictions", line)
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
