"""What was registered: the prompt behind each task, without SeqIO, so that reports stay light."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping

SCORE_EVAL_SUFFIX = "_score_eval"


@dataclasses.dataclass(frozen=True)
class PromptedTask:
    """One registered task and the prompt that it renders.

    Attributes:
      name: the SeqIO task's name.
      dataset: the Hugging Face name, for instance `super_glue`.
      subset: the configuration of the dataset, or None where it has only one.
      template_name: promptsource's name of the template, as written there.
      template_id: promptsource's identifier of the template.
      has_answer_choices: whether the template lists answers to rank.
      fixed_choices: the answers where every example has the same ones, else None.
      metrics: the names of the metrics in the template's metadata.
      original_task: whether the prompt asks for the task that the dataset was made for.
      prompt: the template's Jinja text, the input and the target on either side of `|||`.
      score_eval: whether this is the twin that expands an example to one per answer choice.
    """

    name: str
    dataset: str
    subset: str | None
    template_name: str
    template_id: str
    has_answer_choices: bool
    fixed_choices: tuple[str, ...] | None
    metrics: tuple[str, ...]
    original_task: bool
    prompt: str
    score_eval: bool = False

    def twin(self) -> PromptedTask:
        """The same prompt as the task that rank classification evaluates."""
        return dataclasses.replace(self, name=self.name + SCORE_EVAL_SUFFIX, score_eval=True)


_tasks: dict[str, PromptedTask] = {}


def prompted_tasks() -> Mapping[str, PromptedTask]:
    """Every prompted task registered so far, by name, the `_score_eval` twins included."""
    return types.MappingProxyType(_tasks)


def record(task: PromptedTask) -> None:
    """Adds a task to `prompted_tasks`."""
    _tasks[task.name] = task
