"""Makes the plan of a cache run: the one step that imports SeqIO, run in a process of its own.

SeqIO and TensorFlow take about a gigabyte; that process has ended before the workers begin.
"""

from __future__ import annotations

import fnmatch
import hashlib
import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from t0repro.data.prompt_cache.folders import MARKER, PROVENANCE, remove_interrupted
from t0repro.data.prompt_cache.plan import (
    CachedTask,
    PlainTemplate,
    Plan,
    Prompt,
    Request,
    RowsOfSplit,
)
from t0repro.errors import UserError, nearest_names


def make_plan(request: Request) -> Plan:
    """Registers the tasks, selects those asked for, and says what of them is not cached yet.

    Raises:
      UserError: if a name matches nothing, a task is not a prompted one, rows are missing, or a
        task is cached already from other templates, another vocabulary or another seed.
    """
    from t0repro.tasks.template_files import read_template_file, register_templates

    for path in request.templates:
        read_template_file(path)  # a broken file is told of before seconds of imports
    import seqio

    for module in request.modules:
        _import(module)
    for path in request.templates:
        register_templates(path)
    names = _selected(request, seqio)
    tasks = [seqio.TaskRegistry.get(name) for name in names]
    for task in tasks:
        _check_prompted(task)
    planner = _Planner(request)
    for task in tasks:
        planner.add(task)
    planner.check_at_hand(len(tasks))
    return Plan(
        prompts=planner.prompts(),
        vocabularies=planner.vocabularies,
        selected=len(tasks),
        left_out=tuple(planner.left_out),
        seqio_version=seqio.__version__,
    )


def make_plan_quietly(request: Request) -> Plan:
    """`make_plan` without TensorFlow's start-up chatter, for a process that begins with it."""
    from t0repro.mesh import compat

    compat.quiet_logs()
    return make_plan(request)


def _import(module: str) -> None:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise
        raise UserError(
            f"There is no module {module!r}.",
            where="--module_import",
            fix="Name a module that registers tasks, for instance t0repro.tasks.t0.",
        ) from error


def _selected(request: Request, seqio: Any) -> list[str]:
    tasks, mixtures = list(seqio.TaskRegistry.names()), list(seqio.MixtureRegistry.names())
    names: list[str] = []
    for mixture in request.mixtures:
        if mixture not in mixtures:
            raise UserError(
                f"There is no mixture {mixture!r}.",
                where="--mixture",
                fix=f"Nearest: {nearest_names(mixture, mixtures)}.",
            )
        names += [task.name for task in seqio.MixtureRegistry.get(mixture).tasks]
    for pattern in request.patterns:
        matching = fnmatch.filter(tasks, pattern)
        if not matching:
            regex = " Write * for anything, not .*;" if ".*" in pattern else ""
            raise UserError(
                f"No task matches {pattern!r}.",
                where="--tasks",
                fix=f"{regex} nearest: {nearest_names(pattern, tasks)}.".strip(),
            )
        names += matching
    return list(dict.fromkeys(names))


def _check_prompted(task: Any) -> None:
    from t0repro.tasks.registry import prompted_tasks
    from t0repro.tasks.sources import PromptedSource

    if task.name not in prompted_tasks() or not isinstance(task.source, PromptedSource):
        raise UserError(
            f"Task {task.name!r} is not one of t0repro's prompted tasks.",
            where="--tasks, --mixture",
            fix="Cache it with seqio_cache_tasks, which writes the same format.",
        )


class _Planner:
    """Collects prompts task by task; a task and its twin share one."""

    def __init__(self, request: Request):
        self.request = request
        self.folder = Path(request.folder)
        self.vocabularies: dict[str, bytes] = {}
        self.left_out: list[tuple[str, str, str]] = []
        self._tasks: dict[str, list[CachedTask]] = {}
        self._seqio: dict[str, Any] = {}
        self._missing: dict[str, UserError] = {}

    def add(self, task: Any) -> None:
        """Adds what a task lacks."""
        import seqio

        from t0repro.tasks.registry import prompted_tasks

        folder = seqio.get_task_dir_from_name(task.name)
        wanted = [
            split
            for split in task.splits
            if self.request.splits is None or split in self.request.splits
        ]
        cached = _cached_splits(self.folder / folder)
        if cached is not None:
            self._check_same(task, self.folder / folder)
        splits = [split for split in wanted if split not in (cached or ())]
        splits = [split for split in splits if self._at_hand(task, split)]
        if not splits:
            return
        remove_interrupted(self.folder / folder, task.name)
        self._tasks.setdefault(task.source.name, []).append(
            CachedTask(task.name, folder, tuple(splits), prompted_tasks()[task.name].score_eval)
        )
        self._seqio[task.source.name] = task

    def check_at_hand(self, selected: int) -> None:
        """Stops where rows are missing, unless such splits are to be left out."""
        if self._missing and not self.request.at_hand:
            first = next(iter(self._missing.values()))
            places = sorted(self._missing)
            raise UserError(
                f"The rows of {len(places)} splits are missing: {', '.join(places[:8])}"
                f"{', ...' if len(places) > 8 else ''}. The first: {first.what}",
                where=first.where,
                fix=f"{first.fix} Or leave such splits out with --at_hand, or name others with"
                " --splits.",
            )
        if selected and not self._tasks and len(self.left_out) and not self._any_cached():
            raise UserError(
                "None of the rows that these tasks need are at hand.",
                where=self.left_out[0][2],
                fix="Set T0REPRO_DATA_DIR to the folder of the datasets.",
            )

    def _any_cached(self) -> bool:
        return any(self.folder.glob(f"*/{MARKER}"))

    def _at_hand(self, task: Any, split: str) -> bool:
        try:
            task.source.reader(split)
        except UserError as error:
            place = "/".join(filter(None, (task.source.dataset, task.source.subset)))
            self._missing.setdefault(f"{place} {split}", error)
            self.left_out.append((task.name, split, error.what))
            return False
        return True

    def prompts(self) -> tuple[Prompt, ...]:
        """The prompts, those of a dataset together."""
        rows = self._rows()
        found = []
        for source_name, tasks in self._tasks.items():
            task = self._seqio[source_name]
            source, template = task.source, task.source.template
            splits = dict.fromkeys(split for each in tasks for split in each.splits)
            found.append(
                Prompt(
                    source=source_name,
                    dataset=source.dataset,
                    subset=source.subset,
                    template=PlainTemplate(
                        template.name, template.id, template.jinja, template.answer_choices
                    ),
                    rows={split: rows[self._key(source, split)] for split in splits},
                    tasks=tuple(tasks),
                    vocabulary=self._vocabulary(task),
                    eos=_eos(task),
                )
            )
        return tuple(sorted(found, key=lambda prompt: (prompt.dataset, prompt.subset or "")))

    @staticmethod
    def _key(source: Any, split: str) -> tuple[Any, ...]:
        return source.root, source.dataset, source.subset, source.files_of_splits[split]

    def _rows(self) -> dict[tuple[Any, ...], RowsOfSplit]:
        """Of each split's rows, once for all templates: the columns are those that any reads."""
        from t0repro.tasks.columns import columns_read

        columns: dict[tuple[Any, ...], set[str]] = {}
        sources: dict[tuple[Any, ...], Any] = {}
        for source_name, tasks in self._tasks.items():
            source = self._seqio[source_name].source
            for split in dict.fromkeys(split for each in tasks for split in each.splits):
                key = self._key(source, split)
                columns.setdefault(key, set()).update(columns_read(source.template))
                sources[key] = (source, split)
        return {
            key: RowsOfSplit(
                root=None if key[0] is None else str(key[0]),
                dataset=key[1],
                subset=key[2],
                file=key[3].file,
                max_rows=key[3].max_rows,
                columns=tuple(sorted(columns[key])),
                estimate=min(source.row_count(split), key[3].max_rows or 1 << 62),
            )
            for key, (source, split) in sources.items()
        }

    def _vocabulary(self, task: Any) -> str:
        model = _model_of(task)
        digest = hashlib.sha256(model).hexdigest()
        self.vocabularies[digest] = model
        return digest

    def _check_same(self, task: Any, folder: Path) -> None:
        """A complete cache is kept as it is: it must be what would be made now."""
        try:
            made = json.loads((folder / PROVENANCE).read_text(encoding="utf-8"))
        except FileNotFoundError:  # seqio_cache_tasks made it
            return
        template = task.source.template
        plain = PlainTemplate(template.name, "", template.jinja, template.answer_choices)
        now = {
            "template": plain.digest(),
            "vocabulary": hashlib.sha256(_model_of(task)).hexdigest(),
            "seed": self.request.seed,
        }
        then = {
            "template": made["template"]["sha256"],
            "vocabulary": made["vocabulary"]["sha256"],
            "seed": made["seed"],
        }
        differing = [name for name in now if now[name] != then[name]]
        if differing:
            raise UserError(
                f"Task {task.name} is cached already, with another {' and '.join(differing)}.",
                where=str(folder / PROVENANCE),
                fix="Use another --output_cache_dir, or remove that folder to have it made anew.",
            )


def _cached_splits(folder: Path) -> Sequence[str] | None:
    """The splits that a task's complete cache has, or None if there is none."""
    if not (folder / MARKER).is_file():
        return None
    return [path.name[len("info.") : -len(".json")] for path in folder.glob("info.*.json")]


def _model_of(task: Any) -> bytes:
    import seqio

    features = task.output_features
    vocabulary = features["inputs"].vocabulary
    others = [feature for feature in features.values() if feature.vocabulary != vocabulary]
    if others or not isinstance(vocabulary, seqio.SentencePieceVocabulary):
        raise UserError(
            f"Task {task.name!r} has not one SentencePiece vocabulary for all its features.",
            where="--tasks",
            fix="Cache it with seqio_cache_tasks.",
        )
    model = vocabulary.sp_model
    assert model is not None
    return model


def _eos(task: Any) -> Mapping[str, int | None]:
    return {
        name: feature.vocabulary.eos_id if feature.add_eos else None
        for name, feature in task.output_features.items()
    }
