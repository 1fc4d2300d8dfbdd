"""Recomputes figures of a report."""

from __future__ import annotations

import dataclasses
import itertools
import math
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from t0repro.errors import UserError
from t0repro.evaluation.outputs import find_tasks
from t0repro.evaluation.records import read_records
from t0repro.reports.history import read_history
from t0repro.reports.make_report import ExtraContent, ReportOptions, make_report
from t0repro.reports.page_html import render_html
from t0repro.reports.page_markdown import render_markdown
from t0repro.reports.prompts import PromptInfo
from t0repro.reports.provenance import Provenance
from t0repro.reports.report import Report
from t0repro.reports.report_page import report_page
from t0repro.reports.run import Run
from t0repro.reports.score_tables import writable_tables, write_tables
from t0repro.runs.verified_cells import Finding
from t0repro.storage import absolute
from t0repro.words import counted

_FIGURE = 1e-6  # percentage points; sums on other processors differ by less


PAGES = ("report.json", "report.md", "report.html")


def compare_tasks(
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
    yield Finding(f"{counted(len(there), 'task')} of the folder", not left_out, details)
    without = sorted((ranked - records.keys()) | (decoded - whole.keys()))
    details = f"none, or an incomplete one: {', '.join(without)}" if without else ""
    yield Finding(f"records of {counted(len(ranked | decoded), 'task')}", not without, details)


def compare_figures(
    report: Report, eval_dir: Path, step: int, prompts: Mapping[str, PromptInfo]
) -> Iterator[Finding]:
    """Recomputes the report from the files; findings for its figures, provenance and notes."""
    run = Run(report.provenance.label, eval_dir, step)
    try:
        options = options_of(report)
        history = report.history and read_history(
            eval_dir, prompts, report.history.steps, options.tasks
        )
        again = make_report(run, prompts, options, ExtraContent(history=history))
    except UserError as error:
        yield Finding("figures", False, str(error))
        return
    parts = ("groups", "datasets", "generation", "tasks", "published", "synthetic", "history")
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
        for place, recorded, found in _leaves(
            _make_path_absolute(report.provenance),
            _make_path_absolute(again.provenance),
            "provenance",
        )
        if not place.startswith(TAKEN_AS_THEY_ARE) and not _equal(recorded, found)
    ]
    yield Finding("provenance", not differences, "; ".join(differences[:5]))
    lost = [note for note in again.notes if note not in report.notes]
    yield Finding("notes about the examples", not lost, " ".join(lost))


def _make_path_absolute(provenance: Provenance) -> Provenance:
    """The provenance with its checkpoint's path from the root, however it was spelled."""
    given = provenance.checkpoint
    if given is None:
        return provenance
    whole = absolute(given)
    config = (provenance.operative_config or "").replace(
        f"rank_eval.checkpoint = {given!r}\n", f"rank_eval.checkpoint = {whole!r}\n"
    )
    return dataclasses.replace(provenance, checkpoint=whole, operative_config=config)


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
    elif isinstance(recorded, str) and isinstance(found, str) and "\n" in recorded + found:
        # A configuration: only the lines that differ are of interest.
        lines = itertools.zip_longest(recorded.splitlines(), found.splitlines())
        for number, pair in enumerate(lines, 1):
            yield f"{place}, line {number}", *pair
    else:
        yield place, recorded, found


def _equal(recorded: Any, found: Any) -> bool:
    if isinstance(recorded, float) and isinstance(found, float):
        same = math.isclose(recorded, found, rel_tol=1e-9, abs_tol=_FIGURE)
        return same or (math.isnan(recorded) and math.isnan(found))
    return recorded == found


def compare_pages(report: Report, folder: Path) -> Iterator[Finding]:
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


def compare_tables(
    report: Report, folder: Path, eval_dir: Path, step: int, prompts: Mapping[str, PromptInfo]
) -> Iterator[Finding]:
    """Compares the tables beside report.json with those of the scores, in any order of tasks."""
    tasks = [prompt.task for dataset in report.datasets for prompt in dataset.prompts]
    there = [name for name in writable_tables() if (folder / name).is_file()]
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


# Fields whose values no record of the scores shows, so that verification takes them as they are.
TAKEN_AS_THEY_ARE = (
    "schema_version", "title", "notes", "stacks", "losses", "loss_curve", "conversion",
    "datasets.group (what was trained on)", "datasets.prompts.extras", "tasks (sizes and times)",
    "generation (decoded texts)", "provenance.created", "provenance.label", "provenance.eval_dir",
    "provenance.git_commit",
)  # fmt: skip
