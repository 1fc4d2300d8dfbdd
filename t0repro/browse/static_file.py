"""The bench as one static file, to send to someone."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from typing import Any

from t0repro.browse.listing import ListedDataset, list_datasets, list_prompts, options
from t0repro.browse.pages import Pages, asset, first_splits
from t0repro.browse.shown_rows import find_fault, show_rows
from t0repro.errors import UserError
from t0repro.tasks.catalog import label
from t0repro.tasks.rows import choose_rows
from t0repro.tasks.task import TaskDescription
from t0repro.words import counted, some

_MOST_BYTES = 8_000_000


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def render_static(pages: Pages, count: int, most_bytes: int = _MOST_BYTES) -> tuple[str, str]:
    """All prompts, the bird's-eye view and a sample of rows as one file without requests.

    Args:
      pages: The bench's.
      count: Rows of each prompt with rows here.
      most_bytes: About so many bytes of rows; the prompts after them are listed alone.

    Returns:
      The HTML, and what it has, in words.
    """
    prompts = list_prompts(pages.bench)
    samples: dict[str, str] = {}
    # Prompts, and why they lack examples of rows, or scores.
    lacking: dict[str, list[str]] = {"with rows that give no example": [], "without any score": []}
    size, left_out = 0, 0
    for each in prompts:
        if not each.is_here:
            continue
        task = pages.bench.find(each.name)
        if size > most_bytes:
            left_out += 1
            continue
        samples[each.name] = body = _sample(pages, task, count, lacking)
        size += len(body.encode())
    datasets = [(each, _summary(pages, each)) for each in list_datasets(pages.bench)]
    said = f"A sample of up to {counted(count, 'row')} of each of {counted(len(samples), 'prompt')}"
    if not samples and pages.bench.row_files:
        given = some([label(*each) for each in pages.bench.row_files])
        asked = some(sorted({each.dataset for each in prompts}))
        said = (
            f"No prompt is for the rows given, of the dataset {given}: the prompts are for {asked}."
            " A file's name, or DATASET/default/SPLIT.csv, gives the dataset of its rows"
        )
    elif not samples:
        said = "No prompt has rows on this machine: set T0REPRO_DATA_DIR to a folder that has them"
    if not prompts:
        said = "There is no prompt to show: name a file that has some with --templates"
    if left_out:
        said += f"; to bound the file, {counted(left_out, 'prompt')} with rows have none here"
    for what, why in lacking.items():
        if why:
            said += f"; {counted(len(why), 'prompt')} {what}, such as {why[0]}"
    css, script = asset("browse.css"), asset("browse.js")
    policy = (
        f"default-src 'none'; style-src {_hash(css)}; script-src {_hash(script)}; img-src data:;"
        " base-uri 'none'; form-action 'none'"
    )
    html = pages.render(
        "static.html",
        static=True,
        policy=policy,
        css=css,
        script=script,
        said=said,
        prompts=prompts,
        options=options(prompts),
        datasets=datasets,
        samples=samples,
        templates={name: pages.bench.find(name).rows.template for name in samples},
    )
    return html, said


def _sample(
    pages: Pages, task: TaskDescription, count: int, lacking: Mapping[str, list[str]]
) -> str:
    """A prompt's rows as HTML; why rows have no example or score is added to `lacking`."""
    no_example, no_score = lacking.values()
    name, split = task.prompt.name, first_splits(task.rows.available_splits())[0]
    try:
        numbers = sorted(choose_rows(task.rows.row_count(split), count))
        rows = [row for number in numbers for row in show_rows(task, split, number, 1)]
    except UserError as error:
        no_example.append(f"{name}: {error.what.rstrip('.')} ({error.where})")
        return pages.render("fault.html", error=error)
    if fault := find_fault(rows):
        no_example.append(f"{name}: {fault}")
    scores, faults = pages.score(task, rows)
    no_score += [f"{name}: {fault.text.rstrip('.')}" for fault in faults]
    return pages.rows(task, split, 0, faults, shown=rows, scored=scores)


def _summary(pages: Pages, listed: ListedDataset) -> dict[str, Any] | None:
    return pages.summary(pages.bench.find_dataset(listed.name)) if listed.splits else None
