import numpy as np
import pytest
from scipy.stats import beta

from t0repro.evaluation.rank import rank_classification
from t0repro.evaluation.scores import TaskScores
from t0repro.reports.bootstrap import Bootstrap, Interval, accuracy_bounds, resampled_accuracy


def ranked(correct, weights=None):
    """A prompt's result on examples of two choices, right where `correct` says so."""
    examples = np.arange(len(correct)).repeat(2)
    weights = np.ones(len(correct)) if weights is None else np.array(weights)
    first = np.tile([True, False], len(correct))
    return rank_classification(
        TaskScores(
            task="rte_score_eval",
            step=1,
            input_index=examples,
            choice_index=np.tile([0, 1], len(correct)),
            is_correct=first == np.array(correct)[examples],
            weight=weights[examples],
            target_length=np.ones(len(examples), np.int64),
            score=np.where(first, 0.0, -1.0),
        )
    )


def test_an_interval_leaves_out_as_much_on_either_side():
    values = np.random.default_rng(0).permutation(1001)
    assert Bootstrap().interval(values) == Interval(pytest.approx(25), pytest.approx(975))
    ninety = Bootstrap(confidence=0.9)
    assert ninety.interval(values) == Interval(pytest.approx(50), pytest.approx(950))
    assert (Bootstrap().percent, ninety.percent) == ("95%", "90%")


def test_random_numbers_differ_by_seed_dataset_and_what_else_is_named():
    generators = [
        Bootstrap().generator("rte"),
        Bootstrap(seed=1).generator("rte"),
        Bootstrap().generator("cb"),
        Bootstrap().generator("rte", 7),
    ]
    assert len({generator.random() for generator in generators}) == 4
    assert Bootstrap().generator("rte").random() == Bootstrap().generator("rte").random()


def test_each_resample_counts_its_examples_by_their_weight():
    accuracy, paired = resampled_accuracy([ranked([1, 0], [3, 1])], "rte", Bootstrap(4000))
    assert accuracy.shape == (4000, 1) and paired
    # Drawn: the wrong one twice, each once, the right one twice.
    values, counts = np.unique(accuracy, return_counts=True)
    assert values.tolist() == [0, 75, 100]
    np.testing.assert_allclose(counts / 4000, [0.25, 0.5, 0.25], atol=0.03)


def test_prompts_of_as_many_examples_share_their_resamples_and_others_have_their_own():
    right = [True, False, True]
    results = [ranked(right), ranked([*right, False]), ranked([not x for x in right])]
    accuracy, paired = resampled_accuracy(results, "rte", Bootstrap(6))
    assert not paired
    np.testing.assert_allclose(accuracy[:, 0] + accuracy[:, 2], 100)
    # A report made again, in whatever version, has the numbers that it had.
    third = 100 / 3
    np.testing.assert_allclose(accuracy[:, 0], [0, third, 100, 0, 100, third])
    np.testing.assert_allclose(accuracy[:, 1], [50, 75, 50, 75, 50, 25])


@pytest.mark.parametrize(("right", "size"), [(2, 2), (0, 3), (4, 5), (60, 64), (64, 64)])
def test_a_prompts_interval_is_clopper_and_pearsons(right, size):
    correct = [1] * right + [0] * (size - right)
    bounds = accuracy_bounds([ranked(correct)], "rte", Bootstrap(50000))
    interval = bounds.each(lambda values: values[:, 0]).interval(Bootstrap())
    low = 100 * beta.ppf(0.025, right, size - right + 1) if right else 0
    high = 100 * beta.ppf(0.975, right + 1, size - right) if right < size else 100
    assert interval.low == pytest.approx(low, abs=1.5)
    assert interval.high == pytest.approx(high, abs=1.5)
    assert right < size or interval.high == 100


def test_many_prompts_with_few_examples_have_a_wide_interval():
    prompts = [ranked([1, 1])] * 10
    bounds = accuracy_bounds(prompts, "rte", Bootstrap())
    interval = bounds.each(lambda values: values.mean(-1)).interval(Bootstrap())
    assert interval.low < 25 and interval.high == 100


def test_prompts_share_the_weights_of_their_examples_and_heavier_ones_count_for_more():
    light, heavy = ranked([1, 0], [1, 1]), ranked([1, 0], [9, 1])
    bounds = accuracy_bounds([light, light, heavy, ranked([1, 0, 1])], "rte", Bootstrap(50))
    for values in (bounds.lower, bounds.upper):
        np.testing.assert_array_equal(values[:, 0], values[:, 1])
        assert (values[:, 2] > values[:, 0]).all()
        assert len(np.unique(values[:, 3])) == 50
    assert (bounds.lower < bounds.upper).all()
