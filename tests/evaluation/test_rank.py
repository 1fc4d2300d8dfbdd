import dataclasses
import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from t0repro.errors import UserError
from t0repro.evaluation.judge import Judge
from t0repro.evaluation.rank import postprocess_rank, rank_classification, rank_metrics
from t0repro.evaluation.task_scores import TaskScores


def task_scores(targets, scores):
    """TaskScores of t5's tuples ((input, choice), is_correct, weight, length) and of scores."""
    return TaskScores(
        task="demo_score_eval",
        step=5,
        input_index=np.array([t[0][0] for t in targets], np.int64),
        choice_index=np.array([t[0][1] for t in targets], np.int64),
        is_correct=np.array([t[1] for t in targets], np.bool_),
        weight=np.array([t[2] for t in targets], np.float64),
        target_length=np.array([t[3] for t in targets], np.int64),
        score=np.array(scores, np.float64),
    )


def examples_of(*examples, lengths=None):
    """One example per argument: a list of (is_correct, score)."""
    targets, scores = [], []
    for i, choices in enumerate(examples):
        for j, (is_correct, score) in enumerate(choices):
            targets.append(((i, j), is_correct, 1.0, lengths[i][j] if lengths else 1))
            scores.append(score)
    return task_scores(targets, scores)


# Few distinct values, so that ties are common; float32 values, as scorers write them.
SCORES = st.sampled_from([-0.1, -0.5, -0.5000001, -1.0, -2.0, -30.0]).map(np.float32).map(float)


@st.composite
def evaluations(draw, fixed):
    """Targets and scores in any order, with ties, several or no correct choices and weights."""
    num_classes = draw(st.sampled_from([2, 2, 3, 4])) if fixed else None
    # Most metrics want at most one correct choice for each example, which is rare by chance.
    one_each = fixed and draw(st.integers(0, 3)) > 0
    targets, scores = [], []
    for i in range(draw(st.integers(1, 8))):
        weight = draw(st.sampled_from([0.5, 1.0, 2.0]))
        choices = num_classes or draw(st.integers(1, 5))
        answer = draw(st.integers(-1, choices - 1))
        for j in range(choices):
            is_correct = j == answer if one_each else draw(st.booleans())
            targets.append(((3 * i, j), is_correct, weight, draw(st.integers(1, 6))))
            scores.append(draw(SCORES))
    order = draw(st.permutations(range(len(targets))))
    return num_classes, [targets[k] for k in order], [scores[k] for k in order]


def assert_as_t5(evaluation, normalize):
    from t5.evaluation import metrics as t5_metrics

    num_classes, targets, scores = evaluation
    theirs = t5_metrics.rank_classification(
        targets, scores, num_classes=num_classes, normalize_by_target_length=normalize
    )
    ours = rank_classification(
        task_scores(targets, scores),
        num_classes=num_classes,
        normalize_by_target_length=normalize,
    ).metrics
    theirs = {name: value for name, value in theirs.items() if np.isfinite(value)}
    assert ours.keys() == theirs.keys()
    if not normalize:
        same = rank_metrics(targets, scores, num_classes)
        assert {name: x for name, x in same.items() if np.isfinite(x)} == theirs
    for name, value in theirs.items():
        assert ours[name] == pytest.approx(value, rel=1e-12, abs=1e-12), name


@settings(max_examples=200)
@given(evaluations(fixed=False), st.booleans())
def test_accuracy_is_t5s_where_the_number_of_choices_varies(evaluation, normalize):
    assert_as_t5(evaluation, normalize)


# t5 lets scikit-learn warn where one class only is among the answers.
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.UndefinedMetricWarning")
@pytest.mark.filterwarnings("ignore:No positive class found in y_true")
@settings(max_examples=200)
@given(evaluations(fixed=True), st.booleans())
def test_metrics_are_t5s_where_the_number_of_choices_is_fixed(evaluation, normalize):
    assert_as_t5(evaluation, normalize)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.UndefinedMetricWarning")
@pytest.mark.filterwarnings("ignore:No positive class found in y_true")
@pytest.mark.parametrize("num_classes", [None, 2, 3])
def test_float32_weights_and_undefined_metrics_are_treated_as_t5_does(num_classes):
    """Sums in float32, NaN where all answers are of one class; targets as rank_eval has them."""
    from t5.data import postprocessors
    from t5.evaluation import metrics as t5_metrics

    generator = np.random.default_rng(0)
    targets = []
    for number in range(41):
        for choice in range(num_classes or 1 + number % 4):
            example = {
                "idx": np.array([number, choice], np.int32),
                "is_correct": np.bool_(choice == 0),
                "weight": np.float32(0.1 + number % 3),
                "targets": np.ones(number % 5, np.int32),
            }
            targets.append(postprocess_rank("", example=example, is_target=True))
            theirs = postprocessors.rank_classification("", example=example, is_target=True)
            assert repr(targets[-1]) == repr(theirs)
    scores = list(generator.normal(size=len(targets)).astype(np.float32))
    assert postprocess_rank(scores[0], example={}) is scores[0]
    ours = rank_metrics(targets, scores, num_classes)
    theirs = t5_metrics.rank_classification(targets, scores, num_classes=num_classes)
    assert {name: repr(float(value)) for name, value in theirs.items()} == {
        name: repr(value) for name, value in ours.items()
    }


def test_the_highest_log_likelihood_is_predicted():
    result = rank_classification(examples_of([(0, -3.0), (1, -1.0), (0, -2.0)]))
    assert result.predicted.tolist() == [1]
    assert result.correct.tolist() == [True]
    assert result.margin.tolist() == [1.0]


def test_the_first_choice_wins_a_tie_and_the_tie_is_counted():
    result = rank_classification(
        examples_of([(1, -1.0), (0, -1.0)], [(0, -2.0), (1, -1.0)], [(0, -np.inf), (1, -np.inf)])
    )
    assert result.predicted.tolist() == [0, 1, 0]
    assert result.tie.tolist() == [True, False, True]
    assert result.margin.tolist() == [0.0, 1.0, 0.0]


def test_any_of_several_correct_choices_counts():
    result = rank_classification(examples_of([(1, -3.0), (1, -1.0), (0, -2.0)]))
    assert result.accuracy == 100
    assert result.chance == pytest.approx(200 / 3)


def test_an_answer_that_is_none_of_the_choices_is_wrong_and_counted():
    result = rank_classification(examples_of([(0, -1.0), (0, -2.0)], [(1, -1.0), (0, -2.0)]))
    assert result.answerable.tolist() == [False, True]
    assert result.accuracy == 50
    assert result.chance == 50


def test_length_normalization_changes_the_prediction_only_when_asked_for():
    scores = examples_of([(1, -4.0), (0, -3.0)], lengths=[[4, 1]])
    assert rank_classification(scores).predicted.tolist() == [1]
    assert rank_classification(scores, normalize_by_target_length=True).predicted.tolist() == [0]


def test_a_choice_without_tokens_is_named_where_scores_are_divided_by_their_number():
    scores = examples_of([(1, -4.0), (0, -3.0)], [(1, -1.0), (0, 0.0)], lengths=[[4, 1], [1, 0]])
    assert rank_classification(scores).predicted.tolist() == [1, 1]
    with pytest.raises(UserError, match="choice 1 of example 1 has no tokens"):
        rank_classification(scores, normalize_by_target_length=True)


@pytest.mark.parametrize("times", [1, 2])
def test_t5s_metric_is_not_given_a_choice_without_tokens_to_divide_by(times):
    from t5.evaluation import metrics as t5_metrics

    metric = functools.partial(t5_metrics.rank_classification, normalize_by_target_length=True)
    for _ in range(times - 1):
        metric = functools.partial(metric, num_classes=2)
    targets = [((0, 0), True, 1.0, 2), ((0, 1), False, 1.0, 1)]
    judge = Judge("task", lambda output, **_: output, [metric])
    assert judge.metrics(targets, [-2.0, -3.0])["accuracy"] == 100
    with pytest.raises(UserError, match="choice 1 of example 0 has no tokens"):
        judge.metrics([targets[0], ((0, 1), False, 1.0, 0)], [-2.0, 0.0])


def test_chance_is_the_mean_of_one_over_the_number_of_choices():
    result = rank_classification(
        examples_of([(1, -1.0), (0, -2.0)], [(1, -1.0), (0, -2.0), (0, -2.0), (0, -2.0)])
    )
    assert result.num_choices.tolist() == [2, 4]
    assert result.chance == pytest.approx(37.5)


def test_the_majority_class_is_the_best_constant_choice():
    second = [(0, -1.0), (1, -2.0)]
    assert rank_classification(examples_of(second, second, second[::-1])).majority == (
        pytest.approx(200 / 3)
    )


def test_a_single_choice_has_an_infinite_margin_and_no_tie():
    result = rank_classification(examples_of([(1, -1.0)], [(0, -1.0), (1, -4.0)]))
    assert result.margin.tolist() == [np.inf, 3.0]
    assert not result.tie.any()


def test_a_result_has_each_example_by_its_index_with_answer_weight_and_confidence():
    targets = [((7, 1), True, 2.0, 1), ((3, 4), False, 0.5, 1), ((7, 0), True, 2.0, 1)]
    targets += [((3, 2), False, 0.5, 1), ((9, 0), False, 1.0, 1), ((9, 5), True, 1.0, 1)]
    scores = np.log([0.8, 0.3, 0.2, 0.1, 1.0, 1.0]) + [0, 0, 0, 0, -np.inf, -np.inf]
    result = rank_classification(task_scores(targets, scores))
    assert (result.task, result.step) == ("demo_score_eval", 5)
    assert result.example.tolist() == [3, 7, 9]
    assert result.predicted.tolist() == [4, 1, 0]
    assert result.answer.tolist() == [-1, 0, 5]
    assert result.weight.tolist() == [0.5, 2.0, 1.0]
    assert result.num_correct.tolist() == [0, 2, 1]
    # Where no choice is possible, the first of them is predicted with nothing to compare it to.
    assert result.confidence == pytest.approx([0.75, 0.8, 1.0])
    assert result.accuracy == pytest.approx(100 * 2 / 3.5)
    assert result.chance == pytest.approx(100 * (0.5 * 0.5 + 2.0 * 1.0 + 1.0 * 0.5) / 3.5)
    assert result.majority == pytest.approx(100 * 2 / 3.5)


def test_one_fixed_choice_has_an_accuracy_and_no_other_metric():
    result = rank_classification(examples_of([(1, -1.0)], [(0, -1.0)]), num_classes=1)
    assert result.metrics == {"accuracy": 50.0}
    assert result.margin.tolist() == [np.inf, np.inf]


def test_fixed_classes_compare_in_float32_and_weigh_by_the_first_choice():
    targets = [((0, 0), False, 3.0, 1), ((0, 1), True, 1.0, 1)]
    scores = task_scores(targets, [-1.0, -1.0 + 1e-12])
    varying, fixed = rank_classification(scores), rank_classification(scores, num_classes=2)
    assert (varying.predicted.tolist(), varying.weight.tolist()) == ([1], [1.0])
    assert (fixed.predicted.tolist(), fixed.weight.tolist()) == ([0], [3.0])
    assert fixed.tie.all() and not varying.tie.any()
    second = rank_classification(task_scores(targets, [-2.0, -1.0]), num_classes=2)
    assert (second.predicted.tolist(), second.weight.tolist()) == ([1], [3.0])


def test_f1_counts_examples_by_their_weight():
    targets, scores = [], []
    for i, (answer, predicted, weight) in enumerate([(1, 1, 2), (1, 0, 1), (0, 1, 0.5), (0, 0, 1)]):
        targets += [((i, j), j == answer, weight, 1) for j in (0, 1)]
        scores += [0.0 if j == predicted else -1.0 for j in (0, 1)]
    metrics = rank_classification(task_scores(targets, scores), num_classes=2).metrics
    # Two true positives, half a false one, one false negative.
    assert metrics["f1"] == pytest.approx(100 * 4 / (4 + 0.5 + 1))
    assert metrics["accuracy"] == pytest.approx(100 * 3 / 4.5)


def test_probabilities_of_unlikely_choices_do_not_vanish_beside_likely_ones():
    scores = examples_of([(1, -2000.0), (0, -2001.0)], [(0, -1.0), (1, -0.5)])
    metrics = rank_classification(scores, num_classes=2).metrics
    assert (metrics["auc-roc"], metrics["auc-pr"]) == (100, 100)


def test_metrics_undefined_where_all_answers_are_of_one_class_are_absent_without_a_warning():
    result = rank_classification(examples_of([(1, -1.0), (0, -2.0)]), num_classes=2)
    assert result.metrics == {"accuracy": 100.0, "f1": 0.0, "auc-pr": 0.0}


def test_a_nan_score_names_task_example_and_step():
    with pytest.raises(UserError, match="'demo_score_eval', example 1, step 5: the score is NaN"):
        rank_classification(examples_of([(1, -1.0), (0, -2.0)], [(1, -1.0), (0, np.nan)]))


def test_an_idx_that_comes_twice_is_an_error():
    targets = [((1, 2), True, 1.0, 1), ((0, 0), False, 1.0, 1), ((1, 2), False, 1.0, 1)]
    with pytest.raises(UserError, match=r"idx \(1, 2\) occurs more than once"):
        rank_classification(task_scores(targets, [-1.0, -2.0, -3.0]))


def test_an_example_with_another_number_of_choices_is_named_where_it_is_fixed():
    with pytest.raises(UserError, match="Example 1 of 'demo_score_eval' has 3 choices, not 2"):
        rank_classification(examples_of([(1, 0.0)] * 2, [(1, 0.0)] * 3), num_classes=2)


def test_no_pairs_and_no_weight_are_errors():
    with pytest.raises(UserError, match="no .input, choice. pairs"):
        rank_classification(task_scores([], []))
    scores = examples_of([(1, -1.0), (0, -2.0)])
    with pytest.raises(UserError, match="sum to zero"):
        rank_classification(dataclasses.replace(scores, weight=np.zeros(2)))
