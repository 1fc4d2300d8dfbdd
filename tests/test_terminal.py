import io
import re

import pytest
from rich.console import Console

from t0repro.reports.page import Column, Page, Section
from t0repro.reports.page_terminal import print_page
from t0repro.tasks.listing import ListedTask
from t0repro.tasks.printing import print_list
from t0repro.terminal import print_table
from t0repro.words import counted, printable

WIDTHS = (80, 100, 120)
KEYS = [
    "super_glue_rte_does_it_follow_that_score_eval",
    "hellaswag_Predict_ending_with_hint_score_eval",
    "a_dataset_with_" + "a_very_" * 12 + "long_name",
    "rte",
]
HEADER = ["task", "pairs", "largest difference", "accuracy of jax", "prompt", "interval"]


def printed(width, **options):
    """A table of the keys, as printed to a terminal of a width."""
    stream = io.StringIO()
    console = Console(file=stream, width=width, markup=False, emoji=False, force_terminal=False)
    rows = [[key, "1,234", "1.2e-05", "87.12", f"prompt of {key}", "80.1-91.2"] for key in KEYS]
    print_table(console, "A title", HEADER, rows, numbers=HEADER[1:4], **options)
    return stream.getvalue()


@pytest.mark.parametrize("width", [30, *WIDTHS])
def test_every_key_and_number_is_there_in_full_at_every_width(width):
    text = printed(width)
    assert max(map(len, text.splitlines())) <= width
    assert "\u2026" not in text
    for number in ("1,234", "1.2e-05", "87.12"):
        assert text.count(number) == len(KEYS)
    assert "interval" in text and text.count("80.1-") == len(KEYS)  # the last column
    for key in KEYS:
        assert key in first_column(text)


def first_column(text):
    """The first column's words, one after the other: a folded one continues on the next line."""
    return "".join(re.match(r" ?(\S*)", line)[1] for line in text.splitlines())


def test_rows_become_records_where_folded_columns_do_not_fit():
    text = printed(40)
    assert "rte\n  pairs: 1,234, largest difference:" in text


@pytest.mark.parametrize("width", [*WIDTHS, 160])
def test_lines_of_an_input_are_readable_at_every_width(width):
    stream = io.StringIO()
    header = (Column("task"), "example", Column("input", wide=True), Column("choice"), "margin")
    rows = ((KEYS[0], "7", "Oil prices fall back as the threat is lifted. " * 3, "Yes", "1.0e-01"),)
    page = Page("A page", (Section("A title", header=header, rows=rows),))
    print_page(page, Console(file=stream, width=width, markup=False, force_terminal=False))
    assert "Oil prices fall back as the threat" in stream.getvalue()


@pytest.mark.parametrize("width", WIDTHS)
def test_the_list_of_tasks_keeps_every_tasks_name(width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr("t0repro.terminal.Console.is_terminal", True)
    tasks = [
        ListedTask(
            task=key,
            dataset="super_glue",
            subset="rte",
            template="does it follow that (with a long name)",
            choices=("Yes", "No", "Maybe this is a long one"),
            metrics=("Accuracy",),
            original_task=True,
            mixture=None,
            rate=500_000,
            examples=2_490,
            oversampled=None,
            cached=None,
        )
        for key in KEYS
    ]
    print_list(tasks, [])
    text = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert max(map(len, text.splitlines())) <= width
    for key in KEYS:
        assert key in first_column(text)
    assert "4 tasks of 1 dataset." in text


def test_counts_have_the_nouns_number():
    assert [counted(n, "example") for n in (0, 1, 2_000)] == [
        "0 examples",
        "1 example",
        "2,000 examples",
    ]
    assert counted(1, "step is", "steps are") == "1 step is"
    assert counted(2, "step is", "steps are") == "2 steps are"


def test_what_a_terminal_acts_on_is_made_visible():
    assert printable("a\x1b[2Jb\x07") == "a\\x1b[2Jb\\x07"
    assert printable("one\ntwo\r\u2028three") == "one two  three"
    assert printable("\u202egnp.exe \udcff \x9b31m") == "\\u202egnp.exe \\udcff \\x9b31m"
    assert printable("naïve 中文 🙂") == "naïve 中文 🙂"
    assert printable("a\nb\x00", keep="\n") == "a\nb\\x00"
