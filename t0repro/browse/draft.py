"""A template while it is being written: its fields, its findings, and where an error is."""

from __future__ import annotations

import dataclasses
import itertools
import uuid
from collections.abc import Mapping
from typing import Any

import jinja2

from t0repro.browse.bench import Bench, Dataset
from t0repro.browse.shown_rows import ShownRow
from t0repro.errors import UserError
from t0repro.tasks.checking import Verdict, check_prompt
from t0repro.tasks.metrics import PROMPTSOURCE_METRICS
from t0repro.tasks.prompt_environment import TemplateFailure
from t0repro.tasks.rendering import compile_template
from t0repro.tasks.sandbox import check_jinja
from t0repro.tasks.task import TaskDescription
from t0repro.tasks.templates import SEPARATOR, is_own, make_template
from t0repro.words import counted, shortened

LONGEST = 100_000
"""Characters of a template; T0's longest has 5,000."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """What is to be said about a draft.

    Attributes:
      text: The finding.
      tone: Whether it is good or bad news.
      field: The field that it is about; "" for none.
      line: The field's line, from 1; None if it is about no line.
      source: That line's text.
    """

    text: str
    tone: str = "bad"
    field: str = ""
    line: int | None = None
    source: str = ""


@dataclasses.dataclass(frozen=True)
class Draft:
    """The fields of a template, as they stand on the page.

    Attributes:
      name: promptsource's name for it.
      jinja: Input, `|||` and target.
      answer_choices: Jinja of the choices; "" for none.
      original_task: Whether it poses the dataset's original task.
      choices_in_prompt: Whether the input lists the choices.
      metrics: Names of promptsource's metrics.
      identifier: promptsource's id for it; a new one if it is "".
      base: `digest` of the template that is edited; "" for none.
    """

    name: str = ""
    jinja: str = ""
    answer_choices: str = ""
    original_task: bool = False
    choices_in_prompt: bool = False
    metrics: tuple[str, ...] = ()
    identifier: str = ""
    base: str = ""

    @classmethod
    def of(cls, template: Any, base: str | None) -> Draft:
        """The fields of a template; T0's own gets a new id when it is saved."""
        return cls(
            template.name,
            template.jinja,
            template.answer_choices or "",
            bool(template.metadata.original_task),
            bool(template.metadata.choices_in_prompt),
            tuple(template.metadata.metrics or ()),
            template.id if is_own(template) else "",
            base or "",
        )

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Draft:
        """The fields that a page sends.

        Raises:
          UserError: If a field is of another type, too long, or names no metric.
        """
        values = {}
        for field in dataclasses.fields(cls):
            value = fields.get(field.name, field.default)
            value = tuple(value) if isinstance(value, list) else value
            if type(value) is not type(field.default) or len(str(value)) > LONGEST:
                raise UserError(
                    f"The field {field.name} has the wrong type, or is too long.",
                    fix="Shorten it, or reload the page.",
                )
            values[field.name] = value
        if unknown := [each for each in values["metrics"] if each not in PROMPTSOURCE_METRICS]:
            raise UserError(
                f"There is no metric {unknown[0]!r}.", fix="Choose one of the page's list."
            )
        return cls(**values)

    def template(self) -> Any:
        """A user's template with these fields."""
        metadata = {
            "original_task": self.original_task,
            "choices_in_prompt": self.choices_in_prompt,
            "metrics": list(self.metrics),
        }
        return make_template(
            self.name,
            self.jinja,
            self.answer_choices or None,
            metadata,
            identifier=self.identifier or str(uuid.uuid4()),
            reference="",
        )


def start_draft(name: str, row: Mapping[str, Any]) -> Draft:
    """A first template for a dataset: every text column, and the label or the last text.

    Args:
      name: The template's name.
      row: The dataset's first row.
    """
    fields = fields_of(row)
    texts = [field for field, value in fields.items() if isinstance(value, str)]
    numbers = [field for field, value in fields.items() if type(value) is int]
    known = [field for field in ("label", "answer", "target") if field in fields]
    label = next(iter((*known, *numbers, *texts[-1:])), None)
    asked = "\n".join(f"{{{{ {field} }}}}" for field in texts if field != label)
    if label is None:
        return Draft(name, f"{asked}\n{SEPARATOR} ")
    if type(fields[label]) is int:
        target = f"{{{{ answer_choices[{label}] }}}}"
        jinja = f"{asked}\nIs it so? {SEPARATOR} {target}"
        return Draft(name, jinja, f"no {SEPARATOR} yes", True, metrics=("Accuracy",))
    return Draft(name, f"{asked}\nIs it so? {SEPARATOR} {{{{ {label} }}}}", "", True)


def fields_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a row that a template can name, by their names in it."""
    fields = {column.replace("-", "_"): value for column, value in row.items()}
    return {field: value for field, value in fields.items() if field.isidentifier()}


def find_faults(draft: Draft) -> list[Finding]:
    """What keeps a draft from being rendered at all."""
    faults = []
    if not draft.name.strip():
        faults.append(Finding("Give the prompt a name.", field="name"))
    for field in ("jinja", "answer_choices"):
        text = getattr(draft, field)
        try:
            check_jinja(text)
        except jinja2.TemplateSyntaxError as error:
            faults.append(place_finding(draft, str(error.message), field, error.lineno))
        except TemplateFailure as error:
            faults.append(place_finding(draft, f"{error}", field, error.line))
    if SEPARATOR not in draft.jinja:
        text = f"Write the input, then {SEPARATOR}, then the target."
        faults.append(Finding(text, field="jinja"))
    return faults


def check_draft(draft: Draft, task: TaskDescription, rows: list[ShownRow]) -> list[Finding]:
    """The findings of `tasks check`, with the place in the template of an error on the rows."""
    failed = next((row for row in rows if row.error is not None), None)
    if failed is not None and failed.error is not None:
        field = "answer_choices" if _choices_fail(task, failed) else "jinja"
        text = f"Row {failed.number}: {failed.reason}"
        return [place_finding(draft, text, field, failed.error.line)]
    checked = check_prompt(task)
    if checked.verdict is Verdict.OK:
        examples, rows_seen = counted(checked.examples, "example"), counted(checked.rows, "row")
        return [Finding(f"tasks check: ok; {examples} of {rows_seen}.", "good")]
    return [Finding(f"tasks check: {checked.verdict.value}; {checked.reason}.")]


def place_finding(draft: Draft, text: str, field: str, line: int | None) -> Finding:
    """A finding at a line of a field, with that line's text."""
    lines = getattr(draft, field).splitlines()
    source = lines[line - 1] if line and line <= len(lines) else ""
    return Finding(text, "bad", field, line, shortened(source, 200))


def _choices_fail(task: TaskDescription, row: ShownRow) -> bool:
    """Whether the answer choices alone fail on a row."""
    template = task.rows.template
    if not template.answer_choices:
        return False
    alone = make_template(
        template.name, f"a {SEPARATOR} b", template.answer_choices, {}, identifier="", reference=""
    )
    try:
        compile_template(alone).render(row.fields, "")
    except TemplateFailure:
        return True
    return False


def new_draft(bench: Bench, dataset: Dataset) -> Draft:
    """A first draft for a dataset, from its first row if there are rows here."""
    names = {task.prompt.template_name for task in bench.tasks_of(dataset)}
    name = next(each for n in itertools.count(1) if (each := f"prompt {n}") not in names)
    empty = Draft(name, f"\n{SEPARATOR} ")
    rows = bench.describe(dataset, empty.template()).rows
    for split in rows.available_splits():
        for _, row in rows.rows(split, 0, 1):
            return start_draft(name, row)
    return empty
