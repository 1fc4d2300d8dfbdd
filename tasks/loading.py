"""Imports modules and files that register tasks, and names what is registered."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from t0repro.errors import UserError, nearest_names
from t0repro.tasks.registration import describing
from t0repro.tasks.registry import (
    PromptedTask,
    prompted_mixtures,
    prompted_tasks,
    task_descriptions,
)
from t0repro.tasks.template_files import read_template_file, register_templates

_OWN = "t0repro.tasks."


def needs_seqio(modules: Iterable[str]) -> bool:
    """Whether a module may add to SeqIO what only SeqIO knows: any that is not t0repro's own."""
    return not all(module.startswith(_OWN) for module in modules)


def load_tasks(
    modules: Sequence[str], templates: Sequence[str | Path] = (), *, into_seqio: bool
) -> Mapping[str, PromptedTask]:
    """Imports modules that register tasks, and registers those of template files.

    Args:
      modules: names of modules.
      templates: files in promptsource's YAML format.
      into_seqio: whether SeqIO is to have the tasks. Without it they are described alone, within a
        second, unless a module needs SeqIO.

    Returns:
      Every prompted task registered so far.

    Raises:
      UserError: if a module cannot be found, or a file is broken.
    """
    for path in templates:
        read_template_file(path)  # a broken file is told of before seconds of imports
    with_seqio = into_seqio or needs_seqio(modules)
    if with_seqio and modules:
        from t0repro.mesh import compat

        compat.quiet_logs()
    with contextlib.nullcontext() if with_seqio else describing():
        for module in modules:
            _import(module)
        for path in templates:
            register_templates(path)
    return prompted_tasks()


def _import(module: str) -> None:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise
        raise UserError(
            f"There is no module {module!r}.",
            where="--module_import",
            fix="Name a module that registers tasks, for instance t0repro.tasks.t0.",
        ) from error


def registered_tasks() -> list[str]:
    """Names of all tasks, those that only SeqIO knows included."""
    known = task_descriptions()
    seqio = sys.modules.get("seqio")
    others = () if seqio is None else seqio.TaskRegistry.names()
    return [*known, *(name for name in others if name not in known)]


def registered_mixtures() -> Mapping[str, Sequence[str]]:
    """Name of each mixture -> its tasks, those that only SeqIO knows included."""
    found: dict[str, Sequence[str]] = {
        name: mixture.tasks for name, mixture in prompted_mixtures().items()
    }
    seqio = sys.modules.get("seqio")
    if seqio is not None:
        for name in seqio.MixtureRegistry.names():
            found[name] = [task.name for task in seqio.MixtureRegistry.get(name).tasks]
    return found


def tasks_of_mixture(name: str, option: str = "--mixture") -> Sequence[str]:
    """Names of a mixture's tasks.

    Args:
      name: of the mixture.
      option: of the command line, that named it.

    Raises:
      UserError: if there is no such mixture; the nearest names are listed.
    """
    mixtures = registered_mixtures()
    if name not in mixtures:
        raise UserError(
            f"There is no mixture {name!r}.",
            where=option,
            fix=f"Nearest: {nearest_names(name, mixtures)}; or name its --module_import.",
        )
    return mixtures[name]


def select_tasks(mixture: str | None = None, dataset: str | None = None) -> list[str]:
    """Names of prompted tasks, sorted.

    Args:
      mixture: only its tasks.
      dataset: only this one's, `dataset` or `dataset/subset`.

    Raises:
      UserError: if the mixture or the dataset is not there; the nearest names are listed.
    """
    known = prompted_tasks()
    names: Iterable[str] = known
    if mixture is not None:
        names = set(tasks_of_mixture(mixture)) & set(known)
    if dataset is not None:
        names = [name for name in names if dataset in _labels(known[name])]
        if not names:
            everywhere = sorted({label for task in known.values() for label in _labels(task)})
            inside = f" in {mixture}" if mixture else ""
            raise UserError(
                f"There is no task of dataset {dataset!r}{inside}.",
                where="--dataset",
                fix=f"Nearest: {nearest_names(dataset, everywhere)}.",
            )
    return sorted(names)


def _labels(task: PromptedTask) -> tuple[str, ...]:
    label = task.dataset if task.subset is None else f"{task.dataset}/{task.subset}"
    return (task.dataset, label)
