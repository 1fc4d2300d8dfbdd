"""What the registered tasks tell a report: a task's prompt and dataset, and what was trained on."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from t0repro.evaluation.outputs import find_tasks
from t0repro.progress import say
from t0repro.tasks.catalog import SYNTHETIC
from t0repro.tasks.registry import prompted_tasks, registered_tasks, tasks_of_mixture
from t0repro.tasks.task import PromptedTask
from t0repro.tasks.user_files import template_files
from t0repro.words import counted


@dataclasses.dataclass(frozen=True)
class ReportedPrompt:
    """What a report says of a task's prompt; its dataset is the label that the report shows."""

    dataset: str
    template_name: str
    prompt: str
    subset: str | None = None
    fixed_choices: tuple[str, ...] | None = None


PromptInfo = PromptedTask | ReportedPrompt
"""A task's prompt, by its registered task or by the report beside an evaluation."""


def dataset_label(task: str, prompts: Mapping[str, PromptInfo]) -> str:
    """The dataset label of a task: `super_glue/rte`, or the task's name if unknown.

    Each of ANLI's rounds is a separate dataset, as in T0's figures: `anli/r1`, from the task's
    suffix.
    """
    info = prompts.get(task)
    if info is None:
        return task.removesuffix("_score_eval")
    label = f"{info.dataset}/{info.subset}" if info.subset else info.dataset
    # Parse the task's name, since the registered dataset is ANLI as a whole.
    round_of_anli = re.search(r"_(r[123])(_score_eval)?$", task)
    return f"anli/{round_of_anli[1]}" if info.dataset == "anli" and round_of_anli else label


def tasks_by_dataset(
    tasks: Iterable[str], prompts: Mapping[str, PromptInfo]
) -> dict[str, list[str]]:
    """Dataset label -> its tasks, in the order given; sorted by label."""
    found: dict[str, list[str]] = {}
    for task in tasks:
        found.setdefault(dataset_label(task, prompts), []).append(task)
    return dict(sorted(found.items()))


def template_name(task: str, prompts: Mapping[str, PromptInfo]) -> str:
    """The prompt's name in promptsource, or the task's own name if unknown."""
    info = prompts.get(task)
    return info.template_name if info else task.removesuffix("_score_eval")


def choice_text(info: PromptInfo | None, choice: int) -> str:
    """An answer choice's text, or `choice 2` where the prompt's choices vary or are unknown."""
    fixed = info.fixed_choices if info else None
    return fixed[choice] if fixed and choice < len(fixed) else f"choice {choice}"


def fixed_classes(prompts: Mapping[str, PromptInfo]) -> dict[str, int]:
    """Task name -> number of choices, for tasks where it is fixed."""
    return {name: len(info.fixed_choices) for name, info in prompts.items() if info.fixed_choices}


def read_reported_prompts(eval_dir: str | os.PathLike[str]) -> dict[str, PromptInfo]:
    """Task name -> its prompt, from the report beside an evaluation; empty without a report."""
    above = Path(eval_dir).resolve().parent
    for path in (above / "report.json", above / "report" / "report.json"):
        try:
            datasets = json.loads(path.read_text(encoding="utf-8"))["datasets"]
            return {
                prompt["task"]: ReportedPrompt(
                    dataset["dataset"], prompt["template_name"], prompt["prompt"]
                )
                for dataset in datasets
                for prompt in dataset["prompts"]
                # None: the report did not know the task either.
                if prompt["prompt"] is not None
            }
        except (OSError, ValueError, KeyError, TypeError):
            continue  # no report, or something else of that name: its tasks stay ungrouped
    return {}


def prompts_of_evaluations(
    eval_dirs: Sequence[str | os.PathLike[str]], modules: Sequence[str]
) -> dict[str, PromptInfo]:
    """The prompts that modules register, and for other tasks those of the reports beside.

    A line says which tasks have neither, and so stand for datasets.
    """
    prompts: dict[str, PromptInfo] = {}
    for eval_dir in eval_dirs:
        prompts |= read_reported_prompts(eval_dir)
    prompts |= load_prompts(modules)
    tasks = {task for eval_dir in eval_dirs for task in find_tasks(eval_dir)}
    if unknown := sorted(tasks - prompts.keys()):
        say(
            f"note: {counted(len(unknown), 'task')} of unknown datasets ({unknown[0]}"
            f"{', ...' if len(unknown) > 1 else ''}): each is shown as a dataset."
            " --module_import MODULE groups them, where MODULE registers them."
        )
    return prompts


def load_prompts(modules: Sequence[str], *, into_seqio: bool = False) -> Mapping[str, PromptInfo]:
    """Imports modules that register tasks; task name -> its prompt.

    Empty without a module, unless T0REPRO_TEMPLATES names files of prompts.

    Args:
      modules: names of modules.
      into_seqio: whether to register the tasks with SeqIO, to read their examples.

    Raises:
      UserError: if a module cannot be found.
    """
    if not modules and not template_files():
        return {}
    from t0repro.tasks.modules import load_tasks

    load_tasks(modules, into_seqio=into_seqio)
    return prompted_tasks()


def training_tasks(mixtures: Sequence[str]) -> set[str]:
    """Names of the tasks in registered mixtures; a task's own name stands for itself.

    Raises:
      UserError: if one is not registered.
    """
    tasks = set(registered_tasks()) & set(mixtures)
    # Names that are not tasks must be mixtures.
    for mixture in set(mixtures) - tasks:
        tasks |= set(tasks_of_mixture(mixture, "--train_mixture"))
    return tasks


def training_datasets(tasks: Collection[str], prompts: Mapping[str, PromptInfo]) -> set[str]:
    """Labels of the datasets of tasks."""
    return {dataset_label(task, prompts) for task in tasks}


def synthetic_datasets(labels: Collection[str]) -> tuple[str, ...]:
    """Labels of datasets with generated rows, recognized by name."""
    # Anywhere in the label: without the tasks' module it is a task's name, which need not start
    # with the dataset's.
    return tuple(sorted(label for label in labels if SYNTHETIC in label))


def synthetic_warning(labels: Collection[str], synthetic: Collection[str]) -> str:
    """The banner of a page about some datasets; empty if all rows are real.

    Args:
      labels: of all the page's datasets.
      synthetic: those with generated rows.
    """
    if not synthetic:
        return ""
    rows = "all rows" if set(labels) <= set(synthetic) else f"rows of {', '.join(synthetic)}"
    return (
        f"Synthetic data: {rows} were generated by a program. Scores on them show that the"
        " machinery works; they say nothing about any real dataset."
    )
