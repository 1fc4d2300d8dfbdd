"""`t0repro report`: a rank evaluation's report as JSON, Markdown and one HTML page."""

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
    label: Annotated[str, typer.Option(help="What to call the run, for instance jax.")] = "jax",
    title: Annotated[str, typer.Option(help="Heading of the report.")] = "Rank evaluation",
    step: Annotated[int | None, typer.Option(help="Step to report; the latest there.")] = None,
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
            help="Two metrics.jsonl whose losses to put side by side.",
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
        typer.Option(help="What was trained on: its prompts are not held out; repeatable."),
    ] = None,
    train_dataset: Annotated[
        list[str] | None,
        typer.Option(help="A dataset trained on, as super_glue/rte or ag_news; repeatable."),
    ] = None,
    checkpoint: Annotated[str | None, typer.Option(help="The evaluated checkpoint.")] = None,
    device: Annotated[str | None, typer.Option(help="What it was evaluated on.")] = None,
    duration: Annotated[float | None, typer.Option(help="The evaluation's seconds.")] = None,
    conversion: Annotated[
        Path | None, typer.Option(help="Text file with a conversion's result.")
    ] = None,
    note: Annotated[list[str] | None, typer.Option(help="A sentence to add; repeatable.")] = None,
    resamples: Annotated[int, typer.Option(help="Bootstrap resamples.", min=100)] = 1000,
    seed: Annotated[int, typer.Option(help="Seed of the bootstrap.")] = 0,
) -> None:
    """Write report.json, report.md and report.html of a rank evaluation.

    Example: t0repro report make runs/demo/validation_eval --out runs/demo/report
    --module-import t0repro.tasks.demo --train-mixture demo_train
    --metrics runs/demo/metrics.jsonl --other mtf=runs/mtf/validation_eval
    """
    from t0repro.reports.make_report import Beside, make_report
    from t0repro.reports.render import write_report
    from t0repro.reports.report import Bootstrap
    from t0repro.reports.training_tasks import load_prompts, training_datasets, training_tasks

    prompts = load_prompts(module_import or ())
    trained = training_tasks(train_mixture or ())
    datasets = training_datasets(trained, prompts) | set(train_dataset or ())
    other_label, other_dir = _labelled(other) if other else (None, None)
    pair = [_labelled(value) for value in losses] if losses else None
    labels = ((pair[0][0] or label), (pair[1][0] or other_label or "other")) if pair else None
    report = make_report(
        eval_dir,
        prompts,
        label=label,
        training_datasets=datasets or None,
        training_tasks=trained,
        step=step,
        title=title,
        bootstrap=Bootstrap(replicates=resamples, seed=seed),
        checkpoint=checkpoint,
        device=device,
        duration_seconds=duration,
        beside=Beside(
            other_label=other_label,
            other_eval_dir=other_dir,
            metrics=metrics,
            losses=(pair[0][1], pair[1][1]) if pair else None,
            losses_labels=labels,
            conversion=_text(conversion) if conversion else None,
            notes=tuple(note or ()),
        ),
    )
    paths = write_report(report, out)
    _print(report, paths)


_Modules = Annotated[
    list[str] | None,
    typer.Option(help="A module that registers the tasks, to group them by dataset; repeatable."),
]


@app.command("compare")
def compare_command(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="[LABEL=]A [LABEL=]B ...",
            help="Folders of rank-eval, or <split>_eval folders; all are compared with the first.",
        ),
    ],
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for compare.json, .md and .html.")
    ] = None,
    module_import: _Modules = None,
    resamples: Annotated[int, typer.Option(help="Bootstrap resamples.", min=100)] = 1000,
    seed: Annotated[int, typer.Option(help="Seed of the bootstrap.")] = 0,
) -> None:
    """Compare runs: paired bootstrap and McNemar's test per dataset, agreement, flipped examples.

    Example: t0repro report compare mtf=runs/mtf/eval jax=runs/jax/eval --out runs/compared
    """
    from t0repro.errors import UserError
    from t0repro.reports.compare_runs import compare_runs, evaluation_of
    from t0repro.reports.pages import comparison_sections, write_comparison
    from t0repro.reports.report import Bootstrap
    from t0repro.reports.terminal import print_sections
    from t0repro.reports.training_tasks import load_prompts

    if len(runs) < 2:
        raise UserError("One run alone cannot be compared.", fix="Name two folders or more.")
    prompts = load_prompts(module_import or ())
    found = [_labelled(run) for run in runs]
    named = [(label or path.resolve().name, evaluation_of(path)) for label, path in found]
    if len({label for label, _ in named}) < len(named):
        named = [(chr(ord("A") + at), folder) for at, (_, folder) in enumerate(named)]
    comparisons = compare_runs(named, prompts, Bootstrap(replicates=resamples, seed=seed))
    print_sections(comparison_sections(comparisons))
    for path in write_comparison(comparisons, out) if out else []:
        typer.echo(f"wrote {path}")


@app.command()
def history(
    eval_dir: Annotated[
        Path, typer.Argument(metavar="DIR", help="A <split>_eval folder with several steps.")
    ],
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for history.json, .md and .html.")
    ] = None,
    module_import: _Modules = None,
) -> None:
    """Show accuracy by checkpoint, a curve for each dataset.

    Example: t0repro report history runs/demo/model/validation_eval --out runs/demo/history
    """
    from t0repro.reports.compare_runs import evaluation_of
    from t0repro.reports.history import read_history
    from t0repro.reports.pages import history_sections, write_history
    from t0repro.reports.terminal import print_sections
    from t0repro.reports.training_tasks import load_prompts

    found = read_history(evaluation_of(eval_dir), load_prompts(module_import or ()))
    print_sections(history_sections(found))
    for path in write_history(found, out) if out else []:
        typer.echo(f"wrote {path}")


def _labelled(value: str) -> tuple[str | None, Path]:
    """LABEL=PATH, or a path alone."""
    label, separator, path = value.partition("=")
    return (label, Path(path)) if separator else (None, Path(value))


def _text(path: Path) -> str:
    from t0repro.errors import UserError

    if not path.is_file():
        raise UserError("There is no file with a conversion's result here.", where=str(path))
    return path.read_text(encoding="utf-8").strip()


def _print(report: Report, paths: list[Path]) -> None:
    from t0repro.reports.terminal import losses_in_words, print_report, scores_in_words

    print_report(report)
    if report.stacks:
        typer.echo("\n".join(scores_in_words(report.stacks)))
    if report.losses:
        typer.echo(losses_in_words(report.losses))
    for path in paths:
        typer.echo(f"wrote {path}")
