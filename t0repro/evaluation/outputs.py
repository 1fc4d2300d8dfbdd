r"""The files of a task's scored (input, choice) pairs, as an evaluation leaves them in a folder.

Each of three files has one line per (input, choice) pair. Mesh TensorFlow's eval_model
(mesh_tensorflow/transformer/utils.py, 0.1.21) and the JAX scorer write the same files into
`<model_dir>/<split>_eval/`:

    <task>_inputs              one rendered input per pair, newlines replaced by spaces; from Mesh
                               TensorFlow the text is the repr of bytes: b'Is it so?\nYes or no?'
    <task>_targets             str() of the tuple of t5.data.postprocessors.rank_classification:
                               ((0, 1), True, 1.0, 3), or, where numpy 2 printed it,
                               ((np.int32(0), np.int32(1)), np.True_, np.float32(1.0), 3)
    <task>_<step>_predictions  one log-likelihood per line, natural logarithm, summed over the
                               target's tokens, EOS included

Only "\n" ends a line: an input may contain "\r" or U+2028, which `str.splitlines` would treat
as line ends.
"""

from __future__ import annotations

import ast
import hashlib
import itertools
import math
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from t0repro.errors import UserError, nearest_names
from t0repro.evaluation.records import check_files, find_decoded_tasks
from t0repro.evaluation.task_scores import TaskScores

_RUN_AGAIN = "Run the evaluation again; it writes the files of a task together."


def find_tasks(eval_dir: str | os.PathLike[str]) -> dict[str, list[int]]:
    """Finds the scored tasks in a folder, each with the steps that it has predictions for.

    Tasks that the evaluation recorded as decoded are left out.

    Raises:
      UserError: if there is no such folder, or no file in it ends in _targets.
    """
    folder = Path(eval_dir)
    if not folder.is_dir():
        raise UserError(
            "There is no folder of evaluation outputs here.",
            where=str(folder),
            fix="Give the <split>_eval folder that a score evaluation wrote, inside its model_dir.",
        )
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_file())
    tasks = [name.removesuffix("_targets") for name in names if name.endswith("_targets")]
    if not tasks:
        refuse_without_scores(folder)
        raise UserError(
            "The folder holds no evaluation outputs (no file ends in _targets).",
            where=str(folder),
            fix="`t0repro rank-eval --checkpoint MODEL --mixture MIXTURE --out DIR` writes them and"
            " a report. t5_mesh_transformer's score_eval.gin writes them, with"
            " eval_model.output_eval_examples left on.",
        )
    predictions = [name for name in names if name.endswith("_predictions")]
    decoded = find_decoded_tasks(folder)
    return {task: _steps_of(task, predictions) for task in tasks if task not in decoded}


def refuse_without_scores(folder: Path) -> None:
    """Raises UserError for `t0repro eval`'s folder, and rank-eval's before its first task ends."""
    if any(folder.glob("scores/step_*.json")) and not any(folder.glob("*_eval/*_targets")):
        raise UserError(
            "rank-eval has started here, and has finished no task yet.",
            where=str(folder),
            fix="If it was ended, start it again with the same --out: it continues.",
        )
    for pattern in ("*-metrics.jsonl", "inference_eval/*-metrics.jsonl"):
        if any(folder.glob(pattern)):
            raise UserError(
                "This is an evaluation by `t0repro eval`: the tasks' metrics, without the choices'"
                " scores (<task>_<step>_predictions and <task>_targets).",
                where=str(folder),
                fix="`t0repro rank-eval --checkpoint MODEL --mixture MIXTURE --out DIR` writes"
                " them; `t0repro plot DIR DIR` draws the metrics of several evaluations.",
            )


def latest_step(eval_dir: str | os.PathLike[str]) -> int:
    """The highest step for which any task in the folder has predictions.

    Raises:
      UserError: if the folder holds no predictions.
    """
    steps = [step for steps in find_tasks(eval_dir).values() for step in steps]
    if not steps:
        raise UserError(
            "The folder holds targets but no predictions: the evaluation stopped before it scored.",
            where=str(eval_dir),
            fix=_RUN_AGAIN,
        )
    return max(steps)


def read_task_scores(
    eval_dir: str | os.PathLike[str],
    step: int | None = None,
    tasks: Sequence[str] | None = None,
    *,
    with_inputs: bool = False,
) -> list[TaskScores]:
    """The scores of a folder's tasks at one step, in the order of `tasks` or of their names.

    Reads all tasks at once; `iterate_task_scores` holds one at a time.

    Args:
      eval_dir: the `<split>_eval` folder.
      step: the checkpoint's step; defaults to the latest in the folder.
      tasks: names of the tasks to read; None for all that have the step.
      with_inputs: also read the rendered inputs, which are most of the bytes.

    Raises:
      UserError: if files are missing, were changed since they were written, disagree in length,
        or have a line that cannot be parsed (reported with file and line number).
    """
    return list(iterate_task_scores(eval_dir, step, tasks, with_inputs=with_inputs))


def iterate_task_scores(
    eval_dir: str | os.PathLike[str],
    step: int | None = None,
    tasks: Sequence[str] | None = None,
    *,
    with_inputs: bool = False,
) -> Iterator[TaskScores]:
    """Like read_task_scores, one task at a time, so that memory holds one task's pairs.

    Raises:
      UserError: at once if a task or its step is missing; while iterating if a file is bad.
    """
    steps_of = find_tasks(eval_dir)
    step = latest_step(eval_dir) if step is None else step
    # Evaluations of other steps may have had other tasks.
    at_step = [task for task in steps_of if step in steps_of[task]]
    names = at_step or list(steps_of) if tasks is None else list(tasks)
    for task in names:
        if task not in steps_of:
            raise UserError(
                f"The folder has no outputs of task {task!r}.",
                where=str(eval_dir),
                fix=f"Nearest names there: {nearest_names(task, steps_of)}.",
            )
        if step not in steps_of[task]:
            have = ", ".join(map(str, steps_of[task])) or "none"
            raise UserError(
                f"Task {task!r} has no predictions at step {step} (steps there: {have}).",
                where=str(eval_dir),
                fix="Name a step that every task has, or let the evaluation of that step finish.",
            )
    return (_read_task(Path(eval_dir), task, step, with_inputs) for task in names)


def read_first_input(eval_dir: str | os.PathLike[str], task: str) -> str | None:
    """The first rendered input of a task; None if none was written."""
    path = Path(eval_dir) / f"{task}_inputs"
    if not path.is_file():
        return None
    with open(path, encoding="utf-8", newline="\n") as file:
        line = file.readline()
    return _input_text(line.rstrip("\n")) or None


def read_line_of(path: str | os.PathLike[str], number: int) -> str | None:
    """A line of one of a task's files, by its number from 0; None if there is none."""
    if not Path(path).is_file():
        return None
    with open(path, encoding="utf-8", newline="\n") as lines:
        line = next(itertools.islice(lines, number, None), None)
    return None if line is None else line.rstrip("\n")


def read_inputs_of(
    eval_dir: str | os.PathLike[str], task: str, examples: Sequence[int]
) -> dict[int, str]:
    """Rendered inputs of some of a task's examples, by index; empty if none were written."""
    folder, numbers = Path(eval_dir), set(examples)
    path = folder / f"{task}_inputs"
    if not numbers or not path.is_file():
        return {}
    targets = folder / f"{task}_targets"
    inputs: dict[int, str] = {}
    # Not strict: a file that another process is still writing may end earlier.
    for (number, target), (_, line) in zip(_lines(targets), _lines(path), strict=False):
        example = _parse_target(target, targets, number)[0][0]
        if example in numbers:
            inputs.setdefault(example, _input_text(line))
            if len(inputs) == len(numbers):
                break
    return inputs


def input_digests(eval_dir: str | os.PathLike[str], task: str) -> dict[int, bytes]:
    """A digest of each example's rendered input, by index; empty if none were written."""
    folder = Path(eval_dir)
    targets, path = folder / f"{task}_targets", folder / f"{task}_inputs"
    digests: dict[int, bytes] = {}
    if not path.is_file():
        return digests
    for (number, target), (_, line) in zip(_lines(targets), _lines(path), strict=False):
        example = _parse_target(target, targets, number)[0][0]
        if example not in digests:
            digests[example] = hashlib.blake2b(_input_text(line).encode(), digest_size=8).digest()
    return digests


def _steps_of(task: str, predictions: list[str]) -> list[int]:
    pattern = re.compile(re.escape(task) + r"_(\d+)_predictions")
    return sorted(int(match[1]) for name in predictions if (match := pattern.fullmatch(name)))


def _read_task(folder: Path, task: str, step: int, with_inputs: bool) -> TaskScores:
    check_files(folder, task, step)
    targets_path = folder / f"{task}_targets"
    scores_path = folder / f"{task}_{step}_predictions"
    targets = [_parse_target(line, targets_path, n) for n, line in _lines(targets_path)]
    scores = [_parse_score(line, scores_path, n) for n, line in _lines(scores_path)]
    if not targets:
        raise UserError("The task has no examples.", where=str(targets_path), fix=_RUN_AGAIN)
    _check_counts(targets_path, len(targets), scores_path, len(scores))
    indices = np.array([target[0] for target in targets], np.int64)
    # Files list pairs in evaluation order, which batching may change. Sorted by example and choice,
    # two runs compare entry by entry. lexsort's last key is the primary one.
    order = np.lexsort((indices[:, 1], indices[:, 0]))
    _check_choices(indices, order, targets_path)
    return TaskScores(
        task=task,
        step=step,
        input_index=indices[order, 0],
        choice_index=indices[order, 1],
        is_correct=np.array([target[1] for target in targets], np.bool_)[order],
        weight=np.array([target[2] for target in targets], np.float64)[order],
        target_length=np.array([target[3] for target in targets], np.int64)[order],
        score=np.array(scores, np.float64)[order],
        inputs=_read_inputs(folder, task, targets_path, order) if with_inputs else None,
    )


def _read_inputs(
    folder: Path, task: str, targets_path: Path, order: np.ndarray
) -> tuple[str, ...] | None:
    path = folder / f"{task}_inputs"
    if not path.is_file():
        return None
    inputs = [_input_text(line) for _, line in _lines(path)]
    # Mesh TensorFlow writes an empty file if a dataset has no inputs_pretokenized.
    if not inputs:
        return None
    _check_counts(targets_path, len(order), path, len(inputs))
    return tuple(inputs[i] for i in order)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yields (line number from 1, line without its line feed); only a line feed ends a line."""
    # str.splitlines and open's default also end lines at characters that texts may contain: \r,
    # U+2028.
    try:
        with open(path, encoding="utf-8", newline="\n") as file:
            for number, line in enumerate(file, 1):
                yield number, line.removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UserError(
            f"The file is not UTF-8 text ({error.reason}).", where=str(path), fix=_RUN_AGAIN
        ) from error


def _number(name: str, kinds: str, literal: str) -> str:
    """Pattern for a bare literal, or one inside the constructor that numpy 2 prints around it."""
    return rf"(?:np\.(?:{kinds})\((?P<{name}_np>{literal})\)|(?P<{name}>{literal}))"


# Targets are matched, not evaluated: a results folder may come from anybody.
_INTEGER = r"\d{1,18}"  # fits into int64
_FLOAT = r"[-+]?(?:\d+\.?\d*(?:e[-+]?\d+)?|inf|nan)"
_TARGET = re.compile(
    r"\(\("
    + _number("input", r"u?int\d+", _INTEGER)
    + ", "
    + _number("choice", r"u?int\d+", _INTEGER)
    + r"\), "
    + _number("correct", "bool_?", "(?:np\\.)?(?:True_?|False_?)|[01]")
    + ", "
    + _number("weight", r"float\d+", _FLOAT)
    + ", "
    + _number("length", r"u?int\d+", _INTEGER)
    + r"\)"
)


def _parse_target(line: str, path: Path, number: int) -> tuple[tuple[int, int], bool, float, int]:
    match = _TARGET.fullmatch(line)
    if match is None:
        raise UserError(
            "This is not a rank-classification target, ((input, choice), is_correct, weight,"
            f" length): {line[:120]!r}",
            where=f"{path}:{number}",
            fix="Rank classification reads tasks whose name ends in _score_eval; leave others out.",
        )
    fields = match.groupdict()

    def text(name: str) -> str:
        return fields[name] or fields[f"{name}_np"]

    correct = "True" in text("correct") or text("correct") == "1"
    indices, weight = (int(text("input")), int(text("choice"))), float(text("weight"))
    # t5's weights are float32, so sums of them are finite in float64. NaN is not within the limits.
    if not 0 <= weight <= float(np.finfo(np.float32).max):
        raise UserError(
            f"The weight of example {indices[0]} is {text('weight')}; a weight is finite and not"
            " negative.",
            where=f"{path}:{number}",
            fix=_RUN_AGAIN,
        )
    return indices, correct, weight, int(text("length"))


def _parse_score(line: str, path: Path, number: int) -> float:
    try:
        score = float(line)
    except ValueError as error:
        raise UserError(
            f"This is not a log-likelihood: {line[:120]!r}",
            where=f"{path}:{number}",
            fix="Evaluate in score_eval mode; infer and eval write decoded text instead.",
        ) from error
    if not math.isfinite(score):
        raise UserError(
            f"This score cannot be ranked: {line[:120]!r}",
            where=f"{path}:{number}",
            fix="Evaluate again; if it comes again, check the checkpoint or compute in float32.",
        )
    if score > 0:
        raise UserError(
            f"This is not a log-likelihood, which is at most 0: {line[:120]!r}",
            where=f"{path}:{number}",
            fix="Write log-likelihoods (natural logarithm), not losses or logits.",
        )
    return score


def _input_text(line: str) -> str:
    """The input on a line, decoded if Mesh TensorFlow wrote it as the repr of its bytes."""
    if re.match(r"b['\"].*['\"]$", line, re.DOTALL):
        try:
            # It builds constants and runs no code, so a stranger's file cannot do harm.
            value = ast.literal_eval(line)
        except (SyntaxError, ValueError):
            return line
        return value.decode("utf-8", "replace").replace("\n", " ")
    return line


def _check_counts(path_a: Path, count_a: int, path_b: Path, count_b: int) -> None:
    if count_a != count_b:
        raise UserError(
            f"The files of a task disagree: {count_a} lines in {path_a.name},"
            f" {count_b} in {path_b.name}.",
            where=str(path_a.parent),
            fix=_RUN_AGAIN,
        )


def _check_choices(indices: np.ndarray, order: np.ndarray, path: Path) -> None:
    """Refuses repeated and missing choices: an example could not be ranked, or not among all.

    Args:
      indices: (input, choice) of each line.
      order: sorts them.
      path: the file of the targets.
    """
    inputs, choices = indices[order].T
    # Each input's choices count up from 0: a choice is the distance from the input's first pair.
    expected = np.arange(len(choices)) - np.searchsorted(inputs, inputs)
    repeated = 1 + np.flatnonzero((np.diff(inputs) == 0) & (np.diff(choices) == 0))
    wrong = repeated if repeated.size else np.flatnonzero(choices != expected)
    if not wrong.size:
        return
    at = wrong[0]
    example, choice = int(inputs[at]), int(choices[at])
    what = f"Example {example} has choice {choice} and no choice {expected[at]}."
    if repeated.size:
        what = f"The pair idx {(example, choice)} comes more than once."
    raise UserError(
        what,
        where=f"{path}:{order[at] + 1}",
        fix="Give each example of the task its own idx, and its choices the numbers from 0 on.",
    )
