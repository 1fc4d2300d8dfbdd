"""The bench as a person meets it: in Chromium, by keyboard, on a phone, in the dark."""

import json
import time

import pytest

from t0repro.tasks.demo.datasets import VOCABULARY
from t0repro.tasks.template_files import read_template_file

from ..reports.browser import ENTER, HERE, SPACE, TAB, VIOLATIONS, open_browser
from ..reports.test_pages_in_chromium import OUTSIDE
from .started import DEMO, PROMPT, fields, run_bench, start_bench

pytestmark = pytest.mark.skipif(not HERE, reason="Chromium and chromedriver are not here")

CSV = 'text,label\n"A quiet, lovely film.",1\n"Two hours that I want back.",0\n'
PAGES = (
    "/",
    "/datasets",
    "/dataset?name=synthetic_glue/mrpc",
    f"/prompt?name={PROMPT}",
    "/new?dataset=reviews",
    f"/compare?a={PROMPT}",
    "/prompt?name=nope",
)
JINJA = "document.getElementById('jinja')"
FIRST = "document.querySelector('#rows .pair .text')?.textContent"
FINDINGS = "document.querySelector('.findings')?.innerText"
SETTLED = "return document.getElementById('rows').getAttribute('aria-busy') !== 'true'"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mine")
    (folder / "reviews.csv").write_text(CSV)
    return folder


@pytest.fixture(scope="module")
def bench(folder, models):
    arguments = [DEMO, f"--rows={folder}/reviews.csv", f"--templates={folder}/mine.yaml"]
    named = [f"--checkpoint={name}={models / name}" for name in "ab"]
    variables = {"T0REPRO_DATA_DIR": "", "T0REPRO_VOCAB": str(VOCABULARY)}
    with start_bench(*arguments, *named, **variables) as started:
        yield started


@pytest.fixture(scope="module")
def browser(bench):
    with open_browser() as browser:
        browser.show(bench.url)
        # The token is in the cookie, and in no address any more.
        assert browser.run("return location.href") == f"{bench.base}/"
        yield browser


def focus_on(browser, script):
    """Presses Tab until the focus is where a script says."""
    for _ in range(150):
        if browser.run(f"return {script} === document.activeElement"):
            return
        browser.press(TAB)
    raise AssertionError(script)


def put(browser, text):
    """Puts a template into the editor, as pasting does."""
    browser.run(
        f"{JINJA}.value = {json.dumps(text)};"
        f"{JINJA}.dispatchEvent(new Event('input', {{bubbles: true}}))"
    )


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("page", PAGES)
def test_a_page_fits_and_asks_nobody_else_for_anything(bench, browser, page, width, dark):
    browser.show(bench.base + page, width, dark=dark)
    assert browser.run("return document.documentElement.scrollWidth") == width
    assert browser.run(OUTSIDE) == []
    color = browser.run("return getComputedStyle(document.body).backgroundColor")
    levels = [int(level) for level in color.strip("rgb()").split(",")]
    assert (max(levels) < 60) if dark else (min(levels) > 200)
    asked = [each for each in browser.requests() if each != "data:,"]
    assert all(each.startswith(bench.base) for each in asked)
    assert browser.errors() == [] or page.endswith("nope")


@pytest.mark.slow
@pytest.mark.network
def test_axe_objects_to_nothing(bench, browser, axe, tmp_path):
    out = tmp_path / "bench.html"
    assert run_bench(DEMO, f"--out={out}").returncode == 0
    for page in (*(bench.base + page for page in PAGES), out):
        for width in (390, 1280):
            for dark in (False, True):
                browser.show(page, width, dark=dark)
                is_prompt = "prompt?name=demo" in str(page)
                if is_prompt:
                    browser.wait_for("return document.querySelector('meter')")
                    put(browser, "{{ nope }} ||| x")  # a finding with its place
                    browser.wait_for("return document.querySelector('.place')")
                browser.run(
                    "for (const part of document.querySelectorAll('details')) part.open = true"
                )
                browser.run(axe)
                assert browser.run(VIOLATIONS) == [], (page, width, dark)
                if is_prompt:  # or the next time, the page shows this draft, which has no scores
                    browser.run("localStorage.clear()")


def test_a_prompt_is_found_by_the_keyboard_alone(bench, browser):
    browser.show(f"{bench.base}/")
    focus_on(browser, "document.querySelector('[name=search]')")
    browser.press(*"mrpc know")
    assert browser.run("return document.getElementById('found').textContent").startswith("1 of")
    focus_on(browser, "document.querySelector('.prompts li:not([hidden]) a')")
    browser.press(ENTER)
    browser.wait_for(f"return document.title.startsWith('{PROMPT}')")


def test_filters_leave_what_they_say(bench, browser):
    browser.show(f"{bench.base}/")
    browser.run(
        "const select = document.querySelector('[name=choices]'); select.value = '2 choices';"
        "select.dispatchEvent(new Event('input', {bubbles: true}))"
    )
    shown = browser.run(
        "return [...document.querySelectorAll('.prompts li:not([hidden])')].map((e) => e.innerText)"
    )
    assert shown and all("2 choices" in text for text in shown)


def test_a_new_prompt_for_a_new_file_is_written_and_saved_by_the_keyboard_alone(
    bench, browser, folder
):
    browser.show(f"{bench.base}/new?dataset=reviews")
    focus_on(browser, "document.querySelector('#editor [name=name]')")
    browser.press("\ue010", *" two")  # End
    focus_on(browser, JINJA)
    browser.run(f"{JINJA}.setSelectionRange(0, 0)")
    focus_on(browser, "document.querySelector('[data-insert]')")
    browser.press(SPACE)
    browser.wait_for(f"return {JINJA}.value.startsWith('{{{{ text }}}}{{{{ text }}}}')")
    browser.wait_for(f"return ({FIRST} ?? '').startsWith('A quiet, lovely film.A quiet')")
    browser.wait_for(SETTLED)
    assert "tasks check: ok" in browser.run(f"return {FINDINGS}")
    focus_on(browser, "document.querySelector('#editor [type=submit]')")
    browser.press(ENTER)
    browser.wait_for("return document.title.startsWith('reviews_prompt_1_two')")
    (template,) = read_template_file(folder / "mine.yaml").templates
    assert template.name == "prompt 1 two"
    assert template.jinja.startswith("{{ text }}{{ text }}\n")
    assert sorted(each.name for each in folder.iterdir()) == ["mine.yaml", "reviews.csv"]
    assert browser.run("return localStorage.length") == 0


def test_an_error_is_shown_as_one_types_and_leads_to_its_line(bench, browser):
    browser.show(f"{bench.base}/prompt?name={PROMPT}")
    put(browser, "{{ sentence1 }}\n{{ sentense2 }} ||| x")
    browser.wait_for("return document.querySelector('.place')")
    assert "'sentense2' is undefined" in browser.run(f"return {FINDINGS}")
    focus_on(browser, "document.querySelector('.place')")
    browser.press(ENTER)
    marked = f"return {JINJA}.value.slice({JINJA}.selectionStart, {JINJA}.selectionEnd)"
    assert browser.run(marked) == "{{ sentense2 }} ||| x"
    browser.run("localStorage.clear()")


def test_unsaved_text_survives_a_reload_until_it_is_discarded(bench, browser):
    address = f"{bench.base}/prompt?name={PROMPT}"
    browser.show(address)
    text = "mine </textarea><b>{{ sentence1 }} ||| {{ answer_choices[label] }}"
    put(browser, text)
    browser.show(f"{bench.base}/")
    browser.show(address)
    assert browser.run(f"return {JINJA}.value") == text
    assert browser.wait_for(f"return ({FIRST} ?? '').startsWith('mine </textarea>')")
    focus_on(browser, "document.getElementById('discard')")
    browser.press(ENTER)
    browser.wait_for(f"return {JINJA}.value.startsWith('I want to know')")
    assert browser.run("return document.querySelector('.draft').hidden")


def test_scores_stand_at_the_choices_and_two_models_side_by_side(bench, browser):
    browser.show(f"{bench.base}/prompt?name={PROMPT}")
    assert browser.wait_for("return document.querySelectorAll('meter').length") == 40
    text = browser.run("return document.getElementById('rows').innerText")
    assert "a: " in text and "95% interval" in text and "predicted, " in text
    browser.show(f"{bench.base}/compare?a={PROMPT}&different=yes")
    assert browser.run("return document.querySelectorAll('article').length") > 0
    assert browser.run(
        "return [...document.querySelectorAll('article h2')]"
        ".every((e) => e.innerText.includes('differ'))"
    )


@pytest.mark.slow  # times on an idle machine
def test_rendering_and_scores_follow_a_key_at_once(bench, browser):
    """Processor time of the bench, since the machine may be busy."""
    browser.show(f"{bench.base}/prompt?name={PROMPT}")
    browser.wait_for("return document.querySelectorAll('meter').length")
    browser.run(f"{JINJA}.focus(); {JINJA}.setSelectionRange(0, 0)")
    rendered, scored = [], []
    for key in "xyzxyz":
        before = bench.processor_seconds()
        browser.press(key)
        browser.wait_for(f"return ({FIRST} ?? '').startsWith('{key}')")
        browser.wait_for(f"return document.querySelector('meter') && ({SETTLED[7:]})")
        scored.append(bench.processor_seconds() - before)
        browser.run(f"{JINJA}.setSelectionRange(0, 0)")
        # What the page asks for first, which scores would run into.
        before = bench.processor_seconds()
        assert bench.ask("/rows", fields(jinja=f"{key} {{{{sentence1}}}} ||| x"))[0] == 200
        rendered.append(bench.processor_seconds() - before)
    # The first ones compile a program for a length.
    assert sorted(rendered)[2] < 0.3 and sorted(scored)[2] < 1
    browser.run("localStorage.clear()")


@pytest.mark.slow  # times on an idle machine
def test_the_first_page_is_there_within_two_seconds_of_processor_time():
    with start_bench() as bench:
        status, text, _ = bench.ask("/")
        assert status == 200 and "971 task names" in text
        assert bench.processor_seconds() < 2


HOSTILE_ROWS = [
    "<script>window.pwned = 1</script>",
    "<img src=x onerror='window.pwned = 2'>",
    "</textarea></p><svg onload='window.pwned = 3'>",
    "\"><iframe src='javascript:parent.pwned = 4'></iframe>",
    "<meta http-equiv=refresh content='0;url=http://192.0.2.1/'>",
    "<link rel=stylesheet href=http://192.0.2.1/x.css>",
    "<form action=http://192.0.2.1/><button>go</button></form>",
    "<style>*{background:url(http://192.0.2.1/y)}</style>",
    "<base href=http://192.0.2.1/>",
    "{{ 7 * 7 }}{% raw %}",
]
HOSTILE_TEMPLATES = [
    "{{ text }} ||| {{ text }}",
    "{{ text | safe }} ||| {{ text | safe }}",
    "<script>window.pwned = 5</script>{{ text }} ||| <img src=x onerror='window.pwned = 6'>",
    "{{ cycler.__init__.__globals__.os.system('touch pwned') }} ||| x",
    "{{ ''.__class__.__mro__[1].__subclasses__() }} ||| x",
    "{{ 'a' * 10**10 }} ||| x",
    "{% include '/etc/passwd' %} ||| x",
]


def test_hostile_templates_and_rows_execute_nothing(browser, tmp_path):
    name = "<img src=x onerror='window.pwned = 7'>"
    rows = [{name: "a", "text": text, "label": 0} for text in HOSTILE_ROWS]
    (tmp_path / "evil.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out, mine = tmp_path / "out.html", tmp_path / "mine.yaml"
    arguments = [f"--rows={tmp_path}/evil.jsonl", f"--templates={mine}"]
    with start_bench(*arguments, T0REPRO_DATA_DIR="") as bench:
        browser.show(bench.url)
        for number, jinja in enumerate(HOSTILE_TEMPLATES):
            browser.show(f"{bench.base}/new?dataset=evil")
            browser.run(
                "document.querySelector('#editor [name=name]').value ="
                f" {json.dumps(name)} + {number}"
            )
            put(browser, jinja)
            browser.wait_for(SETTLED)
            time.sleep(0.3)
            assert browser.run("return window.pwned ?? null") is None, jinja
            browser.run("document.querySelector('#editor [type=submit]').click()")
            browser.wait_for(
                "return document.title.startsWith('evil_') || document.querySelector('#saved p')"
            )
            assert browser.run("return window.pwned ?? null") is None, jinja
            browser.run("localStorage.clear()")
        pages = [f"{bench.base}{page}" for page in ("/", "/datasets", "/dataset?name=evil")]
        pages += [f"{bench.base}/compare?a={name}" for name in read_names(browser, bench)]
        for page in pages:
            browser.show(page)
            assert browser.run("return window.pwned ?? null") is None, page
            assert all(each.startswith((bench.base, "data:,")) for each in browser.requests())
    assert run_bench(*arguments, f"--out={out}", T0REPRO_DATA_DIR="").returncode == 0
    browser.show(out)
    browser.run("for (const part of document.querySelectorAll('details')) part.open = true")
    time.sleep(0.3)
    assert browser.run("return window.pwned ?? null") is None
    assert [each for each in browser.requests() if each != "data:,"] == []
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "evil.jsonl",
        "mine.yaml",
        "out.html",
    ]


def read_names(browser, bench):
    """The names in the list."""
    browser.show(f"{bench.base}/")
    names = browser.run(
        "return [...document.querySelectorAll('.prompts .name')].map((e) => e.innerText)"
    )
    assert names
    return names
