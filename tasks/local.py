"""Registers T0's tasks, under T0's names, for each dataset under T0REPRO_DATA_DIR.

    T0REPRO_DATA_DIR=../shared/data seqio_cache_tasks --module_import=t0repro.tasks.local \
        --tasks='super_glue_rte_.*' --output_cache_dir=...

A task gets the splits found there, so that part of a mixture can be cached. File names are listed,
but no rows are read. If t0repro.tasks.t0 is also imported, its tasks, with all their splits,
remain.
"""

from __future__ import annotations

from pathlib import Path

from t0repro.tasks.catalog import catalog
from t0repro.tasks.readers import local_reader
from t0repro.tasks.t0_mixtures import register_t0_tasks
from t0repro.tasks.user_files import data_folders


def register_local(root: Path | None = None) -> None:
    """Registers the tasks of every dataset in T0's table that the folder has.

    Args:
      root: The folder of datasets; defaults to those that T0REPRO_DATA_DIR names.
    """
    register_t0_tasks(
        lambda entry: [
            split
            for split in catalog()[entry.dataset, entry.subset].splits
            if local_reader(root, entry.dataset, entry.subset, split) is not None
        ]
    )


data_folders()  # an error if there is none
register_local()
