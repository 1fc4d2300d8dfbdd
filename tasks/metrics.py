"""A prompted task's metrics: which ones it has, and the functions that compute them.

To add a metric, write a function of (targets, predictions) and give it a row in METRIC_FUNCTIONS,
and one in PROMPTSOURCE_METRICS if templates name it. SeqIO's tasks then have it too. A package that
only the metric needs is imported in its function and named in `t0repro.cli.gate`.

T0's metrics of decoded texts give the same numbers as t5.evaluation.metrics (0.9.4). Only t5
computes those of MultiRC, ReCoRD and SQuAD's spans, which do not compare texts.
"""

from __future__ import annotations

import functools
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from t0repro.tasks.catalog import modeled_on
from t0repro.tasks.task import PromptedTask

Metric = Callable[[Sequence[Any], Sequence[Any]], Mapping[str, float]]

PROMPTSOURCE_METRICS = {
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
"""promptsource's names -> those of metrics; "Other" counts as accuracy in T0."""

T5_DATASETS = ("glue", "super_glue")
"""Datasets whose tasks have T5's metrics, whatever the template names."""

# Tasks with other metrics than accuracy. Source: t5.data.glue_utils.
_T5S: dict[tuple[str, str | None], tuple[str, ...]] = {
    # ax, axb and axg are test sets alone.
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
    """Names of a task's evaluation metrics; for a twin, rank_classification."""
    if task.score_eval:
        return ("rank_classification",)
    dataset = modeled_on(task.dataset)
    if dataset in T5_DATASETS:
        return _T5S.get((dataset, task.subset), ("accuracy",))
    return tuple(PROMPTSOURCE_METRICS[name] for name in task.metrics)


def find_uncomputable_metric(task: PromptedTask) -> str | None:
    """The first of a task's metrics of decoded texts that is not computed here, if there is one."""
    names = () if task.score_eval else metric_names(task)
    # ReCoRD's "squad" takes the best of several answers.
    if names and (task.dataset, task.subset) == ("super_glue", "record"):
        return "squad of several answers"
    return next((name for name in names if name not in METRIC_FUNCTIONS), None)


def find_metrics(task: PromptedTask) -> list[Metric]:
    """A task's metrics, each called as metric(targets, predictions) -> {name: value}.

    Raises:
      KeyError: If one is not computed here (`find_uncomputable_metric`).
    """
    return [METRIC_FUNCTIONS[name] for name in metric_names(task)]


def postprocess(
    output_or_target: str,
    example: Mapping[str, Any] | None = None,
    is_target: bool = False,
    label_classes: Sequence[str] | None = None,
) -> str | int:
    """The stripped text or, if the answer choices are fixed, the index of its class, -1 if none.

    Args:
      output_or_target: The text to compare.
      example: Ignored; SeqIO passes it.
      is_target: Ignored; SeqIO passes it.
      label_classes: The answer choices that every example has, or None.
    """
    del example, is_target
    # Cached targets of P3 begin with a space, so both outputs and targets are stripped.
    text = output_or_target.strip()
    if not label_classes:
        return text
    return list(label_classes).index(text) if text in label_classes else -1


def _accuracy(name: str, targets: Sequence[Any], predictions: Sequence[Any]) -> dict[str, float]:
    pairs = zip(targets, predictions, strict=True)
    return {name: 100 * float(np.mean([target == found for target, found in pairs]))}


def _f1(targets: Sequence[int], predictions: Sequence[int]) -> dict[str, float]:
    """F1 of class 1, where a text that is neither class counts as the wrong one."""
    answers, found = np.asarray(targets), np.asarray(predictions)
    valid = (found == 0) | (found == 1)
    return {"f1": 100 * _sklearn("f1_score")(answers, np.where(valid, found, 1 - answers))}


def _mean_f1(
    targets: Sequence[int], predictions: Sequence[int], classes: int = 3
) -> dict[str, float]:
    mean = _sklearn("fbeta_score")(
        targets, predictions, beta=1, labels=range(classes), average="macro"
    )
    return {f"mean_{classes}class_f1": 100 * mean}


def _matthews(targets: Sequence[int], predictions: Sequence[int]) -> dict[str, float]:
    return {"matthews_corrcoef": 100 * _sklearn("matthews_corrcoef")(targets, predictions)}


def _correlation(kind: str, targets: Sequence[Any], predictions: Sequence[Any]) -> dict[str, float]:
    import scipy.stats

    return {f"{kind}_corrcoef": 100 * getattr(scipy.stats, f"{kind}r")(targets, predictions)[0]}


def _question_answering(
    normalize: Callable[[str], str], targets: Sequence[str], predictions: Sequence[str]
) -> dict[str, float]:
    """Exact matches, and F1 of words, of one right answer each; both in percent."""
    pairs = [
        (normalize(target), normalize(output))
        for target, output in zip(targets, predictions, strict=True)
    ]
    exact = np.mean([target == found for target, found in pairs])
    f1 = np.mean([_words_f1(target.split(), found.split()) for target, found in pairs])
    return {"em": 100 * float(exact), "f1": 100 * float(f1)}


def _words_f1(target: Sequence[str], found: Sequence[str]) -> float:
    common = (Counter(target) & Counter(found)).total()
    if not common:
        return 0.0
    precision, recall = common / len(found), common / len(target)
    return 2 * precision * recall / (precision + recall)


def _normalize(text: str, punctuation: str, replaced_by: str) -> str:
    """Lower case without punctuation, articles and repeated spaces."""
    table = str.maketrans(dict.fromkeys(punctuation, replaced_by))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(table)).split())


def _coqa_f1(targets: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
    """F1 of words, where two texts without any are equal; in percent."""
    pairs = [
        (_normalize_squad(target).split(), _normalize_squad(found).split())
        for target, found in zip(targets, predictions, strict=True)
    ]
    f1 = np.mean([_words_f1(*pair) if any(pair) else 1.0 for pair in pairs])
    return {"f1": 100 * float(f1)}


def _bleu(targets: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
    import sacrebleu

    # t5's arguments; sacrebleu's own defaults give other scores.
    found = sacrebleu.corpus_bleu(predictions, [targets], smooth_value=0.0, tokenize="intl")
    return {"bleu": found.score}


def _rouge(targets: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
    """F1 of ROUGE-1, -2 and -L of sentences: medians of resampled means, in percent."""
    from rouge_score import rouge_scorer, scoring

    names = ("rouge1", "rouge2", "rougeLsum")
    # As in t5, it resamples with NumPy's global generator, so the last digits vary.
    scorer, means = rouge_scorer.RougeScorer(names), scoring.BootstrapAggregator()
    for texts in zip(targets, predictions, strict=True):
        # ROUGE-L reads a sentence a line.
        means.add_scores(scorer.score(*(text.replace(" . ", " .\n") for text in texts)))
    found = means.aggregate()
    return {name: 100 * found[name].mid.fmeasure for name in names}


def _edit_distance(targets: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
    """Numbers of words to insert, remove or replace."""
    found = [
        # t5's words: between two separators it has an empty one, which counts.
        _distance(*(re.split(r"[^\w]", text.lower()) for text in pair))
        for pair in zip(targets, predictions, strict=True)
    ]
    return {
        f"{name}_edit": getattr(np, name)(found).item()
        for name in ("min", "max", "mean", "median", "sum")
    }


def _distance(one: Sequence[str], other: Sequence[str]) -> int:
    """Levenshtein's distance of two sequences."""
    above = range(len(other) + 1)
    for row, word in enumerate(one, start=1):
        line = [row]
        for at, its in enumerate(other):
            line.append(min(above[at + 1] + 1, line[at] + 1, above[at] + (word != its)))
        above = line
    return above[-1]


def _auc(targets: Sequence[int], predictions: Sequence[int]) -> dict[str, float]:
    """Areas below the curves of true and false positives, and of precision and recall."""
    return {
        # From 0 to 1, as in t5, where other metrics are in percent.
        "auc-roc": _sklearn("roc_auc_score")(targets, predictions),
        "auc-pr": _sklearn("average_precision_score")(targets, predictions),
    }


def _sklearn(name: str) -> Callable[..., Any]:
    import sklearn.metrics  # which takes a second

    return getattr(sklearn.metrics, name)


_normalize_squad = functools.partial(_normalize, punctuation=string.punctuation, replaced_by="")


# TriviaQA has more characters to drop, and puts a space in their place.
_normalize_trivia_qa = functools.partial(
    _normalize, punctuation=string.punctuation + "‘’´`_", replaced_by=" "
)


METRIC_FUNCTIONS: Mapping[str, Metric] = {
    "accuracy": functools.partial(_accuracy, "accuracy"),
    "auc": _auc,
    "bleu": _bleu,
    "coqa_f1": _coqa_f1,
    "edit_distance": _edit_distance,
    "f1_score_with_invalid": _f1,
    "matthews_corrcoef": _matthews,
    "mean_3class_f1": _mean_f1,
    "pearson_corrcoef": functools.partial(_correlation, "pearson"),
    "rouge": _rouge,
    "sequence_accuracy": functools.partial(_accuracy, "sequence_accuracy"),
    "spearman_corrcoef": functools.partial(_correlation, "spearman"),
    "squad": functools.partial(_question_answering, _normalize_squad),
    "trivia_qa": functools.partial(_question_answering, _normalize_trivia_qa),
}
"""The metrics, by the names that `metric_names` gives."""
