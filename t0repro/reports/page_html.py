"""A page as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from t0repro.reports.page import Page, as_cell, as_column
from t0repro.words import printable

if TYPE_CHECKING:
    import jinja2

TEMPLATES = Path(__file__).parent / "templates"


def render_html(page: Page) -> str:
    """Renders the page with style, script and plots inline, so that it makes no requests."""
    environment = make_environment(TEMPLATES)
    environment.filters |= {"cell": as_cell, "column": as_column}
    return environment.get_template("page.html").render(
        page=page,
        css=_asset("page.css"),
        script=_asset("page.js"),
    )


def make_environment(folder: Path) -> jinja2.Environment:
    """Jinja for a folder of HTML templates: everything is escaped, and a missing name an error."""
    import jinja2

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        # Names come from tasks and files, so escape everything except our own HTML.
        autoescape=True,
        # By default Jinja renders a name that it does not know as nothing.
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        finalize=_show_controls,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _show_controls(value: Any) -> Any:
    """Text with control characters made visible; HTML is returned unchanged."""
    import markupsafe

    if isinstance(value, str) and not isinstance(value, markupsafe.Markup):
        return printable(value, keep="\n\t")
    return value


def _asset(name: str) -> str:
    return (TEMPLATES / name).read_text(encoding="utf-8")
