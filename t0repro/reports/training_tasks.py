"""What registered tasks tell a report: their prompts, and which datasets were trained on.

Only here does the evaluation meet SeqIO's registry, and only when a module or mixture is named.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from t0repro.reports.summary import PromptInfo, dataset_label


def load_prompts(modules: Sequence[str], *, into_seqio: bool = False) -> Mapping[str, PromptInfo]:
    """Imports modules that register tasks; task name -> its prompt. Empty without a module.

    Args:
      modules: names of modules.
      into_seqio: whether SeqIO is to have the tasks, to read their examples.

    Raises:
      UserError: if a module cannot be found.
    """
    if not modules:
        return {}
    from t0repro.tasks.registration import load_tasks

    return load_tasks(modules, into_seqio=into_seqio)


def training_tasks(mixtures: Sequence[str]) -> set[str]:
    """Names of the tasks of registered mixtures, or of tasks themselves.

    Raises:
      UserError: if one is not registered.
    """
    from t0repro.tasks.mixture import tasks_of_mixture
    from t0repro.tasks.task import registered_tasks

    tasks = set(registered_tasks()) & set(mixtures)
    for mixture in set(mixtures) - tasks:
        tasks |= set(tasks_of_mixture(mixture, "--train-mixture"))
    return tasks


def training_datasets(tasks: Collection[str], prompts: Mapping[str, PromptInfo]) -> set[str]:
    """Labels of the datasets that tasks belong to."""
    return {dataset_label(task, prompts) for task in tasks}
