"""What the bench holds: the prompts of T0 and of users' files, and where their rows are."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from t0repro.errors import UserError, nearest_names
from t0repro.tasks.catalog import label
from t0repro.tasks.readers import LocalReader
from t0repro.tasks.registration import describe, describing
from t0repro.tasks.registry import select_tasks, task_descriptions
from t0repro.tasks.rows import SUFFIXES, dataset_folder, read_rows, rows_suffix, splits_on_disk
from t0repro.tasks.source import PromptedRows, Split
from t0repro.tasks.task import TaskDescription
from t0repro.tasks.template_files import read_template_file
from t0repro.tasks.template_registration import register_templates
from t0repro.tasks.template_saving import digest, save_template
from t0repro.tasks.templates import is_own, task_name
from t0repro.tasks.user_files import DATA_VARIABLE, data_folders
from t0repro.words import some

Dataset = tuple[str, str | None]


class FileRows(PromptedRows):
    """The rows of files wherever they are, each of which is a split."""

    def __init__(self, files: Mapping[str, Path], name: str, dataset: Dataset, template: Any):
        super().__init__(name, *dataset, template, {split: Split(split) for split in files})
        self.files = files

    def reader(self, split: str) -> LocalReader:
        """The reader of a split's file as it is now."""
        return LocalReader.of(self.files[split])

    def available_splits(self) -> list[str]:
        """The files' splits."""
        return list(self.files)


def dataset_of_file(path: Path) -> Dataset:
    """The dataset that a file of rows is of, by its place or its name.

    Raises:
      UserError: If the file cannot have rows, or has none.
    """
    suffix = rows_suffix(path)
    if suffix is None or not path.is_file():
        what = "is no file" if suffix is not None else "has no ending of a file of rows"
        fix = f"Name one: {', '.join(SUFFIXES)}."
        if path.is_dir():
            what = "is a folder"
            near = (each for below in ("*.*", "*/*.*", "*/*/*.*") for each in path.glob(below))
            held = sorted(str(each) for each in itertools.islice(near, 100) if rows_suffix(each))
            if held:
                fix = f"Name a file in it: {some(held)}."
        raise UserError(f"{path.name} {what}.", where=f"--rows {path}", fix=fix)
    if next(read_rows(path, 0, 1), None) is None:
        raise UserError(
            "The file has no rows.", where=f"--rows {path}", fix="Name a file with rows."
        )
    folder = path.resolve().parent
    # As below T0REPRO_DATA_DIR: <dataset>/default/<split>.
    name = folder.parent.name if folder.name == "default" else path.name.removesuffix(suffix)
    return re.sub(r"[^\w.]+", "_", name), None


@dataclasses.dataclass
class Bench:
    """The prompts by the names of their tasks, the files that own prompts are saved in, and rows.

    Attributes:
      tasks: Task's name -> the task, without twins.
      files: Users' files of prompts, which may not exist yet.
      row_files: Dataset -> split -> its file of rows, for files that were named.
      saved_in: Task's name -> the user's file that it is from.
      left_out: Identifiers of templates in these files that are not shown.
    """

    tasks: Mapping[str, TaskDescription]
    files: Sequence[Path] = ()
    row_files: Mapping[Dataset, Mapping[str, Path]] = dataclasses.field(default_factory=dict)
    saved_in: Mapping[str, Path] = dataclasses.field(default_factory=dict)
    left_out: Set[str] = frozenset()

    @property
    def datasets(self) -> list[Dataset]:
        """The datasets with prompts or named rows, sorted."""
        found = {(task.rows.dataset, task.rows.subset) for task in self.tasks.values()}
        return sorted(found | set(self.row_files), key=lambda each: label(*each))

    def tasks_of(self, dataset: Dataset) -> list[TaskDescription]:
        """The tasks of a dataset, by name."""
        return [
            task
            for _, task in sorted(self.tasks.items())
            if (task.rows.dataset, task.rows.subset) == dataset
        ]

    def find(self, name: str) -> TaskDescription:
        """The task of a name, or of its twin.

        Raises:
          UserError: If there is none.
        """
        task = self.tasks.get(name) or self.tasks.get(name.removesuffix("_score_eval"))
        if task is None:
            fix = f"Nearest: {nearest_names(name, self.tasks)}."
            raise UserError(f"There is no prompt {name!r}.", fix=fix)
        return task

    def find_dataset(self, name: str) -> Dataset:
        """The dataset of a label, as in `super_glue/rte`.

        Raises:
          UserError: If there is none.
        """
        known = {label(*each): each for each in self.datasets}
        if name not in known:
            fix = f"Nearest: {nearest_names(name, known)}."
            raise UserError(f"There is no dataset {name!r}.", fix=fix)
        return known[name]

    def describe(
        self, dataset: Dataset, template: Any, like: TaskDescription | None = None
    ) -> TaskDescription:
        """The task of a template, over the rows of a task or else of its dataset."""
        name = task_name(*dataset, template.name)
        if dataset in self.row_files:
            return describe(FileRows(self.row_files[dataset], name, dataset, template))
        like = like or next(iter(self.tasks_of(dataset)), None)
        if like is None:
            roots = data_folders() if os.environ.get(DATA_VARIABLE) else []
            folders = [dataset_folder(root, *dataset) for root in roots]
            names = sorted({name for folder in folders for name in splits_on_disk(folder)})
            splits, root, vocabulary = {split: Split(split) for split in names}, None, None
        else:
            splits, root = like.rows.files_of_splits, like.rows.root
            vocabulary = like.vocabulary
        return describe(PromptedRows(name, *dataset, template, splits, root), vocabulary)

    def read_file(self, path: Path) -> None:
        """Takes the prompts of a user's file in place of those that it had before.

        Raises:
          UserError: If the file is broken, or a task's name is taken.
        """
        content = read_template_file(path)
        dataset = content.dataset, content.subset
        # New mappings, since other threads go through those that there are.
        saved_in = {name: file for name, file in self.saved_in.items() if file != path}
        tasks = {name: task for name, task in self.tasks.items() if self.saved_in.get(name) != path}
        for template in content.templates:
            if template.id in self.left_out:
                continue
            task = self.describe(dataset, template)
            self._check_name(task, tasks, path)
            tasks[task.prompt.name], saved_in[task.prompt.name] = task, path
        self.tasks, self.saved_in = tasks, saved_in

    def _check_name(
        self, task: TaskDescription, tasks: Mapping[str, TaskDescription], path: Path
    ) -> None:
        if task.prompt.name in tasks:
            raise UserError(
                f"There is a task {task.prompt.name!r} already.",
                where=f"{path}, template {task.prompt.template_name!r}",
                fix="Give the template another name.",
            )

    def file_of(self, dataset: Dataset, identifier: str = "") -> Path:
        """The user's file that a prompt is saved in: the one that it is from, or the dataset's.

        Args:
          dataset: The prompt's dataset.
          identifier: The template's id.

        Raises:
          UserError: If none was named.
        """
        for name, file in self.saved_in.items():
            if self.tasks[name].prompt.template_id == identifier:
                return file
        new = None
        for path in self.files:
            if not path.exists():
                new = new or path
                continue
            content = read_template_file(path)
            if (content.dataset, content.subset) == dataset:
                return path
        if new is not None:
            return new
        raise UserError(
            f"No file was named to save prompts of {label(*dataset)} in.",
            where="--templates",
            fix="Start t0repro browse with --templates NEW.yaml, and for T0's prompts also with"
            " --module_import t0repro.tasks.t0. A reload brings your text back.",
        )

    def save(self, dataset: Dataset, template: Any, base: str | None) -> TaskDescription:
        """Saves a template in the user's file; see `save_template`.

        Raises:
          UserError: If there is no such file, or the template cannot be saved there.
        """
        path = self.file_of(dataset, template.id)
        # Before anything is written: two tasks of one name could not be registered.
        others = {
            name: task
            for name, task in self.tasks.items()
            if task.prompt.template_id != template.id
        }
        self._check_name(self.describe(dataset, template), others, path)
        save_template(path, *dataset, template, base)
        self.read_file(path)
        return self.find(task_name(*dataset, template.name))


def make_bench(
    files: Iterable[Path] = (),
    row_files: Iterable[Path] = (),
    mixture: str | None = None,
    dataset: str | None = None,
) -> Bench:
    """The bench of the registered tasks and a user's files.

    Args:
      files: Files in promptsource's form, which may not exist yet.
      row_files: Files of rows; those of one dataset are its splits.
      mixture: Only the tasks of this mixture.
      dataset: Only those of this dataset.

    Raises:
      UserError: If a file is broken, or there is no such mixture or dataset.
    """
    named: dict[Dataset, dict[str, Path]] = {}
    for path in row_files:
        splits = named.setdefault(dataset_of_file(path), {})
        split = path.name.removesuffix(rows_suffix(path) or "")
        if split in splits:
            raise UserError(
                f"{path} and {splits[split]} have one name.",
                where="--rows",
                fix="Rename one: a file's name is that of its dataset.",
            )
        splits[split] = path
    saved = [path for path in files if path.exists()]
    in_files = {template.id for path in saved for template in read_template_file(path).templates}
    if mixture or dataset:
        with describing():
            for path in saved:
                register_templates(path, rows_needed=False)
    registered = task_descriptions()
    names = {name.removesuffix("_score_eval") for name in select_tasks(mixture, dataset)}
    tasks = {name: registered[name] for name in sorted(names)}
    shown = {task.prompt.template_id for task in tasks.values()}

    def is_read_below(task: TaskDescription) -> bool:  # as it is saved, with the rows named here
        return is_own(task.rows.template) and task.prompt.template_id in in_files

    bench = Bench(
        {name: task for name, task in tasks.items() if not is_read_below(task)},
        list(files),
        named,
        left_out=in_files - shown if mixture or dataset else frozenset(),
    )
    for path in saved:
        bench.read_file(path)
    return bench


def version(task: TaskDescription) -> str | None:
    """`digest` of a user's template, by which a change on disk is noticed; None for T0's."""
    template = task.rows.template
    return digest(template) if is_own(template) else None
