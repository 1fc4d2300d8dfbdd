"""Runs `t0repro` command lines in this process."""

import sys

import pytest

from t0repro.cli import app


def run(monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a t0repro command line."""
    monkeypatch.setattr(sys, "argv", ["t0repro", *arguments])
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as end:
        app.main()
    printed = capsys.readouterr()
    return int(end.value.code or 0), printed.out, printed.err
