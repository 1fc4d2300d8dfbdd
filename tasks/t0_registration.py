"""Registers the tasks of T0's table: all of them, or what is at hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from t0repro.tasks.catalogue import T0Dataset, catalogue, rounds_of, t0_datasets
from t0repro.tasks.prompted_rows import PromptedRows
from t0repro.tasks.registration import add_prompted_task
from t0repro.tasks.splits import Split
from t0repro.tasks.t0_mixtures import MAX_EXAMPLES, T0Task
from t0repro.tasks.templates import task_name, template_datasets, template_names


def splits_in_catalogue(entry: T0Dataset) -> list[str]:
    """The splits that a dataset of the table had in T0's time."""
    return list(catalogue()[entry.dataset, entry.subset].splits)


def register_t0_tasks(
    held: Callable[[T0Dataset], list[str]] = splits_in_catalogue,
) -> list[T0Task]:
    """Registers the tasks of every dataset of T0's table, and their twins, by T0's names.

    Args:
      held: the splits of a dataset that its tasks are to have; tasks without any are left out.
    """
    prompted = set(template_datasets())
    registered = []
    for entry in t0_datasets():
        dataset, subset = entry.dataset, entry.subset
        if (dataset, subset) not in prompted:  # jigsaw_toxicity_pred has no templates
            continue
        names = template_names(dataset, subset)
        for suffix, splits in _splits_of_tasks(dataset, held(entry)).items():
            for template in names:
                name = task_name(dataset, subset, template) + suffix
                task = add_prompted_task(dataset, subset, template, splits, name=name)
                registered.append(T0Task(task, entry, len(names)))
    return registered


def _splits_of_tasks(dataset: str, held: list[str]) -> dict[str, dict[str, Split]]:
    """Suffix of the tasks' names -> their splits, without tasks that would have none."""
    rounds = rounds_of(dataset) or {"": {split: split for split in held}}
    found = {
        suffix: {name: Split(file) for name, file in splits.items() if file in held}
        for suffix, splits in rounds.items()
    }
    return {suffix: splits for suffix, splits in found.items() if splits}


def evaluation_rate(rows: PromptedRows) -> float:
    """Examples up to 500,000, as T0 rates what it only evaluates.

    Those of the training split, or of the next one where a dataset has none; the catalogue's, so
    that no row is read.
    """
    sizes: Mapping[str, int] = catalogue()[rows.dataset, rows.subset].splits
    files = rows.files_of_splits
    split = next(name for name in ("train", "validation", "test") if name in files)
    return float(min(sizes[files[split].file], MAX_EXAMPLES))
