"""Writes a report's files: all of them or none."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from t0repro.errors import UserError
from t0repro.reports.page import Page
from t0repro.reports.page_html import render_html
from t0repro.reports.page_markdown import render_markdown
from t0repro.reports.report import Report
from t0repro.reports.report_page import report_page
from t0repro.storage import make_folder, output_path, write_atomically
from t0repro.storage.disk import sync, sync_tree


def write_report(report: Report, out: str | os.PathLike[str]) -> list[Path]:
    """Writes report.json, report.md and report.html into a folder; returns their paths.

    Raises:
      UserError: like write_files.
    """
    return write_files(_page_files("report", report.to_json(), report_page(report)), out)


def write_page(name: str, page: Page, content: Any, out: str | os.PathLike[str]) -> list[Path]:
    """Writes <name>.json with the content, and the page as <name>.md and <name>.html.

    Args:
      name: of the files.
      page: the page.
      content: what is in it, of dataclasses and of what JSON has.
      out: the folder.

    Raises:
      UserError: like write_files.
    """
    text = json.dumps(content, indent=1, default=dataclasses.asdict) + "\n"
    return write_files(_page_files(name, text, page), out)


def _page_files(name: str, content: str, page: Page) -> dict[str, str]:
    return {
        f"{name}.json": content,
        f"{name}.md": render_markdown(page),
        f"{name}.html": render_html(page),
    }


def write_files(files: Mapping[str, str | bytes], out: str | os.PathLike[str]) -> list[Path]:
    """Writes files into a folder, all of them or none, and returns their paths.

    Raises:
      UserError: if a file cannot be written; it names the file.
    """
    with stage_files(out) as staging:
        for name, content in files.items():
            write_atomically(staging / name, content)
    return [Path(out) / name for name in files]


@contextlib.contextmanager
def stage_files(out: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a temporary folder; its files are moved into `out` if the block raises nothing.

    All files are synced before the first is renamed into place, so that a full disk leaves the
    files of an earlier report as they were.

    Raises:
      UserError: if a file cannot be written; it names the file, or else the folder.
    """
    out = output_path(out)
    # A unique name: two reports may be written to one folder at the same time.
    staging = out / f".{uuid.uuid4().hex[:8]}.tmp"
    try:
        make_folder(staging)
        yield staging
        sync_tree(staging)
        # By now everything is on disk, so running out of space is unlikely from here on.
        for path in sorted(staging.iterdir()):
            os.replace(path, out / path.name)
        sync(out)
    except OSError as error:
        # Named as in the user's folder: the temporary one is gone when the message is read.
        at_fault = Path(error.filename or staging)
        path = out / at_fault.name if at_fault.parent == staging else out
        raise UserError(
            f"{path.name} cannot be written: {error.strerror or error}.",
            where=str(path),
            fix="Free some space, or name another folder with --out, and run the command again.",
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
