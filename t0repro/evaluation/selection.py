"""Selects the tasks of a mixture to evaluate: which to rank, to decode and to leave out."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from t0repro import storage
from t0repro.data.checks import (
    check_readable,
    check_same_tasks,
    check_tokens,
    missing_split_error,
)
from t0repro.data.eval_examples import why_task_evaluation_needs_seqio
from t0repro.errors import UserError
from t0repro.evaluation.evaluation_folder import EvaluationSettings
from t0repro.evaluation.judge import ranks_choices
from t0repro.evaluation.opened import Checkpoint
from t0repro.tasks.availability import SKIP_MISSING, missing_tasks
from t0repro.tasks.metrics import metric_names
from t0repro.tasks.registry import (
    DescribedTask,
    find_named_tasks,
    find_task,
    registered_mixtures,
    task_descriptions,
)
from t0repro.tasks.task import SCORE_EVAL_SUFFIX
from t0repro.tasks.templates import SEPARATOR
from t0repro.tasks.user_files import data_is
from t0repro.tasks.vocabulary import (
    VOCABULARY_VARIABLE,
    address_of,
    are_same,
    check_rows,
    default_vocabulary,
    is_here,
    padded_rows,
    shown,
)
from t0repro.words import some

MODES = ("rank", "generate")

_FIX = (
    f"Give the vocabulary that the checkpoint was trained with ({VOCABULARY_VARIABLE}, encode's"
    " --vocab, in Python vocabulary=)."
)
_TASKS_OWN = (
    "The tasks' module gives them this vocabulary: evaluate a model that was trained with it, or"
    " tasks of the checkpoint's."
)


@dataclasses.dataclass(frozen=True)
class Selection:
    """The tasks of a mixture, by what is done with them.

    Attributes:
      ranked: names of the tasks whose answers are ranked.
      generated: names of the tasks that are decoded.
      left_out: names of the tasks that lack the split or its rows, each with the reason.
    """

    ranked: tuple[str, ...]
    generated: tuple[str, ...]
    left_out: dict[str, str]

    @property
    def names(self) -> tuple[str, ...]:
        """Those that are evaluated."""
        return (*self.ranked, *self.generated)


def select_tasks(mixture: str, settings: EvaluationSettings) -> Selection:
    """Selects the mixture's tasks that have the split: those to rank and those to decode.

    With both modes, a task whose answers can be ranked (it has a `_score_eval` twin) is ranked and
    the others are decoded. With `generate` alone, no task may rank answers. Tasks without
    metrics are left out: T0's training mixture has some.

    Args:
      mixture: a registered mixture or task.
      settings: split and modes; whether tasks are read from SeqIO's cache, and whether those whose
        rows, or caches, are missing are left out; otherwise they are an error.

    Raises:
      UserError: if there is no such mixture or task, if a task cannot be evaluated in these modes,
        if the rows or the cache of a task are missing, if no task has the split (or, with
        `skip_missing`, its rows), or if other hosts have the rows of other tasks.
    """
    tasks = _resolve_tasks(mixture, settings.modes)
    ranked = [task for task in tasks if _ranks(task)]
    others = [task for task in tasks if not _ranks(task)]
    _check_modes(mixture, settings.modes, ranked, others)
    left_out = _find_left_out(mixture, tasks, settings)
    if settings.skip_missing:
        there = {task.name for task in tasks} - left_out.keys()
        check_same_tasks(mixture, settings.split, there)
    # Now: a task that cannot be read would otherwise stop the run hours later.
    evaluated = [task for task in tasks if task.name not in left_out]
    check_readable(mixture, settings.split, use_cached=settings.use_cached, tasks=evaluated)
    names = [[t.name for t in kind if t.name not in left_out] for kind in (ranked, others)]
    return Selection(tuple(names[0]), tuple(names[1]), left_out)


def why_not_alone(mixture: str, settings: EvaluationSettings) -> str | None:
    """What needs SeqIO to read the tasks to evaluate, or t5 for their metrics; None for nothing."""
    reasons = (
        why_task_evaluation_needs_seqio(task, use_cached=settings.use_cached)
        for task in _resolve_tasks(mixture, settings.modes)
        if settings.split in task.splits
    )
    return next((why for why in reasons if why), None)


def _resolve_tasks(mixture: str, modes: Sequence[str]) -> list[Any]:
    """The mixture's tasks, each in the form that ranks if both modes are asked for and it has one.

    They are sorted by name, so that two runs read, score and report them in the same order.
    """
    tasks = sorted(find_named_tasks(mixture, "--mixture"), key=lambda task: task.name)
    return [_find_score_eval_task(task) for task in tasks] if set(modes) == set(MODES) else tasks


def _check_modes(
    mixture: str, modes: Sequence[str], ranked: Sequence[Any], others: Sequence[Any]
) -> None:
    """Refuses tasks that cannot be evaluated in any of the modes."""
    # A task in no mode would be left out silently.
    if "generate" not in modes and others:
        # A mixture of tasks with choices, such as t0_eval_score_eval, is named like this one.
        alike = re.compile(rf"{re.escape(mixture.partition('_')[0])}_.*{SCORE_EVAL_SUFFIX}")
        twins = [name for name in registered_mixtures() if alike.fullmatch(name)]
        twins += [twin.name for task in others if (twin := _find_score_eval_task(task)) is not task]
        instead = f"{some(twins)}, with their choices" if twins else "tasks with choices"
        raise UserError(
            f"Tasks have no answer choices to rank: {some([task.name for task in others])}.",
            where=mixture,
            fix=f"Evaluate {instead}; or decode the others with --modes rank,generate.",
        )
    if "rank" not in modes and ranked:
        raise UserError(
            f"Tasks have answer choices to rank: {some([task.name for task in ranked])}.",
            where=mixture,
            fix="Add the mode rank.",
        )
    if others and not ranked and not any(map(_has_metric, others)):
        raise UserError(
            f"Tasks to decode have no metric: {some([task.name for task in others])}.",
            where=mixture,
            fix="Evaluate tasks that have metrics.",
        )
    described = task_descriptions()
    only = {
        task.name: choices[0]
        for task in ranked
        if task.name in described
        and len(choices := described[task.name].prompt.fixed_choices or ()) == 1
    }
    if only:
        name, choice = next(iter(only.items()))
        raise UserError(
            f"Tasks have one answer choice, which always ranks first: {some([*only])}.",
            where=f"the template of {name}, answer_choices: {choice}",
            fix=f"Separate the choices with {SEPARATOR}.",
        )


def _find_left_out(
    mixture: str, tasks: Sequence[Any], settings: EvaluationSettings
) -> dict[str, str]:
    """Tasks without metrics, the split or, with `skip_missing`, its rows or cache; with reasons."""
    split = settings.split
    if not any(split in task.splits for task in tasks):
        raise missing_split_error(mixture, split, "--split")
    left_out = {task.name: f"no split {split}" for task in tasks if split not in task.splits}
    # Nothing would be reported of such a task.
    left_out |= {task.name: "no metric" for task in tasks if not _has_metric(task)}
    if settings.skip_missing:
        left_out |= missing_tasks(tasks, split, use_cached=settings.use_cached)
    if len(left_out) == len(tasks):
        raise UserError(
            f"No task of {mixture!r} has rows of split {split!r} here.",
            where=SKIP_MISSING if settings.skip_missing else None,
            fix=f"Set T0REPRO_DATA_DIR (or --data) to the folder of the datasets; {data_is()}.",
        )
    return left_out


def _find_score_eval_task(task: Any) -> Any:
    """The task that ranks the same prompt's answers, or the task itself if there is none."""
    try:
        # T0 registers a prompt with answer choices a second time, under this suffix.
        return find_task(task.name + SCORE_EVAL_SUFFIX)
    except KeyError:
        return task


def _has_metric(task: Any) -> bool:
    described = isinstance(task, DescribedTask)
    return bool(metric_names(task.prompt) if described else task.metric_fns)


def _ranks(task: Any) -> bool:
    if isinstance(task, DescribedTask):
        return task.prompt.score_eval
    return ranks_choices(task.metric_fns)


def check_vocabulary(names: Sequence[str], checkpoint: Checkpoint) -> Any:
    """Returns the tasks' vocabulary after checking that it fits the checkpoint.

    Args:
      names: names of the tasks.
      checkpoint: the checkpoint.

    Raises:
      UserError: see `check_fits`.
    """
    tasks = [find_task(name) for name in names]
    model = checkpoint.model.config
    check_tokens(tasks, model, mesh=True)
    vocabularies: list[Any] = []
    for task in tasks:
        inputs, vocabulary = (
            task.output_features[each].vocabulary for each in ("inputs", "targets")
        )
        if inputs != vocabulary:
            check_rows(inputs, model.vocab_size, checkpoint.path, _FIX)
        if vocabulary not in vocabularies:
            is_default = address_of(vocabulary) == default_vocabulary().address
            fix = _FIX if is_default else _TASKS_OWN
            check_fits(vocabulary, model.vocab_size, checkpoint.path, checkpoint.folders, fix)
            vocabularies.append(vocabulary)
    return vocabularies[-1] if vocabularies else None


def check_fits(
    vocabulary: Any, rows: int, path: str, folders: Sequence[str], fix: str = _FIX
) -> None:
    """Checks that a checkpoint's embedding has rows for a vocabulary's pieces, and for these.

    Args:
      vocabulary: of the tasks or the texts.
      rows: the embedding's number of rows.
      path: the checkpoint's.
      folders: where files about it are.
      fix: what to do if they do not fit.

    Raises:
      UserError: if there are too few rows; if the tokenizer beside the checkpoint has other pieces;
        or, without one, if there are more rows than padding explains.
    """
    from t0repro.converters.own_tokenizer import PIECES, check_own_tokenizer, trained_vocabulary

    trained = next(filter(None, map(trained_vocabulary, folders)), None)
    if fix == _FIX and trained is not None:
        fix = _FIX.replace(" (", f", {trained.address} (", 1)
    try:
        check_rows(vocabulary, rows, path, fix)
        is_compared = check_own_tokenizer(folders, vocabulary)
    except UserError as error:
        beside = (storage.join(folder, PIECES) for folder in folders)
        own = next(filter(storage.is_file, beside), None)
        if own is None or is_here(vocabulary):
            raise
        own_fix = (
            f"Take the checkpoint's own: {VOCABULARY_VARIABLE}={own}, or in Python"
            f" vocabulary={own!r}."
        )
        raise UserError(error.what, where=error.where, fix=own_fix) from error
    padded = padded_rows(vocabulary.vocab_size)
    if not is_compared and rows > padded:
        if trained is not None and are_same(vocabulary, trained):
            return
        raise UserError(
            f"The checkpoint's embedding has {rows:,} rows, and the vocabulary"
            f" {vocabulary.vocab_size:,} pieces ({padded:,} when padded): {shown(vocabulary)}.",
            where=path,
            fix=f"{fix} If it is this one, put a copy beside the checkpoint, as {PIECES}.",
        )
