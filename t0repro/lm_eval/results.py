"""lm-evaluation-harness's results: its written as an evaluation of ours, and ours as its.

At each start, `lm_eval run --log_samples --output_path DIR` writes

    DIR/<model>/results_<date>.json          settings, and the number of examples of each task
    DIR/<model>/samples_<task>_<date>.jsonl  each example with its choices' log-likelihoods

and `import_results` writes the files of evaluation.outputs from them. A harness task that
`export_tasks` wrote gets the name of its `_score_eval` twin, so that the result can be compared
with rank-eval's. The harness does not count tokens, so lengths are 0 and ranking by length is
refused.

`export_results` writes the same files from an evaluation of ours, for tools that read the
harness's. Whether greedy decoding gives a choice is unknown then, so it is null.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import json
import os
import re
import reprlib
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from t0repro.errors import UserError
from t0repro.lm_eval.files import harness_task, render_examples
from t0repro.storage import write_atomically
from t0repro.storage.disk import atomic_directory
from t0repro.storage.names import check_is_name
from t0repro.tasks.registry import task_descriptions
from t0repro.tasks.task import SCORE_EVAL_SUFFIX, TaskDescription
from t0repro.words import parse_json

# Evaluations import JAX, which takes seconds that exporting tasks does without.
if TYPE_CHECKING:
    from t0repro.evaluation.task_output import LineFile
    from t0repro.evaluation.task_scores import TaskScores

STEP = 0
"""The step of an imported evaluation: the harness does not know a model's."""
_RUN_AGAIN = "Run lm_eval again with --log_samples and --output_path."
_OURS = {"example", "inputs", "choices", "label"}


def import_results(results: str | os.PathLike[str], folder: Path) -> tuple[Path, dict[str, str]]:
    """Writes the latest results below a folder as a `<split>_eval` folder.

    A task whose scores do not give the accuracies that the harness recorded, of each example and of
    the task, is left out.

    Args:
      results: The folder that `--output_path` named, or one inside it.
      folder: Where to write the `<split>_eval` folder; earlier imports there are replaced.

    Returns:
      The written folder, and harness task -> why it was left out.

    Raises:
      UserError: If there are no results, samples are missing or fewer than were evaluated, a file
        is damaged, a name in it is not a file's, no task is left, or the folder holds another
        evaluation.
    """
    from t0repro.evaluation.evaluation_facts import EVALUATION_FACTS

    path = _latest(Path(results))
    found = _json(path.read_bytes(), str(path))
    date = path.stem.removeprefix("results_")
    configs = _table(found, "configs", path)
    ranked, left_out = [], {}
    for task in configs:
        check_is_name(task, "task", str(path))
        output_type = _table(configs, task, path).get("output_type")
        if output_type == "multiple_choice":
            ranked.append(task)
        else:
            left_out[task] = f"its output_type is {output_type}"
    if not ranked:
        raise UserError("No task in these results ranks choices.", where=str(path), fix=_RUN_AGAIN)
    # The harness evaluates the test split of a task that has one.
    splits = {
        str(configs[task].get("test_split") or configs[task].get("validation_split"))
        for task in ranked
    }
    split = splits.pop() if len(splits) == 1 else "all"
    check_is_name(split, "split", str(path))
    eval_dir = folder / f"{split}_eval"
    _remove_import(eval_dir)
    with atomic_directory(eval_dir) as staged:
        for task in ranked:
            samples = path.with_name(f"samples_{task}_{date}.jsonl")
            expected = _table(found, "n-samples", path).get(task)
            if isinstance(expected, Mapping):
                expected = expected.get("effective")
            metrics = _table(_table(found, "results", path), task, path)
            try:
                _import_task(task, samples, expected, metrics, staged)
            except UnusableSamplesError as error:
                left_out[task] = str(error)
        if left_out.keys() >= {*ranked}:
            raise UserError(
                f"No task of these results can be reported. {ranked[0]}: {left_out[ranked[0]]}.",
                where=str(path),
                fix=_RUN_AGAIN,
            )
        write_atomically(staged / EVALUATION_FACTS, json.dumps(_facts(found, path), indent=1))
    return eval_dir, left_out


def _remove_import(eval_dir: Path) -> None:
    """Removes an earlier import, whose other tasks would pass for this model's.

    Raises:
      UserError: If the folder holds another evaluation.
    """
    from t0repro.evaluation.evaluation_facts import EVALUATION_FACTS

    if not eval_dir.exists():
        return
    facts = eval_dir / EVALUATION_FACTS
    known = _json(facts.read_bytes(), str(facts)) if facts.is_file() else {}
    # Only an import names the file of its results.
    if "results" not in (known.get("data") or {}):
        raise UserError(
            "The folder holds another evaluation.", where=str(eval_dir), fix="Choose another --out."
        )
    shutil.rmtree(eval_dir)


def _latest(folder: Path) -> Path:
    # A file's name ends with the date, so the last one is the latest.
    if folder.is_file():
        raise UserError(
            "This is a file, not the folder of lm-evaluation-harness's results.",
            where=str(folder),
            fix=f"Give its folder, {folder.parent}, which must hold the samples too.",
        )
    found = sorted(folder.rglob("results_*.json"), key=lambda path: path.name)
    if not found:
        older = next(iter(sorted(folder.rglob("results.json"))), None)
        raise UserError(
            "There are no results of lm-evaluation-harness here (results_<date>.json)."
            + (f" {older} is another program's, or lm-eval's before 0.4.3." if older else ""),
            where=str(folder),
            fix=f"{'If it is lm-eval, update it. ' if older else ''}{_RUN_AGAIN}",
        )
    models = sorted({str(path.parent) for path in found})
    if len(models) > 1:
        raise UserError(
            f"There are results of {len(models)} models here.",
            where=str(folder),
            fix=f"Name the folder of one: {', '.join(models)}.",
        )
    return found[-1]


def _import_task(
    task: str, path: Path, expected: int | None, metrics: Mapping[str, Any], eval_dir: Path
) -> None:
    """Writes a task's files.

    Raises:
      UserError: If the samples are missing, fewer than `expected`, or damaged.
      UnusableSamplesError: If they are not scores of the choices of one context, or contradict
        `metrics`.
    """
    if not path.is_file():
        raise UserError(f"The samples of {task!r} are missing.", where=str(path), fix=_RUN_AGAIN)
    samples = []
    for fields, where in _lines(path):
        try:
            samples.append(_sample(fields))
        except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
            raise UserError(
                f"This is not a sample of a multiple-choice task: {error!r}.",
                where=where,
                fix=_RUN_AGAIN,
            ) from error
    examples = {sample.example for sample in samples}
    if not samples or (expected is not None and len(examples) != expected):
        raise UserError(
            f"Task {task!r} has samples of {len(examples)} examples; {expected} were evaluated.",
            where=str(path),
            fix="Copy the file again, or run lm_eval again.",
        )
    if len(examples) != len(samples):
        raise UnusableSamplesError("an example has several samples, of several filters")
    right = _right_choices(samples)
    accuracy = float(np.mean([s.best in found for s, found in zip(samples, right, strict=True)]))
    # The harness names a figure by metric and filter; one filter was applied.
    for name, value in metrics.items():
        if name.partition(",")[0] != "acc":
            continue
        if not isinstance(value, int | float) or not accuracy - 1e-6 <= value <= accuracy + 1e-6:
            raise UnusableSamplesError(
                f"its scores give {name} = {accuracy:g}, and its results say {value}"
            )
    # Only a task of ours has a twin that ranks the same choices.
    ours = all(sample.is_ours for sample in samples)
    pairs = [pair for s, found in zip(samples, right, strict=True) for pair in s.pairs(found, ours)]
    name = task + SCORE_EVAL_SUFFIX if ours else task
    endings = ("inputs", "targets", f"{STEP}_predictions")
    for ending, values in zip(endings, zip(*pairs, strict=True), strict=True):
        with _atomic_file(eval_dir / f"{name}_{ending}") as file:
            file.write(values)


class UnusableSamplesError(Exception):
    """Why a task's samples cannot be reported as rank classification."""


@dataclasses.dataclass(frozen=True)
class _Sample:
    """One example of a multiple-choice task.

    Attributes:
      example: Its number.
      input: The context of all choices.
      choices: Their texts.
      scores: Their log-likelihoods.
      target: The harness's record of the right choice, of which it does not say whether it is a
        number, a list of numbers or a text.
      acc: Whether the harness counted it as right; None if it did not.
      is_ours: Whether `export_tasks` wrote it.
    """

    example: int
    input: str
    choices: tuple[str, ...]
    scores: tuple[float, ...]
    target: str
    acc: float | None
    is_ours: bool

    @property
    def best(self) -> int:
        """The number of the choice with the highest score, of the first one in a tie."""
        return int(np.argmax(self.scores))

    def pairs(self, right: Collection[int], ours: bool) -> Iterator[tuple[str, Any, float]]:
        """(input, target, log-likelihood) of each choice, as score_eval writes them."""
        # Equal choices are equally right in T0's tasks, and not in the harness's.
        texts = {self.choices[number] for number in right} if ours else set()
        for number, score in enumerate(self.scores):
            correct = number in right or self.choices[number] in texts
            yield self.input, ((self.example, number), correct, 1.0, 0), score


def _sample(fields: Mapping[str, Any]) -> _Sample:
    """Reads a sample.

    Raises:
      KeyError, TypeError, ValueError, IndexError, OverflowError: If it is damaged.
      UnusableSamplesError: If its scores are not those of the choices of one context.
    """
    number, arguments = int(fields["doc_id"]), fields["arguments"]
    # Before 0.4.3, the harness wrote lists: [[context, continuation], ...].
    texts = [
        (arguments[f"gen_args_{at}"]["arg_0"], arguments[f"gen_args_{at}"]["arg_1"])
        if isinstance(arguments, Mapping)
        else (arguments[at][0], arguments[at][1])
        for at in range(len(arguments))
    ]
    # Of each choice: its log-likelihood, and whether greedy decoding gives it.
    scores = [float(score[0]) for score in fields["filtered_resps"]]
    if not scores:
        raise ValueError("it has no scores")
    if len(scores) != len(texts):
        raise UnusableSamplesError(
            f"doc_id {number} has {len(texts)} choices and {len(scores)} scores"
        )
    choices = [str(text) for _, text in texts]
    half = len(texts) // 2
    # For acc_mutual_info the harness scores the choices again, without a context.
    if half and choices[:half] == choices[half:] and not any(text for text, _ in texts[half:]):
        texts, choices, scores = texts[:half], choices[:half], scores[:half]
    if len({text for text, _ in texts}) > 1:
        # As in WinoGrande, whose samples do not say which context is right.
        raise UnusableSamplesError(f"the choices of doc_id {number} have different contexts")
    # Not `score > 0`, which is false for NaN.
    if impossible := [score for score in scores if not -np.inf < score <= 0]:
        raise UnusableSamplesError(
            f"doc_id {number} has {impossible[0]}, which is not a log-likelihood"
        )
    doc = fields["doc"]
    ours = isinstance(doc, Mapping) and doc.keys() >= _OURS
    example = int(doc["example"]) if ours else number
    if not 0 <= example <= np.iinfo(np.int32).max:
        raise ValueError(f"its example has the number {example}")
    return _Sample(
        example,
        str(texts[0][0]),
        tuple(choice.strip() for choice in choices),
        tuple(scores),
        str(fields["target"]).strip(),
        None if fields.get("acc") is None else float(fields["acc"]),
        ours,
    )


def _right_choices(samples: Sequence[_Sample]) -> list[frozenset[int]]:
    """The numbers of each example's right choices, as the harness counted them.

    Raises:
      UnusableSamplesError: If the targets are not choices, or give other accuracies than the
        harness recorded.
    """
    readings = [[read(sample) for sample in samples] for read in (_match_number, _match_text)]
    possible = [
        [right for right in found if right is not None] for found in readings if None not in found
    ]
    if not possible:
        raise UnusableSamplesError("its targets are neither numbers nor texts of choices")
    agreeing = [
        found
        for found in possible
        if all(
            sample.acc in (None, float(sample.best in right))
            for sample, right in zip(samples, found, strict=True)
        )
    ]
    if not agreeing:
        at = next(
            sample
            for sample, right in zip(samples, possible[0], strict=True)
            if sample.acc not in (None, float(sample.best in right))
        )
        raise UnusableSamplesError(
            f"the scores of doc_id {at.example} contradict its acc, {at.acc}"
        )
    if any(found != agreeing[0] for found in agreeing):
        raise UnusableSamplesError("its targets may be numbers or texts of choices")
    return agreeing[0]


def _match_number(sample: _Sample) -> frozenset[int] | None:
    """The right choices if a target is a number or a list of numbers; None if it is neither."""
    if not re.fullmatch(r"-?\d+|\[(-?\d+(, -?\d+)*)?\]", sample.target):
        return None
    numbers = map(int, re.findall(r"-?\d+", sample.target))
    # As the harness does for a number that is not a choice's: nothing is right.
    return frozenset(number for number in numbers if 0 <= number < len(sample.choices))


def _match_text(sample: _Sample) -> frozenset[int] | None:
    """The right choice if a target is a choice's text; None if it is not."""
    if sample.target not in sample.choices:
        return None
    return frozenset([sample.choices.index(sample.target)])


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
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}:{number}"
            if line.strip():  # an editor may leave an empty one at the end
                yield _json(line, where), where


def _json(content: bytes, where: str) -> dict[str, Any]:
    try:
        found = parse_json(content)
    except ValueError as error:
        raise UserError(f"This is not JSON: {error}", where=where, fix=_RUN_AGAIN) from error
    if not isinstance(found, dict):
        raise UserError("This is not a JSON object.", where=where, fix=_RUN_AGAIN)
    return found


def _table(found: Mapping[str, Any], key: str, path: Path) -> dict[str, Any]:
    """A table in a file of results; empty if it is missing or null."""
    table = {} if found.get(key) is None else found[key]
    if not isinstance(table, dict):
        raise UserError(
            f"{key} is {reprlib.repr(table)}, not a table of names and values.",
            where=str(path),
            fix=_RUN_AGAIN,
        )
    return table


def _facts(found: Mapping[str, Any], path: Path) -> dict[str, Any]:
    config = _table(found, "config", path)
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
    from t0repro.reports.provenance import recorded_facts

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
        configs[name] = harness_task(task, split, "")
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
    for doc in render_examples(task, split):
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
