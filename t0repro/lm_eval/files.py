"""Our tasks as lm-evaluation-harness's.

`export_tasks` writes one YAML file per prompt:

    DIR/<task>.yaml       a multiple-choice task; reads DIR/rows/<task>.jsonl
    DIR/<group>.yaml      a group for each dataset, and one for all of them
    DIR/rows/<task>.jsonl {"example", "inputs", "choices", "label"}, one rendered example per line

The harness looks up the rows' fields by name, so no template engine comes between our renderings
and the model. A choice's score is the sum of its tokens' log-likelihoods, as in T0, and `acc` is
the share of examples whose answer scores highest; a few-shot context is never added.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from t0repro.errors import UserError
from t0repro.storage import address_of, write_atomically
from t0repro.storage.disk import atomic_directory, name_in_errors
from t0repro.tasks.availability import refuse_missing_rows
from t0repro.tasks.catalog import label
from t0repro.tasks.registry import task_descriptions
from t0repro.tasks.task import SCORE_EVAL_SUFFIX, TaskDescription
from t0repro.words import counted

_NO_ANSWER = -100
"""lm-evaluation-harness's label of an example whose answer is none of its choices."""
_ROWS = "rows"


@dataclasses.dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
      tasks: Task of lm-evaluation-harness -> its number of examples.
      groups: Group -> its tasks, or the groups in it.
      left_out: Task -> why it was not exported.
    """

    tasks: dict[str, int]
    groups: dict[str, list[str]]
    left_out: dict[str, str]


def export_tasks(
    names: Sequence[str],
    split: str,
    folder: Path,
    suite: str,
    advance: Callable[[int], None] = lambda done: None,
) -> Exported:
    """Writes tasks and groups into a new folder, atomically.

    Args:
      names: Prompted tasks, or their `_score_eval` twins; those without answer choices are left
        out.
      split: The split to evaluate; tasks that do not have it are left out.
      folder: Must be empty or not exist.
      suite: The name of the group of all datasets.
      advance: Called with 1 after each task.

    Raises:
      UserError: If the folder is not empty, rows are missing or broken, or nothing is left to
        export.
    """
    if folder.is_dir() and any(folder.iterdir()):
        raise UserError(
            "The folder is not empty.", where=str(folder), fix="Name a new one, or remove it."
        )
    # The YAML files name their rows by absolute path, because the harness supports no other, or by
    # address.
    final = address_of(folder) or str(folder.resolve())
    if folder.is_dir():
        folder.rmdir()
    with atomic_directory(folder) as staged:
        (staged / _ROWS).mkdir()
        return _export(names, split, staged, final, suite, advance)


def _export(
    names: Sequence[str],
    split: str,
    staged: Path,
    final: str,
    suite: str,
    advance: Callable[[int], None],
) -> Exported:
    exported = Exported({}, {}, {})
    of_dataset: dict[str, list[str]] = collections.defaultdict(list)
    found: dict[str, TaskDescription] = {}
    for name in dict.fromkeys(each.removesuffix(SCORE_EVAL_SUFFIX) for each in names):
        task = task_descriptions()[name]
        if not task.prompt.has_answer_choices:
            exported.left_out[name] = "its template has no answer choices"
        elif split not in task.rows.files_of_splits:
            exported.left_out[name] = f"it has no split {split!r}"
        else:
            found[name] = task
    for task in found.values():
        refuse_missing_rows(task.rows, split, alone=len(found) == 1)
    for name, task in found.items():
        rows = f"{_ROWS}/{name}.jsonl"
        exported.tasks[name] = _write_rows(task, split, staged / rows)
        _write(staged / f"{name}.yaml", harness_task(task, split, f"{final}/{rows}"))
        of_dataset[_group_of(task, suite)].append(name)
        advance(1)
    if not exported.tasks:
        raise UserError(
            f"None of {counted(len(exported.left_out), 'task')} can be exported.",
            where=", ".join(f"{task}: {why}" for task, why in list(exported.left_out.items())[:3]),
            fix="Name tasks with answer choices, or another --split.",
        )
    exported.groups.update(of_dataset)
    exported.groups[suite] = list(of_dataset)
    for group, members in exported.groups.items():
        _write(staged / f"{group}.yaml", _group(group, members))
    return exported


def _write_rows(task: TaskDescription, split: str, path: Path) -> int:
    """Writes the split's rendered examples; returns their number."""
    examples = 0
    with name_in_errors(path), open(path, "w", encoding="utf-8") as file:
        for row in render_examples(task, split):
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            examples += 1
    if not examples:
        raise UserError(
            f"Task {task.prompt.name!r} gives no example of split {split!r}.",
            where="--split",
            fix="Name another split, or leave the task out of the mixture.",
        )
    return examples


def render_examples(task: TaskDescription, split: str) -> Iterator[dict[str, Any]]:
    """The examples of a split as documents of the harness, in their order."""
    for example, rendering in enumerate(task.rows.examples(split)):
        choices, answer = list(rendering["answer_choices"]), rendering["targets"].strip()
        yield {
            "example": example,
            "inputs": rendering["inputs"],
            "choices": choices,
            # Equal choices have equal scores and the first wins, so the first is the answer.
            "label": choices.index(answer) if answer in choices else _NO_ANSWER,
        }


def harness_task(task: TaskDescription, split: str, rows: str) -> dict[str, Any]:
    """A task's configuration in the harness, with the path of its rows."""
    return {
        "task": task.prompt.name,
        # A reader of the library `datasets`, which the harness loads all rows with.
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {split: rows}},
        "test_split": split,
        "output_type": "multiple_choice",
        "doc_to_text": "inputs",
        "doc_to_choice": "choices",
        "doc_to_target": "label",
        # The harness puts it before each choice; `lm_eval.model` removes it again.
        "target_delimiter": " ",
        "num_fewshot": 0,
        # Not acc_norm too, which divides scores by the choices' lengths: T0 does not.
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        "metadata": {
            "version": 1.0,
            "dataset": label(task.prompt.dataset, task.prompt.subset),
            "template": task.prompt.template_name,
            "template_id": str(task.prompt.template_id),
        },
    }


def _group(name: str, members: Sequence[str]) -> dict[str, Any]:
    # Each prompt counts the same, whatever its number of examples. The harness averages a group of
    # groups over its prompts too; T0's mean over datasets is in the report.
    mean = {"metric": "acc", "aggregation": "mean", "weight_by_size": False}
    return {
        "group": name,
        "task": list(members),
        "aggregate_metric_list": [mean],
        "metadata": {"version": 1.0},
    }


def _group_of(task: TaskDescription, suite: str) -> str:
    """The group of a task's dataset: names of groups and tasks must differ."""
    prompt = task.prompt
    # In T0, ANLI's rounds are separate datasets; the end of the task's name tells which.
    split_of_rounds = re.search(r"_r\d$", prompt.name)
    parts = [suite, prompt.dataset.rpartition("/")[2], prompt.subset or ""]
    return "_".join(filter(None, parts)) + (split_of_rounds[0] if split_of_rounds else "")


def _write(path: Path, content: dict[str, Any]) -> None:
    write_atomically(path, yaml.safe_dump(content, sort_keys=False, allow_unicode=True))
