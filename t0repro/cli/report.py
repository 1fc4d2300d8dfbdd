"""`t0repro report`: writes a rank evaluation's report as JSON, Markdown and one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from t0repro.reports.report import Report

app = typer.Typer(
    name="report",
    help="Write and read reports of rank evaluations.",
    no_args_is_help=True,
)


@app.callback()
def _group() -> None:
    """Write and read reports of rank evaluations."""


@app.command()
def make(
    eval_dir: Annotated[Path, typer.Argument(help="The <split>_eval folder to report on.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for the three files.")],
    label: Annotated[str, typer.Option(help="Name of the run, for instance jax.")] = "jax",
    title: Annotated[str, typer.Option(help="Heading of the report.")] = "Rank evaluation",
    step: Annotated[int | None, typer.Option(help="Step to report; the latest by default.")] = None,
    other: Annotated[
        str | None,
        typer.Option(metavar="LABEL=EVAL_DIR", help="A second run to compare the scores with."),
    ] = None,
    metrics: Annotated[
        Path | None, typer.Option(help="metrics.jsonl of the training, for its loss curve.")
    ] = None,
    losses: Annotated[
        tuple[str, str] | None,
        typer.Option(
            metavar="[LABEL=]A.jsonl [LABEL=]B.jsonl",
            help="Two metrics.jsonl files whose losses to compare.",
        ),
    ] = None,
    module_import: Annotated[
        list[str] | None,
        typer.Option(
            help="A module that registers the tasks, for prompts and answers; repeatable."
        ),
    ] = None,
    train_mixture: Annotated[
        list[str] | None,
        typer.Option(help="A mixture trained on, whose prompts are not held out; repeatable."),
    ] = None,
    train_dataset: Annotated[
        list[str] | None,
        typer.Option(help="A dataset that was trained on, such as super_glue/rte; repeatable."),
    ] = None,
    checkpoint: Annotated[str | None, typer.Option(help="The evaluated checkpoint.")] = None,
    device: Annotated[str | None, typer.Option(help="The device that it was evaluated on.")] = None,
    duration: Annotated[
        float | None, typer.Option(help="How long the evaluation took, in seconds.")
    ] = None,
    conversion: Annotated[
        Path | None, typer.Option(help="Text file with the result of a conversion.")
    ] = None,
    note: Annotated[list[str] | None, typer.Option(help="A sentence to add; repeatable.")] = None,
    resamples: Annotated[int, typer.Option(help="Bootstrap resamples.", min=100)] = 1000,
    seed: Annotated[int, typer.Option(help="Seed for the bootstrap.")] = 0,
) -> None:
    """Write report.json, report.md and report.html for a rank evaluation.

    Example: t0repro report make runs/demo/validation_eval --out runs/demo/report
    --module_import t0repro.tasks.demo --train_mixture demo_train
    --metrics runs/demo/metrics.jsonl --other mtf=runs/mtf/validation_eval
    """
    from t0repro.locks import folder_lock
    from t0repro.reports.bootstrap import Bootstrap
    from t0repro.reports.make_report import Beside, ReportOptions, make_report
    from t0repro.reports.prompts import load_prompts, training_datasets, training_tasks
    from t0repro.reports.run import Run, labelled
    from t0repro.reports.write import write_report

    prompts = load_prompts(module_import or ())
    trained = training_tasks(train_mixture or ())
    datasets = training_datasets(trained, prompts) | set(train_dataset or ())
    options = ReportOptions(
        title=title,
        bootstrap=Bootstrap(replicates=resamples, seed=seed),
        training_datasets=datasets or None,
        training_tasks=trained,
        checkpoint=checkpoint,
        device=device,
        duration_seconds=duration,
        notes=tuple(note or ()),
    )
    other_label, other_path = labelled(other) if other else (None, None)
    pair = [labelled(value) for value in losses] if losses else None
    beside = Beside(
        other=Run(other_label or "other", other_path) if other_path else None,
        metrics=metrics,
        losses=(
            (pair[0][0] or label, pair[0][1]),
            (pair[1][0] or other_label or "other", pair[1][1]),
        )
        if pair
        else None,
        conversion=_text(conversion) if conversion else None,
    )
    report = make_report(Run(label, eval_dir, step), prompts, options, beside)
    with folder_lock(out, "writing a report"):
        paths = write_report(report, out)
    _print(report, paths)


@app.command()
def history(
    eval_dir: Annotated[
        Path, typer.Argument(metavar="DIR", help="A <split>_eval folder with several steps.")
    ],
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for history.json, .md and .html.")
    ] = None,
    module_import: Annotated[
        list[str] | None,
        typer.Option(
            help="A module that registers the tasks, to group them by dataset; repeatable."
        ),
    ] = None,
) -> None:
    """Show accuracy by checkpoint, one curve per dataset.

    Example: t0repro report history runs/demo/model/validation_eval --out runs/demo/history
    """
    from t0repro.locks import folder_lock
    from t0repro.reports.comparison_page import history_page
    from t0repro.reports.history import read_history
    from t0repro.reports.prompts import load_prompts
    from t0repro.reports.run import find_evaluation
    from t0repro.reports.terminal import print_page
    from t0repro.reports.write import write_page

    folder, _ = find_evaluation(eval_dir)
    found = read_history(folder, load_prompts(module_import or ()))
    page = history_page(found)
    print_page(page)
    if out:
        with folder_lock(out, "writing a history"):
            paths = write_page("history", page, found.to_json(), out)
        for path in paths:
            typer.echo(f"wrote {path}")


def _text(path: Path) -> str:
    from t0repro.errors import UserError

    if not path.is_file():
        raise UserError("There is no file with the result of a conversion here.", where=str(path))
    return path.read_text(encoding="utf-8").strip()


def _print(report: Report, paths: list[Path]) -> None:
    from t0repro.reports.comparison_page import losses_in_words, scores_in_words
    from t0repro.reports.report_page import brief_page
    from t0repro.reports.terminal import print_page

    print_page(brief_page(report))
    if report.stacks:
        typer.echo("\n".join(scores_in_words(report.stacks)))
    if report.losses:
        typer.echo(losses_in_words(report.losses))
    for path in paths:
        typer.echo(f"wrote {path}")
