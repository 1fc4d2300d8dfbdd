"""What was registered: the prompt behind each task, without SeqIO, so that reports stay light."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import seqio

    from t0repro.tasks.prompted_rows import PromptedRows
    from t0repro.tasks.vocabulary import VocabularyFile

SCORE_EVAL_SUFFIX = "_score_eval"

ADDS_EOS = {"inputs": False, "targets": True}
"""T0 ends targets with EOS and inputs with nothing."""


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


@dataclasses.dataclass(frozen=True)
class TaskDescription:
    """All that a task is made of.

    Attributes:
      prompt: what it asks.
      rows: what it renders.
      vocabulary: of inputs and targets; SeqIO's own where a user's module gives one.
    """

    prompt: PromptedTask
    rows: PromptedRows
    vocabulary: VocabularyFile | seqio.Vocabulary

    @property
    def sp_model(self) -> bytes | None:
        """The vocabulary's serialized SentencePiece model; None where it is of another kind."""
        return getattr(self.vocabulary, "sp_model", None)

    def twin(self) -> TaskDescription:
        """The twin's, of the same rows."""
        return dataclasses.replace(self, prompt=self.prompt.twin())


@dataclasses.dataclass(frozen=True)
class PromptedMixture:
    """A mixture of prompted tasks.

    Attributes:
      name: of the mixture.
      tasks: their names.
      rates: task -> its rate, in examples.
      default_rate: a task's rows -> the rate of one that is not among `rates`.
    """

    name: str
    tasks: tuple[str, ...]
    rates: Mapping[str, float]
    default_rate: Callable[[PromptedRows], float] | None

    def rate(self, task: str) -> float:
        """A task's rate.

        Raises:
          UserError: if it is the number of rows, and these are missing.
        """
        if task in self.rates or self.default_rate is None:
            return self.rates[task]
        return self.default_rate(_tasks[task].rows)


_tasks: dict[str, TaskDescription] = {}
_mixtures: dict[str, PromptedMixture] = {}


def prompted_tasks() -> Mapping[str, PromptedTask]:
    """Every prompted task registered so far, by name, the `_score_eval` twins included."""
    return {name: description.prompt for name, description in _tasks.items()}


def task_descriptions() -> Mapping[str, TaskDescription]:
    """The same tasks with what they are made of."""
    return types.MappingProxyType(_tasks)


def prompted_mixtures() -> Mapping[str, PromptedMixture]:
    """Every mixture of prompted tasks registered so far, by name."""
    return types.MappingProxyType(_mixtures)


def record_task(description: TaskDescription) -> None:
    """Adds a task, or puts it in the place of one of its name."""
    _tasks[description.prompt.name] = description


def record_mixture(mixture: PromptedMixture) -> None:
    """Adds a mixture."""
    _mixtures[mixture.name] = mixture
