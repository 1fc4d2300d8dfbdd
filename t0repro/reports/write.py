"""Writes a page in its three forms."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from t0repro.files import write_atomically
from t0repro.reports.html import render_html
from t0repro.reports.markdown import render_markdown
from t0repro.reports.page import Page
from t0repro.reports.report import Report
from t0repro.reports.report_page import report_page


def as_json(values: Sequence[Any]) -> str:
    """Dataclasses as an indented JSON list."""
    return json.dumps([dataclasses.asdict(value) for value in values], indent=1) + "\n"


def write_report(report: Report, out: str | os.PathLike[str]) -> list[Path]:
    """Writes report.json, report.md and report.html into a folder; returns their paths."""
    return write_page("report", report_page(report), report.to_json(), out)


def write_page(name: str, page: Page, content: str, out: str | os.PathLike[str]) -> list[Path]:
    """Writes <name>.json with the content, and the page as <name>.md and <name>.html.

    All three are rendered before the first is written, and each is renamed into place.
    """
    contents = {
        f"{name}.json": content,
        f"{name}.md": render_markdown(page),
        f"{name}.html": render_html(page),
    }
    paths = [Path(out) / file for file in contents]
    for path in paths:
        write_atomically(path, contents[path.name])
    return paths
