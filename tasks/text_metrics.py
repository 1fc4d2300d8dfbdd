"""T0's metrics of decoded texts without t5: the same numbers as t5.evaluation.metrics (0.9.4).

BLEU, ROUGE, edit distance, CoQA's F1 and the metrics of MultiRC and ReCoRD are t5's alone.
"""

from __future__ import annotations

import functools
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from t0repro.tasks.task import PromptedTask, metric_names

Metric = Callable[[Sequence[Any], Sequence[Any]], Mapping[str, float]]


def computable(task: PromptedTask) -> bool:
    """Whether all metrics of a task's decoded texts are computed here."""
    names = metric_names(task)
    # ReCoRD's "squad" takes the best of several answers.
    return (task.dataset, task.subset) != ("super_glue", "record") and all(
        name in METRICS for name in names
    )


def metrics_of(task: PromptedTask) -> list[Metric]:
    """A task's metrics, each called as metric(targets, predictions) -> {name: value}.

    Raises:
      KeyError: If one is not `computable`.
    """
    return [METRICS[name] for name in metric_names(task)]


def postprocess(
    output_or_target: str,
    example: Mapping[str, Any] | None = None,
    is_target: bool = False,
    label_classes: Sequence[str] | None = None,
) -> str | int:
    """The stripped text or, if the answer choices are fixed, the index of its class, -1 if none.

    Cached targets of P3 begin with a space, which is why both outputs and targets are stripped.

    Args:
      output_or_target: The text to compare.
      example: Ignored; SeqIO passes it.
      is_target: Ignored; SeqIO passes it.
      label_classes: The answer choices that every example has, or None.
    """
    del example, is_target
    text = output_or_target.strip()
    if not label_classes:
        return text
    return list(label_classes).index(text) if text in label_classes else -1


def _accuracy(targets: Sequence[Any], predictions: Sequence[Any]) -> dict[str, float]:
    return {"accuracy": 100 * _sklearn("accuracy_score")(targets, predictions)}


def _sequence_accuracy(targets: Sequence[Any], predictions: Sequence[Any]) -> dict[str, float]:
    pairs = zip(targets, predictions, strict=True)
    equal = np.mean([target == found for target, found in pairs])
    return {"sequence_accuracy": 100 * float(equal)}


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
    normal: Callable[[str], str], targets: Sequence[str], predictions: Sequence[str]
) -> dict[str, float]:
    """Exact matches, and F1 of words, of one right answer each; both in percent."""
    pairs = [
        (normal(target), normal(found)) for target, found in zip(targets, predictions, strict=True)
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


def _normal(text: str, punctuation: str, replaced_by: str) -> str:
    """Lower case without punctuation, articles and repeated spaces."""
    table = str.maketrans(dict.fromkeys(punctuation, replaced_by))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(table)).split())


def _sklearn(name: str) -> Callable[..., Any]:
    import sklearn.metrics  # which takes a second

    return getattr(sklearn.metrics, name)


_OF_SQUAD = functools.partial(_normal, punctuation=string.punctuation, replaced_by="")
# TriviaQA has more characters to drop, and puts a space in their place.
_OF_TRIVIA_QA = functools.partial(
    _normal, punctuation=string.punctuation + "‘’´`_", replaced_by=" "
)

METRICS: Mapping[str, Metric] = {
    "accuracy": _accuracy,
    "f1_score_with_invalid": _f1,
    "matthews_corrcoef": _matthews,
    "mean_3class_f1": _mean_f1,
    "pearson_corrcoef": functools.partial(_correlation, "pearson"),
    "sequence_accuracy": _sequence_accuracy,
    "spearman_corrcoef": functools.partial(_correlation, "spearman"),
    "squad": functools.partial(_question_answering, _OF_SQUAD),
    "trivia_qa": functools.partial(_question_answering, _OF_TRIVIA_QA),
}
"""The metrics, by the names that `t0repro.tasks.task.metric_names` gives."""
