"""A prompted task's evaluation without SeqIO and t5: examples from rows to tokens, and metrics.

Except for padding, the examples equal those of t5.models.mesh_transformer.mesh_eval_dataset_fn.
That function traces and runs a graph per task, which calls back into Python for each row: for a
mixture of a hundred tasks, it would take most of an evaluation's time.
"""

from __future__ import annotations

import functools
import itertools
import re
import string
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from t0repro.tasks.task import PromptedTask, TaskDescription, metric_names
from t0repro.tasks.vocabulary import processor_of

Example = dict[str, Any]
Numbered = Iterator[tuple[int, Example]]

UNCUT: Mapping[str, int] = {"inputs": sys.maxsize, "targets": sys.maxsize}
"""Lengths that truncate nothing."""
_ROWS_AT_ONCE = 512  # tokenized together for speed; also limits memory
_MAX_CACHED_TARGETS = 4096


def prompted_examples(
    task: TaskDescription,
    split: str,
    lengths: Mapping[str, int],
    choose: Callable[[Numbered], Numbered] = iter,
) -> Iterator[Example]:
    """Yields a split's examples in the order of its rows; for a twin, one per answer choice.

    Args:
      task: A task with a SentencePiece vocabulary.
      split: The task's split to read.
      lengths: Maximum tokens per feature; longer ones are truncated, and truncated targets still
        end in EOS.
      choose: Filters the stream of (number, rendered row); keeps all of them by default.

    Yields:
      Examples with `inputs` and `targets`, int32 without padding, the texts of both as bytes
      (`*_pretokenized`), and `answer_choices` or, for a twin, `idx` int32 [2], `is_correct` and
      `weight`.

    Raises:
      UserError: If a row is missing or broken, or the vocabulary cannot be read.
    """
    rendered = choose(enumerate(task.rows.examples(split)))
    tokens, ranks = None, task.prompt.score_eval
    while block := list(itertools.islice(rendered, _ROWS_AT_ONCE)):
        tokens = tokens or _Tokens(task, lengths)  # report missing rows before anything else
        inputs = tokens.of_inputs([example["inputs"] for _, example in block])
        for (number, example), encoded in zip(block, inputs, strict=True):
            if ranks:
                yield from _of_choices(example, encoded, number, tokens)
            else:
                yield _of_target(example, encoded, tokens)


def shard_of(shard: int, num_shards: int) -> Callable[[Numbered], Numbered]:
    """The `choose` that keeps one shard of a split."""
    # SeqIO shards the rendered rows, before a twin makes an example of each choice.
    return lambda rendered: itertools.islice(rendered, shard, None, num_shards)


def _of_target(example: Example, inputs: Example, tokens: _Tokens) -> Example:
    found = {**inputs, **tokens.of_target(example["targets"])}
    if "answer_choices" in example:
        choices = [choice.encode() for choice in example["answer_choices"]]
        found["answer_choices"] = np.array(choices, object)
    return found


def _of_choices(
    example: Example, inputs: Example, ordinal: int, tokens: _Tokens
) -> Iterator[Example]:
    # As t5.data.preprocessors.rank_classification expands them.
    for index, choice in enumerate(example["answer_choices"]):
        yield {
            **inputs,
            **tokens.of_target(choice),
            # t5's preprocessor numbers inputs by their order in the split.
            "idx": np.array([ordinal, index], np.int32),
            "is_correct": np.bool_(choice == example["targets"]),
            "weight": np.float32(1.0),
        }


class _Tokens:
    """Tokenizes the texts of one task into features."""

    def __init__(self, task: TaskDescription, lengths: Mapping[str, int]):
        assert task.sp_model is not None
        self._processor = processor_of(task.sp_model)
        self._lengths = lengths
        self._targets: dict[str, Example] = {}  # choices repeat

    def of_inputs(self, texts: Sequence[str]) -> list[Example]:
        length = self._lengths["inputs"]
        return [
            {
                "inputs": np.array(tokens[:length], np.int32),
                "inputs_pretokenized": text.encode(),
            }
            for text, tokens in zip(texts, self._processor.encode(list(texts)), strict=True)
        ]

    def of_target(self, text: str) -> Example:
        found = self._targets.get(text)
        if found is None:
            if len(self._targets) >= _MAX_CACHED_TARGETS:
                self._targets.clear()
            eos, length = self._processor.eos_id(), self._lengths["targets"]
            tokens = [*self._processor.encode(text), eos]
            # Truncated, but still with EOS at the end.
            if len(tokens) > length:
                tokens = [*tokens[: length - 1], eos]
            found = self._targets[text] = {
                "targets": np.array(tokens, np.int32),
                "targets_pretokenized": text.encode(),
            }
        return found


# ---- T0's metrics of decoded texts, the same numbers as t5.evaluation.metrics (0.9.4) ------------

# Only t5 computes those of MultiRC, ReCoRD and SQuAD's spans, which do not compare texts.

Metric = Callable[[Sequence[Any], Sequence[Any]], Mapping[str, float]]


def uncomputable(task: PromptedTask) -> str | None:
    """The first of a task's metrics of decoded texts that is not computed here, if there is one."""
    names = () if task.score_eval else metric_names(task)
    # ReCoRD's "squad" takes the best of several answers.
    if names and (task.dataset, task.subset) == ("super_glue", "record"):
        return "squad of several answers"
    return next((name for name in names if name not in METRICS), None)


def metrics_of(task: PromptedTask) -> list[Metric]:
    """A task's metrics, each called as metric(targets, predictions) -> {name: value}.

    Raises:
      KeyError: If one is `uncomputable`.
    """
    return [METRICS[name] for name in metric_names(task)]


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


def _coqa_f1(targets: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
    """F1 of words, where two texts without any are equal; in percent."""
    pairs = [
        (_OF_SQUAD(target).split(), _OF_SQUAD(found).split())
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


_OF_SQUAD = functools.partial(_normal, punctuation=string.punctuation, replaced_by="")
# TriviaQA has more characters to drop, and puts a space in their place.
_OF_TRIVIA_QA = functools.partial(
    _normal, punctuation=string.punctuation + "‘’´`_", replaced_by=" "
)

METRICS: Mapping[str, Metric] = {
    "accuracy": _accuracy,
    "auc": _auc,
    "bleu": _bleu,
    "coqa_f1": _coqa_f1,
    "edit_distance": _edit_distance,
    "f1_score_with_invalid": _f1,
    "matthews_corrcoef": _matthews,
    "mean_3class_f1": _mean_f1,
    "pearson_corrcoef": functools.partial(_correlation, "pearson"),
    "rouge": _rouge,
    "sequence_accuracy": _sequence_accuracy,
    "spearman_corrcoef": functools.partial(_correlation, "spearman"),
    "squad": functools.partial(_question_answering, _OF_SQUAD),
    "trivia_qa": functools.partial(_question_answering, _OF_TRIVIA_QA),
}
"""The metrics, by the names that `t0repro.tasks.task.metric_names` gives."""
