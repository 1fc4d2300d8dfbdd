"""Tasks that were decoded rather than ranked."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from t0repro.evaluation.outputs import read_first_input, read_line_of
from t0repro.reports.prompts import PromptInfo, dataset_label, template_name
from t0repro.reports.results import group_of


@dataclasses.dataclass(frozen=True)
class GenerationResult:
    """One prompt without answer choices, decoded.

    Attributes:
      group: a key of GROUP_TITLES.
      metrics: the template's metrics, most in percent; each over all examples.
      first_target: the first example's target; first_output is its decoded output.
    """

    task: str
    dataset: str
    group: str
    template_name: str
    prompt: str | None
    examples: int
    metrics: dict[str, float]
    first_input: str | None
    first_target: str | None
    first_output: str | None
    seconds: float


def generation_results(
    eval_dir: str | os.PathLike[str],
    records: Sequence[Mapping[str, Any]],
    prompts: Mapping[str, PromptInfo],
    training_datasets: Collection[str] | None,
    training_tasks: Collection[str],
) -> tuple[GenerationResult, ...]:
    """The metrics of each decoded task, with its first example, by dataset and task.

    Args:
      eval_dir: the `<split>_eval` folder.
      records: of the decoded tasks.
      prompts: task name -> its prompt.
      training_datasets: labels of the datasets trained on; None if unknown.
      training_tasks: names of the tasks trained on.
    """
    found = []
    for record in records:
        task, step = record["key"]["task"], record["key"]["step"]
        # A task has no prompt if its module was not named; then its own name is its label.
        label, info = dataset_label(task, prompts), prompts.get(task)
        found.append(
            GenerationResult(
                task=task,
                dataset=label,
                group=group_of(task, label, training_datasets, training_tasks),
                template_name=template_name(task, prompts),
                prompt=info.prompt if info else None,
                examples=record["examples"],
                metrics=dict(record["metrics"]),
                first_input=read_first_input(eval_dir, task),
                first_target=read_line_of(os.path.join(eval_dir, f"{task}_targets"), 0),
                first_output=read_line_of(os.path.join(eval_dir, f"{task}_{step}_predictions"), 0),
                seconds=record["seconds"],
            )
        )
    return tuple(sorted(found, key=lambda result: (result.dataset, result.task)))
