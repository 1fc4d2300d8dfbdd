"""Registers the tasks and mixtures of users' template files."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from t0repro.errors import UserError, nearest_names
from t0repro.tasks.catalog import label, rounds_of
from t0repro.tasks.registration import add_mixture, add_prompted_task, check_registered
from t0repro.tasks.registry import (
    prompted_mixtures,
    registered_mixtures,
    registered_tasks,
    task_descriptions,
)
from t0repro.tasks.rows import SUFFIXES, dataset_folder, splits_on_disk
from t0repro.tasks.source import Split
from t0repro.tasks.task import PromptedTask
from t0repro.tasks.template_files import TemplateFile, read_template_file
from t0repro.tasks.templates import task_name
from t0repro.tasks.user_files import DATA_VARIABLE, TEMPLATES_VARIABLE, NoRowsError, data_folders
from t0repro.words import some


def register_templates(path: str | Path, *, rows_needed: bool = True) -> list[PromptedTask]:
    """Registers a task and its `_score_eval` twin for each template of a file, and its mixtures.

    Tasks are named by T0's rule. Their splits are the files in the dataset's folder under
    T0REPRO_DATA_DIR; ANLI's rounds give three tasks, as in T0. Registering the same file again does
    nothing.

    Args:
      path: The file.
      rows_needed: Whether missing rows are an error; otherwise the tasks then have no splits.

    Returns:
      The tasks, without the twins.

    Raises:
      NoRowsError: If the folder of the rows is missing.
      UserError: If the file is broken, or a name is taken.
    """
    content = read_template_file(path)
    splits_of_suffix = _splits(content, rows_needed)
    registered = []
    # One suffix, the empty one, except for ANLI, whose rounds are tasks of their own.
    for suffix, splits in splits_of_suffix.items():
        for template in content.templates:
            name = task_name(content.dataset, content.subset, template.name) + suffix
            _check_name_is_free(name, template, content)
            try:
                task = add_prompted_task(
                    content.dataset,
                    content.subset,
                    template.name,
                    splits,
                    name=name,
                    template=template,
                )
            except UserError as error:
                raise UserError(
                    error.what, where=f"{path}, template {template.name!r}", fix=error.fix
                ) from error
            registered.append(task)
    waiting = dict(content.mixtures)
    while waiting:
        # First those that contain no other of the file; if there are none, the first is refused.
        inner = (name for name, rates in waiting.items() if not rates.keys() & waiting.keys())
        name = next(inner, next(iter(waiting)))
        _register_mixture(name, waiting.pop(name), content)
    return registered


def _register_mixture(name: str, rates: Mapping[str, float], content: TemplateFile) -> None:
    # Checked here, not by read_template_file: a mixture may name tasks of modules imported since.
    where = f"{content.path}, mixture {name!r}"
    known, mixtures = set(registered_tasks()), registered_mixtures()
    check_registered(rates, {*known, *mixtures}, where)
    before = prompted_mixtures().get(name)
    # The same mixture again is not an error: a process may read a file twice.
    if name in known or (
        name in mixtures and (before is None or dict(before.rates) != dict(rates))
    ):
        raise UserError(
            f"There is a task or mixture {name!r} already.", where=where, fix="Give another name."
        )
    add_mixture(name, rates)


def _check_name_is_free(name: str, template: Any, content: TemplateFile) -> None:
    known = task_descriptions().get(name)
    other = None if known is None else known.rows.template
    if other is not None and (other.jinja, other.id) != (template.jinja, template.id):
        raise UserError(
            f"There is a task {name!r} already, of another template.",
            where=f"{content.path}, template {template.name!r}",
            fix=f"Give the template another name, or leave out the file of the other"
            f" (--templates, {TEMPLATES_VARIABLE}).",
        )


def _splits(content: TemplateFile, rows_needed: bool) -> dict[str, dict[str, Split]]:
    """Task name suffix -> split -> where its rows come from, for the splits on disk."""
    if not content.templates:
        return {}
    roots = data_folders() if rows_needed or os.environ.get(DATA_VARIABLE) else []
    folders = [dataset_folder(root, content.dataset, content.subset) for root in roots]
    held = sorted({split for folder in folders for split in splits_on_disk(folder)})
    rounds = rounds_of(content.dataset) or {"": {split: split for split in held}}
    found = {
        suffix: {split: Split(file) for split, file in splits.items() if file in held}
        for suffix, splits in rounds.items()
    }
    found = {suffix: splits for suffix, splits in found.items() if splits}
    if found or not rows_needed:
        return found or {"": {}}
    known = {str(path.parent.relative_to(root)) for root in roots for path in root.glob("*/*/*.*")}
    named, stem = str(folders[0].relative_to(roots[0])), glob.escape(content.dataset)
    beside = [path for each in (*folders, folders[0].parent) for path in each.glob("*.*")]
    others = [path for path in beside if path.parent in folders]
    if saved := next((path for path in beside if path.name == "state.json"), None):
        there = f"Move the files in {saved.parent}, which are one split, to {folders[0]}/<split>."
    elif others:
        there = f"{others[0]} is no such file."
    elif near := [
        path
        for path in (*beside, *(file for root in roots for file in root.glob(f"{stem}*.*")))
        if path.suffix.lower() in SUFFIXES
    ]:
        there = f"Move {some(sorted(map(str, near)))} there."
    elif above := [up for root in roots for up in root.parents[:2] if splits_on_disk(up / named)]:
        there = f"Or set {DATA_VARIABLE} to {above[0]}, which holds them."
    else:
        there = f"Folders with files, nearest: {nearest_names(named, sorted(known))}."
    raise NoRowsError(
        f"There are no rows for {content.path}, of {label(content.dataset, content.subset)}.",
        where=" or ".join(map(str, folders)),
        fix="Put <split>.jsonl, .parquet, .csv or .tsv there, or name several folders:"
        f" {DATA_VARIABLE}=A:B. {there}",
    )
