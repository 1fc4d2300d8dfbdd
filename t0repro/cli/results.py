"""How commands show their results: lines, a page or a table for people, JSON for programs."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from t0repro.words import columns, printable, remove_passwords, rename_for_reader

if TYPE_CHECKING:
    from t0repro.reports.page import Page


def echo(text: str, *, err: bool = False) -> None:
    """Prints a text's lines on stdout or stderr, without passwords; escape sequences are shown."""
    typer.echo(printable(remove_passwords(rename_for_reader(text)), keep="\n"), err=err)


# ---- How commands show what they found: a page or a table for people, JSON for programs ----------


@contextlib.contextmanager
def print_for_people(as_json: bool) -> Iterator[None]:
    """Within the block, what is printed goes to stderr if stdout is for JSON."""
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        yield


def print_json(value: Any) -> None:
    """Prints a result as JSON; a command writes nothing else on stdout then.

    Dataclasses become objects. NaN and infinities, which JSON lacks, become null. Values of other
    types, such as paths, become text.
    """
    # ASCII keeps escape sequences in names from the terminal and is printable in every locale.
    text = json.dumps(_plain(value), indent=1, default=str, allow_nan=False)
    typer.echo(remove_passwords(text))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain({each.name: getattr(value, each.name) for each in dataclasses.fields(value)})
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def print_columns(rows: Sequence[Sequence[str]]) -> None:
    """Prints rows in columns without truncation, so that names can be searched for and copied."""
    for line in columns(rows):
        echo(line)


def show_page(
    name: str,
    page: Page,
    content: Any,
    out: Path | None,
    *,
    as_json: bool,
    lines: Iterable[str] = (),
) -> None:
    """Shows a page on the terminal, or its content, and writes both into a folder if one is given.

    Args:
      name: of the files, without .json, .md and .html.
      page: the page.
      content: what is in it; see `write_page`.
      out: the folder; None for none.
      as_json: whether to print the content instead of the page.
      lines: printed below the page.
    """
    from t0repro.reports.page_terminal import print_page
    from t0repro.reports.report_files import write_page
    from t0repro.storage import lock_folder

    if as_json:
        print_json(content)
    else:
        print_page(page)
        for line in lines:
            typer.echo(line)
    if out:
        # Two commands that write into one folder would mix their files.
        with lock_folder(out, f"writing {name}.html"):
            paths = write_page(name, page, content, out)
        print_written(paths, as_json=as_json)


def print_written(paths: Iterable[Path], *, as_json: bool) -> None:
    """Prints which files were written; on stderr if stdout is JSON."""
    for path in paths:
        echo(f"wrote {path}", err=as_json)
