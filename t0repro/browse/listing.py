"""What is known of each prompt and each dataset before a row is read."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping

from t0repro.browse.bench import Bench, Dataset
from t0repro.tasks.catalog import label, t0_datasets
from t0repro.tasks.task import TaskDescription
from t0repro.tasks.templates import is_own

_TRAINED = {"BASE": "T0 training", "GPT_EVAL": "T0+ training", "SGLUE": "T0++ training"}
_EVALUATED = {"BASE": "held out from T0", "BIAS_FAIRNESS": "bias evaluation"}
_DRAWS = re.compile(r"\|\s*(choice|random)\b")


@dataclasses.dataclass(frozen=True)
class ListedPrompt:
    """A prompt in the list.

    Attributes:
      name: The task's name.
      twin: The name of the task that rank classification evaluates; "" if there is none.
      dataset: `dataset` or `dataset/subset`.
      uses: What T0 used the dataset for; for a user's prompt, that it is one.
      original: Whether it poses the dataset's original task.
      metrics: The template's metrics.
      choices: Their number, `per row` if it depends on the row, or `none`.
      random: Whether the template draws at random.
      is_here: Whether there are rows on this machine.
    """

    name: str
    twin: str
    dataset: str
    uses: tuple[str, ...]
    original: bool
    metrics: tuple[str, ...]
    choices: str
    random: bool
    is_here: bool

    @property
    def facts(self) -> Mapping[str, tuple[str, ...]]:
        """Filter -> this prompt's values, in the words that the page shows."""
        return {
            "dataset": (self.dataset,),
            "use": self.uses,
            "task": ("original task" if self.original else "another task",),
            "metric": self.metrics or ("no metric",),
            "choices": (
                "choices per row" if self.choices == "per row" else f"{self.choices} choices",
            ),
            "random": ("randomized" if self.random else "not randomized",),
            "rows": ("rows are here" if self.is_here else "no rows here",),
        }


@dataclasses.dataclass(frozen=True)
class ListedDataset:
    """A dataset in the list: its label, what T0 used it for, its prompts, splits with rows here."""

    name: str
    uses: tuple[str, ...]
    prompts: int
    original: int
    ranked: int
    splits: tuple[str, ...]


@functools.cache
def _uses() -> Mapping[Dataset, tuple[str, ...]]:
    found: dict[Dataset, tuple[str, ...]] = {}
    for each in t0_datasets():
        uses = (_TRAINED.get(each.train), _EVALUATED.get(each.evaluate))
        found[each.dataset, each.subset] = tuple(filter(None, uses))
    return found


def _uses_of(dataset: Dataset) -> tuple[str, ...]:
    return _uses().get(dataset) or ("not used by T0",)


def list_prompts(bench: Bench) -> list[ListedPrompt]:
    """All prompts, by name."""
    splits = _Splits()
    return [_describe_prompt(task, splits) for _, task in sorted(bench.tasks.items())]


def list_datasets(bench: Bench) -> list[ListedDataset]:
    """All datasets, by name."""
    splits = _Splits()
    listed = []
    for dataset in bench.datasets:
        tasks = bench.tasks_of(dataset)
        here = [splits.of(task) for task in tasks[:1]]
        if dataset in bench.row_files:
            here = [tuple(bench.row_files[dataset])]
        prompts = [task.prompt for task in tasks]
        listed.append(
            ListedDataset(
                label(*dataset),
                _uses_of(dataset),
                len(tasks),
                sum(each.original_task for each in prompts),
                sum(each.has_answer_choices for each in prompts),
                here[0] if here else (),
            )
        )
    return listed


def options(prompts: Iterable[ListedPrompt]) -> dict[str, list[str]]:
    """Filter -> the values that prompts have."""
    found: dict[str, set[str]] = {}
    for prompt in prompts:
        for name, values in prompt.facts.items():
            found.setdefault(name, set()).update(values)
    return {name: sorted(values, key=_make_sort_key) for name, values in found.items()}


def _make_sort_key(value: str) -> tuple[int, str]:
    number = re.match(r"\d+", value)
    return int(number[0]) if number else 0, value


def _describe_prompt(task: TaskDescription, splits: _Splits) -> ListedPrompt:
    prompt, template = task.prompt, task.rows.template
    choices = str(len(prompt.fixed_choices)) if prompt.fixed_choices else "per row"
    own = ("your prompt",) if is_own(template) else ()
    return ListedPrompt(
        prompt.name,
        prompt.twin().name if prompt.has_answer_choices else "",
        label(prompt.dataset, prompt.subset),
        own or _uses_of((prompt.dataset, prompt.subset)),
        prompt.original_task,
        prompt.metrics,
        choices if prompt.has_answer_choices else "no",
        bool(_DRAWS.search(prompt.prompt + (template.answer_choices or ""))),
        bool(splits.of(task)),
    )


class _Splits:
    """The splits with rows here, looked for once for all prompts of the same files."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], tuple[str, ...]] = {}

    def of(self, task: TaskDescription) -> tuple[str, ...]:
        rows = task.rows
        key = (rows.dataset, rows.subset, rows.root, *rows.files_of_splits)
        if key not in self._known:
            self._known[key] = tuple(rows.available_splits())
        return self._known[key]
