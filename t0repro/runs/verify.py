"""`t0repro report verify`: recomputes a report's figures, and a sample of its scores.

Four things are checked, the cheap ones first:

    figures     every figure of report.json is recomputed from the scores in the folder, of which no
                task is left out; report.md and report.html are rendered again from report.json, and
                scores.csv and scores.parquet are written again from the scores
    hashes      the score files, the prompts, the rows and the checkpoint match their records
    cells       random examples are read from the rows or the cache, rendered, tokenized and scored
                with the checkpoint

If a share f of the examples was altered, and all records and figures were changed to match, k cells
reveal it with a probability of at least 1 - (1 - f) ** k.

`not_verified` names everything else that a report's folder holds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from t0repro.errors import UserError
from t0repro.evaluation.evaluation_facts import package_versions, rounds_alike, scores_sha256
from t0repro.evaluation.opened import open_checkpoint
from t0repro.evaluation.records import RESULTS, digest_of_texts, read_records
from t0repro.reports.prompts import PromptInfo
from t0repro.reports.report import Report, load_report
from t0repro.reports.run import find_evaluation
from t0repro.reports.score_tables import writable_tables
from t0repro.runs.verified_cells import Finding, choose_cells, recompute_cells
from t0repro.runs.verified_figures import (
    PAGES,
    TAKEN_AS_THEY_ARE,
    compare_figures,
    compare_pages,
    compare_tables,
    compare_tasks,
)
from t0repro.tasks.registry import how_to_register_own, registered_tasks
from t0repro.words import counted, some

if TYPE_CHECKING:
    from t0repro.evaluation.opened import Checkpoint


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
    report, folder, eval_dir, step = _read(path)
    records = {
        name: record
        for name, record in read_records(eval_dir, step).items()
        if record.get("mode") == "rank" and record["key"].get("command") == "rank_eval"
    }
    if not records or report.provenance.checkpoint_hash is None:
        raise UserError(
            "The evaluation did not record what is needed to compute its scores again.",
            where=str(eval_dir),
            fix="Only what this version's rank-eval wrote can be verified: t0repro rank-eval"
            f" --checkpoint {report.provenance.checkpoint or 'MODEL'} --mixture MIXTURE --out DIR.",
        )
    if unknown := sorted(records.keys() - set(registered_tasks())):
        raise UserError(
            f"The report has tasks that are not registered: {some(unknown, 3)}.",
            where=str(path),
            fix=how_to_register_own(unknown[0]),
        )
    yield from compare_tasks(report, eval_dir, step, records)
    yield from compare_figures(report, eval_dir, step, prompts)
    yield from compare_pages(report, folder)
    yield from compare_tables(report, folder, eval_dir, step, prompts)
    yield from _hashes(report, eval_dir, records, prompts)
    opened = _open_checkpoint(report, checkpoint, records)
    if opened.digest != report.provenance.checkpoint_hash:
        yield Finding("checkpoint", False, f"its hash is {opened.digest}")
        return
    yield Finding("checkpoint", True, f"hash {opened.digest}")
    exact = (
        rounds_alike(report.provenance.device) and report.provenance.versions == package_versions()
    )
    for task, cells in choose_cells(records, sample, seed).items():
        yield from recompute_cells(opened, eval_dir, records[task], cells, exact)


def _read(path: str | os.PathLike[str]) -> tuple[Report, Path, Path, int]:
    """A report, its folder, and its evaluation's folder and step."""
    report = load_report(path)
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    eval_dir, step = find_evaluation(path)
    return report, folder, eval_dir, report.provenance.step if step is None else step


# Fields that are compared with what the evaluation's own record says, and with nothing else.
_RECORDED_ALONE = (
    "provenance.checkpoint", "provenance.device", "provenance.duration_seconds",
    "provenance.versions", "provenance.operative_config", "provenance.templates_hash",
    "provenance.data_revision", "provenance.data",
)  # fmt: skip
_SHOWN_FILES = 20


def not_verified(path: str | os.PathLike[str]) -> list[str]:
    """What `verify` does not check, a sentence for each kind: fields and files, by name."""
    _, folder, eval_dir, step = _read(path)
    found = [
        f"report.json: {', '.join(TAKEN_AS_THEY_ARE)}.",
        f"Compared with provenance.json only: {', '.join(_RECORDED_ALONE)}.",
    ]
    tables = writable_tables()
    known = {name for record in read_records(eval_dir, step).values() for name in record["files"]}
    there = [*_other_files(folder, {*PAGES, *tables, eval_dir.name})]
    there += [f"{eval_dir.name}/{name}" for name in _other_files(eval_dir, {*known, RESULTS})]
    more = len(there) - _SHOWN_FILES
    if there:
        names = ", ".join(there[:_SHOWN_FILES]) + (f" and {more} more" if more > 0 else "")
        found.append(f"Files: {names}.")
    if missing := [name for name in (*PAGES, *tables) if not (folder / name).is_file()]:
        found.append(f"Not in the folder: {', '.join(missing)}.")
    return found


def _other_files(folder: Path, known: Collection[str]) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name not in known)


def detection_probability(share: float, cells: int) -> float:
    """Probability that a sample of cells reveals alterations in a share of all cells."""
    return 1 - (1 - share) ** cells


def _hashes(
    report: Report,
    eval_dir: Path,
    records: Mapping[str, Mapping[str, Any]],
    prompts: Mapping[str, PromptInfo],
) -> Iterator[Finding]:
    """Compares the files of scores, the prompts and the rows with their recorded hashes."""
    from t0repro.evaluation.reading import data_origin, find_dropped_rows

    source = report.provenance
    found = scores_sha256(eval_dir, read_records(eval_dir, source.step))
    yield Finding("SHA-256 of the scores", found == source.scores_sha256, found)
    templates = {name: prompts[name].prompt if name in prompts else "" for name in records}
    changed = [
        name
        for name, record in records.items()
        if digest_of_texts([templates[name] or ""]) != record["key"]["prompt"]
    ]
    yield Finding(counted(len(records), "prompt"), not changed, ", ".join(changed[:5]))
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
        dropped = find_dropped_rows(name, key["split"], examples)
        if json.loads(json.dumps(origin)) != key["data"] or dropped != record["dropped_rows"]:
            changed.append(name)
    yield Finding(f"rows of {counted(len(records), 'task')}", not changed, ", ".join(changed[:5]))


def _open_checkpoint(
    report: Report, checkpoint: str | None, records: Mapping[str, Mapping[str, Any]]
) -> Checkpoint:
    path = checkpoint or report.provenance.checkpoint
    if path is None:
        raise UserError("The report names no checkpoint.", fix="Give it with --checkpoint.")
    activation = next(iter(records.values()))["key"]["activation"]
    # Step 0 stands for a checkpoint that has none and is found by its path alone.
    return open_checkpoint(path, report.provenance.step or None, activation)
