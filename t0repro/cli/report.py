"""`t0repro report`, `compare`, `runs`, `plot` and `replay`: what runs gave, as files and pages."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import typer

from t0repro.cli.options import (
    AsJson,
    BootstrapSeed,
    Modules,
    ModulesOrT0,
    ReportHead,
    Resamples,
    modules_or_t0,
    with_groups,
)
from t0repro.cli.results import echo, print_json, print_written, show_page
from t0repro.cli.spelling import output, source

if TYPE_CHECKING:
    from t0repro.reports.make_report import ExtraContent, ReportOptions
    from t0repro.reports.page import Page
    from t0repro.reports.report import Report
    from t0repro.reports.run import PromptInfo

app = typer.Typer(
    name="report",
    help="Write and read reports of rank evaluations.",
    no_args_is_help=True,
    epilog="Example: t0repro report make runs/demo/model/validation_eval --out runs/demo/report",
)

_EvalDir = Annotated[Path, typer.Argument(help="The <split>_eval folder to report on.")]
_Out = Annotated[Path, typer.Option("--out", callback=output, help="Folder for the three files.")]
_Step = Annotated[int | None, typer.Option(help="Step to report.", show_default="the latest")]
_From = Annotated[
    Literal["lm-eval"] | None,
    typer.Option(
        "--from",
        help="EVAL_DIR holds lm-evaluation-harness's results (lm_eval --log_samples --output_path);"
        " its scores are written beside the report.",
    ),
]


@app.callback()
def _group() -> None:
    """Write and read reports of rank evaluations."""


@dataclasses.dataclass(frozen=True)
class ContentOptions:
    """What a report shows in addition to its run's scores."""

    HEADING: ClassVar = "Beside the scores"

    other: Annotated[
        str | None,
        typer.Option(metavar="LABEL=EVAL_DIR", help="A second run to compare the scores with."),
    ] = None
    metrics: Annotated[
        Path | None, typer.Option(help="The training run's metrics.jsonl, for a loss curve.")
    ] = None
    losses: Annotated[
        tuple[str, str] | None,
        typer.Option(
            metavar="[LABEL=]A.jsonl [LABEL=]B.jsonl",
            help="Two metrics.jsonl files whose losses to compare.",
        ),
    ] = None
    conversion: Annotated[
        Path | None, typer.Option(help="A text file with the result of a conversion.")
    ] = None
    overlap: Annotated[
        Path | None,
        typer.Option(
            help="The output of `tasks overlap`; adds accuracies without the rows that it found."
        ),
    ] = None
    note: Annotated[
        list[str] | None, typer.Option(help="A sentence for the top of the report; repeatable.")
    ] = None


@dataclasses.dataclass(frozen=True)
class RecordOptions:
    """Facts that an evaluation may not have recorded."""

    HEADING: ClassVar = "Not in the evaluation's own record"

    train_dataset: Annotated[
        list[str] | None,
        typer.Option(help="A dataset that was trained on, such as super_glue/rte; repeatable."),
    ] = None
    checkpoint: Annotated[
        str | None,
        typer.Option(help="The checkpoint that was evaluated.", show_default="as recorded"),
    ] = None
    device: Annotated[
        str | None,
        typer.Option(help="The device that it was evaluated on.", show_default="as recorded"),
    ] = None
    duration: Annotated[
        float | None,
        typer.Option(help="Duration of the evaluation, in seconds.", show_default="as recorded"),
    ] = None


@app.command()
@with_groups
def make(
    eval_dir: _EvalDir,
    out: _Out,
    head: ReportHead,
    shown: ContentOptions,
    recorded: RecordOptions,
    step: _Step = None,
    module_import: Modules = None,
    source: _From = None,
    seed: BootstrapSeed = 0,
    as_json: AsJson = False,
) -> None:
    """Write report.json, report.md and report.html for a rank evaluation.

    Example: t0repro report make runs/demo/validation_eval --out runs/demo/report
    --module_import t0repro.tasks.demo --train_mixture demo_train
    --metrics runs/demo/metrics.jsonl --other mtf=runs/mtf/validation_eval

    For another model: t0repro report make RESULTS --from lm-eval --out runs/other/report
    --module_import t0repro.tasks.t0
    """
    echo(f"reading {eval_dir} ...", err=True)
    from t0repro.files import folder_lock
    from t0repro.reports.make_report import make_report, write_report
    from t0repro.reports.run import Run, load_prompts

    left_out: Mapping[str, str] = {}
    if source is not None:
        from t0repro.lm_eval.files import import_results

        eval_dir, left_out = import_results(eval_dir, out)
        for task, why in left_out.items():
            echo(f"left out {task}: {why}", err=True)
    # A mixture that was trained on is T0's unless another module is named.
    modules = modules_or_t0(module_import) if head.train_mixture else module_import or ()
    prompts = load_prompts(modules)
    options = _report_options(head, shown, recorded, seed, prompts)
    reasons = (f"Left out {task}: {why}." for task, why in left_out.items())
    options = dataclasses.replace(options, notes=(*options.notes, *reasons))
    run = Run(head.label, eval_dir, step)
    report = make_report(run, prompts, options, _extra_content(head.label, shown))
    # Two commands that write into one folder would mix their files.
    with folder_lock(out, "writing a report"):
        paths = write_report(report, out)
    if as_json:
        print_json(json.loads(report.to_json()))
    else:
        _print(report)
    print_written(paths, as_json=as_json)


@app.command()
def verify(
    report: Annotated[
        Path, typer.Argument(metavar="REPORT", help="A report.json, or the folder that holds it.")
    ],
    sample: Annotated[
        int, typer.Option(min=1, help="Number of random examples to score again.")
    ] = 20,
    seed: Annotated[
        int | None,
        typer.Option(help="Seed of the sample.", show_default="another sample each time"),
    ] = None,
    module_import: ModulesOrT0 = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            callback=source, help="Where the checkpoint is now.", show_default="as recorded"
        ),
    ] = None,
    cache_dir: Annotated[Path | None, typer.Option(help="SeqIO's cache of the tasks.")] = None,
    as_json: AsJson = False,
) -> None:
    """Recompute a report's figures, and a sample of its scores from the checkpoint.

    Figures, files of scores, prompts and rows are compared in full, by their values or hashes;
    random examples are rendered and scored again. Ends with what was not verified. Exits with 1 if
    anything differs.

    Example: t0repro report verify runs/demo/rank_eval --sample 20
    --module_import t0repro.tasks.demo
    """
    from t0repro.reports.run import load_prompts
    from t0repro.runs.verify import detection_probability, not_verified, verify

    echo("importing JAX and the tasks ...", err=True)
    prompts = load_prompts(modules_or_t0(module_import))
    if cache_dir is not None:
        from t0repro.tasks.task import add_cache_dirs

        add_cache_dirs([cache_dir], "--cache_dir")
    findings, differ, cells = [], 0, 0
    for found in verify(report, prompts, sample=sample, seed=seed, checkpoint=checkpoint):
        findings.append(found)
        differ += not found.agrees
        cells += found.is_cell
        details = f": {found.details}" if found.details else ""
        echo(f"{'agrees ' if found.agrees else 'DIFFERS'}  {found.what}{details}", err=as_json)
    shares = ", ".join(
        f"{100 * detection_probability(f, cells):.0f}% if {100 * f:g}% were" for f in _SHARES
    )
    if cells:
        echo(f"Changed examples are detected with a probability of {shares}.", err=as_json)
    unverified = not_verified(report)
    echo("Not verified:\n" + "\n".join(f"  {line}" for line in unverified), err=as_json)
    if as_json:
        print_json({"findings": findings, "not_verified": unverified})
    if differ:
        raise typer.Exit(1)


_SHARES = (0.01, 0.05, 0.1, 0.2)


@app.command()
def history(
    eval_dir: Annotated[
        Path, typer.Argument(metavar="DIR", help="A <split>_eval folder with several steps.")
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", callback=output, help="Folder for history.json, .md and .html."),
    ] = None,
    module_import: Modules = None,
    as_json: AsJson = False,
) -> None:
    """Show accuracy by checkpoint, one curve per dataset.

    With --module_import, tasks are grouped by dataset.

    Example: t0repro report history runs/demo/model/validation_eval --out runs/demo/history
    """
    from t0repro.reports.comparison import read_history
    from t0repro.reports.comparison_page import history_page
    from t0repro.reports.run import find_evaluation, load_prompts

    # Any step will do, because a history includes all steps.
    folder, _ = find_evaluation(eval_dir)
    found = read_history(folder, load_prompts(module_import or ()))
    show_page("history", history_page(found), found.to_json(), out, as_json=as_json)


def _report_options(
    head: ReportHead,
    shown: ContentOptions,
    recorded: RecordOptions,
    seed: int,
    prompts: Mapping[str, PromptInfo],
) -> ReportOptions:
    from t0repro.reports.make_report import ReportOptions
    from t0repro.reports.run import training_datasets, training_tasks
    from t0repro.reports.statistics import Bootstrap
    from t0repro.tasks.overlap import read_overlap

    trained = training_tasks(head.train_mixture or ())
    # Datasets may be named without a module that registers their tasks.
    datasets = training_datasets(trained, prompts) | set(recorded.train_dataset or ())
    return ReportOptions(
        title=head.title,
        bootstrap=Bootstrap(replicates=head.resamples, seed=seed),
        # None if nothing was named: then it is unknown which datasets are held out.
        training_datasets=datasets or None,
        training_tasks=trained,
        checkpoint=recorded.checkpoint,
        device=recorded.device,
        duration_seconds=recorded.duration,
        notes=tuple(shown.note or ()),
        overlap=read_overlap(shown.overlap) if shown.overlap else None,
    )


def _extra_content(label: str, shown: ContentOptions) -> ExtraContent:
    """What the report shows besides its run's scores; unlabelled losses get the runs' labels."""
    from t0repro.reports.make_report import ExtraContent
    from t0repro.reports.run import Run, labelled

    other_label, other_path = labelled(shown.other) if shown.other else (None, None)
    compared = None
    if shown.losses:
        (label_a, path_a), (label_b, path_b) = map(labelled, shown.losses)
        # Losses without labels are assumed to belong to the compared runs.
        compared = ((label_a or label, path_a), (label_b or other_label or "other", path_b))
    return ExtraContent(
        other=Run(other_label or "other", other_path) if other_path else None,
        metrics=shown.metrics,
        losses=compared,
        conversion=_text(shown.conversion) if shown.conversion else None,
    )


def _text(path: Path) -> str:
    from t0repro.errors import UserError

    if not path.is_file():
        raise UserError("There is no file with the result of a conversion here.", where=str(path))
    return path.read_text(encoding="utf-8").strip()


def _print(report: Report) -> None:
    from t0repro.reports.comparison_page import losses_in_words, scores_in_words
    from t0repro.reports.page import print_page
    from t0repro.reports.report_page import brief_page

    print_page(brief_page(report))
    if report.stacks:
        typer.echo("\n".join(scores_in_words(report.stacks)))
    if report.losses:
        typer.echo(losses_in_words(report.losses))


# ---- `t0repro compare`: compares runs, with an exit code for scripts -----------------------------


Given = tuple[str | None, Path]


_Runs = Annotated[
    list[str],
    typer.Argument(
        metavar="[LABEL=]A [LABEL=]B ...",
        help="metrics.jsonl files, to compare losses; or evaluation folders, rank-eval folders or"
        " reports, to compare scores, predictions and accuracies. All are compared with the first,"
        " and models with each other; runs with one label are a model's seeds.",
    ),
]
_Tolerance = Annotated[
    float | None,
    typer.Option(
        "--tol",
        min=0,
        help="Exit with 1 if a loss differs by more than this (relative to the first run's), a"
        " score differs by more per target token, or an example is predicted differently.",
    ),
]
_Steps = Annotated[
    list[int] | None,
    typer.Option(help="Step of each run, in their order.", show_default="the latest"),
]
_PageOut = Annotated[
    Path | None,
    typer.Option("--out", callback=output, help="Folder for compare.json, .md and .html."),
]


def compare(
    runs: _Runs,
    tol: _Tolerance = None,
    step: _Steps = None,
    out: _PageOut = None,
    module_import: Modules = None,
    resamples: Resamples = 4000,
    seed: BootstrapSeed = 0,
    as_json: AsJson = False,
) -> None:
    """Compare runs: losses step by step, or scores, predictions and accuracies.

    The arguments decide what is compared. Accuracies come with the difference's interval and
    McNemar's test for each dataset; --module_import groups tasks by dataset.

    Example: t0repro compare mtf=runs/mtf/metrics.jsonl jax=runs/jax/metrics.jsonl --tol 1e-4

    Example: t0repro compare mtf=runs/mtf/validation_eval jax=runs/jax/validation_eval
    """
    from t0repro.errors import UserError
    from t0repro.reports.run import labelled
    from t0repro.reports.statistics import Bootstrap
    from t0repro.words import counted

    given = [labelled(run) for run in runs]
    if len(given) < 2:
        raise UserError("One run cannot be compared.", fix="Name two or more.")
    if step and len(step) != len(given):
        raise UserError(
            f"--step is given {counted(len(step), 'time')} for {counted(len(given), 'run')}.",
            fix="Give one for each run, in their order.",
        )
    kinds = {path.suffix == ".jsonl" for _, path in given}
    if len(kinds) > 1:
        raise UserError(
            "Losses (metrics.jsonl files) cannot be compared with evaluations.",
            where=" and ".join(str(path) for _, path in given),
            fix="Name files of one kind.",
        )
    # The first run is the reference for all others.
    if kinds == {True}:
        page, content, within = _losses(given, tol)
    else:
        bootstrap = Bootstrap(replicates=resamples, seed=seed)
        page, content, within = _evaluations(given, step, tol, module_import or (), bootstrap)
    # Show the page before the exit code, because users want to see the difference.
    show_page("compare", page, content, out, as_json=as_json)
    if not within:
        raise typer.Exit(1)


def _losses(given: Sequence[Given], tol: float | None) -> tuple[Page, str, bool]:
    from t0repro.reports.comparison_page import losses_page
    from t0repro.reports.losses import compare_losses
    from t0repro.reports.make_report import as_json

    first, *others = zip(_labels(given), (path for _, path in given), strict=True)
    compared = [
        compare_losses(first[1], path, label_a=first[0], label_b=label) for label, path in others
    ]
    within = tol is None or all(found.within(tol) for found in compared)
    return losses_page(compared), as_json(compared), within


def _evaluations(
    given: Sequence[Given],
    steps: Sequence[int] | None,
    tol: float | None,
    modules: Sequence[str],
    bootstrap,
) -> tuple[Page, str, bool]:
    from t0repro.reports.comparison import compare_runs, to_json
    from t0repro.reports.comparison_page import comparison_page
    from t0repro.reports.models import compare_models, corrected, corrected_by
    from t0repro.reports.run import Run, find_evaluation, load_prompts

    prompts = load_prompts(modules)
    found = [find_evaluation(path) for _, path in given]
    runs = [
        Run(label, folder, steps[at] if steps else step)
        for at, (label, (folder, step)) in enumerate(zip(_labels(given), found, strict=True))
    ]
    # As columns, the seeds of a model need distinct names.
    first, *others = (
        dataclasses.replace(run, label=label)
        for run, label in zip(runs, _numbered([run.label for run in runs]), strict=True)
    )
    compared = [
        # To judge scores by a tolerance, both runs must have scored the same pairs.
        compare_runs(first, run, prompts, bootstrap, same_pairs=tol is not None)
        for run in others
    ]
    within = tol is None or all(entry.within(tol) for entry in compared)
    models = compare_models(runs, prompts, bootstrap) if len({r.label for r in runs}) > 1 else None
    if models is not None and set(models.seeds.values()) == {1}:
        compared = corrected_by(models, compared)
    else:
        compared = corrected(compared)
    return comparison_page(compared, models), to_json(compared, models), within


def _numbered(labels: Sequence[str]) -> list[str]:
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
    return path.parent.name if path.suffix or "_eval" in path.name else path.name


# ---- Training runs: their state and their curves -------------------------------------------------


def runs(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A folder with training runs below it.")
    ] = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """List the training runs below a folder: state, step, loss, tokens, speed, time left.

    A training run is running, finished, stopped before its last step with everything saved, or
    failed; a run whose local process vanished is shown as failed. Mesh TensorFlow's runs
    record no state: they are named below the list.

    Example: t0repro runs runs
    """
    from t0repro.reports.training_runs import (
        HEADER,
        find_runs,
        left_out_in_words,
        run_rows,
        to_json,
    )
    from t0repro.terminal import print_table, terminal

    found = find_runs(folder)
    if as_json:
        print_json(to_json(found))
    else:
        numbers = ("loss", "tokens", "tokens/s")
        print_table(terminal(), "", HEADER, run_rows(found), numbers=numbers)
    if left_out := left_out_in_words(folder):
        echo(left_out, err=True)


def plot(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="DIR...", help="Folders of training runs, or above them."),
    ],
    metric: Annotated[
        str, typer.Option(help="A metric of metrics.jsonl, or a tag of TensorBoard's.")
    ] = "loss",
    out: Annotated[
        Path | None,
        typer.Option("--out", callback=output, help="Folder for curves.json, .md and .html."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Draw a metric of several training runs by step, in the terminal and as an HTML page.

    The page is a single self-contained file.

    Example: t0repro plot runs/a runs/b --out runs/plot
    """
    from t0repro.reports.training_runs import curves_in_words, curves_page, read_curves

    curves = read_curves(folders, metric)
    content = json.dumps({"metric": metric, "curves": curves}, indent=1) + "\n"
    page, lines = curves_page(curves, metric), curves_in_words(curves)
    show_page("curves", page, content, out, as_json=as_json, lines=lines)


# ---- `t0repro replay`: recomputes an update that went NaN or Inf ---------------------------------


def replay(
    folder: Annotated[
        Path, typer.Argument(help="A bad_update_<step> folder that a training run wrote.")
    ],
) -> None:
    """Recompute an update that went NaN or Inf; exit code 1 if it happens again.

    Example: t0repro replay runs/t0/bad_update_1200
    """
    from t0repro.training.hooks import replay as run

    bad = run(folder)
    if bad is None:
        echo("every parameter, activation and gradient is finite")
        return
    echo(f"first: {bad}")
    raise typer.Exit(1)
