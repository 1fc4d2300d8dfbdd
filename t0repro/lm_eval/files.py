"""lm-evaluation-harness's files: our tasks written as its, and results in either direction.

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
import contextlib
import dataclasses
import datetime
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from t0repro.errors import UserError
from t0repro.files import atomic_directory, make_folder, naming, write_atomically
from t0repro.tasks.catalogue import label
from t0repro.tasks.task import SCORE_EVAL_SUFFIX, TaskDescription, task_descriptions
from t0repro.words import counted
from t0repro.working_copies import address_of

# Evaluations import JAX, which takes seconds that exporting tasks does without.
if TYPE_CHECKING:
    from t0repro.evaluation.outputs import TaskScores
    from t0repro.evaluation.task_output import LineFile

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
    for name in dict.fromkeys(each.removesuffix(SCORE_EVAL_SUFFIX) for each in names):
        task = task_descriptions()[name]
        if not task.prompt.has_answer_choices:
            exported.left_out[name] = "its template has no answer choices"
        elif split not in task.rows.files_of_splits:
            exported.left_out[name] = f"it has no split {split!r}"
        else:
            rows = f"{_ROWS}/{name}.jsonl"
            exported.tasks[name] = _write_rows(task, split, staged / rows)
            _write(staged / f"{name}.yaml", _harness_task(task, split, f"{final}/{rows}"))
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
    with naming(path), open(path, "w", encoding="utf-8") as file:
        for row in _rendered(task, split):
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            examples += 1
    if not examples:
        raise UserError(f"Task {task.prompt.name!r} gives no example of split {split!r}.")
    return examples


def _rendered(task: TaskDescription, split: str) -> Iterator[dict[str, Any]]:
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


def _harness_task(task: TaskDescription, split: str, rows: str) -> dict[str, Any]:
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


# ---- Results -------------------------------------------------------------------------------------

# At each start, `lm_eval run --log_samples --output_path DIR` writes
#
#     DIR/<model>/results_<date>.json          settings, and the number of examples of each task
#     DIR/<model>/samples_<task>_<date>.jsonl  each example with its choices' log-likelihoods
#
# and `import_results` writes the files of evaluation.outputs from them. A harness task that
# `export_tasks` wrote gets the name of its `_score_eval` twin, so that the result can be compared
# with rank-eval's. The harness does not count tokens, so lengths are 0 and ranking by length is
# refused.
#
# `export_results` writes the same files from an evaluation of ours, for tools that read the
# harness's. Whether greedy decoding gives a choice is unknown then, so it is null.

STEP = 0
"""The step of an imported evaluation: the harness does not know a model's."""
_RUN_AGAIN = "Run lm_eval again with --log_samples and --output_path."
_OURS = {"example", "inputs", "choices", "label"}


def import_results(results: str | os.PathLike[str], folder: Path) -> tuple[Path, dict[str, str]]:
    """Writes the latest results below a folder as a `<split>_eval` folder.

    Args:
      results: The folder that `--output_path` named, or one inside it.
      folder: Where to write the `<split>_eval` folder; files of the same tasks are replaced.

    Returns:
      The written folder, and harness task -> why it was left out, for tasks that do not rank
      choices.

    Raises:
      UserError: If there are no results, samples are missing or fewer than were evaluated, a file
        is damaged, or no task ranks choices.
    """
    from t0repro.evaluation.evaluation_facts import EVALUATION_FACTS

    path = _latest(Path(results))
    found = _json(path.read_text(encoding="utf-8"), str(path))
    date = path.stem.removeprefix("results_")
    configs = found.get("configs", {})
    ranked = {
        task: config
        for task, config in configs.items()
        if config.get("output_type") == "multiple_choice"
    }
    if not ranked:
        raise UserError("No task in these results ranks choices.", where=str(path), fix=_RUN_AGAIN)
    # The harness evaluates the test split of a task that has one.
    splits = {each.get("test_split") or each.get("validation_split") for each in ranked.values()}
    eval_dir = folder / f"{splits.pop() if len(splits) == 1 else 'all'}_eval"
    make_folder(eval_dir)
    for task in ranked:
        samples = path.with_name(f"samples_{task}_{date}.jsonl")
        expected = found.get("n-samples", {}).get(task, {}).get("effective")
        _import_task(task, samples, expected, eval_dir)
    # Written last: it identifies the model of the scores.
    facts = json.dumps(_facts(found, path), indent=1)
    write_atomically(eval_dir / EVALUATION_FACTS, facts)
    left_out = {
        task: f"its output_type is {config.get('output_type')}"
        for task, config in configs.items()
        if task not in ranked
    }
    return eval_dir, left_out


def _latest(folder: Path) -> Path:
    # A file's name ends with the date, so the last one is the latest.
    found = sorted(folder.rglob("results_*.json"), key=lambda path: path.name)
    if not found:
        raise UserError(
            "There are no results of lm-evaluation-harness here (results_<date>.json).",
            where=str(folder),
            fix=_RUN_AGAIN,
        )
    models = sorted({str(path.parent) for path in found})
    if len(models) > 1:
        raise UserError(
            f"There are results of {len(models)} models here.",
            where=str(folder),
            fix=f"Name the folder of one: {', '.join(models)}.",
        )
    return found[-1]


def _import_task(task: str, samples: Path, expected: int | None, eval_dir: Path) -> None:
    if not samples.is_file():
        raise UserError(f"The samples of {task!r} are missing.", where=str(samples), fix=_RUN_AGAIN)
    pairs, examples, ours = [], set(), True
    for sample, where in _lines(samples):
        try:
            pairs += list(_pairs(sample))
            ours = ours and sample["doc"].keys() >= _OURS
            examples.add(sample["doc_id"])
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise UserError(
                f"This is not a sample of a multiple-choice task: {error!r}.",
                where=where,
                fix=_RUN_AGAIN,
            ) from error
    if not pairs or (expected is not None and len(examples) != expected):
        raise UserError(
            f"Task {task!r} has samples of {len(examples)} examples; {expected} were evaluated.",
            where=str(samples),
            fix="Copy the file again, or run lm_eval again.",
        )
    # Only a task of ours has a twin that ranks the same choices.
    name = task + SCORE_EVAL_SUFFIX if ours else task
    columns = zip(*pairs, strict=True)
    endings = ("inputs", "targets", f"{STEP}_predictions")
    for ending, values in zip(endings, columns, strict=True):
        with _atomic_file(eval_dir / f"{name}_{ending}") as file:
            file.write(values)


def _pairs(sample: Mapping[str, Any]) -> Iterator[tuple[str, Any, float]]:
    """(input, target, log-likelihood) of each choice, as score_eval writes them."""
    doc, arguments = sample["doc"], sample["arguments"]
    # Of each choice: its log-likelihood, and whether greedy decoding gives it.
    scores = [float(score[0]) for score in sample["filtered_resps"]]
    if not scores:
        raise ValueError("it has no scores")
    texts = [arguments[f"gen_args_{number}"] for number in range(len(scores))]
    choices = [str(text["arg_1"]).strip() for text in texts]
    example, answer = int(doc.get("example", sample["doc_id"])), int(sample["target"])
    for number, score in enumerate(scores):
        # Equal choices are equally right, as in T0's tasks.
        correct = 0 <= answer < len(choices) and choices[number] == choices[answer]
        yield texts[number]["arg_0"], ((example, number), correct, 1.0, 0), score


@contextlib.contextmanager
def _atomic_file(path: Path) -> Iterator[LineFile]:
    """A file of lines, which appears only if the block succeeds."""
    from t0repro.evaluation.task_output import LineFile

    file = LineFile(path)
    try:
        yield file
    except BaseException:
        file.discard()
        raise
    file.commit()


def _lines(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    with open(path, encoding="utf-8", newline="\n") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}:{number}"
            yield _json(line, where), where


def _json(text: str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UserError(f"This is not JSON: {error}", where=where, fix=_RUN_AGAIN) from error
    if not isinstance(found, dict):
        raise UserError("This is not a JSON object.", where=where, fix=_RUN_AGAIN)
    return found


def _facts(found: Mapping[str, Any], path: Path) -> dict[str, Any]:
    config = found.get("config", {})
    arguments, digest = config.get("model_args"), config.get("model_sha")
    named = arguments if isinstance(arguments, Mapping) else {}
    versions = {
        "lm-eval": found.get("lm_eval_version"),
        "transformers": found.get("transformers_version"),
    }
    return {
        "step": STEP,
        "checkpoint": str(named.get("checkpoint") or named.get("pretrained") or arguments),
        "checkpoint_hash": digest if isinstance(digest, str) and digest else None,
        "duration_seconds": float(found.get("total_evaluation_time_seconds") or 0) or None,
        "versions": {name: str(version) for name, version in versions.items() if version},
        "data": {"results": str(path)},
    }


# ---- Our scores as the harness's results ---------------------------------------------------------


def export_results(eval_dir: Path, step: int, split: str, folder: Path) -> Path:
    """Writes an evaluation's ranked tasks in the harness's layout.

    Args:
      eval_dir: The `<split>_eval` folder.
      step: The step to export.
      split: The split that was evaluated; its examples are rendered again.
      folder: Where to write `results_<date>.json` and a file of samples for each task.

    Returns:
      The file of results, which is written last.

    Raises:
      UserError: If there are no scores, or a task's rows are no longer those that were scored.
    """
    from t0repro.evaluation.outputs import iterate_task_scores
    from t0repro.reports.run import recorded_facts

    facts = recorded_facts(eval_dir, step)
    date = datetime.datetime.now().isoformat().replace(":", "-")
    results, configs, counts = {}, {}, {}
    for scores in iterate_task_scores(eval_dir, step):
        name = scores.task.removesuffix(SCORE_EVAL_SUFFIX)
        task = task_descriptions()[scores.task]
        right = []
        with _atomic_file(folder / f"samples_{name}_{date}.jsonl") as file:
            for sample in _samples(scores, task, split):
                right.append(sample["acc"])
                file.write([json.dumps(sample, ensure_ascii=False)])
        # The harness's formula, and its word where a single example has no standard error.
        error = float(np.std(right, ddof=1) / len(right) ** 0.5) if len(right) > 1 else "N/A"
        results[name] = {
            "name": name,
            "alias": name,
            "sample_len": len(right),
            # The harness names a figure by metric and filter.
            "acc,none": float(np.mean(right)),
            "acc_stderr,none": error,
        }
        configs[name] = _harness_task(task, split, "")
        counts[name] = {"original": len(right), "effective": len(right)}
    content = {
        "results": results,
        "configs": configs,
        "versions": dict.fromkeys(results, 1.0),
        "n-shot": dict.fromkeys(results, 0),
        "higher_is_better": {name: {"acc": True} for name in results},
        "n-samples": counts,
        "config": {
            "model": "t0repro",
            "model_args": {"checkpoint": facts.get("checkpoint")},
            "model_sha": facts.get("checkpoint_hash") or "",
        },
        "model_source": "t0repro",
        "model_name": str(facts.get("checkpoint")),
        "t0repro_version": (facts.get("versions") or {}).get("t0repro"),
    }
    path = folder / f"results_{date}.json"
    write_atomically(path, json.dumps(content, indent=2, ensure_ascii=False))
    return path


def _samples(scores: TaskScores, task: TaskDescription, split: str) -> Iterator[dict[str, Any]]:
    """The samples of a task's scored examples, in their order."""
    of_example: dict[int, list[float]] = {}
    # In the order of examples and choices, as TaskScores has them.
    for example, score in zip(scores.input_index.tolist(), scores.score.tolist(), strict=True):
        of_example.setdefault(example, []).append(score)
    for doc in _rendered(task, split):
        found = of_example.pop(doc["example"], None)
        if found is None:  # a sample of the split was evaluated
            continue
        if len(found) != len(doc["choices"]):
            raise _other_rows(task, split)
        texts = [{"arg_0": doc["inputs"], "arg_1": f" {choice}"} for choice in doc["choices"]]
        responses = [[str(score), None] for score in found]
        yield {
            "doc_id": doc["example"],
            "doc": doc,
            "target": str(doc["label"]),
            "arguments": {f"gen_args_{number}": text for number, text in enumerate(texts)},
            "resps": [[response] for response in responses],
            "filtered_resps": responses,
            "filter": "none",
            "metrics": ["acc"],
            # The harness hashes these texts in this form.
            "doc_hash": _digest(json.dumps(doc, indent=2, ensure_ascii=False)),
            "prompt_hash": _digest(doc["inputs"]),
            "target_hash": _digest(str(doc["label"])),
            "acc": float(int(np.argmax(found)) == doc["label"]),
        }
    if of_example:
        raise _other_rows(task, split)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _other_rows(task: TaskDescription, split: str) -> UserError:
    return UserError(
        f"The rows of split {split!r} are not those that {task.prompt.name!r} was scored with.",
        where=task.rows.reader(split).place(0),
        fix="Put the rows back that were scored, or evaluate again.",
    )
