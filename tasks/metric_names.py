"""Names of the metrics that T0 evaluates a task by, without T5, whose functions they are."""

from __future__ import annotations

from t0repro.tasks.registry import PromptedTask

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
    if task.dataset in OF_T5:
        return _T5S.get((task.dataset, task.subset), ("accuracy",))
    return tuple(METRICS[name] for name in task.metrics)
