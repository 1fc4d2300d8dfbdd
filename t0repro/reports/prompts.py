"""What a report needs from the registered tasks: each task's prompt, and what was trained on.

This is the only reporting module that uses the task registry, and only if a module or mixture is
named.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol


class PromptInfo(Protocol):
    """The part of t0repro.tasks.PromptedTask that a report uses."""

    @property
    def dataset(self) -> str:
        """The Hugging Face name of the dataset."""
        ...

    @property
    def subset(self) -> str | None:
        """The dataset's configuration."""
        ...

    @property
    def template_name(self) -> str:
        """The name in promptsource of the template."""
        ...

    @property
    def fixed_choices(self) -> tuple[str, ...] | None:
        """The answers where every example has the same ones."""
        ...

    @property
    def prompt(self) -> str:
        """The template's Jinja text."""
        ...


def dataset_label(task: str, prompts: Mapping[str, PromptInfo]) -> str:
    """The dataset label to group a task under: `super_glue/rte`, or the task's name if unknown.

    Each of ANLI's rounds is a separate dataset, as in T0's figures: `anli/r1`, from the task's
    suffix.
    """
    info = prompts.get(task)
    if info is None:
        return task.removesuffix("_score_eval")
    label = f"{info.dataset}/{info.subset}" if info.subset else info.dataset
    # From the task's name: the registered dataset is ANLI as a whole.
    round_of_anli = re.search(r"_(r[123])(_score_eval)?$", task)
    return f"anli/{round_of_anli[1]}" if info.dataset == "anli" and round_of_anli else label


def template_name(task: str, prompts: Mapping[str, PromptInfo]) -> str:
    """The prompt's name in promptsource, or the task's own name if unknown."""
    info = prompts.get(task)
    return info.template_name if info else task.removesuffix("_score_eval")


def fixed_classes(prompts: Mapping[str, PromptInfo]) -> dict[str, int]:
    """Task name -> number of choices, for the tasks where it is fixed."""
    return {name: len(info.fixed_choices) for name, info in prompts.items() if info.fixed_choices}


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
    # Names that are no tasks have to be mixtures.
    for mixture in set(mixtures) - tasks:
        tasks |= set(tasks_of_mixture(mixture, "--train_mixture"))
    return tasks


def training_datasets(tasks: Collection[str], prompts: Mapping[str, PromptInfo]) -> set[str]:
    """Labels of the datasets that tasks belong to."""
    return {dataset_label(task, prompts) for task in tasks}
