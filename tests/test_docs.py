"""The pages: they build into a site without a warning, and what they say of the code is so."""

import ast
import contextlib
import html
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from t0repro.cli import app
from t0repro.cli.spelling import canonical, translate_t5x_overrides
from t0repro.config.mtf.refusals import known_bindings
from t0repro.config.t5x.arguments import MODULES, parameters_of
from t0repro.storage.access import addresses_of_another_machine

from .helpers.docs_commands import (
    ROOT,
    command_lines,
    fault,
    pages,
    programs_started,
    shell_blocks,
)
from .reports.browser import HERE, open_browser

COMMAND = app.command()


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site, built as scripts/docs.sh builds it: strictly, so that a broken link fails."""
    folder = tmp_path_factory.mktemp("site")
    # This Python's programs first: a checkout need not have a .venv.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "scripts/docs.sh", str(folder)],
        cwd=ROOT, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_site_has_every_page_and_asks_no_other_server_for_anything(site):
    docs = ROOT / "docs"
    names = {path.relative_to(docs).with_suffix("") for path in docs.rglob("*.md")}
    assert names <= {path.relative_to(site).with_suffix("") for path in site.rglob("*.html")}
    fetched = re.compile(
        r"""<(script|img|iframe)[^>]*\ssrc=["']?https?:"""
        r"""|<link[^>]*(stylesheet|preconnect)[^>]*\shref=["']?https?:"""
    )
    for page in site.rglob("*.html"):
        assert not fetched.findall(page.read_text()), page.name
    search = (site / "search" / "search_index.json").read_text()
    assert "rank classification" in search.lower()


def test_the_api_page_documents_what_t0repro_exports(site):
    import t0repro

    text = (site / "api.html").read_text()
    missing = [name for name in t0repro.__all__ if f".{name}" not in text]
    assert not missing


def test_dir_lists_the_public_names_and_errors_are_public_classes():
    import t0repro

    assert dir(t0repro) == sorted(t0repro.__all__)
    private = [
        f"{path.name}: {node.name}"
        for folder in ("t0repro", "tasks", "converters")
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and node.name.startswith("_")
        and any(re.search("Error|Exception|Found", ast.unparse(base)) for base in node.bases)
    ]  # fmt: skip
    assert private == []


def test_every_command_line_of_the_pages_is_one_that_t0repro_takes():
    lines = {(page.name, line) for page in pages() for line in command_lines(page.read_text())}
    assert lines
    faults = {f"{page}: {line}": fault(line, COMMAND) for page, line in sorted(lines)}
    assert {line: what for line, what in faults.items() if what} == {}


@pytest.mark.parametrize(
    "line",
    ["t0repro cach --mixture a", "t0repro cache --mixtures a", "t0repro checkpoint dif A B"],
)
def test_the_check_of_command_lines_can_fail(line):
    assert fault(next(command_lines(f"    $ {line}  # a comment\n")), COMMAND)


def refusal(words: list[str]) -> str | None:
    """What t0repro's own parser refuses in the words of a command; None if it takes them."""
    optional = [word.strip("[]") for word in words[1:]]  # as in `inspect PATH [--json]`
    words = translate_t5x_overrides(word for word in optional if word != "...")
    command, path = COMMAND, ["t0repro"]
    # `t0repro aux --model_dir ...` is the group's own.
    while words and hasattr(command, "commands") and not words[0].startswith("-"):
        path.append(words.pop(0))
        if path[-1] not in command.commands:
            return f"there is no command {path[-1]}"
        command = command.commands[path[-1]]
    try:
        # The reader's machine has credentials for the addresses on a page.
        with contextlib.redirect_stdout(io.StringIO()), addresses_of_another_machine():
            command.make_context(" ".join(path), words, token_normalize_func=canonical).close()
    except typer.Exit:  # --help
        return None
    except Exception as error:
        # "..." stands for options that the page has shown before.
        if "..." in optional and type(error).__name__ == "MissingParameter":
            return None
        return str(error) or type(error).__name__
    return None


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_a_reader_can_paste_every_block_of_commands(page, tmp_path):
    """Bash reads the blocks of a page in one clean folder; t0repro parses what bash passes."""
    started = programs_started("\n".join(shell_blocks(page.read_text())), tmp_path)
    for program, *words in started:
        if program == "t0repro":
            assert (refusal([program, *words])) is None, " ".join(words)
        elif program in ("bash", "python"):
            for script in (word for word in words if re.match(r"(scripts|tests)/\S+\.", word)):
                assert (ROOT / script).exists(), script


def test_blocks_of_commands_are_found_and_a_wrong_one_is_refused(tmp_path):
    started = [
        words[0]
        for page in pages()
        for words in programs_started("\n".join(shell_blocks(page.read_text())), tmp_path)
    ]
    assert {"t0repro", "bash"} <= set(started)
    with pytest.raises(AssertionError):
        programs_started("t0repro cache (", tmp_path)
    assert refusal(["t0repro", "infer", "--checkpoints", "3"])
    assert refusal(["t0repro", "convert", "a", "b", "--to", "FORMAT"])


def messages() -> list[str]:
    """The text of every error in the code, with … for what is filled in."""
    found = []
    for path in (path for folder in ("t0repro", "tasks", "converters")
                 for path in (ROOT / folder).rglob("*.py")):  # fmt: skip
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and node.args and "Error" in ast.unparse(node.func):
                found += _text(node.args[0])
    return found


def _text(node: ast.expr) -> list[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.JoinedStr):
        parts = [each.value if isinstance(each, ast.Constant) else "…" for each in node.values]
        return [re.sub("…+", "…", "".join(map(str, parts)))]
    if isinstance(node, ast.IfExp):
        return [*_text(node.body), *_text(node.orelse)]
    if isinstance(node, ast.BinOp):  # a text, and more after it
        return _text(node.left)
    return []


def test_every_message_of_the_troubleshooting_page_is_in_the_code():
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    quoted = [each for line in re.findall(r"^`.*`$", text, re.M)
              for each in re.findall(r"`([^`]+)`", line)]  # fmt: skip
    assert quoted
    known = set(messages())
    assert [each for each in quoted if each not in known] == []


def test_the_page_of_gins_fields_has_every_record_binding_and_range(site):
    text = html.unescape((site / "gin_fields.html").read_text())
    for module, contents in MODULES.items():
        for name, configurable in contents.items():
            assert f"<code>{module}.{name}</code>" in text
            assert all(f"<code>{each}</code>" in text for each in parameters_of(configurable))
    assert all(f"<code>{name}</code>" in text for name in known_bindings())
    assert "at least 0 and below 1" in text  # dropout_rate's range
    # A default of Mesh TensorFlow's own signature.
    assert re.search(r"<code>clipping_threshold</code></td>\s*<td[^>]*><code>1.0</code>", text)


def test_the_table_of_what_fits_is_that_of_the_shapes():
    script = [sys.executable, "-P", "-W", "ignore", "scripts/bench/what_fits.py"]
    table = subprocess.run(script, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert table and table in (ROOT / "docs" / "what_fits.md").read_text()


def test_the_benchmarks_page_and_its_pictures_show_the_recorded_figures():
    script = runpy.run_path(str(ROOT / "scripts" / "bench" / "page.py"))
    for path, text in script["files"]().items():
        assert path.read_text() == text, f"run scripts/bench/page.py: {path.name} is older"


# What sticks out of a narrow screen or scrolls sideways by more than a code's padding, and the
# short words of code that are broken across lines. Blocks of code may scroll.
STICKS_OUT = """
return [...document.querySelectorAll(".md-content table, .md-content p, .md-content img,"
  + ".md-typeset__scrollwrap")]
  .filter((e) => e.checkVisibility()
    && (e.scrollWidth > e.clientWidth + 6 || e.getBoundingClientRect().right > innerWidth + 0.5))
  .map((e) => e.tagName + " " + e.textContent.trim().slice(0, 60))
"""
BROKEN_WORDS = """
const found = [];
for (const code of document.querySelectorAll(".md-content td code, .md-content p code")) {
  for (const node of code.childNodes) {
    for (const word of (node.nodeValue ?? "").matchAll(/\\S+/g)) {
      if (word[0].length > 24 || !code.checkVisibility()) continue;
      const range = document.createRange();
      range.setStart(node, word.index);
      range.setEnd(node, word.index + word[0].length);
      const tops = new Set([...range.getClientRects()].map((box) => Math.round(box.top)));
      if (tops.size > 1 && !/[-/.]/.test(word[0])) found.push(word[0]);
    }
  }
}
return found
"""


@pytest.mark.skipif(not HERE, reason="Chromium and chromedriver are not here")
def test_on_a_phone_no_table_runs_off_the_page_and_no_command_breaks_inside_a_word(site):
    found = {}
    with open_browser() as browser:
        for page in sorted(site.rglob("*.html")):
            if "<td" not in page.read_text():
                continue
            browser.show(page, 400)
            faults = browser.run(STICKS_OUT) + browser.run(BROKEN_WORDS)
            if faults:
                found[page.name] = faults[:5]
    assert found == {}


def test_the_diagrams_show_their_texts_and_the_import_contract():
    script = runpy.run_path(str(ROOT / "scripts" / "dev" / "pictures.py"))
    pictures = script["pictures"]()
    assert pictures
    for path, svg in pictures.items():
        assert path.read_text() == svg, f"run scripts/dev/pictures.py: {path.name} is older"
