"""Evaluations for the tests of reports, and what a reader of a page sees of it."""

import html.parser
import json
from types import SimpleNamespace

import numpy as np

from t0repro.reports import page_html, page_markdown
from t0repro.reports.make_report import ExtraContent, ReportOptions, make_report
from t0repro.reports.report_page import report_page
from t0repro.reports.run import Run
from t0repro.reports.statistics import Bootstrap

QUICK = Bootstrap(replicates=200)


class Evaluation:
    """A folder of an evaluation's outputs and the prompts behind its tasks."""

    def __init__(self, folder, seed=0):
        self.folder, self.prompts = folder, {}
        self.random = np.random.default_rng(seed)
        folder.mkdir(parents=True)

    def add(self, dataset, subset, template, examples, choices, skill, noise=0.0, step=20):
        """Scores that favor the right choice by `skill` natural-logarithm units."""
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
        # Lower for all choices: a log-likelihood is at most 0.
        scores += skill * (right[:, None] == np.arange(choices)) - abs(skill)
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


def report_of(evaluation, beside=None, **options):
    options = ReportOptions(**{"training_datasets": {"ag_news"}, "bootstrap": QUICK} | options)
    return make_report(Run("jax", evaluation.folder), evaluation.prompts, options, beside)


def render_html(report):
    return page_html.render_html(report_page(report))


def render_markdown(report):
    return page_markdown.render_markdown(report_page(report))


def full_report(evaluation, tmp_path):
    """A report with every part: a second run, a loss curve, losses, a conversion, a note."""
    other = small_suite(tmp_path / "mtf" / "validation_eval", noise=1e-3)
    lines = [json.dumps({"split": "train", "step": s, "loss": 5 / s}) for s in range(1, 21)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    (evaluation.folder.parent / "operative_config.gin").write_text("run.train_steps = 20\n")
    beside = ExtraContent(
        other=Run("mtf", other.folder),
        metrics=tmp_path / "metrics.jsonl",
        losses=(("jax", tmp_path / "metrics.jsonl"), ("mtf", tmp_path / "metrics.jsonl")),
        conversion="jax -> mtf -> jax: nothing changed",
    )
    notes = ("A small model.",)
    return report_of(evaluation, beside, device="cpu", duration_seconds=1.5, notes=notes)


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
