"""A page as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from t0repro.reports.page import Page, as_cell, as_column
from t0repro.words import printable

_TEMPLATES = Path(__file__).parent / "templates"


def render_html(page: Page) -> str:
    """Renders the page with style, script and plots inline, so that it makes no requests."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        # Names come from tasks and files, so escape everything except our own HTML.
        autoescape=True,
        # By default Jinja renders a name that it does not know as nothing.
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"cell": as_cell, "column": as_column}
    return environment.get_template("page.html").render(
        page=page,
        css=_asset("page.css"),
        script=_asset("page.js"),
    )


def _shown(value: Any) -> Any:
    """Text with control characters made visible; HTML is returned unchanged."""
    import markupsafe

    if isinstance(value, str) and not isinstance(value, markupsafe.Markup):
        return printable(value, keep="\n\t")
    return value


def _asset(name: str) -> str:
    return (_TEMPLATES / name).read_text(encoding="utf-8")
