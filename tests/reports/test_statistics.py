import runpy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.special import expit, logit
from scipy.stats import beta
from scipy.stats import t as student

from t0repro.evaluation.rank import rank_classification
from t0repro.evaluation.task_scores import TaskScores
from t0repro.reports.statistics import (
    Bootstrap,
    DatasetMean,
    Interval,
    Outcomes,
    Reweighted,
    detectable_difference,
    holm,
    mean_over_datasets,
    random_prompts_interval,
    reweighted,
    t_quantile,
)

COVERAGE = Path(__file__).parents[2] / "scripts" / "bench" / "coverage.py"

DEFAULT = Bootstrap()


def ranked(correct, weights=None, examples=None):
    """A prompt's result on examples of two choices, right where `correct` says so."""
    at = np.arange(len(correct)).repeat(2)
    weights = np.ones(len(correct)) if weights is None else np.array(weights)
    examples = np.arange(len(correct)) if examples is None else np.array(examples)
    first = np.tile([True, False], len(correct))
    return rank_classification(
        TaskScores(
            task="rte_score_eval",
            step=1,
            input_index=examples[at],
            choice_index=np.tile([0, 1], len(correct)),
            is_correct=first == np.array(correct)[at],
            weight=weights[at],
            target_length=np.ones(len(at), np.int64),
            score=np.where(first, 0.0, -1.0),
        )
    )


def of_prompts(prompts, bootstrap=DEFAULT):
    """Their accuracies under each weighting, and their outcomes."""
    outcomes = Outcomes.of(prompts)
    return reweighted(outcomes, "rte", bootstrap), outcomes


def mean(found):
    return found.each(lambda values: values.mean(-1))


def test_an_interval_leaves_out_as_much_on_either_side():
    values = np.random.default_rng(0).permutation(1001)
    same = Reweighted(values, values, values)
    assert same.interval(Bootstrap()) == Interval(pytest.approx(25), pytest.approx(975))
    ninety = Bootstrap(confidence=0.9)
    assert same.interval(ninety) == Interval(pytest.approx(50), pytest.approx(950))
    assert (Bootstrap().percent, ninety.percent) == ("95%", "90%")


def test_weightings_differ_by_seed_dataset_and_number_of_examples_alone():
    def first(bootstrap, *of):
        return next(bootstrap.weightings(*of))[0, 0]

    others = (("rte", 7), ("cb", 7), ("rte", 8))
    found = [first(Bootstrap(), *of) for of in others] + [first(Bootstrap(seed=1), "rte", 7)]
    assert len(set(found)) == 4
    assert first(Bootstrap(), "rte", 7) == first(Bootstrap(200), "rte", 7)


def test_weightings_of_many_examples_come_in_parts():
    parts = list(Bootstrap(5).weightings("rte", 900_000))
    assert [part.shape for part in parts] == [(2, 900_001), (2, 900_001), (1, 900_001)]


def test_prompts_are_paired_by_the_examples_index_whatever_rows_they_have():
    # Equal counts of other rows: only examples 2 and 3 are in both.
    outcomes = Outcomes.of(
        [ranked([1, 1, 0], examples=[0, 2, 3]), ranked([0, 1, 1], examples=[2, 3, 9])]
    )
    assert outcomes.right.tolist() == [[1, 0], [1, 0], [0, 1], [0, 1]]
    assert outcomes.weight.tolist() == [[1, 0], [1, 1], [1, 1], [0, 1]]
    assert (outcomes.examples, outcomes.same_rows) == (4, False)
    np.testing.assert_allclose(outcomes.accuracy, [200 / 3, 200 / 3])
    assert outcomes.largest_share == pytest.approx(1 / 3)


def test_a_prompt_that_lacks_a_row_is_as_uncertain_with_the_others_as_without():
    right = np.random.default_rng(3).random(100) < 0.6
    whole = [ranked(right)] * 10
    # Each of these lacks another row, so that no two have the same ones.
    lacking = [
        ranked(np.delete(right, at), examples=np.delete(np.arange(100), at)) for at in range(10)
    ]
    paired, unpaired = (mean(of_prompts(of)[0]).interval(Bootstrap()) for of in (whole, lacking))
    assert unpaired.high - unpaired.low == pytest.approx(paired.high - paired.low, abs=0.5)


def test_standard_errors_are_of_weighted_examples_and_of_prompts_that_share_them():
    right = [1, 0, 1, 1]
    outcomes = Outcomes.of([ranked(right), ranked(right), ranked([not x for x in right])])
    each, of_mean = outcomes.standard_errors()
    np.testing.assert_allclose(each, 100 * np.sqrt(0.75 * 0.25 / 3))
    assert of_mean == pytest.approx(each[0] / 3)  # the third prompt cancels one of the others
    each, of_mean = Outcomes.of([ranked([1, 0], [3, 1])]).standard_errors()
    # The shares 3/4 and 1/4, times the distances from 75%; two examples double the variance.
    assert of_mean == pytest.approx(each[0]) == pytest.approx(np.sqrt(2 * 2) * 0.75 * 25)
    assert Outcomes.of([ranked([1])]).standard_errors()[1] == 0


@pytest.mark.parametrize(("right", "size"), [(2, 2), (0, 3), (4, 5), (60, 64), (64, 64)])
def test_a_prompts_interval_is_clopper_and_pearsons(right, size):
    correct = [1] * right + [0] * (size - right)
    interval = mean(of_prompts([ranked(correct)], Bootstrap(50000))[0]).interval(Bootstrap())
    low = 100 * beta.ppf(0.025, right, size - right + 1) if right else 0
    high = 100 * beta.ppf(0.975, right + 1, size - right) if right < size else 100
    assert interval.low == pytest.approx(low, abs=1.5)
    assert interval.high == pytest.approx(high, abs=1.5)
    assert right < size or interval.high == 100


def test_many_prompts_with_few_examples_have_a_wide_interval():
    interval = mean(of_prompts([ranked([1, 1])] * 10)[0]).interval(Bootstrap())
    assert interval.low < 25 and interval.high == 100


def test_prompts_share_the_weights_of_their_examples_and_heavier_ones_count_for_more():
    light, heavy = ranked([1, 0], [1, 1]), ranked([1, 0], [9, 1])
    found, _ = of_prompts([light, light, heavy], Bootstrap(50))
    for values in (found.plain, found.lower, found.upper):
        np.testing.assert_array_equal(values[:, 0], values[:, 1])
    assert (found.plain[:, 2] > found.plain[:, 0]).all()
    assert (found.lower < found.plain).all() and (found.plain < found.upper).all()
    # The further example is as heavy as the heaviest one, 9.
    even = Outcomes.of([heavy]).reweighted(np.ones((1, 3)))
    assert (even.plain, even.lower, even.upper) == (90, pytest.approx(900 / 19), 100 - 100 / 19)


@pytest.mark.parametrize("examples", [10, 3])
def test_runs_that_flip_every_example_or_none_have_an_interval_with_a_width(examples):
    wrong, right = ([ranked([at] * examples)] for at in (0, 1))
    found = {name: of_prompts(of, Bootstrap(50000))[0] for name, of in (("a", wrong), ("b", right))}
    # All of ten flip: at least 69% of all examples do, and at most 31% flip back.
    least = 100 * 0.025 ** (1 / examples)
    flipped = mean(found["b"].minus(found["a"])).interval(Bootstrap())
    assert flipped == Interval(pytest.approx(2 * least - 100, abs=1.5), 100)
    same = mean(found["b"].minus(found["b"])).interval(Bootstrap())
    assert same.low == pytest.approx(least - 100, abs=1.5)
    assert same.high == pytest.approx(100 - least, abs=1.5)


def test_a_mean_over_datasets_that_are_all_right_is_as_sure_as_of_all_their_examples():
    found, outcomes = of_prompts([ranked([1] * 8)] * 3, Bootstrap(50000))
    dataset = DatasetMean.of(outcomes, found)
    alone = mean_over_datasets([dataset], Bootstrap()).interval(Bootstrap())
    assert alone == mean(found).interval(Bootstrap())
    together = mean_over_datasets([dataset] * 5, Bootstrap()).interval(Bootstrap())
    assert together == Interval(pytest.approx(100 * 0.025 ** (1 / 40), abs=1), 100)


def test_every_interval_holds_the_truth_as_often_as_it_says():
    """A short run of the simulation; 300 suites give 95% with a standard error of 1.3."""
    simulated = SimpleNamespace(**runpy.run_path(str(COVERAGE)))
    simulation, suite = simulated.Simulation(300, Bootstrap(400)), simulated.Suite
    # Nothing makes these conservative: many outcomes that differ, or rows that prompts lack.
    near = {
        "unequal rows": simulation.dataset(suite(64, 0.5, 1.0, 6, "unequal"))["mean"],
        "weights": simulation.dataset(suite(64, 0.5, 1.0, 2, weighted=True))["mean"],
        "datasets": simulation.group((suite(16, 0.5, 0.5, 3, "unequal"),) * 6),
        "differences": simulation.difference(suite(64, 0.5, 1.0, 3), 0.1, 1.0),
    }
    for name, found in near.items():
        assert 91 <= found.percent <= 99.7, (name, found)
    # Few examples and few that differ: Gaffke's interval holds the truth more often than 95%.
    few = {
        **simulation.dataset(suite(3, 0.98, 0.5, 4, "unequal")),
        "flips": simulation.difference(suite(16, 0.02, 1.0, 2), 0.96, 0.0),
        "runs alike": simulation.difference(suite(16, 0.9, 0.5, 2, "unequal"), 0.0, 0.05),
    }
    for name, found in few.items():
        assert 93 <= found.percent, (name, found)


def test_holms_values_are_those_of_his_rule_and_hold_their_level():
    # By hand: 5 * 0.005, 4 * 0.01, 3 * 0.03, the larger of that and 2 * 0.04, 0.5.
    values = [0.01, 0.04, 0.03, 0.005, 0.5]
    assert holm(values) == pytest.approx([0.04, 0.09, 0.09, 0.025, 0.5])
    assert holm([]) == [] and holm([0.4]) == [0.4] and holm([0.9, 0.9]) == [1.0, 1.0]
    # Eleven true hypotheses: some claim is made in at most 5% of suites.
    rng = np.random.default_rng(0)
    false = [min(holm(list(rng.random(11)))) <= 0.05 for _ in range(4000)]
    assert 0.035 < np.mean(false) < 0.06


def test_a_p_value_is_small_where_the_interval_begins_above():
    found, _ = of_prompts([ranked([True] * 18 + [False] * 2)])
    figure = mean(found)
    low = figure.interval(DEFAULT).low
    assert figure.p_above(low - 0.5) <= 0.025 < figure.p_above(low + 0.5)
    high = figure.interval(DEFAULT).high
    assert figure.p_below(high + 0.5) <= 0.025 < figure.p_below(high - 0.5)
    assert figure.p_above(0.0) == pytest.approx(1 / (DEFAULT.replicates + 1))


@pytest.mark.parametrize("prompts", [5, 10, 15])
@pytest.mark.parametrize("effect", [0.0, 0.2, 0.5])
@pytest.mark.parametrize("accuracy", [0.5, 0.8])
def test_an_interval_over_random_prompts_holds_their_mean(prompts, effect, accuracy):
    simulated = SimpleNamespace(**runpy.run_path(str(COVERAGE)))
    suite = simulated.Suite(100, accuracy, 0.8, prompts)
    found = simulated.Simulation(400, DEFAULT).prompts_as_a_sample(suite, effect)
    # Two standard errors of a simulation of 400 beyond 93% to 98%.
    assert 90.5 <= found.percent <= 99.4, found


def test_students_quantiles_are_scipys():
    for freedom in (1, 1.5, 2, 4, 9.3, 30, 1000):
        assert t_quantile(freedom, 0.95) == pytest.approx(student.ppf(0.975, freedom), rel=1e-4)


def test_an_interval_over_random_prompts_is_wider_and_one_prompt_has_none():
    rng = np.random.default_rng(0)
    latent = 0.5 + rng.normal(size=(200, 1)) + 0.5 * rng.normal(size=(1, 5))
    outcomes = Outcomes((latent + rng.normal(size=(200, 5)) > 0).astype(float), np.ones((200, 5)))
    found = reweighted(outcomes, "rte", DEFAULT)
    fixed = mean(found).interval(DEFAULT)
    sampled = random_prompts_interval(outcomes, fixed, DEFAULT)
    assert sampled.low < fixed.low and sampled.high > fixed.high
    error, freedom = outcomes.random_prompts_error()
    accuracy = outcomes.accuracy.mean() / 100
    reach = student.ppf(0.975, freedom) * error / 100 / (accuracy * (1 - accuracy))
    assert sampled.low == pytest.approx(100 * expit(logit(accuracy) - reach), abs=0.01)
    one = Outcomes(outcomes.right[:, :1], outcomes.weight[:, :1])
    assert random_prompts_interval(one, fixed, DEFAULT) is None
    two = Outcomes(outcomes.right[:, :2], outcomes.weight[:, :2])
    assert random_prompts_interval(two, fixed, DEFAULT) is not None
    alike = Outcomes(np.ones((20, 3)), np.ones((20, 3)))
    assert random_prompts_interval(alike, fixed, DEFAULT) == fixed


def test_a_detectable_difference_is_found_in_four_of_five_pairs_of_runs():
    rng = np.random.default_rng(0)
    examples, error = 277, 100 * np.sqrt(2 * 0.25 / 277)
    difference = detectable_difference(error, DEFAULT)
    assert difference is not None
    # All examples alike say nothing of how much others would vary.
    assert detectable_difference(0.0, DEFAULT) is None
    first = rng.random((4000, examples)) < 0.5 - difference / 200
    second = rng.random((4000, examples)) < 0.5 + difference / 200
    gain = 100 * (second.mean(-1) - first.mean(-1))
    assert np.mean(gain > 1.96 * error) == pytest.approx(0.8, abs=0.02)
