"""Registers every task of T0's table, by T0's name, whose dataset lies under T0REPRO_DATA_DIR.

    T0REPRO_DATA_DIR=../shared/data seqio_cache_tasks --module_import=t0repro.tasks.local \
        --tasks='super_glue_rte_.*' --output_cache_dir=...

A task has those splits that are there. File names are listed; no row is read.
"""

from __future__ import annotations

from pathlib import Path

from t0repro.tasks.catalogue import T0Dataset, rounds_of, t0_datasets
from t0repro.tasks.registration import add_prompted_task
from t0repro.tasks.rows import data_folder, dataset_folder, splits_on_disk
from t0repro.tasks.splits import Split
from t0repro.tasks.templates import task_name, template_datasets, template_names


def splits_of_tasks(entry: T0Dataset, root: Path) -> dict[str, dict[str, Split]]:
    """Suffix of the tasks' names -> the splits that the folder holds for these tasks."""
    held = splits_on_disk(dataset_folder(root, entry.dataset, entry.subset))
    rounds = rounds_of(entry.dataset) or {"": {split: split for split in held}}
    found = {
        suffix: {name: Split(file) for name, file in splits.items() if file in held}
        for suffix, splits in rounds.items()
    }
    return {suffix: splits for suffix, splits in found.items() if splits}


def register_local(root: Path) -> None:
    """Registers the tasks of every dataset of T0's table that the folder holds."""
    prompted = set(template_datasets())
    for entry in t0_datasets():
        dataset, subset = entry.dataset, entry.subset
        if (dataset, subset) not in prompted:  # jigsaw_toxicity_pred has no templates
            continue
        for suffix, splits in splits_of_tasks(entry, root).items():
            for template in template_names(dataset, subset):
                name = task_name(dataset, subset, template) + suffix
                add_prompted_task(dataset, subset, template, splits, name=name)


register_local(data_folder())
