"""`t0repro report`, `compare`, `runs`, `plot` and `replay`: what runs gave, as files and pages."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import typer

from t0repro.cli.commands import App
from t0repro.cli.groups import expand_groups
from t0repro.cli.options import (
    AsJson,
    BootstrapSeed,
    Modules,
    ModulesOrT0,
    ReportHead,
    modules_or_t0,
)
from t0repro.cli.paths import output, source
from t0repro.cli.results import echo, print_json, print_written, show_page
from t0repro.errors import UserError
from t0repro.lm_eval.results import import_results
from t0repro.reports.comparison_page import history_page, losses_in_words, scores_in_words
from t0repro.reports.history import read_history
from t0repro.reports.make_report import ExtraContent, make_report
from t0repro.reports.page_terminal import print_page
from t0repro.reports.prompts import load_prompts, prompts_of_evaluations
from t0repro.reports.provenance import default_label, describe_unfinished
from t0repro.reports.report import Report, load_report
from t0repro.reports.report_files import write_report
from t0repro.reports.report_page import brief_page
from t0repro.reports.run import Run, find_evaluation, split_labeled_path
from t0repro.reports.sharing import share_report
from t0repro.runs.verify import detection_probability, not_verified
from t0repro.runs.verify import verify as verify_report
from t0repro.storage import lock_folder
from t0repro.tasks.overlap import read_overlap
from t0repro.tasks.registry import add_cache_dirs

app = App(
    "report",
    help="Write and read reports of rank evaluations.",
    example="t0repro report make runs/demo/model/validation_eval --out runs/demo/report",
)

_Report = Annotated[
    Path, typer.Argument(metavar="REPORT", help="A report.json, or the folder that holds it.")
]


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
@expand_groups
def make(
    eval_dir: Annotated[Path, typer.Argument(help="The evaluation's folder, or the one above.")],
    out: Annotated[Path, typer.Option(callback=output, help="Folder for the three files.")],
    head: ReportHead,
    shown: ContentOptions,
    recorded: RecordOptions,
    step: Annotated[
        int | None, typer.Option(help="Step to report.", show_default="the latest")
    ] = None,
    module_import: Modules = None,
    source: Annotated[
        Literal["lm-eval"] | None,
        typer.Option(
            "--from",
            help="EVAL_DIR holds lm-evaluation-harness's results (lm_eval --log_samples"
            " --output_path); its scores are written beside the report.",
        ),
    ] = None,
    seed: BootstrapSeed = 0,
    as_json: AsJson = False,
) -> None:
    r"""Write report.json, report.md and report.html for a rank evaluation.

    Example:
      t0repro report make runs/demo/model/validation_eval \
        --out runs/demo/report --module_import t0repro.tasks.demo \
        --train_mixture demo_train --metrics runs/demo/model/metrics.jsonl \
        --other mtf=runs/mtf/validation_eval

    For another model:
      t0repro report make RESULTS --from lm-eval --out runs/other/report \
        --module_import t0repro.tasks.t0
    """
    echo(f"reading {eval_dir} ...", err=True)

    left_out: Mapping[str, str] = {}
    if any(out.glob("scores/step_*.json")):
        raise UserError(
            "rank-eval writes its own report into this folder.",
            where=f"--out {out}",
            fix="Name another folder, or start rank-eval again with the options that differ.",
        )
    if source is not None:
        eval_dir, left_out = import_results(eval_dir, out)
        for task, why in left_out.items():
            echo(f"left out {task}: {why}", err=True)
    else:
        eval_dir, reported = find_evaluation(eval_dir)
        step = reported if step is None else step
    # A mixture that was trained on is T0's unless another module is named.
    modules = modules_or_t0(module_import) if head.train_mixture else module_import or ()
    prompts = prompts_of_evaluations([eval_dir], modules)
    reasons = (f"Left out {task}: {why}." for task, why in left_out.items())
    options = head.report_options(
        prompts,
        recorded.train_dataset or (),
        seed,
        checkpoint=recorded.checkpoint,
        device=recorded.device,
        duration_seconds=recorded.duration,
        notes=(*(shown.note or ()), *reasons),
        overlap=read_overlap(shown.overlap) if shown.overlap else None,
    )
    label = head.label or default_label(eval_dir, step, recorded.checkpoint)
    report = make_report(Run(label, eval_dir, step), prompts, options, _extra_content(label, shown))
    # Two commands that write into one folder would mix their files.
    with lock_folder(out, "writing a report"):
        replaces = (out / "report.json").exists()
        paths = write_report(report, out)
    if replaces:
        echo(f"note: this replaced the report that was in {out}", err=True)
    if as_json:
        print_json(report)
    else:
        _print(report)
    print_written(paths, as_json=as_json)


@app.command()
def verify(
    report: _Report,
    sample: Annotated[
        int, typer.Option(min=1, help="Number of random examples to score again.")
    ] = 20,
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="Seed of the sample.", show_default="another sample each time"),
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
    r"""Recompute a report's figures, and a sample of its scores from the checkpoint.

    Figures, files of scores, prompts and rows are compared in full, by their values or hashes;
    random examples are rendered and scored again. Ends with what was not verified. Exits with 1 if
    anything differs.

    Example:
      t0repro report verify runs/demo/rank_eval --sample 20 \
        --module_import t0repro.tasks.demo
    """
    echo("importing JAX and the tasks ...", err=True)
    prompts = load_prompts(modules_or_t0(module_import))
    if cache_dir is not None:
        add_cache_dirs([cache_dir], "--cache_dir")
    findings, differ, cells = [], 0, 0
    for found in verify_report(report, prompts, sample=sample, seed=seed, checkpoint=checkpoint):
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
def share(
    report: _Report,
    model: Annotated[
        str, typer.Option(metavar="OWNER/NAME", help="The evaluated model's repository.")
    ],
    out: Annotated[Path, typer.Option(callback=output, help="Folder for the files to upload.")],
) -> None:
    r"""Write a report's figures as others collect them.

    For Every Eval Ever (data/), for the Hub's model repository (.eval_results/), and as a section
    of a model card (model_card.md). Nothing is uploaded.

    Example:
      t0repro report share runs/t0_3b_eval --model bigscience/T0_3B \
        --out runs/t0_3b_eval/share
    """
    with lock_folder(out, "sharing a report"):
        paths = share_report(load_report(report), model, out)
    print_written(paths, as_json=False)


@app.command()
def history(
    eval_dir: Annotated[
        Path, typer.Argument(metavar="DIR", help="A <split>_eval folder with several steps.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(callback=output, help="Folder for history.json, .md and .html."),
    ] = None,
    module_import: Modules = None,
    as_json: AsJson = False,
) -> None:
    r"""Show accuracy by checkpoint, one curve per dataset.

    Tasks are grouped by dataset, as in the report beside the evaluation; without one, give
    --module_import.

    Example:
      t0repro report history runs/demo/model/validation_eval \
        --out runs/demo/history
    """
    # Any step will do, because a history includes all steps.
    folder, _ = find_evaluation(eval_dir)
    prompts = prompts_of_evaluations([folder], module_import or ())
    found = read_history(folder, prompts)
    if unfinished := describe_unfinished(folder, max(found.steps)):
        echo(f"note: {unfinished}", err=True)
    show_page("history", history_page(found), found, out, as_json=as_json)


def _extra_content(label: str, shown: ContentOptions) -> ExtraContent:
    """What the report shows besides its run's scores; unlabeled losses get the runs' labels."""
    other_label, other_path = split_labeled_path(shown.other) if shown.other else (None, None)
    compared = None
    if shown.losses:
        (label_a, path_a), (label_b, path_b) = map(split_labeled_path, shown.losses)
        # Losses without labels are assumed to belong to the compared runs.
        compared = ((label_a or label, path_a), (label_b or other_label or "other", path_b))
    return ExtraContent(
        other=Run(other_label or "other", other_path) if other_path else None,
        metrics=shown.metrics,
        losses=compared,
        conversion=_text(shown.conversion) if shown.conversion else None,
    )


def _text(path: Path) -> str:
    if not path.is_file():
        raise UserError(
            "There is no file with the result of a conversion here.",
            where=f"--conversion {path}",
            fix="Name one, such as `t0repro checkpoint diff A B > conversion.txt` writes.",
        )
    return path.read_text(encoding="utf-8").strip()


def _print(report: Report) -> None:
    print_page(brief_page(report))
    if report.stacks:
        typer.echo("\n".join(scores_in_words(report.stacks)))
    if report.losses:
        typer.echo(losses_in_words(report.losses))
