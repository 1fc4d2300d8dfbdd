"""docs/quickstart.ipynb runs from its first cell to its last."""

import os
import sys
from pathlib import Path

import nbclient
import nbformat

from .helpers.docs_commands import ROOT

NOTEBOOK = ROOT / "docs" / "quickstart.ipynb"
# What is run in place of what a reader runs: fewer steps and rows.
CUT = {"train_steps=60": "train_steps=4", "--limit 20": "--limit 4"}


def test_the_notebook_is_kept_without_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert not [cell for cell in notebook.cells if cell.get("outputs")]


def test_the_notebook_runs(tmp_path, monkeypatch):
    programs = Path(sys.executable).parent
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    text = NOTEBOOK.read_text()
    for whole, part in CUT.items():
        assert whole in text
        text = text.replace(whole, part)
    notebook = nbformat.reads(text, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=600, resources=resources).execute()
    printed = [str(cell["outputs"]) for cell in notebook.cells if cell.cell_type == "code"]
    assert not [text for text in printed if "Traceback" in text or "fix:" in text]
    report = tmp_path / "runs" / "notebook" / "eval" / "report.html"
    assert report.is_file()
