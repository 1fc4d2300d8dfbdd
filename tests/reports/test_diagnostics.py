import html
import re
from types import SimpleNamespace

import numpy as np
import pytest

from t0repro.reports.accuracy_plot import published_letters
from t0repro.reports.diagnostics import calibration, confusion, prompt_flips
from t0repro.reports.make_report import ReportOptions, make_report
from t0repro.reports.page_html import render_html
from t0repro.reports.published import published_figures
from t0repro.reports.ranking import rank_folder
from t0repro.reports.report import load_report
from t0repro.reports.report_page import report_page
from t0repro.reports.run import Run
from t0repro.reports.statistics import Bootstrap

from .scored_folder import write_scores
from .suites import report_of, small_suite

HIGH, LOW = np.log(0.75), np.log(0.25)
PROMPTS = {
    f"super_glue_rte_{name}_score_eval": SimpleNamespace(
        dataset="super_glue",
        subset="rte",
        template_name=name,
        fixed_choices=("Yes", "No"),
        prompt="{{premise}} ||| {{label}}",
    )
    for name in ("one", "two", "three")
}


@pytest.fixture
def folder(tmp_path):
    """Three prompts of four examples: the second is flipped by one prompt, the third by none."""
    yes, no = [HIGH, LOW], [LOW, HIGH]
    scores = {"one": [yes, yes, no, yes], "two": [yes, no, no, yes], "three": [yes, yes, no, yes]}
    for name, rows in scores.items():
        write_scores(tmp_path, f"super_glue_rte_{name}_score_eval", rows, [0, 0, 1, -1])
    return tmp_path


def test_confusion_counts_answers_by_prediction_and_leaves_out_examples_without_answer(folder):
    results = rank_folder(folder, PROMPTS)
    found = confusion(results, {task: info.fixed_choices for task, info in PROMPTS.items()})
    assert found is not None
    assert (found.labels, found.prompts) == (("Yes", "No"), 3)
    assert found.counts == ((5, 1), (0, 3))
    assert confusion(results, {}) is None


def test_calibration_compares_confidence_with_accuracy(folder):
    (found,) = calibration(rank_folder(folder, PROMPTS)).bins
    assert found.confidence == pytest.approx(75)
    assert found.accuracy == pytest.approx(100 * 8 / 12)
    assert found.examples == 12
    assert calibration(rank_folder(folder, PROMPTS)).error == pytest.approx(75 - 100 * 8 / 12)


def test_an_example_that_some_prompts_get_wrong_is_a_flip(folder):
    flips, share = prompt_flips(rank_folder(folder, PROMPTS), folder)
    assert share == 25.0
    (flip,) = flips
    assert (flip.example, flip.right, flip.prompts, flip.first_input) == (1, 2, 3, "input 1")
    assert prompt_flips(rank_folder(folder, PROMPTS)[:1], folder) == ((), 0.0)


def test_accuracies_without_rows_shared_with_training_stand_beside_the_others(tmp_path):
    evaluation = small_suite(tmp_path / "e")
    tasks = [task for task in evaluation.prompts if task.startswith("ag_news")]
    plain = {each.dataset: each for each in report_of(evaluation).datasets}
    report = report_of(evaluation, overlap={task: list(range(30)) for task in tasks})
    found = {each.dataset: each for each in report.datasets}
    assert found["super_glue/rte"] == plain["super_glue/rte"]
    assert found["ag_news"].accuracy == plain["ag_news"].accuracy
    without = [prompt.extras["without_overlap"] for prompt in found["ag_news"].prompts]
    (note,) = report.notes
    assert note.startswith("ag_news: 30 of 60 examples share text with training rows.")
    assert note.endswith(f"{np.mean(without):.1f} without.")
    assert "without rows shared with training" in render_html(report_page(report))
    # A prompt of which nothing is left is not in the mean without them.
    left, *gone = tasks
    overlap = {left: list(range(30)), **{task: list(range(60)) for task in gone}}
    report = report_of(evaluation, overlap=overlap)
    (alone,) = [
        p.extras["without_overlap"]
        for d in report.datasets
        for p in d.prompts
        if "without_overlap" in p.extras
    ]
    assert report.notes[0].endswith(f"{alone:.1f} without.")
    (note,) = report_of(evaluation, overlap={task: list(range(60)) for task in tasks}).notes
    assert note.endswith("with them, and no prompt has others.")
    (note,) = report_of(evaluation, overlap={task: [] for task in tasks}).notes
    assert note.startswith("No example that was evaluated shares text")
    assert not report_of(evaluation).notes


def test_the_report_has_diagnostics_extras_and_published_figures(folder, tmp_path):
    options = ReportOptions(bootstrap=Bootstrap(100), extras=["target_length"])
    report = make_report(Run("jax", folder), PROMPTS, options)
    (dataset,) = report.datasets
    assert dataset.confusion and dataset.calibration and dataset.flips
    assert dataset.prompts[0].extras == {"target_length": dataset.prompts[0].accuracy}
    assert {found.value for found in report.published} >= {64.6, 81.2, 81.0, 84.0}
    path = tmp_path / "report.json"
    path.write_text(report.to_json())
    assert load_report(path) == report


def test_every_published_figure_names_its_source():
    names = ["anli/r1", "anli/r3", "hellaswag", "super_glue/rte", "winogrande/winogrande_xl"]
    figures = published_figures(names)
    assert all(found.source and found.statistic in ("mean", "median") for found in figures)
    assert all(0 <= found.value <= 100 for found in figures)
    assert len([found for found in figures if found.dataset == "anli"]) == 4
    assert published_figures(["ag_news"]) == ()


def test_published_figures_are_named_in_the_plot_without_hovering(folder):
    report = make_report(Run("jax", folder), PROMPTS, ReportOptions(bootstrap=Bootstrap(100)))
    letters = published_letters(report.published)
    assert letters["T0 3B", "mean"] == "a" and len(set(letters.values())) == len(letters)
    page = render_html(report_page(report))
    drawn = re.findall(r"<text[^>]*>([a-z])</text>", page)
    # Once in the wide chart and once in the narrow one
    assert sorted(drawn) == sorted(list(letters.values()) * 2)
    for (model, statistic), letter in letters.items():
        assert f"</span>{html.escape(f'{letter}: {model}, {statistic}', quote=True)}" in (
            page.replace("&#39;", "&#x27;")
        )
