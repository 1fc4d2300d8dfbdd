"""The pages: they build into a site without a warning, and what they say of the code is so."""

import ast
import dataclasses
import html
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from t0repro.cli import app
from t0repro.config.mtf.reader import KNOWN_BINDINGS
from t0repro.config.t5x.modules import records_by_module

from .docs_commands import ROOT, command_lines, fault, pages

COMMAND = typer.main.get_command(app.app)


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


def test_every_command_line_of_the_pages_is_one_that_t0repro_takes():
    lines = {(page.name, line) for page in pages() for line in command_lines(page.read_text())}
    assert len(lines) > 100
    faults = {f"{page}: {line}": fault(line, COMMAND) for page, line in sorted(lines)}
    assert {line: what for line, what in faults.items() if what} == {}


@pytest.mark.parametrize(
    "line",
    ["t0repro cach --mixture a", "t0repro cache --mixtures a", "t0repro checkpoint dif A B"],
)
def test_the_check_of_command_lines_can_fail(line):
    assert fault(next(command_lines(f"    $ {line}  # a comment\n")), COMMAND)


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
    return []


def test_every_message_of_the_troubleshooting_page_is_in_the_code():
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    quoted = [each for line in re.findall(r"^`.*`$", text, re.M)
              for each in re.findall(r"`([^`]+)`", line)]  # fmt: skip
    assert len(quoted) > 30
    known = set(messages())
    assert [each for each in quoted if each not in known] == []


def test_the_page_of_gins_fields_has_every_record_binding_and_range(site):
    text = html.unescape((site / "gin_fields.html").read_text())
    for module, contents in records_by_module().items():
        for name, kind in contents.items():
            assert f"<code>{module}.{name}</code>" in text
            assert all(
                f"<code>{each.name}</code>" in text
                for each in dataclasses.fields(kind)
                if each.init
            )
    assert all(f"<code>{name}</code>" in text for name in KNOWN_BINDINGS)
    assert "at least 0 and below 1" in text  # dropout_rate's range
    # A default of Mesh TensorFlow's own signature.
    assert re.search(r"<code>clipping_threshold</code></td>\s*<td><code>1.0</code>", text)


def test_the_table_of_what_fits_is_that_of_the_shapes():
    script = [sys.executable, "-P", "-W", "ignore", "scripts/bench/what_fits.py"]
    table = subprocess.run(script, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert len(table.splitlines()) == 7
    assert table in (ROOT / "docs" / "what_fits.md").read_text()


def test_the_benchmarks_page_and_its_pictures_show_the_recorded_figures():
    script = runpy.run_path(str(ROOT / "scripts" / "bench" / "page.py"))
    for path, text in script["files"]().items():
        assert path.read_text() == text, f"run scripts/bench/page.py: {path.name} is older"
