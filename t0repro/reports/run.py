"""A run to report on: how a path resolves to one, its numbers' provenance, and its tasks' prompts.

Only this reporting module uses the task registry, and only if a module or mixture is named.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import re
import subprocess
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from t0repro.errors import UserError, as_shown
from t0repro.evaluation.evaluation_facts import EVALUATION_FACTS, package_versions
from t0repro.files import input_path
from t0repro.working_copies import address_of

_FIX = "Give the <split>_eval folder, the --out folder of rank-eval, or a report.json."


@dataclasses.dataclass(frozen=True)
class Run:
    """An evaluation with a label.

    Attributes:
      label: the run's name in the report.
      eval_dir: its `<split>_eval` folder.
      step: the checkpoint's step; None for the latest in the folder.
    """

    label: str
    eval_dir: str | os.PathLike[str]
    step: int | None = None


def labelled(text: str) -> tuple[str | None, Path]:
    """`split_label`, with the path as commands open it."""
    label, path = split_label(text)
    return label, input_path(path)


def split_label(text: str) -> tuple[str | None, str]:
    """Splits LABEL=PATH; a path without a label may itself contain `=`."""
    label, separator, path = text.partition("=")
    # A path may contain `=`; if it exists as written, it has no label.
    return (label, path) if separator and not Path(text).exists() else (None, text)


def find_evaluation(path: str | os.PathLike[str]) -> tuple[Path, int | None]:
    """Finds the `<split>_eval` folder for a path, and the step if a report names it.

    The folder is the path itself if it has an evaluation's files; else the only evaluation inside
    it; else, if the path is a report or its folder, the report's evaluation at the report's step.

    Raises:
      UserError: if there is no evaluation, or more than one.
    """
    path = Path(path)
    # Check the folder itself before searching inside.
    if any(path.glob("*_targets")):
        return path, None
    evaluations = sorted(
        folder
        for folder in path.glob("*_eval*")
        if folder.is_dir() and any(folder.glob("*_targets"))
    )
    if len(evaluations) == 1:
        return evaluations[0], None
    report = path / "report.json" if path.is_dir() else path
    # rank-eval's --out folder has both; prefer the folder of files.
    if not evaluations and report.is_file():
        return _evaluation_of_report(report)
    if evaluations:
        names = ", ".join(folder.name for folder in evaluations)
        what, fix = f"There are {len(evaluations)} evaluations here.", f"Name one of them: {names}."
    elif not path.exists():
        what, fix = "There is no such file or folder.", _FIX
    elif (losses := path / "metrics.jsonl").is_file():
        what = "There is no evaluation here, only the metrics of a training run."
        fix = f"To compare losses, name {losses}; to compare scores, evaluate the run first."
    else:
        what, fix = "There is no evaluation here.", _FIX
    raise UserError(what, where=str(path), fix=fix)


def _evaluation_of_report(path: Path) -> tuple[Path, int]:
    try:
        provenance = json.loads(path.read_text(encoding="utf-8"))["provenance"]
        folder, step = input_path(provenance["eval_dir"]), int(provenance["step"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError("This is not a t0repro report.", where=str(path), fix=_FIX) from error
    if not any(folder.glob("*_targets")):
        raise UserError(
            f"The report's evaluation is no longer at {folder}.",
            where=str(path),
            fix="Give the <split>_eval folder; relative paths start where the report was made.",
        )
    return folder, step


# ---- Where its numbers come from ---------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Provenance:
    """The origin of a report's numbers; None for what is unknown."""

    created: str
    label: str
    eval_dir: str
    checkpoint: str | None
    step: int
    device: str | None
    duration_seconds: float | None
    versions: dict[str, str]
    git_commit: str | None
    operative_config: str | None
    checkpoint_hash: str | None = None
    templates_hash: str | None = None
    data_revision: str | None = None
    energy_joules: float | None = None
    energy_source: str | None = None
    data: dict[str, str] = dataclasses.field(default_factory=dict)
    scores_sha256: str | None = None


def collect_provenance(
    run: Run,
    step: int,
    *,
    checkpoint: str | None = None,
    device: str | None = None,
    duration_seconds: float | None = None,
) -> Provenance:
    """Collects an evaluation's provenance; arguments override provenance.json in its folder.

    The operative configuration is operative_config.gin in the folder, or in the model_dir above it.

    Raises:
      UserError: if provenance.json exists but is not a JSON object.
    """
    folder = Path(run.eval_dir)
    facts = recorded_facts(folder, step)
    return Provenance(
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        label=run.label,
        # A bucket's address, if the folder is a working copy of it.
        eval_dir=as_shown(str(run.eval_dir)),
        checkpoint=checkpoint or facts.get("checkpoint"),
        step=step,
        device=device or facts.get("device"),
        # Keep a duration of 0.
        duration_seconds=facts.get("duration_seconds")
        if duration_seconds is None
        else duration_seconds,
        # If the evaluation recorded no versions, give those of the report's writer.
        versions=facts.get("versions") or package_versions(),
        git_commit=git_commit(),
        operative_config=_operative_config(folder),
        checkpoint_hash=facts.get("checkpoint_hash"),
        templates_hash=facts.get("templates_hash"),
        data_revision=facts.get("data_revision"),
        energy_joules=facts.get("energy_joules"),
        energy_source=facts.get("energy_source"),
        data=facts.get("data") or {},
        scores_sha256=facts.get("scores_sha256"),
    )


def git_commit() -> str | None:
    """The commit of the checkout that this code runs from, with `-dirty` if it has changes."""
    try:
        found = subprocess.run(
            # --exclude=* matches no tag, so that only the commit is printed.
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):  # no git, or no checkout
        return None
    return found.stdout.strip() or None


def recorded_facts(folder: str | os.PathLike[str], step: int) -> dict[str, Any]:
    """An evaluation's record in provenance.json; empty if it is for another step.

    Raises:
      UserError: if the file exists but is not a JSON object.
    """
    path = Path(folder) / EVALUATION_FACTS
    if not path.is_file():
        return {}
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"This is not JSON: {error}", where=str(path)) from error
    if not isinstance(facts, dict):
        raise UserError("This is not a JSON object.", where=str(path))
    # A folder may have several steps; the file describes the one evaluated last.
    return facts if facts.get("step", step) == step else {}


def _operative_config(folder: Path) -> str | None:
    # rank_eval writes it into the folder, training into the model_dir above, which is not in the
    # working copy of an address below it.
    above: str | Path = folder.resolve().parent
    if address := address_of(folder):
        above = address.rpartition("/")[0]
    for place in (folder, above):
        path = input_path(f"{place}/operative_config.gin")
        if path.is_file():
            return path.read_text(encoding="utf-8")
    return None


# ---- Facts from the registered tasks: each task's prompt, and which tasks were trained on --------


class PromptInfo(Protocol):
    """The part of t0repro.tasks.PromptedTask that a report uses."""

    @property
    def dataset(self) -> str:
        """The Hugging Face name of the dataset."""
        ...

    @property
    def subset(self) -> str | None:
        """The dataset's configuration."""
        ...

    @property
    def template_name(self) -> str:
        """The template's name in promptsource."""
        ...

    @property
    def fixed_choices(self) -> tuple[str, ...] | None:
        """The answers, if every example has the same ones."""
        ...

    @property
    def prompt(self) -> str:
        """The template's Jinja text."""
        ...


def dataset_label(task: str, prompts: Mapping[str, PromptInfo]) -> str:
    """The dataset label of a task: `super_glue/rte`, or the task's name if unknown.

    Each of ANLI's rounds is a separate dataset, as in T0's figures: `anli/r1`, from the task's
    suffix.
    """
    info = prompts.get(task)
    if info is None:
        return task.removesuffix("_score_eval")
    label = f"{info.dataset}/{info.subset}" if info.subset else info.dataset
    # Parse the task's name, since the registered dataset is ANLI as a whole.
    round_of_anli = re.search(r"_(r[123])(_score_eval)?$", task)
    return f"anli/{round_of_anli[1]}" if info.dataset == "anli" and round_of_anli else label


def tasks_by_dataset(
    tasks: Iterable[str], prompts: Mapping[str, PromptInfo]
) -> dict[str, list[str]]:
    """Dataset label -> its tasks, in the order given; sorted by label."""
    found: dict[str, list[str]] = {}
    for task in tasks:
        found.setdefault(dataset_label(task, prompts), []).append(task)
    return dict(sorted(found.items()))


def template_name(task: str, prompts: Mapping[str, PromptInfo]) -> str:
    """The prompt's name in promptsource, or the task's own name if unknown."""
    info = prompts.get(task)
    return info.template_name if info else task.removesuffix("_score_eval")


def fixed_classes(prompts: Mapping[str, PromptInfo]) -> dict[str, int]:
    """Task name -> number of choices, for tasks where it is fixed."""
    return {name: len(info.fixed_choices) for name, info in prompts.items() if info.fixed_choices}


def load_prompts(modules: Sequence[str], *, into_seqio: bool = False) -> Mapping[str, PromptInfo]:
    """Imports modules that register tasks; task name -> its prompt. Empty without a module.

    Args:
      modules: names of modules.
      into_seqio: whether to register the tasks with SeqIO, to read their examples.

    Raises:
      UserError: if a module cannot be found.
    """
    if not modules:
        return {}
    from t0repro.tasks.registration import load_tasks

    return load_tasks(modules, into_seqio=into_seqio)


def training_tasks(mixtures: Sequence[str]) -> set[str]:
    """Names of the tasks in registered mixtures; a task's own name stands for itself.

    Raises:
      UserError: if one is not registered.
    """
    from t0repro.tasks.task import registered_tasks, tasks_of_mixture

    tasks = set(registered_tasks()) & set(mixtures)
    # Names that are not tasks must be mixtures.
    for mixture in set(mixtures) - tasks:
        tasks |= set(tasks_of_mixture(mixture, "--train_mixture"))
    return tasks


def training_datasets(tasks: Collection[str], prompts: Mapping[str, PromptInfo]) -> set[str]:
    """Labels of the datasets of tasks."""
    return {dataset_label(task, prompts) for task in tasks}


# ---- Datasets of generated rows ------------------------------------------------------------------


def synthetic_datasets(labels: Collection[str]) -> tuple[str, ...]:
    """Labels of datasets with generated rows, recognized by name."""
    from t0repro.tasks.catalogue import SYNTHETIC

    # Anywhere in the label: without the tasks' module it is a task's name, which need not start
    # with the dataset's.
    return tuple(sorted(label for label in labels if SYNTHETIC in label))


def synthetic_warning(labels: Collection[str], synthetic: Collection[str]) -> str:
    """The banner of a page about some datasets; empty if all rows are real.

    Args:
      labels: of all the page's datasets.
      synthetic: those with generated rows.
    """
    if not synthetic:
        return ""
    rows = "all rows" if set(labels) <= set(synthetic) else f"rows of {', '.join(synthetic)}"
    return (
        f"Synthetic data: {rows} were generated by a program. Scores on them show that the"
        " machinery works; they say nothing about any real dataset."
    )
