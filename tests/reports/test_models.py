"""Which models can be told apart, and models that were trained with several seeds."""

import json
import runpy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import typer
from scipy.stats import t as student
from scipy.stats import ttest_rel
from typer.testing import CliRunner

from t0repro.cli.compare import compare
from t0repro.errors import UserError
from t0repro.reports.make_report import ExtraContent
from t0repro.reports.models import compare_models, sets_alike
from t0repro.reports.run import Run
from t0repro.reports.statistics import Bootstrap, Outcomes, difference_over_seeds, t_p_value

from .suites import QUICK, Evaluation, render_html, render_markdown, report_of

COVERAGE = Path(__file__).parents[2] / "scripts" / "bench" / "coverage.py"

app = typer.Typer()
app.command()(compare)


def trained(folder, seed, skill):
    """One run's evaluation: two datasets of two prompts; RTE by chance whatever the skill."""
    evaluation = Evaluation(folder / "validation_eval", seed)
    for template in ("classify", "recommend"):
        evaluation.add("ag_news", None, template, 60, 4, skill)
        evaluation.add("super_glue", "rte", template, 40, 2, 0.0)
    return evaluation


def models_of(*runs):
    evaluations = [trained(*run[1:]) for run in runs]
    found = [Run(run[0], e.folder, 20) for run, e in zip(runs, evaluations, strict=True)]
    return compare_models(found, evaluations[0].prompts, QUICK)


def pairs(*names):
    return {frozenset(name) for name in names}


@pytest.mark.parametrize(
    ("labels", "apart", "sets"),
    [
        ("abc", pairs(), [("a", "b", "c")]),
        ("abc", pairs("ac"), [("a", "b"), ("b", "c")]),
        ("abc", pairs("ab", "ac"), [("a",), ("b", "c")]),
        ("cab", pairs("ab", "bc", "ca"), [("c",), ("a",), ("b",)]),
        ("abcd", pairs("ad", "bd"), [("a", "b", "c"), ("c", "d")]),
    ],
)
def test_sets_are_the_largest_without_two_models_that_differ(labels, apart, sets):
    assert list(sets_alike(labels, apart)) == sets


def test_models_that_cannot_be_told_apart_are_a_set_and_others_are_not(tmp_path):
    found = models_of(
        ("x", tmp_path / "x", 0, 2.5), ("y", tmp_path / "y", 1, 2.5), ("z", tmp_path / "z", 2, 0.0)
    )
    news, rte = found.datasets
    assert set(news.alike) == {tuple(sorted("xy", key=lambda m: -news.accuracy[m])), ("z",)}
    assert [set(each) for each in rte.alike] == [{"x", "y", "z"}]
    assert found.never_apart == (("x", "y"),)
    # Holm's family: three pairs of models on two datasets.
    values = sorted(pair.p_value for each in found.datasets for pair in each.pairs)
    adjusted = sorted(pair.p_adjusted for each in found.datasets for pair in each.pairs)
    assert len(values) == 6 and adjusted[0] == pytest.approx(6 * values[0])


def test_the_command_says_which_models_are_alike_and_over_seeds(tmp_path):
    runs = [("x", 0, 2.5), ("x", 1, 2.6), ("x", 2, 2.4), ("z", 3, 0.0), ("z", 4, 0.1)]
    for number, (_, seed, skill) in enumerate(runs):
        trained(tmp_path / str(number), seed, skill)
    given = [f"{label}={tmp_path}/{at}" for at, (label, *_) in enumerate(runs)]
    out = tmp_path / "out"
    run = CliRunner().invoke(app, [*given, "--out", str(out)], catch_exceptions=False)
    assert run.exit_code == 0
    assert "x (3 seeds)" in run.output and "Differences over seeds" in run.output
    assert "x (1) and x (2)" in run.output
    entries = json.loads((out / "compare.json").read_text())
    models = entries[0]["models"]
    assert models["seeds"] == {"x": 3, "z": 2}
    for dataset in models["datasets"]:
        (pair,) = dataset["pairs"]
        low, high = pair["interval"]["low"], pair["interval"]["high"]
        assert low <= pair["difference"] <= high
    for name in ("compare.md", "compare.html"):
        assert "cannot be told apart" in (out / name).read_text()


def test_runs_of_one_label_alone_are_no_comparison(tmp_path):
    with pytest.raises(UserError, match="one model's seeds"):
        models_of(("x", tmp_path / "a", 0, 1.0), ("x", tmp_path / "b", 1, 1.0))


def test_the_report_says_whether_its_run_and_the_other_can_be_told_apart(tmp_path):
    first, second = trained(tmp_path / "a", 0, 2.5), trained(tmp_path / "b", 1, 0.0)
    report = report_of(first, ExtraContent(other=Run("other", second.folder)))
    sentence = "jax and other cannot be told apart on super_glue/rte (95% confidence"
    assert sentence in render_markdown(report) and sentence in render_html(report)


def test_a_dataset_wholly_below_chance_is_called_that_on_every_page(tmp_path):
    evaluation = Evaluation(tmp_path / "validation_eval")
    for template in ("classify", "recommend"):
        evaluation.add("ag_news", None, template, 200, 4, -3.0)
    report = report_of(evaluation)
    for text in (render_markdown(report), render_html(report)):
        assert "below chance" in text and "not clearly above" not in text
    trained(tmp_path / "other", 1, -3.0)
    paths = [str(tmp_path), str(tmp_path / "other")]
    shown = CliRunner().invoke(app, paths, catch_exceptions=False).output
    assert "Clearly below chance on ag_news_classify: " in shown.replace("\n", " ")


def test_students_p_values_are_scipys():
    for freedom, t in ((1, 0.5), (2.5, 3.0), (9, 2.2), (40, 1.0)):
        assert t_p_value(freedom, t) == pytest.approx(2 * student.sf(t, freedom), abs=1e-4)


def test_more_seeds_make_the_difference_surer_and_a_p_value_fits_its_interval():
    rng = np.random.default_rng(0)

    def runs(count, better):
        shifts = better + 0.02 * rng.normal(size=(count, 1, 1))
        right = rng.random((count, 277, 10)) < 0.6 + shifts
        return [Outcomes(each.astype(float), np.ones(each.shape)) for each in right]

    few = difference_over_seeds(runs(1, 0.0), runs(2, 0.1), Bootstrap())
    many = difference_over_seeds(runs(8, 0.0), runs(8, 0.1), Bootstrap())
    assert many.interval.high - many.interval.low < (few.interval.high - few.interval.low) / 2
    for found in (few, many):
        assert (found.p_value <= 0.05) == (found.interval.low > 0 or found.interval.high < 0)
    with pytest.raises(ValueError, match="two seeds"):
        difference_over_seeds(runs(1, 0.0), runs(1, 0.0), Bootstrap())


def test_where_nothing_varies_the_examples_alone_say_how_sure_a_difference_is():
    """20 examples that are all alike leave 17% for others, by Clopper and Pearson."""
    right, wrong = np.ones((20, 3)), np.zeros((20, 3))

    def model(right):
        return [Outcomes(right, np.ones((20, 3)))] * 2

    found = difference_over_seeds(model(wrong), model(right), Bootstrap())
    assert found.difference == found.interval.high == 100
    assert found.interval.low == pytest.approx(100 - 2 * 16.84, abs=0.01)
    assert found.p_value == pytest.approx(2 * 0.5**20)
    same = difference_over_seeds(model(right), model(right), Bootstrap())
    assert (same.difference, same.p_value) == (0, 1)
    assert (same.interval.low, same.interval.high) == pytest.approx((-16.84, 16.84), abs=0.01)


def test_where_examples_alone_vary_a_difference_is_a_paired_t_test():
    right = (np.random.default_rng(0).random((2, 12, 1)) < [[[0.3]], [[0.7]]]).astype(float)
    first, second = ([Outcomes(each, np.ones_like(each))] * 8 for each in right)
    found = difference_over_seeds(first, second, Bootstrap())
    expected = ttest_rel(right[1, :, 0], right[0, :, 0])
    low, high = expected.confidence_interval(0.95)
    ours = (found.interval.low, found.interval.high)
    assert ours == pytest.approx((100 * low, 100 * high), abs=0.01)
    assert found.p_value == pytest.approx(expected.pvalue, abs=1e-4)


@pytest.mark.parametrize("seeds", [(1, 3), (2, 2), (5, 5)])
@pytest.mark.parametrize("effect", [0.1, 0.3])
def test_an_interval_over_seeds_holds_the_truth(seeds, effect):
    simulated = SimpleNamespace(**runpy.run_path(str(COVERAGE)))
    effects = simulated.Effects(0.2, 0.1, effect)
    simulation = simulated.Simulation(300, Bootstrap(100))
    found = simulation.seeds(simulated.Suite(100, 0.7, 0.8, 10), seeds, effects)
    # Three standard errors of a simulation of 300 below 95%.
    assert found["ours"].percent >= 91.2, found
    # Drawing all three factors again does not make up for so few seeds.
    if effect == 0.3 and seeds != (5, 5):
        assert found["crossed bootstrap"].percent < 85, found
