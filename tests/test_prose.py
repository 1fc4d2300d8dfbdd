"""What people read uses the field's words: pages, help texts, messages, docstrings and comments."""

import runpy

import pytest
import typer

from t0repro.cli import app

from .docs_commands import ROOT

PROSE = runpy.run_path(str(ROOT / "scripts" / "prose.py"))


def test_pages_messages_docstrings_and_comments_use_the_fields_words():
    paths = PROSE["files"](PROSE["PAGES"] + PROSE["CODE"])
    assert len(paths) > 300
    assert [hit for path in paths for hit in PROSE["check"](path)] == []


def test_help_uses_the_fields_words():
    texts = {}

    def walk(command, name):
        texts[name] = command.help or ""
        texts.update({f"{name} {each.name}": getattr(each, "help", "") for each in command.params})
        for word, below in getattr(command, "commands", {}).items():
            walk(below, f"{name} {word}")

    walk(typer.main.get_command(app.app), "t0repro")
    assert len(texts) > 300
    assert [hit for name, text in texts.items() for hit in PROSE["hits"](text or "", name)] == []


@pytest.mark.parametrize(
    "text",
    [
        "a product's rate in the layers\nin a loop",
        "The training's loss was not finite.",
        "Parameters are drawn anew",
        "divided among devices",
        "1,000 tokens a second",
    ],
)
def test_the_check_of_words_can_fail(text):
    assert list(PROSE["hits"](text, "here"))


@pytest.mark.parametrize(
    "text",
    ["a training run", "Every training step", "It can be told apart.", "not finished", "handle"],
)
def test_the_fields_own_words_pass(text):
    assert not list(PROSE["hits"](text, "here"))
