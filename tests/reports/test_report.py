import dataclasses
import json
import os
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

import t0repro.reports
from t0repro.cli.report import app
from t0repro.errors import UserError
from t0repro.reports.make_report import ReportOptions, make_report
from t0repro.reports.prompts import dataset_label
from t0repro.reports.report import SCHEMA_VERSION, load_report
from t0repro.reports.report_files import write_report
from t0repro.reports.report_page import brief_page, report_page
from t0repro.reports.run import Run
from t0repro.reports.statistics import Bootstrap

from .scored_folder import write_scores
from .suites import (
    QUICK,
    Evaluation,
    Page,
    full_report,
    render_html,
    render_markdown,
    report_of,
)

# Figures -----------------------------------------------------------------------------------------


def test_datasets_are_grouped_by_whether_they_were_trained_on(suite):
    report = report_of(suite)
    groups = {group.group: group for group in report.groups}
    assert list(groups) == ["held_out_prompts", "held_out_datasets"]
    assert (groups["held_out_prompts"].datasets, groups["held_out_prompts"].prompts) == (1, 3)
    assert (groups["held_out_datasets"].datasets, groups["held_out_datasets"].prompts) == (1, 2)
    assert {d.dataset: d.group for d in report.datasets} == {
        "ag_news": "held_out_prompts",
        "super_glue/rte": "held_out_datasets",
    }


def test_without_training_datasets_there_is_one_group(suite):
    assert [g.group for g in report_of(suite, training_datasets=None).groups] == ["datasets"]


def test_a_prompt_that_was_trained_on_is_not_called_held_out(suite):
    report = report_of(suite, training_tasks={"ag_news_classify"})
    assert [(g.group, g.prompts) for g in report.groups] == [
        ("trained_prompts", 1),
        ("held_out_prompts", 2),
        ("held_out_datasets", 2),
    ]
    assert [d.dataset for d in report.datasets].count("ag_news") == 2


def test_the_spread_over_prompts_is_that_of_their_accuracies(suite):
    news = report_of(suite).datasets[0]
    accuracy = [prompt.accuracy for prompt in news.prompts]
    assert news.accuracy.mean == pytest.approx(np.mean(accuracy))
    assert news.accuracy.median == pytest.approx(np.median(accuracy))
    assert (news.accuracy.minimum, news.accuracy.maximum) == (min(accuracy), max(accuracy))
    assert (news.chance, news.majority, news.examples) == (25.0, 25.0, 60)
    assert report_of(suite).groups[0].mean == pytest.approx(news.accuracy.mean)


def test_clearly_above_chance_means_that_the_interval_begins_above_it(suite):
    news, rte = report_of(suite).datasets
    assert news.above_chance and news.mean_interval.low > 25
    assert not rte.above_chance and rte.mean_interval.low <= 50


def test_the_bootstrap_agrees_with_the_binomial_standard_error(tmp_path):
    evaluation = Evaluation(tmp_path / "eval")
    evaluation.add("ag_news", None, "classify", 400, 2, 1.0)
    (dataset,) = report_of(evaluation, bootstrap=Bootstrap(replicates=2000)).datasets
    p = dataset.accuracy.mean / 100
    expected = 100 * np.sqrt(p * (1 - p) / 400)
    assert dataset.standard_error == pytest.approx(expected, rel=0.1)
    assert dataset.mean_interval.low == pytest.approx(100 * p - 1.96 * expected, abs=0.5)
    assert dataset.mean_interval.high == pytest.approx(100 * p + 1.96 * expected, abs=0.5)


def test_prompts_of_a_dataset_are_resampled_together(tmp_path):
    evaluation = Evaluation(tmp_path / "eval")
    for template in ("one", "two"):
        evaluation.random = np.random.default_rng(5)  # the same scores under both prompts
        evaluation.add("ag_news", None, template, 50, 2, 0.5)
    (dataset,) = report_of(evaluation).datasets
    assert dataset.paired
    assert dataset.standard_error == pytest.approx(dataset.prompts[0].standard_error)


def test_prompts_with_other_numbers_of_examples_are_kept_and_said_not_to_be_paired(tmp_path):
    evaluation = Evaluation(tmp_path / "eval")
    evaluation.add("ag_news", None, "one", 50, 2, 0.5)
    evaluation.add("ag_news", None, "two", 40, 2, 0.5)
    (dataset,) = report_of(evaluation).datasets
    assert (dataset.paired, dataset.examples) == (False, 50)


def test_intervals_depend_on_the_seed_and_not_on_what_else_is_reported(suite, tmp_path):
    alone = Evaluation(tmp_path / "alone")
    for template in ("classify", "which section", "recommend"):
        alone.add("ag_news", None, template, 60, 4, 2.0)
    news = report_of(suite).datasets[0]
    assert news == report_of(suite).datasets[0]
    # P-values are corrected for the number of datasets.
    values = ("p_above_chance", "p_below_chance", "p_above_majority")
    same = {name: getattr(news, name) for name in values}
    assert news == dataclasses.replace(report_of(alone).datasets[0], **same)
    other = report_of(suite, bootstrap=dataclasses.replace(QUICK, seed=1)).datasets[0]
    assert news.mean_interval != other.mean_interval


def test_tasks_without_a_prompt_are_grouped_by_their_own_name(suite):
    report = make_report(Run("jax", suite.folder), {}, ReportOptions(bootstrap=QUICK))
    assert "super_glue_rte_GPT-3_style" in [d.dataset for d in report.datasets]
    assert report.datasets[0].prompts[0].prompt is None


def test_rounds_of_anli_are_datasets_of_their_own():
    info = SimpleNamespace(dataset="anli", subset=None)
    prompts = {"anli_GPT_3_style_r2_score_eval": info, "anli_GPT_3_style_r2": info}
    assert [dataset_label(task, prompts) for task in prompts] == ["anli/r2", "anli/r2"]


def test_the_operative_config_and_what_the_evaluation_recorded_are_found(suite):
    (suite.folder / "operative_config.gin").write_text("run.train_steps = 20\n")
    facts = {"checkpoint": "runs/checkpoint_20", "device": "cpu", "duration_seconds": 2.5}
    (suite.folder / "provenance.json").write_text(json.dumps(facts))
    source = report_of(suite).provenance
    assert source.operative_config == "run.train_steps = 20\n"
    assert (source.checkpoint, source.device, source.duration_seconds) == tuple(facts.values())
    assert source.step == 20
    assert "numpy" in source.versions
    (suite.folder / "provenance.json").write_text("[")
    with pytest.raises(UserError, match="not JSON"):
        report_of(suite)


def test_examples_whose_answer_is_no_choice_are_counted_and_listed(tmp_path):
    folder = tmp_path / "validation_eval"
    write_scores(folder, "t_score_eval", [[-1.0, -2.0]] * 30, [0, -1] * 15)
    report = make_report(Run("jax", folder), {}, ReportOptions(bootstrap=QUICK))
    (prompt,) = report.datasets[0].prompts
    assert (prompt.unanswerable, prompt.accuracy) == (15, 50.0)  # they count as wrong, as with T0
    listed = [(found.example, found.first_input) for found in prompt.unanswerable_examples]
    assert listed[:2] == [(1, "input 1"), (3, "input 3")] and len(listed) == 15
    text = render_markdown(report)
    assert "### t, t: 15 of 30 examples" in text and "| 1 | input 1 |\n| 3 | input 3 |" in text
    assert "15 of 30 examples" in " ".join(Page(render_html(report)).text)
    write_report(report, tmp_path)
    assert load_report(tmp_path) == report


def test_wrong_answers_are_listed_with_their_inputs_and_choices(tmp_path):
    scores = [[-1.0, -2.0], [-1.0, -2.0], [-2.0, -1.0]]
    folder = write_scores(tmp_path / "validation_eval", "a", scores, [0, 1, -1])
    info = SimpleNamespace(
        dataset="d", subset=None, template_name="t", fixed_choices=("yes", "no"), prompt="?"
    )
    report = make_report(Run("jax", folder), {"a": info})
    (wrong,) = report.datasets[0].prompts[0].wrong_examples
    assert (wrong.example, wrong.input, wrong.predicted, wrong.right) == (1, "input 1", "yes", "no")
    assert "| 1 | input 1 | yes | no |" in render_markdown(report)
    (wrong,) = make_report(Run("jax", folder), {}).datasets[0].prompts[0].wrong_examples
    assert (wrong.predicted, wrong.right) == ("choice 0", "choice 1")


def test_data_is_told_where_it_is_known(suite):
    facts = {"data": {"super_glue/rte": "source local, sha256 ab12"}}
    (suite.folder / "provenance.json").write_text(json.dumps(facts))
    for text in (render_markdown(report_of(suite)), render_html(report_of(suite))):
        assert "source local, sha256 ab12" in text
    (suite.folder / "provenance.json").unlink()
    assert "source local" not in render_markdown(report_of(suite))


def test_a_checkout_without_git_has_no_commit(suite, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert report_of(suite).provenance.git_commit is None


# Files -------------------------------------------------------------------------------------------


def test_a_report_loads_back_equal(suite, tmp_path):
    report = full_report(suite, tmp_path)
    assert report.stacks and report.losses and report.loss_curve
    paths = write_report(report, tmp_path / "out")
    assert [path.name for path in paths] == ["report.json", "report.md", "report.html"]
    assert load_report(tmp_path / "out") == t0repro.reports.load_report(tmp_path / "out") == report
    assert load_report(paths[0]) == report
    plain = report_of(suite)
    write_report(plain, tmp_path / "out")
    assert load_report(tmp_path / "out") == plain
    assert sorted(os.listdir(tmp_path / "out")) == ["report.html", "report.json", "report.md"]


def test_another_schema_and_a_file_that_is_no_report_are_refused(suite, tmp_path):
    path = tmp_path / "report.json"
    content = json.loads(report_of(suite).to_json())
    for version in (SCHEMA_VERSION - 1, SCHEMA_VERSION + 1):
        path.write_text(json.dumps(content | {"schema_version": version}))
        with pytest.raises(UserError, match=f"has schema {version}; this t0repro reads"):
            load_report(path)
    path.write_text(json.dumps(content | {"unheard_of": 1}))
    with pytest.raises(UserError, match="fields are not those of schema"):
        load_report(path)
    for text in ("{}", "[]", "not JSON"):
        path.write_text(text)
        with pytest.raises(UserError, match="not a report(.|\n)*fix: Name a report.json"):
            load_report(path)
    with pytest.raises(UserError, match="no report here(.|\n)*rank-eval(.|\n)*started again"):
        load_report(suite.folder)


def test_a_report_of_an_evaluation_that_has_not_ended_says_so_at_its_top(tmp_path):
    """rank-eval claims a step when it starts, and writes its facts and report.json when it ends."""
    folder = write_scores(tmp_path / "validation_eval", "a", [[-1.0, -2.0]] * 4, [0] * 4)
    (tmp_path / "scores").mkdir()
    (tmp_path / "scores" / "step_10.json").write_text("{}")
    said = (
        "The evaluation has not ended: only 1 task had scores. Started again with"
        f" --out {tmp_path}, rank-eval continues it."
    )
    report = make_report(Run("jax", folder), {})
    assert said in report_page(report).notes and said in brief_page(report).notes
    shown = CliRunner().invoke(app, ["history", str(folder)], catch_exceptions=False)
    assert f"note: {said}" in shown.output
    # A task that only an earlier step has is not among those with scores.
    for step in (5, 10):
        write_scores(folder, "a", [[-1.0, -2.0]] * 4, [0] * 4, step=step)
    write_scores(folder, "b", [[-1.0, -2.0]] * 4, [0] * 4, step=5)
    assert said in make_report(Run("jax", folder), {}).notes
    for path in folder.glob("b_*"):
        path.unlink()
    for ended in (tmp_path / "report.json", folder / "provenance.json"):
        ended.write_text('{"step": 10}')
        assert make_report(Run("jax", folder), {}).notes == ()
        ended.unlink()


def test_markdown_has_every_dataset_prompt_and_comparison(suite, tmp_path):
    text = render_markdown(full_report(suite, tmp_path))
    for expected in ("ag_news", "super_glue/rte", "can we infer", "Predictions differ: nowhere"):
        assert expected in text
    assert "Largest relative difference: 0.00e+00" in text
    assert "nothing changed" in text
    widths = {line.count("|") for line in text.split("\n") if line.startswith("| ag_news |")}
    assert len(widths) == 4  # tables of datasets, prompts, agreement and disagreement
