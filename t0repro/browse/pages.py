"""The bench's pages: what each shows, rendered on this machine or into one static file."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from t0repro.browse.bench import Bench, Dataset, version
from t0repro.browse.draft import Draft, Finding, fields_of
from t0repro.browse.lengths import Lengths, measure
from t0repro.browse.listing import list_datasets, list_prompts, options
from t0repro.browse.scores import Accuracy, Scores, accuracy_of, differ
from t0repro.browse.shown_rows import ShownRow, cut_long_text, find_fault, show_rows
from t0repro.errors import UserError
from t0repro.reports.page_html import TEMPLATES as REPORT_TEMPLATES
from t0repro.reports.page_html import make_environment
from t0repro.tasks.catalog import label
from t0repro.tasks.metrics import PROMPTSOURCE_METRICS
from t0repro.tasks.sandbox import check_jinja
from t0repro.tasks.showing import LENGTHS
from t0repro.tasks.task import TaskDescription
from t0repro.words import counted

if TYPE_CHECKING:
    import jinja2

    from t0repro.browse.models import Models

_TEMPLATES = Path(__file__).parent / "templates"
ROWS = 10
"""Rows on a page."""
MOST_ROWS = 200


@functools.cache
def _environment() -> jinja2.Environment:
    environment = make_environment(_TEMPLATES)
    environment.filters |= {
        "counted": counted,
        "bounded": cut_long_text,
        "label": lambda x: label(*x),
    }
    environment.globals["lengths"] = LENGTHS
    return environment


@functools.cache
def asset(name: str) -> str:
    """A style sheet or script; the style sheet of reports comes first, with colors and tables."""
    text = (_TEMPLATES / name).read_text(encoding="utf-8")
    if name.endswith(".css"):
        return (REPORT_TEMPLATES / "page.css").read_text(encoding="utf-8") + text
    return text


@dataclasses.dataclass(frozen=True)
class Scored:
    """A model's scores of the rows shown, and their accuracy."""

    model: str
    scores: list[Scores | None]
    accuracy: Accuracy | None


@dataclasses.dataclass(frozen=True)
class Side:
    """One side of a comparison: a prompt's rows and, with a model, their scores."""

    task: TaskDescription
    model: str
    rows: list[ShownRow]
    scores: list[Scores | None]

    @property
    def accuracy(self) -> Accuracy | None:
        """The accuracy over the rows shown."""
        return accuracy_of(self.scores)


class Pages:
    """Renders the pages of a bench.

    Args:
      bench: The prompts.
      models: The models; None for none.
    """

    def __init__(self, bench: Bench, models: Models | None):
        self.bench, self.models = bench, models
        self._measured: dict[tuple[str, str | None], Lengths] = {}

    def render(self, name: str, **values: Any) -> str:
        """A template's HTML."""
        labels = self.models.labels if self.models else []
        return (
            _environment().get_template(name).render({"static": False, "models": labels, **values})
        )

    def prompts(self) -> str:
        """The list of all prompts, with search and filters."""
        prompts = list_prompts(self.bench)
        return self.render("prompts.html", prompts=prompts, options=options(prompts))

    def datasets(self) -> str:
        """The bird's-eye view, whose lengths the page asks for one by one."""
        return self.render("datasets.html", datasets=list_datasets(self.bench))

    def measure_prompts(self, dataset: Dataset) -> list[Lengths]:
        """The lengths of a dataset's prompts; measured once."""
        found = []
        for task in self.bench.tasks_of(dataset):
            key = task.prompt.name, version(task)
            if key not in self._measured:
                self._measured[key] = measure(task)
            found.append(self._measured[key])
        return found

    def row_counts(self, dataset: Dataset) -> dict[str, int]:
        """Split -> number of rows on this machine."""
        task = next(iter(self.bench.tasks_of(dataset)), None)
        # Any template is of the same rows.
        rows = task.rows if task else self.bench.describe(dataset, Draft("rows").template()).rows
        return {split: rows.row_count(split) for split in first_splits(rows.available_splits())}

    def dataset(self, dataset: Dataset) -> str:
        """A dataset's prompts and how long their texts are."""
        return self.render(
            "dataset.html",
            dataset=dataset,
            counts=self.row_counts(dataset),
            measured=self.measure_prompts(dataset),
        )

    def dataset_cells(self, dataset: Dataset) -> str:
        """A dataset's rows and lengths, for its line in the bird's-eye view."""
        return self.render("dataset_cells.html", **self.summary(dataset))

    def summary(self, dataset: Dataset) -> dict[str, Any]:
        """A dataset's number of rows and the lengths over all of its prompts."""
        measured = [each for each in self.measure_prompts(dataset) if each.inputs and each.targets]
        cut = [each.cut for each in measured if each.cut is not None]
        return {
            "counts": self.row_counts(dataset),
            "inputs": [each.inputs for each in measured if each.inputs],
            "targets": [each.targets for each in measured if each.targets],
            "cut": sum(cut) / len(cut) if cut else None,
        }

    def prompt(self, task: TaskDescription, split: str | None, start: int) -> str:
        """A prompt in its editor, beside its rows."""
        dataset = task.rows.dataset, task.rows.subset
        draft = Draft.of(task.rows.template, version(task))
        return self._editor(dataset, draft, task, split, start, is_new=False)

    def new_prompt(self, dataset: Dataset, draft: Draft) -> str:
        """The editor with a first draft."""
        task = self.bench.describe(dataset, draft.template())
        return self._editor(dataset, draft, task, None, 0, is_new=True)

    def _editor(
        self,
        dataset: Dataset,
        draft: Draft,
        task: TaskDescription,
        split: str | None,
        start: int,
        *,
        is_new: bool,
    ) -> str:
        # The sandbox takes a second to start, which is over when the first letter is typed.
        threading.Thread(target=check_jinja, args=("",), daemon=True).start()
        splits = task.rows.available_splits()
        try:
            file = str(self.bench.file_of(dataset, draft.identifier))
        except UserError:
            file = ""
        split = choose_split(splits, split)
        columns: list[str] = []
        try:
            body = self.rows(task, split, start, []) if split else self.no_rows()
            first = task.rows.rows(split, 0, 1) if split else ()
            columns = [field for _, row in first for field in fields_of(row)]
        except UserError as error:
            body = self.render("fault.html", error=error)
        return self.render(
            "prompt.html",
            task=task,
            is_new=is_new,
            dataset=dataset,
            draft=draft,
            metrics=list(PROMPTSOURCE_METRICS),
            columns=columns,
            splits=first_splits(splits),
            split=split,
            start=start,
            file=file,
            body=body,
        )

    def no_rows(self) -> str:
        """In place of rows where there are none."""
        return self.render("no_rows.html")

    def rows(
        self,
        task: TaskDescription,
        split: str,
        start: int,
        findings: list[Finding],
        *,
        shown: list[ShownRow] | None = None,
        scored: Sequence[Scored] = (),
    ) -> str:
        """Findings and rows, raw and prompted; with the scores that there are."""
        return self.render(
            "rows.html",
            rows=show_rows(task, split, start, ROWS) if shown is None else shown,
            findings=findings,
            total=task.rows.row_count(split),
            start=start,
            scored=scored,
        )

    def score(
        self, task: TaskDescription, rows: list[ShownRow]
    ) -> tuple[list[Scored], list[Finding]]:
        """Each model's scores of rows, or why there are none."""
        if self.models is None:
            return [], []
        found = []
        try:
            for model in self.models.labels:
                scores = self.models.score(model, task, rows)
                found.append(Scored(model, scores, accuracy_of(scores)))
        except UserError as error:  # the vocabulary is another model's
            return [], [Finding(error.what)]
        return found, []

    def row_faults(self) -> list[str]:
        """Why prompts give no example of the first rows of the files that were named."""
        found = []
        for dataset, files in self.bench.row_files.items():
            split = first_splits(list(files))[0]
            for task in self.bench.tasks_of(dataset):
                try:
                    fault = find_fault(show_rows(task, split, 0, ROWS))
                except UserError as error:
                    fault = f"{error.what.rstrip('.')} ({error.where})"
                found += [f"{task.prompt.name}: {fault}"] if fault else []
        return found

    def side(self, task: TaskDescription, model: str, split: str, start: int, count: int) -> Side:
        """One side of a comparison."""
        rows = show_rows(task, split, start, count)
        if self.models is None or model not in self.models.labels:
            return Side(task, "", rows, [None] * len(rows))
        return Side(task, model, rows, self.models.score(model, task, rows))

    def comparison(
        self,
        names: tuple[TaskDescription, TaskDescription],
        models: tuple[str, str],
        split: str | None,
        start: int,
        count: int,
        only_different: bool,
    ) -> str:
        """Two prompts of a dataset, or two models, side by side."""
        first, second = names
        dataset = first.rows.dataset, first.rows.subset
        splits = [s for s in first.rows.available_splits() if s in second.rows.available_splits()]
        split = choose_split(splits, split)
        sides, pairs = [], []
        if split:
            sides = [
                self.side(task, model, split, start, count)
                for task, model in zip(names, models, strict=True)
            ]
            rows = zip(*(zip(side.rows, side.scores, strict=True) for side in sides), strict=True)
            pairs = [(one, other, differ(one[1], other[1])) for one, other in rows]
        return self.render(
            "compare.html",
            dataset=dataset,
            tasks=[task.prompt.name for task in self.bench.tasks_of(dataset)],
            chosen=[task.prompt.name for task in names],
            chosen_models=models,
            splits=first_splits(splits),
            split=split,
            start=start,
            count=count,
            only_different=only_different,
            sides=sides,
            pairs=pairs,
        )

    def error(self, error: UserError) -> str:
        """A page that says what is wrong."""
        return self.render("error.html", error=error)


def choose_split(splits: list[str], asked: str | None) -> str | None:
    """The split that was asked for, or else the first that a page offers; None of none."""
    return asked if asked in splits else next(iter(first_splits(splits)), None)


def first_splits(splits: list[str]) -> list[str]:
    """Splits in the order in which a page offers them."""
    order = {"train": 0, "validation": 1, "test": 2}
    return sorted(splits, key=lambda name: order.get(name, 3))
