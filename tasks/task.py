"""A prompted task: its prompt, rows and vocabulary."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from t0repro.tasks.catalog import is_synthetic
from t0repro.tasks.vocabulary import (
    VocabularyFile,
    model_of,
)

if TYPE_CHECKING:
    import seqio

    from t0repro.tasks.source import PromptedRows


SCORE_EVAL_SUFFIX = "_score_eval"

ADDS_EOS = {"inputs": False, "targets": True}
"""T0 ends targets with EOS, but not inputs."""


@dataclasses.dataclass(frozen=True)
class PromptedTask:
    """A registered task and the prompt that it renders.

    Attributes:
      name: The SeqIO task's name.
      dataset: The Hugging Face name, for instance `super_glue`; datasets of generated rows have
        names such as `synthetic_imdb`.
      subset: The dataset's configuration, or None if it has only one.
      template_name: promptsource's name for the template, unchanged.
      template_id: promptsource's identifier for the template.
      has_answer_choices: Whether the template lists answers to rank.
      fixed_choices: The answers if every example has the same ones, else None.
      metrics: Names of the metrics in the template's metadata.
      original_task: Whether the prompt poses the dataset's original task.
      prompt: The template's Jinja, with `|||` between input and target.
      score_eval: Whether this is the twin that expands each example to one per answer choice.
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

    @property
    def synthetic(self) -> bool:
        """Whether its rows are generated, like the demo's; scores say nothing of real data."""
        return is_synthetic(self.dataset)

    def twin(self) -> PromptedTask:
        """The `_score_eval` task of this prompt, which rank classification evaluates."""
        return dataclasses.replace(self, name=self.name + SCORE_EVAL_SUFFIX, score_eval=True)


@dataclasses.dataclass(frozen=True)
class TaskDescription:
    """The contents of a task.

    Attributes:
      prompt: The task and its prompt.
      rows: The rows that it renders.
      vocabulary: Vocabulary of inputs and targets; SeqIO's own class if a user's module passed one.
    """

    prompt: PromptedTask
    rows: PromptedRows
    vocabulary: VocabularyFile | seqio.Vocabulary

    @property
    def sp_model(self) -> bytes | None:
        """The vocabulary's serialized model; None for other kinds than pieces and bytes."""
        return model_of(self.vocabulary)

    def twin(self) -> TaskDescription:
        """The twin's description, over the same rows."""
        return dataclasses.replace(self, prompt=self.prompt.twin())
