"""`t0repro compare`: compares runs, with an exit code for scripts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from t0repro.cli.options import AsJson, BootstrapSeed, Modules, Resamples
from t0repro.cli.paths import output
from t0repro.cli.results import echo, show_page
from t0repro.errors import UserError
from t0repro.reports.comparison import compare_runs, read_run_facts
from t0repro.reports.comparison_page import comparison_page, losses_page
from t0repro.reports.losses import compare_losses
from t0repro.reports.models import compare_models, correct_by_models, correct_p_values, to_json
from t0repro.reports.page import Page
from t0repro.reports.prompts import prompts_of_evaluations
from t0repro.reports.run import Run, find_evaluation, split_labeled_path
from t0repro.reports.statistics import Bootstrap
from t0repro.words import counted, some

Given = tuple[str | None, Path]


def compare(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="[LABEL=]A [LABEL=]B ...",
            help="metrics.jsonl files, to compare losses; or evaluation folders, rank-eval folders"
            " or reports, to compare scores, predictions and accuracies. All are compared with the"
            " first, and models with each other; runs with one label are a model's seeds.",
        ),
    ],
    tol: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Exit with 1 if a loss differs by more than this (relative to the first run's), a"
            " score differs by more per target token, or an example is predicted differently.",
        ),
    ] = None,
    step: Annotated[
        list[int] | None,
        typer.Option(help="Step of each run, in their order.", show_default="the latest"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(callback=output, help="Folder for compare.json, .md and .html."),
    ] = None,
    module_import: Modules = None,
    resamples: Resamples = 4000,
    seed: BootstrapSeed = 0,
    as_json: AsJson = False,
) -> None:
    r"""Compare runs: losses step by step, or scores, predictions and accuracies.

    The arguments decide what is compared. Accuracies come with the difference's interval and
    McNemar's test for each dataset, as the report beside an evaluation groups its tasks;
    --module_import groups them without one.

    Example:
      t0repro compare mtf=runs/mtf/metrics.jsonl jax=runs/jax/metrics.jsonl \
        --tol 1e-4

    Example:
      t0repro compare mtf=runs/mtf/validation_eval \
        jax=runs/jax/validation_eval
    """
    given = [split_labeled_path(run) for run in runs]
    if len(given) < 2:
        fix = "Name them, with blanks between them."
        if len(step or ()) > 1:
            fix = f"For steps of one run, name it for each: t0repro compare {runs[0]} {runs[0]} ..."
        raise UserError("A comparison needs two runs or more.", fix=fix)
    paths = [path.resolve() for _, path in given]
    if twice := None if step else next((each for each in paths if paths.count(each) > 1), None):
        echo(f"note: {twice} is compared with itself", err=True)
    if step and len(step) != len(given):
        raise UserError(
            f"--step is given {counted(len(step), 'time')} for {counted(len(given), 'run')}.",
            fix="Give one for each run, in their order: --step A --step B.",
        )
    others = [str(path) for _, path in given if path.suffix != ".jsonl"]
    if 0 < len(others) < len(given):
        raise UserError(
            f"Losses, of a metrics.jsonl, cannot be compared with {some(others)}.",
            where=" and ".join(str(path) for _, path in given),
            fix="Name the metrics.jsonl of each run, for losses; for accuracies, the evaluation's"
            " folder or the report.json of each.",
        )
    # The first run is the reference for all others.
    if not others:
        page, content, within = _losses(given, tol)
    else:
        bootstrap = Bootstrap(replicates=resamples, seed=seed)
        page, content, within = _evaluations(given, step, tol, module_import or (), bootstrap)
    # Show the page before the exit code, because users want to see the difference.
    show_page("compare", page, content, out, as_json=as_json)
    if not within:
        raise typer.Exit(1)


def _losses(given: Sequence[Given], tol: float | None) -> tuple[Page, list[Any], bool]:
    first, *others = zip(_labels(given), (path for _, path in given), strict=True)
    compared = [
        compare_losses(first[1], path, label_a=first[0], label_b=label) for label, path in others
    ]
    within = tol is None or all(found.within(tol) for found in compared)
    return losses_page(compared), compared, within


def _evaluations(
    given: Sequence[Given],
    steps: Sequence[int] | None,
    tol: float | None,
    modules: Sequence[str],
    bootstrap: Bootstrap,
) -> tuple[Page, list[Any], bool]:
    found = [find_evaluation(path) for _, path in given]
    runs = [
        Run(label, folder, steps[at] if steps else step)
        for at, (label, (folder, step)) in enumerate(zip(_labels(given), found, strict=True))
    ]
    prompts = prompts_of_evaluations([run.eval_dir for run in runs], modules)
    # As columns, the seeds of a model need distinct names.
    first, *others = numbered = [
        dataclasses.replace(run, label=label)
        for run, label in zip(runs, _number_labels([run.label for run in runs]), strict=True)
    ]
    compared = [
        # To judge scores by a tolerance, both runs must have scored the same pairs.
        compare_runs(first, run, prompts, bootstrap, same_pairs=tol is not None)
        for run in others
    ]
    within = tol is None or all(entry.within(tol) for entry in compared)
    models = compare_models(runs, prompts, bootstrap) if len({r.label for r in runs}) > 1 else None
    if models is not None and set(models.seeds.values()) == {1}:
        compared = correct_by_models(models, compared)
    else:
        compared = correct_p_values(compared)
    facts = [read_run_facts(run) for run in numbered]
    return comparison_page(compared, models, facts), to_json(compared, models, facts), within


def _number_labels(labels: Sequence[str]) -> list[str]:
    """The labels, with repeated ones numbered: `t0 (1)`, `t0 (2)`."""
    return [
        f"{label} ({labels[: at + 1].count(label)})" if labels.count(label) > 1 else label
        for at, label in enumerate(labels)
    ]


def _labels(given: Sequence[Given]) -> list[str]:
    """The labels, or else the names of the runs' folders; a, b, ... if those are not distinct.

    A label that is given twice stays: it names one model's seeds.
    """
    labels = [label or _name(path) for label, path in given]
    # Labels are column headings, so they must differ.
    if len(set(labels)) == len(labels) and all(labels):
        return labels
    return [label or chr(ord("a") + at) for at, (label, _) in enumerate(given)]


def _name(path: Path) -> str:
    """The folder name that distinguishes a run; not `validation_eval`, which every run has."""
    path = path.resolve()
    is_inside = path.is_file() or any(path.glob("*_targets"))
    return path.parent.name if is_inside else path.name
