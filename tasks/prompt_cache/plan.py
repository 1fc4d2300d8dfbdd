"""Plans a cache run: which tasks and splits are still to cache, and from which rows.

The plan is plain data, which workers can unpickle without SeqIO.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from t0repro.compat import installed_version
from t0repro.errors import UserError, nearest_names
from t0repro.tasks.availability import missing_rows
from t0repro.tasks.prompt_cache.folders import (
    MARKER,
    PROVENANCE,
    cache_name,
    list_cached_splits,
    remove_interrupted,
)
from t0repro.tasks.prompt_cache.prompts import CachedTask, PlainTemplate, Prompt, RowsOfSplit
from t0repro.tasks.prompt_cache.provenance import (
    damage,
    model_digest,
    rows_changed,
    template_digest,
)
from t0repro.words import counted

if TYPE_CHECKING:
    from t0repro.tasks.source import PromptedRows
    from t0repro.tasks.task import TaskDescription


@dataclasses.dataclass(frozen=True)
class CachePlan:
    """All prompts left to render.

    Attributes:
      prompts: Those of a dataset come one after another.
      vocabularies: SHA-256 -> the serialized SentencePiece model, extra ids included.
      selected: Number of tasks selected.
      left_out: (task, split, reason) for each split whose rows are not available.
      skipped: Task -> split -> reason, for those of `left_out` that only --skip_missing leaves out.
      seqio_version: Version to write into SeqIO's info files.
    """

    prompts: tuple[Prompt, ...]
    vocabularies: Mapping[str, bytes]
    selected: int
    left_out: tuple[tuple[str, str, str], ...]
    skipped: Mapping[str, Mapping[str, str]]
    seqio_version: str

    def tasks(self) -> list[CachedTask]:
        """The tasks left to cache."""
        return [task for prompt in self.prompts for task in prompt.tasks]


@dataclasses.dataclass(frozen=True)
class Request:
    """The request on the command line.

    Attributes:
      modules: Modules to import, which register tasks.
      patterns: Patterns of task names, in which `*` matches anything.
      mixtures: Mixtures whose tasks to cache.
      folder: The cache folder.
      splits: Only these splits; None caches all splits of a task.
      skip_missing: Leave out splits whose rows are missing, rather than stop.
      seed: Seed for the templates' random choices and the order of examples.
      min_shards: Minimum number of files per split.
      templates: Files of the user's own templates.
    """

    modules: tuple[str, ...]
    patterns: tuple[str, ...]
    mixtures: tuple[str, ...]
    folder: str
    splits: tuple[str, ...] | None = None
    skip_missing: bool = False
    seed: int = 0
    min_shards: int = 16
    templates: tuple[str, ...] = ()


# t0repro's own modules describe their tasks without SeqIO. A user's module may need it; a separate
# process then makes the plan and ends before the work begins, because SeqIO and TensorFlow take
# about a gigabyte.

# The version of SeqIO whose files are written, byte for byte, where it is not installed.
_SEQIO_FORMAT = "0.0.20"


def make_plan(request: Request) -> CachePlan:
    """Registers and selects tasks, and finds out which are not cached yet.

    Raises:
      UserError: If a name matches nothing, a task is not a prompted one, rows are missing, or a
        task is already cached but damaged, or from another template, vocabulary, seed or rows.
    """
    from t0repro.tasks.modules import load_tasks
    from t0repro.tasks.registry import task_descriptions

    load_tasks(request.modules, request.templates, into_seqio=False)
    names = _select_names(request)
    descriptions = task_descriptions()
    _check_prompted(names, descriptions)
    _check_splits(request.splits, [descriptions[name] for name in names])
    planner = _Planner(request)
    for name in names:
        planner.add(descriptions[name])
    planner.check_missing(len(names))
    return CachePlan(
        prompts=planner.prompts(),
        vocabularies=planner.vocabularies,
        selected=len(names),
        left_out=tuple(planner.left_out),
        skipped=planner.skipped,
        seqio_version=installed_version("seqio") or _SEQIO_FORMAT,
    )


def _select_names(request: Request) -> list[str]:
    from t0repro.tasks.registry import registered_mixtures, registered_tasks, tasks_of_mixture

    names = [task for mixture in request.mixtures for task in tasks_of_mixture(mixture)]
    tasks = registered_tasks()
    for pattern in request.patterns:
        matching = fnmatch.filter(tasks, pattern)
        if not matching:
            if pattern in registered_mixtures():
                raise UserError(
                    f"{pattern!r} is a mixture, not a task.",
                    where="--tasks",
                    fix=f"Give it as --mixture {pattern}.",
                )
            # seqio_cache_tasks takes regular expressions, so users may bring theirs.
            regex = "Write * for anything, not .*. " if ".*" in pattern else ""
            raise UserError(
                f"No task matches {pattern!r}.",
                where="--tasks",
                fix=f"{regex}Nearest: {nearest_names(pattern, tasks)}.",
            )
        names += matching
    # Each once, in order; mixtures and patterns may overlap.
    return list(dict.fromkeys(names))


def _check_prompted(names: Sequence[str], descriptions: Mapping[str, TaskDescription]) -> None:
    for name in names:
        if name not in descriptions:
            raise UserError(
                f"Task {name!r} is not one of t0repro's prompted tasks.",
                where="--tasks, --mixture",
                fix="Cache it with seqio_cache_tasks, which writes the same format.",
            )


def _check_splits(splits: Sequence[str] | None, tasks: Sequence[TaskDescription]) -> None:
    """Refuses a split that no task has: a misspelled one would otherwise be ignored silently."""
    known = list(dict.fromkeys(split for task in tasks for split in task.rows.files_of_splits))
    for split in splits or ():
        if split not in known:
            raise UserError(
                f"No task to cache has a split {split!r}.",
                where="--splits",
                fix=f"Their splits: {', '.join(known) or 'none'}.",
            )


class _Planner:
    """Collects prompts task by task; a task and its twin share a prompt."""

    def __init__(self, request: Request):
        self.request = request
        self.folder = Path(request.folder)
        self.vocabularies: dict[str, bytes] = {}
        self.left_out: list[tuple[str, str, str]] = []
        self.skipped: dict[str, dict[str, str]] = {}
        self._tasks: dict[str, list[CachedTask]] = {}
        self._made_of: dict[str, TaskDescription] = {}
        self._missing: dict[str, UserError] = {}

    def add(self, task: TaskDescription) -> None:
        """Adds the splits of a task that are not cached yet and whose rows are available."""
        name, rows = task.prompt.name, task.rows
        folder = cache_name(name)
        wanted = [
            split
            for split in rows.files_of_splits
            if self.request.splits is None or split in self.request.splits
        ]
        cached = list_cached_splits(self.folder / folder)
        if cached is not None:
            self._check_same(task, self.folder / folder, [s for s in wanted if s in cached])
        # Cached splits are not checked again, so their rows may be gone.
        splits = [split for split in wanted if split not in (cached or ())]
        splits = [split for split in splits if self._has_rows(task, split)]
        if not splits:
            return
        # Only if something is left to write: never touch the folder of a complete task.
        remove_interrupted(self.folder / folder, name)
        self._tasks.setdefault(rows.name, []).append(
            CachedTask(name, folder, tuple(splits), task.prompt.score_eval)
        )
        self._made_of[rows.name] = task

    def check_missing(self, selected: int) -> None:
        """Raises UserError if needed rows are missing, unless such splits are to be left out."""
        if self._missing and not self.request.skip_missing:
            first = next(iter(self._missing.values()))
            places = sorted(self._missing)
            otherwise = (
                " Or leave such splits out with --skip_missing, or name others with --splits."
            )
            raise UserError(
                f"The rows of {counted(len(places), 'split')} are missing: {', '.join(places[:8])}"
                f"{', ...' if len(places) > 8 else ''}. The first: {first.what}",
                where=first.where,
                fix=f"{first.fix}{otherwise * bool(self._tasks)}",
            )
        # All requested splits lack rows, and no earlier run cached any of them.
        any_cached = any(self.folder.glob(f"*/{MARKER}"))
        if selected and not self._tasks and self.left_out and not any_cached:
            raise UserError(
                "None of the rows that these tasks need are available.",
                where=self.left_out[0][2],
                fix="Set T0REPRO_DATA_DIR to the folder of the datasets.",
            )

    def _has_rows(self, task: TaskDescription, split: str) -> bool:
        error = missing_rows(task.rows, split)
        if error is None:
            return True
        self.left_out.append((task.prompt.name, split, error.what))
        if self._is_needed(task, split):
            place = "/".join(filter(None, (task.rows.dataset, task.rows.subset)))
            self._missing.setdefault(f"{place} {split}", error)
            self.skipped.setdefault(task.prompt.name, {})[split] = error.what
        return False

    def _is_needed(self, task: TaskDescription, split: str) -> bool:
        """Whether missing rows of a split stop the run: of one asked for, trained on or ranked."""
        main = "validation" if task.prompt.score_eval else "train"
        needs_all = self.request.splits is not None or main not in task.rows.files_of_splits
        return needs_all or split == main

    def prompts(self) -> tuple[Prompt, ...]:
        """The prompts, grouped by dataset."""
        from t0repro.tasks.templates import is_own

        rows = self._rows()
        found = []
        for source_name, tasks in self._tasks.items():
            made_of = self._made_of[source_name]
            source, template = made_of.rows, made_of.rows.template
            # A dictionary keeps the order and drops repetitions.
            splits = dict.fromkeys(split for each in tasks for split in each.splits)
            found.append(
                Prompt(
                    source=source_name,
                    dataset=source.dataset,
                    subset=source.subset,
                    template=PlainTemplate(
                        template.name,
                        template.id,
                        template.jinja,
                        template.answer_choices,
                        is_own(template),
                    ),
                    rows={split: rows[self._key(source, split)] for split in splits},
                    tasks=tuple(tasks),
                    vocabulary=self._vocabulary(made_of),
                    eos=_eos(made_of),
                )
            )
        # One dataset after another, so that its rows are spooled once.
        return tuple(sorted(found, key=lambda prompt: (prompt.dataset, prompt.subset or "")))

    @staticmethod
    def _key(source: PromptedRows, split: str) -> tuple[Any, ...]:
        return source.root, source.dataset, source.subset, source.files_of_splits[split]

    def _rows(self) -> dict[tuple[Any, ...], RowsOfSplit]:
        """Each split's rows, shared by all templates, with every column that any of them reads."""
        from t0repro.tasks.schema import columns_read

        columns: dict[tuple[Any, ...], set[str]] = {}
        sources: dict[tuple[Any, ...], tuple[PromptedRows, str]] = {}
        for source_name, tasks in self._tasks.items():
            source = self._made_of[source_name].rows
            for split in dict.fromkeys(split for each in tasks for split in each.splits):
                key = self._key(source, split)
                # Check the columns of all templates together.
                columns.setdefault(key, set()).update(columns_read(source.template))
                sources[key] = (source, split)
        return {
            key: RowsOfSplit(
                root=None if key[0] is None else str(key[0]),
                dataset=key[1],
                subset=key[2],
                file=key[3].file,
                max_rows=key[3].max_rows,
                seed=key[3].seed,
                columns=tuple(sorted(columns[key])),
                # Without a limit the whole count is the estimate.
                estimate=min(source.row_count(split), key[3].max_rows or 1 << 62),
            )
            for key, (source, split) in sources.items()
        }

    def _vocabulary(self, task: TaskDescription) -> str:
        model = _model_of(task)
        digest = model_digest(model)
        self.vocabularies[digest] = model
        return digest

    def _check_same(self, task: TaskDescription, folder: Path, splits: Sequence[str]) -> None:
        """Raises UserError if a cache is damaged, or differs from what this run would write."""
        for split in splits:
            found = damage(folder, split)
            if found:
                raise UserError(
                    f"The cache of task {task.prompt.name}, split {split!r}, is incomplete:"
                    f" {found}.",
                    where=str(folder),
                    fix="Remove this folder to cache the task again.",
                )
        try:
            made = json.loads((folder / PROVENANCE).read_text(encoding="utf-8"))
        except FileNotFoundError:  # seqio_cache_tasks made it
            return
        # Complete caches are never rebuilt, so a difference would otherwise go unnoticed.
        now = {
            "template": template_digest(task),
            "vocabulary": model_digest(_model_of(task)),
            "seed": self.request.seed,
        }
        then = {
            "template": made["template"]["sha256"],
            "vocabulary": made["vocabulary"]["sha256"],
            "seed": made["seed"],
        }
        differing = [name for name in now if now[name] != then[name]]
        if any(rows_changed(task, split, made["splits"].get(split, {})) for split in splits):
            differing.append("version of its rows")
        if differing:
            raise UserError(
                f"Task {task.prompt.name} is cached already, with another"
                f" {' and '.join(differing)}.",
                where=str(folder / PROVENANCE),
                fix="Use another --cache_dir, or remove that folder to cache it again.",
            )


def _model_of(task: TaskDescription) -> bytes:
    model = task.sp_model
    if model is None:
        raise UserError(
            f"The vocabulary of task {task.prompt.name!r} is neither pieces nor bytes.",
            where="--tasks",
            fix="Cache it with seqio_cache_tasks.",
        )
    return model


def _eos(task: TaskDescription) -> Mapping[str, int | None]:
    from t0repro.tasks.task import ADDS_EOS

    eos = task.vocabulary.eos_id
    return {feature: eos if adds_eos else None for feature, adds_eos in ADDS_EOS.items()}
