"""Rows beside what a prompt makes of them."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping
from typing import Any

from t0repro.errors import UserError
from t0repro.tasks.prompt_environment import TemplateFailure, UndefinedVariable
from t0repro.tasks.rendering import compile_template
from t0repro.tasks.showing import LENGTHS, ShownExample, find_tokenizer, show_example
from t0repro.tasks.source import name_nearest
from t0repro.tasks.task import TaskDescription
from t0repro.tasks.templates import Drop
from t0repro.tasks.vocabulary import is_here
from t0repro.words import counted

SECONDS = 3.0
"""After so long, a page's further rows are not rendered: a template may need 2 s for each."""
LONGEST = 20_000
"""Characters of a raw value, or of an input, that a page shows."""


@dataclasses.dataclass(frozen=True)
class ShownRow:
    """A row and its example.

    Attributes:
      number: The row's number in the data, from 0.
      fields: The row.
      example: What the prompt makes of it, or None.
      reason: Why there is no example.
      error: The template's failure on the row, if there was one.
    """

    number: int
    fields: Mapping[str, Any]
    example: ShownExample | None
    reason: str = ""
    error: TemplateFailure | None = None

    @property
    def texts(self) -> dict[str, str]:
        """The row's values as text."""
        return {name: _as_text(value) for name, value in self.fields.items()}

    @property
    def cut(self) -> list[str]:
        """What is cut off, in words."""
        if self.example is None:
            return []
        lost = zip(("input", "target"), self.example.lost_tokens, LENGTHS.values(), strict=True)
        words = [
            f"{counted(tokens, 'token')} of the {name} beyond {length:,}"
            for name, tokens, length in lost
            if tokens
        ]
        characters = sum(self.example.cut_characters)
        return words + ([f"{counted(characters, 'character')} of long fields"] * bool(characters))


def _as_text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=repr)
    return cut_long_text(text)


def cut_long_text(text: str) -> str:
    """A text, or its start and how much more there is."""
    if len(text) <= LONGEST:
        return text
    return f"{text[:LONGEST]} … and {counted(len(text) - LONGEST, 'character')} more"


def find_fault(rows: list[ShownRow]) -> str | None:
    """Why the template fails on one of these rows, or why none has an example; None for neither."""
    failed = next((row for row in rows if row.error is not None), None)
    if failed is None and rows and all(row.example is None for row in rows):
        failed = rows[0]
    return failed and f"row {failed.number}: {failed.reason.rstrip('.')}"


def show_rows(task: TaskDescription, split: str, start: int, count: int) -> list[ShownRow]:
    """Rows `start` to `start + count` of a split, rendered.

    Raises:
      UserError: If the rows are missing or broken, or the template is no Jinja.
    """
    source = task.rows
    uncut = compile_template(source.template, cut=False)
    tokenizer, _ = find_tokenizer(task.vocabulary) if is_here(task.vocabulary) else (None, None)
    end, shown = time.monotonic() + SECONDS, []
    for number, row in source.rows(split, start, start + count):
        if time.monotonic() > end:
            reason = f"not rendered: the rows before it took more than {SECONDS:g} s"
            shown.append(ShownRow(number, row, None, reason))
            continue
        try:
            rendering = source.render(split, number, row)
            if isinstance(rendering, Drop):
                shown.append(ShownRow(number, row, None, rendering.value))
                continue
            whole = uncut.render(row, f"{source.name}/{split}/{number}")
        except (UserError, TemplateFailure) as error:
            cause = error.__cause__ if isinstance(error, UserError) else error
            failure = cause if isinstance(cause, TemplateFailure) else None
            what = str(failure) if failure else getattr(error, "what", str(error))
            if isinstance(failure, UndefinedVariable) and (near := name_nearest(failure, row)):
                what += f"; {near}"
            shown.append(ShownRow(number, row, None, what, failure))
            continue
        example = show_example(number, row, rendering, whole, tokenizer, LENGTHS)
        shown.append(ShownRow(number, row, example))
    return shown
