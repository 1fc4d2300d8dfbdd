import dataclasses
import html.parser
import io
import json
import os
import re
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

import t0repro.reports
from t0repro.cli.report import app
from t0repro.errors import UserError
from t0repro.evaluation.records import write_record
from t0repro.reports import html as html_page
from t0repro.reports import markdown
from t0repro.reports.bootstrap import Bootstrap
from t0repro.reports.make_report import Beside, ReportOptions, make_report
from t0repro.reports.prompts import dataset_label
from t0repro.reports.report import SCHEMA_VERSION, load_report
from t0repro.reports.report_page import brief_page, report_page
from t0repro.reports.run import Run
from t0repro.reports.terminal import print_page
from t0repro.reports.write import write_report

from .scored_folder import write_scores

QUICK = Bootstrap(replicates=200)


class Evaluation:
    """A folder of an evaluation's outputs and the prompts behind its tasks."""

    def __init__(self, folder, seed=0):
        self.folder, self.prompts = folder, {}
        self.random = np.random.default_rng(seed)
        folder.mkdir(parents=True)

    def add(self, dataset, subset, template, examples, choices, skill, noise=0.0, step=20):
        """Scores that favour the right choice by `skill` natural-logarithm units."""
        label = f"{dataset}_{subset}" if subset else dataset
        task = f"{label}_{template.replace(' ', '_')}_score_eval"
        self.prompts[task] = SimpleNamespace(
            dataset=dataset,
            subset=subset,
            template_name=template,
            fixed_choices=tuple(f"choice {i}" for i in range(choices)),
            prompt=f'{{{{premise}}}} <b>{template}</b> & "quoted"?|||{{{{label}}}}',
        )
        right = np.arange(examples) % choices
        scores = self.random.normal(size=(examples, choices)) - 5
        scores += skill * (right[:, None] == np.arange(choices))
        targets = [
            f"((np.int32({i}), np.int32({j})), np.{bool(j == right[i])}_, np.float32(1.0), 2)\n"
            for i in range(examples)
            for j in range(choices)
        ]
        texts = [f"input {i} <script>alert(1)</script>\n" for i in range(examples)]
        predictions = (np.float32(scores) + np.float32(noise)).ravel()
        (self.folder / f"{task}_targets").write_text("".join(targets))
        (self.folder / f"{task}_inputs").write_text(
            "".join(t for t in texts for _ in range(choices))
        )
        (self.folder / f"{task}_{step}_predictions").write_text(
            "".join(f"{float(score)}\n" for score in predictions)
        )
        return task


def small_suite(folder, noise=0.0):
    evaluation = Evaluation(folder)
    for template in ("classify", "which section", "recommend"):
        evaluation.add("ag_news", None, template, 60, 4, 2.0, noise)
    for template in ("GPT-3 style", "can we infer"):
        evaluation.add("super_glue", "rte", template, 40, 2, 0.0, noise)
    return evaluation


@pytest.fixture
def suite(tmp_path):
    return small_suite(tmp_path / "jax" / "validation_eval")


def report_of(evaluation, beside=None, **options):
    options = ReportOptions(**{"training_datasets": {"ag_news"}, "bootstrap": QUICK} | options)
    return make_report(Run("jax", evaluation.folder), evaluation.prompts, options, beside)


def render_html(report):
    return html_page.render_html(report_page(report))


def render_markdown(report):
    return markdown.render_markdown(report_page(report))


def full_report(evaluation, tmp_path):
    """A report with every part: a second run, a loss curve, losses, a conversion, a note."""
    other = small_suite(tmp_path / "mtf" / "validation_eval", noise=1e-3)
    lines = [json.dumps({"split": "train", "step": s, "loss": 5 / s}) for s in range(1, 21)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    (evaluation.folder.parent / "operative_config.gin").write_text("run.train_steps = 20\n")
    beside = Beside(
        other=Run("mtf", other.folder),
        metrics=tmp_path / "metrics.jsonl",
        losses=(("jax", tmp_path / "metrics.jsonl"), ("mtf", tmp_path / "metrics.jsonl")),
        conversion="jax -> mtf -> jax: nothing changed",
    )
    notes = ("A small model.",)
    return report_of(evaluation, beside, device="cpu", duration_seconds=1.5, notes=notes)


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
    assert news == report_of(alone).datasets[0]
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


def test_data_and_energy_are_told_where_they_are_known(suite):
    facts = {"data": {"super_glue/rte": "source local, sha256 ab12"}, "energy_joules": 12.4}
    facts["energy_source"] = "1 CPU packages (RAPL)"
    (suite.folder / "provenance.json").write_text(json.dumps(facts))
    for text in (render_markdown(report_of(suite)), render_html(report_of(suite))):
        assert "12 J, measured by 1 CPU packages (RAPL)" in text
        assert "source local, sha256 ab12" in text
    (suite.folder / "provenance.json").unlink()
    assert "12 J" not in render_markdown(report_of(suite))


def test_reports_of_the_schemas_before_are_still_read(suite, tmp_path):
    content = json.loads(report_of(suite).to_json())
    for name in ("generation", "published", "tasks"):
        del content[name]
    del content["provenance"]["data"], content["provenance"]["energy_source"]
    for dataset in content["datasets"]:
        for prompt in dataset["prompts"]:
            del prompt["unanswerable_examples"]
    (tmp_path / "report.json").write_text(json.dumps({**content, "schema_version": 1}))
    assert load_report(tmp_path).datasets == report_of(suite).datasets


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


def test_a_newer_schema_and_a_file_that_is_no_report_are_refused(suite, tmp_path):
    path = tmp_path / "report.json"
    content = json.loads(report_of(suite).to_json())
    path.write_text(json.dumps(content | {"schema_version": SCHEMA_VERSION + 1}))
    with pytest.raises(UserError, match=f"has schema {SCHEMA_VERSION + 1}; this t0repro reads up"):
        load_report(path)
    path.write_text(json.dumps(content | {"unheard_of": 1}))
    with pytest.raises(UserError, match="fields are not those of schema"):
        load_report(path)
    for text in ("{}", "[]", "not JSON"):
        path.write_text(text)
        with pytest.raises(UserError, match="not a report"):
            load_report(path)
    with pytest.raises(UserError, match="no report here"):
        load_report(tmp_path / "absent")


def test_markdown_has_every_dataset_prompt_and_comparison(suite, tmp_path):
    text = render_markdown(full_report(suite, tmp_path))
    for expected in ("ag_news", "super_glue/rte", "can we infer", "Predictions differ: nowhere"):
        assert expected in text
    assert "Largest relative difference: 0.00e+00" in text
    assert "nothing changed" in text
    widths = {line.count("|") for line in text.split("\n") if line.startswith("| ag_news |")}
    assert len(widths) == 4  # tables of datasets, prompts, agreement and disagreement


class Page(html.parser.HTMLParser):
    """What a page names, shows and nests."""

    VOID = frozenset(("meta", "link", "img", "br", "input", "hr"))

    def __init__(self, text):
        super().__init__()
        self.addresses, self.tags, self.text, self.ids = [], [], [], []
        self.open, self.attributes = [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes.append((tag, dict(attrs)))
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "action", "data", "srcset", "poster"):
                self.addresses.append(value)
            if name == "id":
                self.ids.append(value)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture
def page(suite, tmp_path):
    return Page(render_html(full_report(suite, tmp_path)))


def test_the_page_requests_nothing(suite, tmp_path):
    text = render_html(full_report(suite, tmp_path))
    page = Page(text)
    assert all(address.startswith("#") for address in page.addresses)
    assert {"link", "img", "iframe", "object", "embed"}.isdisjoint(page.tags)
    for word in ("@import", "url(http", "fetch(", "XMLHttpRequest", "//cdn"):
        assert word not in text
    # the namespace of SVG is a name, not a request
    outside = [part for part in text.split("http")[1:] if not part.startswith("://www.w3.org/")]
    assert outside == []


def test_the_page_is_well_nested_with_a_title_and_unique_ids(page):
    assert page.open == []
    assert page.tags.count("title") > 1  # the page's own, and one for each mark of a plot
    assert len(page.ids) == len(set(page.ids))
    linked = {address.removeprefix("#") for address in page.addresses}
    assert linked <= set(page.ids)


def test_the_page_shows_every_dataset_and_every_prompts_text(page, suite):
    text = " ".join(page.text)
    for expected in (
        "ag_news",
        "super_glue/rte",
        "Held-out datasets",
        "not clearly",
        "The two stacks",
    ):
        assert expected in text
    tips = [attributes.get("data-tip") or "" for _, attributes in page.attributes]
    for info in suite.prompts.values():
        assert (
            sum(info.prompt in tip for tip in tips) == 3
        )  # in both sizes of the plot and in the table


def test_text_from_the_data_is_never_markup(page):
    assert page.tags.count("script") == 1
    assert "b" not in page.tags


def test_tables_sort_by_buttons_and_plots_take_the_pages_colours(page):
    headings = page.tags.count("th")
    assert page.tags.count("button") > headings // 3
    styles = " ".join(attributes.get("style") or "" for _, attributes in page.attributes)
    assert all(f"var(--{role})" in styles for role in ("accent", "chance", "majority"))
    assert "#0" not in styles and "#1" not in styles  # every stand-in colour was replaced


def test_a_single_prompt_and_a_long_name_are_drawn(tmp_path):
    evaluation = Evaluation(tmp_path / "eval")
    evaluation.add("a" * 80, None, "only", 4, 2, 50.0)
    report = report_of(evaluation, training_datasets=None)
    assert report.datasets[0].mean_interval.low == 100
    assert "a" * 80 in " ".join(Page(render_html(report)).text)


# Command -----------------------------------------------------------------------------------------


def test_report_make_writes_three_files_and_prints_a_summary(suite, tmp_path):
    write_metrics = "\n".join(
        json.dumps({"split": "train", "step": s, "loss": 1.0}) for s in range(3)
    )
    (tmp_path / "m.jsonl").write_text(write_metrics)
    metrics = str(tmp_path / "m.jsonl")
    arguments = ["make", str(suite.folder), "--out", str(tmp_path / "out"), "--label", "jax"]
    arguments += ["--other", f"mtf={suite.folder}", "--metrics", metrics, "--resamples", "100"]
    arguments += ["--losses", f"jax={metrics}", metrics, "--train-dataset", "ag_news_classify"]
    arguments += ["--note", "First sentence.", "--note", "Second sentence."]
    run = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert run.exit_code == 0
    assert "Predictions differ: nowhere" in run.output
    assert str(tmp_path / "out" / "report.html") in run.output.replace("\n", "")
    report = load_report(tmp_path / "out")
    assert report.notes == ("First sentence.", "Second sentence.")
    assert [group.group for group in report.groups] == ["held_out_prompts", "held_out_datasets"]
    assert report.losses is not None
    assert (report.losses.label_a, report.losses.label_b) == ("jax", "mtf")


def test_report_make_writes_nothing_on_bad_input(suite, tmp_path):
    out = tmp_path / "out"
    for arguments in (
        [str(tmp_path), "--out", str(out)],
        [str(suite.folder), "--out", str(out), "--metrics", str(tmp_path / "absent.jsonl")],
        [str(suite.folder), "--out", str(out), "--conversion", str(tmp_path / "absent.txt")],
        [str(suite.folder), "--out", str(out), "--module_import", "no_such_module"],
    ):
        run = CliRunner().invoke(app, ["make", *arguments])
        assert isinstance(run.exception, UserError)
    assert not out.exists()


def test_report_make_help_shows_an_example():
    run = CliRunner().invoke(app, ["make", "--help"])
    assert "t0repro report make runs/demo/validation_eval" in " ".join(run.output.split())


# What a reader must know first ------------------------------------------------------------------


def synthetic_suite(folder, real=False):
    evaluation = Evaluation(folder)
    evaluation.add("synthetic_imdb", None, "sentiment", 40, 2, 3.0)
    if real:
        evaluation.add("super_glue", "rte", "GPT-3 style", 40, 2, 0.0)
    return evaluation


def in_every_form(report):
    stream = io.StringIO()
    console = Console(file=stream, width=100, markup=False, emoji=False)
    print_page(brief_page(report), console)
    return {
        "html": " ".join(Page(render_html(report)).text),
        "markdown": render_markdown(report),
        "terminal": " ".join(stream.getvalue().split()),
    }


def test_generated_rows_are_called_synthetic_before_any_figure(tmp_path):
    report = report_of(synthetic_suite(tmp_path / "all"))
    assert report.synthetic == ("synthetic_imdb",)
    for text in in_every_form(report).values():
        at = text.index("Synthetic data: all rows were generated by a program")
        assert not re.search(r"\d\.\d%|\d\.\d to", text[text.index("Rank evaluation") : at])
        assert "nothing about any real dataset" in text
    mixed = report_of(synthetic_suite(tmp_path / "mixed", real=True))
    for text in in_every_form(mixed).values():
        assert re.search("Synthetic data: rows of synthetic_imdb were generated", text)
    # Also where the tasks' module was not named: the tasks' names say it
    unknown = make_report(Run("jax", tmp_path / "all"), {}, ReportOptions(bootstrap=Bootstrap(100)))
    assert unknown.synthetic == ("synthetic_imdb_sentiment",)
    folder = tmp_path / "demo" / "validation_eval"
    write_scores(folder, "demo_synthetic_imdb_sentiment_score_eval", [[-1.0, -2.0]] * 4, [0] * 4)
    report = make_report(Run("jax", folder), {}, ReportOptions(bootstrap=Bootstrap(100)))
    assert report.synthetic == ("demo_synthetic_imdb_sentiment",)


def test_rows_of_real_datasets_are_not_called_synthetic(suite):
    report = report_of(suite)
    assert report.synthetic == ()
    assert "ynthetic" not in "".join(in_every_form(report).values())


def test_above_chance_but_not_above_the_majority_class_is_said(tmp_path):
    folder = tmp_path / "validation_eval"
    # Always the first choice, right in 85 of 100: far above chance, and no better than a constant
    write_scores(folder, "t_score_eval", [[-1.0, -2.0]] * 100, [0] * 85 + [1] * 15)
    report = make_report(Run("jax", folder), {}, ReportOptions(bootstrap=QUICK))
    (dataset,) = report.datasets
    assert (dataset.chance, dataset.majority, dataset.accuracy.mean) == (50.0, 85.0, 85.0)
    assert dataset.above_chance and not dataset.above_majority
    texts = in_every_form(report)
    for text in texts.values():
        assert "chance only" in text and "chance and majority" not in text
    for form in ("html", "markdown"):
        assert (
            "above chance, but not clearly above always answering with the majority"
            in (texts[form])
        )


def test_clearly_above_both_is_said_only_where_the_interval_begins_above_both(suite):
    report = report_of(suite)
    news, rte = report.datasets
    assert news.above_chance and news.above_majority
    assert not rte.above_chance and not rte.above_majority
    for text in in_every_form(report).values():
        assert "chance and majority" in text and "neither" in text


def with_records(suite, **counts):
    """The suite's folder with a record of each task, as rank-eval leaves them."""
    for task in suite.prompts:
        record = {
            "key": {"task": task, "step": 20},
            "mode": "rank",
            "pairs": 80,
            "input_tokens": 900,
            "target_tokens": 80,
            "longest_input": 30,
            "seconds": 1.5,
            "files": {},
        }
        write_record(suite.folder, record | counts)
    return report_of(suite)


def test_a_sample_and_cut_inputs_are_stated_with_their_numbers(suite):
    report = with_records(suite, inputs=40, available=1_000, cut_inputs=3, cut_targets=1)
    for text in in_every_form(report).values():
        assert "Evaluated on a sample: 200 of 5,000 inputs over all tasks." in text
        assert "Cut to the sequence lengths: 15 of 200 inputs and 5 targets." in text
    assert "Sampled and cut tasks" in render_markdown(report)


def test_a_whole_evaluation_says_so(suite):
    report = with_records(suite, inputs=40, available=40, cut_inputs=0, cut_targets=0)
    for text in in_every_form(report).values():
        assert "Evaluated on all inputs, 200 over all tasks." in text
        assert "No input or target was cut to the sequence lengths." in text
    assert "Sampled and cut tasks" not in render_markdown(report)


def test_an_evaluation_that_recorded_no_counts_claims_none(suite):
    text = render_markdown(with_records(suite))
    assert "Evaluated on" not in text and "cut to the sequence" not in text


def test_only_what_was_not_recorded_is_called_so(suite):
    facts = {"checkpoint": "runs/model", "checkpoint_hash": "ab12", "device": "1 x cpu"}
    (suite.folder / "provenance.json").write_text(json.dumps(facts))
    text = render_markdown(report_of(suite))
    assert "- Hash of the checkpoint: ab12" in text and "- Device: 1 x cpu" in text
    missing = next(line for line in text.split("\n") if "Not recorded" in line)
    assert "duration, energy" in missing and "device" not in missing
