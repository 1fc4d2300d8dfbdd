"""Names, titles and texts come from files that others wrote: none of them may act as markup."""

import csv
import io
import json
import re
from types import SimpleNamespace

import markdown_it
import pyarrow.parquet
import pytest
from rich.console import Console

from t0repro.reports.make_report import ExtraContent, ReportOptions, make_report
from t0repro.reports.page import Column, Page, Section
from t0repro.reports.page_html import render_html
from t0repro.reports.page_markdown import markdown_table, render_markdown
from t0repro.reports.page_terminal import print_page
from t0repro.reports.report import load_report
from t0repro.reports.report_files import write_report
from t0repro.reports.report_page import brief_page, report_page
from t0repro.reports.run import Run
from t0repro.reports.score_tables import write_tables
from t0repro.reports.statistics import Bootstrap

from .scored_folder import write_scores
from .suites import Page as ParsedPage

HOSTILE = [
    '<script>alert(1)</script><img src=x onerror="alert(1)">',
    "</title></style><b onclick=alert(1)>",
    "[click](javascript:alert(1)) ![x](http://example.com/x.png)",
    "`code` **bold** _em_ ~~gone~~ <http://example.com>",
    "# heading",
    "- item",
    "1. item",
    "> quote",
    "a | b | c",
    "line one\n\n# line two\r\n---",
    "\x1b[2J\x1b]0;title\x07 \x9b31m \u202ereversed",
    "\\| \\` &lt;b&gt; &amp;",
    "$x^2$ $unbalanced",
    "{{ 7 * 7 }} {% raw %}",
    "=cmd|'/c calc'!A1",
    "@SUM(1)",
    "-2+3",
    "+1",
    "\t=1",
    "n" * 300,
    "www.example.com http://example.com user@example.com",
]
TASK = "task_score_eval"


def hostile_report(folder, name):
    write_scores(folder, TASK, [[-1.0, -2.0]] * 6, [0, 1, 0, 1, -1, 0])
    (folder / f"{TASK}_inputs").write_text("".join(f"{json.dumps(name)}\n" * 12))
    prompts = {
        TASK: SimpleNamespace(
            dataset=name,
            subset=None,
            template_name=name,
            fixed_choices=(name, "other"),
            prompt=name,
        )
    }
    facts = {"checkpoint": name, "data": {name: name}, "versions": {name: name}}
    (folder / "provenance.json").write_text(json.dumps(facts))
    options = ReportOptions(title=name, bootstrap=Bootstrap(100), notes=(name,))
    beside = ExtraContent(conversion=f"{name}\n```\n# after the fence")
    return make_report(Run(name, folder), prompts, options, beside), prompts


@pytest.fixture(scope="module")
def tame(tmp_path_factory):
    """The report of tame names."""
    report, _ = hostile_report(tmp_path_factory.mktemp("tame") / "validation_eval", "tame")
    return report


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_name_is_text_in_every_form(tmp_path, tame, name):
    folder = tmp_path / "validation_eval"
    report, prompts = hostile_report(folder, name)

    page, expected = (ParsedPage(render_html(report_page(r))) for r in (report, tame))
    assert page.tags == expected.tags
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", "".join(page.text))

    markdown = [blocks(render_markdown(report_page(r))) for r in (report, tame)]
    assert markdown[0] == markdown[1]

    stream = io.StringIO()
    print_page(brief_page(report), Console(file=stream, width=80, markup=False, emoji=False))
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", stream.getvalue())

    write_report(report, tmp_path)
    assert load_report(tmp_path) == report

    write_tables(folder, 10, prompts, tmp_path)
    check_tables(tmp_path, name)


def check_tables(folder, name):
    """No cell of the CSV table is a formula, and the Parquet table has the name as it is."""
    with open(folder / "scores.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 12
    for row in rows:
        assert row["dataset"] in (name, f"'{name}")
        assert row["dataset"][0] not in "=+-@\t\r\n"
        assert float(row["score"]) in (-1.0, -2.0)  # a negative number stays one
    table = pyarrow.parquet.read_table(folder / "scores.parquet")
    assert set(table.column("dataset").to_pylist()) == {name}


def blocks(text):
    """The kinds of blocks and of inline parts of a Markdown text, texts themselves left out."""
    parser = markdown_it.MarkdownIt("commonmark").enable(["table", "strikethrough"])
    kinds = []
    for token in parser.parse(text):
        kinds.append(token.type)
        kinds += [child.type for child in token.children or () if child.type != "text"]
    return kinds


def test_github_makes_no_links_or_mentions_of_names():
    table = Section("t", header=(Column("a"),), rows=(("www.example.com x@y http://z",),))
    text = render_markdown(Page("@someone", (table,)))
    assert not re.search(r"(?<!\\)@\w|www\.|http:", text)


def test_numbers_in_a_table_are_as_they_are_and_at_the_beginning_of_a_line_start_no_list():
    assert markdown_table(["step", "1.5"], [["1. first", "47.8"]]).splitlines() == [
        "| step | 1.5 |",
        "| --- | ---: |",
        "| 1. first | 47.8 |",
    ]
    text = render_markdown(Page("t", (Section("s", lines=("1. is not the first of a list",)),)))
    assert "1\\. is not" in text


def test_a_code_blocks_fence_is_longer_than_any_inside_it():
    text = render_markdown(Page("t", (Section("s", text="before\n`````\n# not a heading"),)))
    assert blocks(text).count("heading_open") == 2 and blocks(text).count("fence") == 1
