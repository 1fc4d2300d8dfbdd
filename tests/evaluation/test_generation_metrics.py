"""Metrics of decoded texts against sacrebleu, rouge_score and SQuAD's definition."""

import collections
import re
import string
from types import SimpleNamespace

import numpy as np
import pytest
import sacrebleu
from rouge_score import rouge_scorer
from t5.evaluation import metrics

from t0repro.evaluation.judge import Judge
from t0repro.tasks.metrics import METRIC_FUNCTIONS, postprocess
from t0repro.tasks.seqio_tasks import task_metrics

WORDS = (
    "the",
    "a",
    "cat",
    "sat",
    "on",
    "mat",
    "Paris",
    "7",
    "Caf\u00e9",
    "don't",
    "x.",
    "\u732b",
    "-",
)


def generated(seed):
    """Targets and outputs: equal, similar, unlike and empty texts."""
    random = np.random.default_rng(seed)
    targets = [" ".join(random.choice(WORDS, random.integers(1, 12))) for _ in range(40)]
    outputs = []
    for at, target in enumerate(targets):
        words = target.split()
        changed = [w if random.random() < 0.7 else str(random.choice(WORDS)) for w in words]
        outputs.append((target, f" {target} ", " ".join(changed), "")[at % 4])
    return targets, outputs


def judged(metric, targets, outputs):
    """What an evaluation reports for a prompted task whose template names a metric."""
    template = SimpleNamespace(metadata=SimpleNamespace(metrics=[metric]))
    judge = Judge("t", postprocess, task_metrics("my_texts", None, template))
    return judge.metrics_of([{"targets_pretokenized": target} for target in targets], outputs)


@pytest.mark.parametrize("seed", range(5))
def test_bleu_is_sacrebleus_with_the_international_tokenizer(seed):
    targets, outputs = generated(seed)
    stripped = [output.strip() for output in outputs]
    expected = sacrebleu.corpus_bleu(stripped, [targets], tokenize="intl").score
    assert judged("BLEU", targets, outputs) == {"bleu": pytest.approx(expected, abs=1e-9)}


@pytest.mark.parametrize("seed", range(2))
def test_rouge_is_t5s_and_the_mean_of_rouge_scores_up_to_t5s_resampling(seed):
    targets, outputs = generated(seed)
    np.random.seed(0)  # t5 reports the median of resampled means
    found = judged("ROUGE", targets, outputs)
    np.random.seed(0)
    assert found == metrics.rouge(targets, [output.strip() for output in outputs])
    scorer = rouge_scorer.RougeScorer(["rouge1", "rouge2"])
    for name in ("rouge1", "rouge2"):
        each = [
            scorer.score(target, output)[name].fmeasure
            for target, output in zip(targets, outputs, strict=True)
        ]
        assert found[name] == pytest.approx(100 * np.mean(each), abs=1)


def normalized(text):
    text = "".join(sign for sign in text.lower() if sign not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def overlap(target, output):
    target, output = collections.Counter(target), collections.Counter(output)
    same = (target & output).total()
    return 2 * same / (target.total() + output.total()) if same else 0.0


@pytest.mark.parametrize("seed", range(5))
def test_squad_compares_with_the_target_as_the_one_right_answer(seed):
    targets, outputs = generated(seed)
    pairs = [(normalized(t), normalized(o)) for t, o in zip(targets, outputs, strict=True)]
    expected = {
        "em": 100 * np.mean([target == output for target, output in pairs]),
        "f1": 100 * np.mean([overlap(*pair) for pair in pairs]),
    }
    assert judged("Squad", targets, outputs) == pytest.approx(expected)


def test_one_character_of_a_target_is_no_right_answer():
    for metric in ("Squad", "Trivia QA"):
        assert judged(metric, ["Paris"], ["P"]) == {"em": 0, "f1": 0}
        assert judged(metric, ["Paris"], ["paris"]) == {"em": 100, "f1": 100}


@pytest.mark.parametrize("metric", ["BLEU", "ROUGE", "Squad", "Sequence Accuracy"])
def test_outputs_without_a_common_word_and_empty_ones_have_a_rate_of_zero(metric):
    for outputs in (["", ""], ["dog", "ran"]):
        found = judged(metric, ["cat sat on mats", "birds fly home now"], outputs)
        assert set(found.values()) == {0.0}, found


# Those that do not compare texts, and two that are below.
NOT_OF_TEXTS = {"auc", "f1_score_with_invalid", "matthews_corrcoef", "mean_3class_f1"}
NUMBERS = {"pearson_corrcoef", "spearman_corrcoef"}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", sorted(METRIC_FUNCTIONS.keys() - NOT_OF_TEXTS - NUMBERS))
def test_metrics_without_t5_are_t5s(name, seed):
    targets, outputs = generated(seed)
    of_several = name in ("squad", "trivia_qa", "coqa_f1")
    np.random.seed(seed)  # ROUGE's are medians of resampled means
    theirs = getattr(metrics, name)([[t] for t in targets] if of_several else targets, outputs)
    np.random.seed(seed)
    assert METRIC_FUNCTIONS[name](targets, outputs) == theirs


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["auc", *sorted(NUMBERS)])
def test_metrics_of_numbers_without_t5_are_t5s(name, seed):
    random = np.random.default_rng(seed)
    targets = random.integers(0, 2, 40).tolist()
    outputs = (random.random(40) + targets).tolist()
    assert METRIC_FUNCTIONS[name](targets, outputs) == getattr(metrics, name)(targets, outputs)


def test_a_class_that_a_text_does_not_name_counts_as_wrong_in_t5s_f1():
    targets, outputs = [0, 1, 1, 0, 1], [0, -1, 1, -1, 0]
    ours = METRIC_FUNCTIONS["f1_score_with_invalid"](targets, outputs)
    assert ours == metrics.f1_score_with_invalid(targets, outputs)
    assert outputs == [0, -1, 1, -1, 0]
