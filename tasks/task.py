"""Prompted tasks: what each is made of, and which are registered. Light: imports no SeqIO."""

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
    """One registered task and the prompt that it renders.

    Attributes:
      name: the SeqIO task's name.
      dataset: the Hugging Face name, for instance `super_glue`; generated rows have a name of
        their own, as `synthetic_imdb`.
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

    @property
    def synthetic(self) -> bool:
        """Whether its rows are generated, as the demo's are: scores say nothing of real data."""
        return is_synthetic(self.dataset)

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


# What is registered -----------------------------------------------------------------------------

_tasks: dict[str, TaskDescription] = {}


def prompted_tasks() -> Mapping[str, PromptedTask]:
    """Every prompted task registered so far, by name, the `_score_eval` twins included."""
    return {name: description.prompt for name, description in _tasks.items()}


def task_descriptions() -> Mapping[str, TaskDescription]:
    """The same tasks with what they are made of."""
    return types.MappingProxyType(_tasks)


def record_task(description: TaskDescription) -> None:
    """Adds a task, or puts it in the place of one of its name."""
    _tasks[description.prompt.name] = description


def registered_tasks() -> list[str]:
    """Names of all tasks, those that only SeqIO knows included."""
    known = task_descriptions()
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

# Those that are not accuracy alone. Source: t5.data.glue_utils.
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
    """What a task is evaluated by; its twin by the rank of its choices."""
    if task.score_eval:
        return ("rank_classification",)
    dataset = modelled_on(task.dataset)
    if dataset in OF_T5:
        return _T5S.get((dataset, task.subset), ("accuracy",))
    return tuple(METRICS[name] for name in task.metrics)
