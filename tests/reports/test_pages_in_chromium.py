"""The pages as a person meets them: in Chromium, wide and narrow, light and dark, by keyboard."""

import json
import re
import shutil
import subprocess

import numpy as np
import pytest
from matplotlib.image import imread

from t0repro.reports.comparison import compare_runs, read_run_facts
from t0repro.reports.comparison_page import comparison_page, history_page
from t0repro.reports.curves import curves_page
from t0repro.reports.history import read_history
from t0repro.reports.losses import LOSS
from t0repro.reports.make_report import ReportOptions, make_report
from t0repro.reports.models import compare_models, to_json
from t0repro.reports.report import SCHEMA_VERSION
from t0repro.reports.report_files import write_page, write_report
from t0repro.reports.run import Run
from t0repro.reports.statistics import Bootstrap

from .browser import ENTER, ESCAPE, HERE, SHIFT, SPACE, TAB, open_browser
from .scored_folder import write_scores
from .suites import full_report, small_suite
from .test_comparison import PROMPTS, write_run

pytestmark = pytest.mark.skipif(not HERE, reason="Chromium and chromedriver are not here")

OUTSIDE = """
const found = [];
for (const element of document.querySelectorAll("body *")) {
  let scrolls = false;
  for (let up = element; up; up = up.parentElement)
    scrolls ||= ["auto", "hidden", "scroll"].includes(getComputedStyle(up).overflowX);
  const box = element.getBoundingClientRect();
  if (!scrolls && box.width && (box.right > innerWidth + 0.5 || box.left < -0.5))
    found.push(element.tagName + " " + element.textContent.slice(0, 40));
}
return found
"""
# Contrast (WCAG 2) of the text that each selector finds first, against the page behind it
CONTRAST = """
const light = (color) => {
  const [r, g, b] = color.match(/[\\d.]+/g).slice(0, 3).map((v) => {
    v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4 });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const back = (element) => {
  for (let up = element; up; up = up.parentElement) {
    const color = getComputedStyle(up).backgroundColor;
    if (!/, 0\\)$|transparent/.test(color)) return color;
  }
};
return [...document.querySelectorAll("h1, p, td, th, summary, dt, dd, svg text")].map((e) => {
  const style = getComputedStyle(e);
  const [a, b] = [light(e.ownerSVGElement ? style.fill : style.color), light(back(e))];
  return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
}).sort((x, y) => x - y)[0]
"""
# Heights in pixels of the screen, smallest first: an SVG's text scales with the plot
TEXT_HEIGHTS = """
return [...document.querySelectorAll("svg text, td, th, dt, dd, p")]
  .filter((e) => e.checkVisibility() && e.textContent.trim())
  .map((e) => parseFloat(getComputedStyle(e).fontSize)
    * (e.ownerSVGElement ? e.ownerSVGElement.getScreenCTM().a : 1))
  .sort((a, b) => a - b)
"""
FOCUSED = "return document.activeElement.textContent.trim()"
TOOLTIP = "const t = document.getElementById('tooltip'); return t.hidden ? null : t.textContent"


@pytest.fixture(scope="module")
def browser():
    with open_browser() as found:
        yield found


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A report with every part, and its page."""
    folder = tmp_path_factory.mktemp("report")
    suite = small_suite(folder / "jax" / "validation_eval")
    found = full_report(suite, folder)
    write_report(found, folder)
    return found, folder / "report.html"


@pytest.fixture(scope="module")
def pages(report, tmp_path_factory):
    """Name -> page, and the marks that its plots must have."""
    found, path = report
    bins = sum(len(dataset.calibration.bins) for dataset in found.datasets)
    assert len(found.published) == 5  # RTE's
    # Prompts, means, chance and majority lines, published figures, bins of confidence
    marks = 5 + 2 + 2 + 2 + 5 + bins
    folder = tmp_path_factory.mktemp("pages")
    a, b = write_run(folder / "a", 20), write_run(folder / "b", 10)
    runs = [Run("first", a), Run("second", b)]
    compared = [compare_runs(*runs, PROMPTS, Bootstrap(200))]
    models = compare_models(runs, PROMPTS, Bootstrap(200))
    facts = [read_run_facts(run) for run in runs]
    page = comparison_page(compared, models, facts)
    write_page("compare", page, to_json(compared, models, facts), folder)
    for step, wrong in ((20, 8), (30, 5)):
        write_run(a, wrong, step=step)
    history = read_history(a, PROMPTS)
    write_page("history", history_page(history), history, folder)
    curves = {
        f"run_{number}_with_a_name_of_some_length": [
            (step, number + 1 / step) for step in range(1, 5 if number else 200)
        ]
        for number in range(5)
    }
    panels = {LOSS: curves, "loss of b in its own unit": {"b": [(1, 5095.0), (2, 4000.0)]}}
    write_page("curves", curves_page(panels), {}, folder)
    return {
        "curves": (folder / "curves.html", 4 * 4 + 1 + 2),  # of a long curve only the end is marked
        "report": (path, marks),
        "compare": (folder / "compare.html", 0),
        "history": (folder / "history.html", 3),
    }


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("name", ["report", "compare", "history", "curves"])
def test_a_page_shows_its_marks_and_nothing_sticks_out_or_is_requested(
    browser, pages, name, width, dark
):
    path, marks = pages[name]
    browser.show(path, width, dark=dark)
    assert browser.run("return innerWidth") == width
    assert browser.run("return document.documentElement.scrollWidth") == width
    assert browser.run(OUTSIDE) == []
    # Each plot is there in two sizes, of which the screen's width chooses one
    drawn = "[...document.querySelectorAll('svg [data-tip]')].filter((m) => m.checkVisibility())"
    assert browser.run(f"return {drawn}.length") == marks
    empty = f"return {drawn}.filter((mark) => !mark.getBoundingClientRect().height).length"
    assert browser.run(empty) == 0
    assert browser.run("return document.querySelectorAll('table').length") > 0
    assert browser.run(CONTRAST) >= 4.5
    page = browser.run("return getComputedStyle(document.body).backgroundColor")
    levels = [int(level) for level in page.strip("rgb()").split(",")]
    assert (max(levels) < 60) if dark else (min(levels) > 200)
    assert browser.requests() == [] and browser.errors() == []


def focus_on(browser, text, presses=400):
    """Tabs on until the element with this text has the focus."""
    for _ in range(presses):
        browser.press(TAB)
        if browser.run(FOCUSED) == text:
            return
    raise AssertionError(f"the focus never comes to {text!r}")


FIRST_COLUMN = (
    "return [...document.querySelector('tbody').rows].map((row) => row.cells[0].textContent)"
)


def test_a_table_is_sorted_by_the_keyboard(browser, report):
    browser.show(report[1])
    focus_on(browser, "mean")
    outline = browser.run("return getComputedStyle(document.activeElement).outlineStyle")
    assert outline != "none"  # the focus is seen
    browser.press(ENTER)
    by_mean = browser.run(FIRST_COLUMN)
    assert by_mean[0] == "ag_news"  # the highest first
    browser.press(SPACE)
    assert browser.run(FIRST_COLUMN) == by_mean[::-1]
    heading = "return document.activeElement.closest('th').ariaSort"
    assert browser.run(heading) == "ascending"
    browser.press(SHIFT, TAB)
    assert browser.run(FOCUSED) == "examples"


def test_a_prompts_text_is_shown_on_focus_and_closed_by_escape(browser, report):
    browser.show(report[1])
    prompt = report[0].datasets[0].prompts[0]
    focus_on(browser, prompt.template_name)
    assert prompt.prompt in browser.run(TOOLTIP)
    box = browser.run(
        "const b = document.getElementById('tooltip').getBoundingClientRect();"
        "return [b.left, b.right, b.top, b.bottom]"
    )
    assert box[0] >= 0 and box[1] <= 1280 and box[2] >= 0 and box[3] <= 900
    browser.press(ESCAPE)
    assert browser.run(TOOLTIP) is None


def test_details_open_and_wide_tables_scroll_by_the_keyboard(browser, report):
    browser.show(report[1], 700)
    focus_on(browser, "Package versions")
    browser.press(ENTER)
    assert browser.run("return document.activeElement.parentElement.open") is True
    table = "document.querySelector('.table')"
    browser.run(f"{table}.focus()")
    browser.press(*["\ue014"] * 3)  # the right arrow
    scrolled = f"return new Promise((done) => setTimeout(() => done({table}.scrollLeft), 500))"
    assert browser.run(scrolled) > 0


@pytest.mark.parametrize("width", [400, 680, 1280])
@pytest.mark.parametrize("name", ["report", "compare", "history", "curves"])
def test_the_text_of_charts_and_tables_can_be_read_at_every_width(browser, pages, name, width):
    browser.show(pages[name][0], width)
    assert browser.run("return document.documentElement.scrollWidth") == width
    heights = browser.run(TEXT_HEIGHTS)
    assert len(heights) > 10 and heights[0] >= 10
    # Charts fit; at 400 px tables of many columns do too, since their rows become blocks
    wider = "[...document.querySelectorAll(%r)].filter((e) => e.scrollWidth > e.clientWidth + 1)"
    assert browser.run(f"return {wider % '.plot'}.length") == 0
    if width == 400:
        assert browser.run(f"return {wider % '.table:has(.many)'}.length") == 0
    if width == 1280:
        names = f"{wider % '.table'}.map((e) => e.ariaLabel)"
        assert browser.run(f"return {names}") == []


def test_a_marks_prompt_is_shown_under_the_pointer(browser, report):
    browser.show(report[1])
    browser.run("document.querySelector('svg [data-tip*=infer]').classList.add('looked-at')")
    browser.hover(".looked-at path, .looked-at use")
    assert "can we infer" in browser.run(TOOLTIP)
    browser.press(ESCAPE)
    assert browser.run(TOOLTIP) is None


def test_the_comparison_is_sorted_by_the_keyboard(browser, pages):
    browser.show(pages["compare"][0])
    focus_on(browser, "difference", 40)
    browser.press(ENTER)
    assert browser.run("return document.activeElement.closest('th').ariaSort") == "descending"


def test_a_page_of_many_datasets_with_long_names_fits_a_narrow_screen(browser, tmp_path):
    folder = tmp_path / "validation_eval"
    for number in range(12):
        name = f"a_dataset_with_a_very_long_name_number_{number}_and_its_configuration_score_eval"
        write_scores(folder, name, [[-1.0, -2.0]] * 10, [number % 2] * 10)
    notes = (f"Left out: {'a_task' * 30}.",)
    options = ReportOptions(bootstrap=Bootstrap(200), notes=notes)
    report = make_report(Run("jax", folder), {}, options)
    write_report(report, tmp_path)
    browser.show(tmp_path / "report.html", 390, dark=True)
    assert browser.run(OUTSIDE) == []
    assert browser.run("return document.documentElement.scrollWidth") == 390


def test_something_is_drawn(browser, report, tmp_path):
    browser.show(report[1])
    (tmp_path / "page.png").write_bytes(browser.picture())
    picture = imread(tmp_path / "page.png")
    assert picture.shape[:2] == (900, 1280)
    assert len(np.unique(picture.reshape(-1, picture.shape[-1]), axis=0)) > 50
    assert (
        json.loads((report[1].parent / "report.json").read_text())["schema_version"]
        == SCHEMA_VERSION
    )


CLIPPED = """
return [...document.querySelectorAll("body *")].filter((e) =>
  e.checkVisibility() && !e.ownerSVGElement && e.clientWidth
  && (e.scrollWidth > e.clientWidth + 1 || e.getBoundingClientRect().right > innerWidth + 0.5))
  .map((e) => e.tagName + " " + e.className + " " + e.textContent.trim().slice(0, 40))
"""
PAPER = 794 - 2 * 45  # A4 without its margins, in pixels of CSS


@pytest.mark.parametrize("name", ["report", "compare", "history", "curves"])
def test_on_paper_no_table_is_cut_and_every_folded_part_is_open(browser, pages, name):
    browser.show(pages[name][0], PAPER)
    browser.cdp("Emulation.setEmulatedMedia", media="print")
    try:
        assert browser.run(CLIPPED) == []
        folded = "[...document.querySelectorAll('details > :not(summary)')]"
        assert browser.run(f"return {folded}.filter((e) => !e.getClientRects().length).length") == 0
    finally:
        browser.cdp("Emulation.setEmulatedMedia", media="")


@pytest.mark.skipif(not shutil.which("pdftotext"), reason="pdftotext is not installed")
@pytest.mark.parametrize("name", ["report", "compare", "history", "curves"])
def test_a_printed_page_has_all_the_words_of_the_page(browser, pages, name, tmp_path):
    browser.show(pages[name][0], dark=True)
    (tmp_path / "page.pdf").write_bytes(browser.printed())
    command = ["pdftotext", "-layout", tmp_path / "page.pdf", "-"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    parts = (
        "[...document.querySelectorAll('h1, h2, h3, summary, th, td, dt, dd, p, pre')]"
        ".map((e) => e.textContent)"
    )
    words = {word for part in browser.run(f"return {parts}") for word in part.split()}
    assert len(words) > 10
    # Lines break within long words, and a row of cells mixes their lines.
    letters = re.sub(r"\W", "", text)
    missing = [word for word in words if len(word) < 12 and re.sub(r"\W", "", word) not in letters]
    assert missing == []
    for heading in browser.run(
        "return [...document.querySelectorAll('h2')].map((e) => e.innerText)"
    ):
        last = [page.rstrip().splitlines()[-1] for page in text.split("\f") if page.strip()]
        assert heading not in {line.strip() for line in last}, f"{heading!r} ends a page"
