"""Prompted tasks: what each consists of, and which are registered. Does not import SeqIO."""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Mapping
from typing import TYPE_CHECKING

from t0repro.tasks.catalogue import is_synthetic, modelled_on

if TYPE_CHECKING:
    import seqio

    from t0repro.tasks.source import PromptedRows
    from t0repro.tasks.vocabulary import VocabularyFile


SCORE_EVAL_SUFFIX = "_score_eval"

ADDS_EOS = {"inputs": False, "targets": True}
"""T0 ends targets with EOS and inputs with nothing."""


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
      original_task: Whether the prompt asks for the task that the dataset was made for.
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
        """Whether its rows are generated, as the demo's are; scores say nothing about real data."""
        return is_synthetic(self.dataset)

    def twin(self) -> PromptedTask:
        """The `_score_eval` task of this prompt, which rank classification evaluates."""
        return dataclasses.replace(self, name=self.name + SCORE_EVAL_SUFFIX, score_eval=True)


@dataclasses.dataclass(frozen=True)
class TaskDescription:
    """Everything that a task consists of.

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
        """The vocabulary's serialized SentencePiece model; None for other kinds of vocabulary."""
        return getattr(self.vocabulary, "sp_model", None)

    def twin(self) -> TaskDescription:
        """The twin's description, over the same rows."""
        return dataclasses.replace(self, prompt=self.prompt.twin())


# What is registered -----------------------------------------------------------------------------

_tasks: dict[str, TaskDescription] = {}


def prompted_tasks() -> Mapping[str, PromptedTask]:
    """Every prompted task registered so far, by name, the `_score_eval` twins included."""
    return {name: description.prompt for name, description in _tasks.items()}


def task_descriptions() -> Mapping[str, TaskDescription]:
    """Descriptions of every prompted task registered so far, by name, including twins."""
    return types.MappingProxyType(_tasks)


def record_task(description: TaskDescription) -> None:
    """Adds a task, replacing any task of the same name."""
    _tasks[description.prompt.name] = description


def registered_tasks() -> list[str]:
    """Names of all tasks, including those that only SeqIO knows."""
    known = task_descriptions()
    # Not imported here: that takes seconds, and nothing is registered in it yet.
    seqio = sys.modules.get("seqio")
    others = () if seqio is None else seqio.TaskRegistry.names()
    return [*known, *(name for name in others if name not in known)]


# Metrics ----------------------------------------------------------------------------------------

METRICS = {
    "Accuracy": "accuracy",
    "AUC": "auc",
    "BLEU": "bleu",
    "COQA F1": "coqa_f1",
    "Edit Distance": "edit_distance",
    "MultiRC": "multirc_f1_over_all_answers",
    "Other": "accuracy",
    "Pearson Correlation": "pearson_corrcoef",
    "ROUGE": "rouge",
    "Sequence Accuracy": "sequence_accuracy",
    "Span Squad": "span_squad",
    "Spearman Correlation": "spearman_corrcoef",
    "Squad": "squad",
    "Trivia QA": "trivia_qa",
}
"""promptsource's names -> functions of t5.evaluation.metrics; "Other" counts as accuracy in T0."""

OF_T5 = ("glue", "super_glue")
"""Datasets whose tasks have T5's metrics, whatever the template names."""

# Those whose metric is not simply accuracy. Source: t5.data.glue_utils.
_T5S: dict[tuple[str, str | None], tuple[str, ...]] = {
    ("glue", "ax"): (),
    ("glue", "cola"): ("matthews_corrcoef",),
    ("glue", "mrpc"): ("f1_score_with_invalid", "accuracy"),
    ("glue", "qqp"): ("f1_score_with_invalid", "accuracy"),
    ("glue", "stsb"): ("pearson_corrcoef", "spearman_corrcoef"),
    ("super_glue", "axb"): (),
    ("super_glue", "axg"): (),
    ("super_glue", "cb"): ("mean_3class_f1", "accuracy"),
    ("super_glue", "record"): ("squad",),
}


def metric_names(task: PromptedTask) -> tuple[str, ...]:
    """Names of the metrics that a task is evaluated with; for a twin, rank_classification."""
    if task.score_eval:
        return ("rank_classification",)
    dataset = modelled_on(task.dataset)
    if dataset in OF_T5:
        return _T5S.get((dataset, task.subset), ("accuracy",))
    return tuple(METRICS[name] for name in task.metrics)
