"""Registers the tasks of a T5X run, with SeqIO and TensorFlow only if it needs them."""

from __future__ import annotations

from collections.abc import Callable

from t0repro import compat
from t0repro.cli.gin_options import folders_of
from t0repro.cli.results import echo
from t0repro.cli.t5x_options import T5xOptions
from t0repro.config.t5x.gin_files import Parsed
from t0repro.errors import needs_reference_tier
from t0repro.tasks.modules import load_tasks, needs_seqio, resolved_modules
from t0repro.tasks.registry import add_cache_dirs


def register(
    parsed: Parsed,
    options: T5xOptions,
    why_not: Callable[[], str | None] | None = None,
) -> None:
    """Registers the tasks of the modules that the gin files and the command line name.

    Args:
      parsed: The gin files.
      options: The flags.
      why_not: Returns what in the run needs TensorFlow and SeqIO, if anything; called once this
        project's own tasks are described. None if the run needs them in any case.

    Raises:
      UserError: If a module cannot be found, or the packages are needed and not installed.
    """
    modules = resolved_modules([*parsed.imports, *(options.module_import or ())])
    folders, flag = folders_of(options.cache_dir), "--cache_dir"
    if why_not is not None and not options.tfds_data_dir and not needs_seqio(modules):
        load_tasks(modules, into_seqio=False)
        add_cache_dirs(folders, flag)
        why = why_not()
        if why is None:
            return
        if not compat.is_installed():
            raise needs_reference_tier(why)
    echo("importing the tasks, with TensorFlow and SeqIO ...", err=True)
    # Before SeqIO, which needs these patches on today's Python.
    compat.install()
    import seqio

    if options.tfds_data_dir:
        seqio.set_tfds_data_dir_override(options.tfds_data_dir)
    add_cache_dirs(folders, flag)
    load_tasks(modules, into_seqio=True)
