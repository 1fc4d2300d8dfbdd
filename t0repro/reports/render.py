"""A report as Markdown and as one self-contained HTML page, and all three files written."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from t0repro.files import write_atomically
from t0repro.reports.plots import (
    accuracy_plot,
    calibration_plot,
    generation_tip,
    loss_plot,
    prompt_tip,
)
from t0repro.reports.report import (
    GROUP_TITLES,
    DatasetResult,
    PromptResult,
    Provenance,
    Report,
    TaskCost,
)
from t0repro.reports.summary import UNANSWERABLE_KEPT
from t0repro.reports.terminal import (
    loss_cells,
    losses_in_words,
    scores_in_words,
    thinned_losses,
)

_TEMPLATES = Path(__file__).parent / "templates"


def write_report(report: Report, out: str | os.PathLike[str]) -> list[Path]:
    """Writes report.json, report.md and report.html into a folder; returns their paths.

    All three are rendered before the first is written, and each is renamed into place.
    """
    contents = {
        "report.json": report.to_json(),
        "report.md": render_markdown(report),
        "report.html": render_html(report),
    }
    paths = [Path(out) / name for name in contents]
    for path in paths:
        write_atomically(path, contents[path.name])
    return paths


def render_html(report: Report) -> str:
    """The page, with its style, script and plots inside it: it requests nothing."""
    import markupsafe

    groups = [(group, _members(report, group.group)) for group in report.groups]
    curve = report.loss_curve
    template = template_environment().get_template("report.html")
    return template.render(
        report=report,
        written=_written(report),
        counts={"datasets": _count_datasets(report), "prompts": _count_prompts(report)},
        confidence=_confidence(report),
        plots=[
            (
                group,
                markupsafe.Markup(
                    accuracy_plot(members, f"Accuracy, {group.title}", report.published)
                ),
            )
            for group, members in groups
        ],
        calibration_svg=markupsafe.Markup(calibration_plot(report.datasets, "Calibration"))
        if any(dataset.calibration for dataset in report.datasets)
        else None,
        unanswerable=_unanswerable(report),
        unanswerable_kept=UNANSWERABLE_KEPT,
        generation_tip=generation_tip,
        extras=extra_names(report),
        extra_titles=EXTRA_TITLES,
        shown_tasks=_slowest_and_longest(report),
        loss_svg=markupsafe.Markup(loss_plot(curve, "Training loss by step")) if curve else None,
        stack_lines=scores_in_words(report.stacks) if report.stacks else [],
        loss_line=losses_in_words(report.losses) if report.losses else None,
        loss_rows=[(row, loss_cells(row)) for row in thinned_losses(report.losses)]
        if report.losses
        else [],
        provenance=_provenance(report),
        method=_method(report),
        tip=prompt_tip,
        css=asset("report.css"),
        script=asset("report.js"),
    )


def template_environment():
    """Jinja over the package's templates; text is escaped."""
    import jinja2

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )


def render_markdown(report: Report) -> str:
    """The report's tables as GitHub-flavoured Markdown."""
    source = report.provenance
    parts = [
        f"# {report.title}",
        f"{source.label}, step {source.step}: rank classification of {_count_datasets(report)}"
        f" datasets under {_count_prompts(report)} prompts. Written {_written(report)}.",
        *report.notes,
        _groups_table(report),
        "## Accuracy by dataset",
        _datasets_table(report.datasets),
        "## Prompts",
        _prompts_table(report.datasets, extra_names(report)),
        *_answers_parts(report),
        *_diagnostics_parts(report),
    ]
    if report.stacks or report.losses:
        parts.append("## The two stacks")
        parts += _stacks_parts(report)
    if report.conversion:
        parts += ["## Conversion", f"```\n{report.conversion}\n```"]
    parts.append("## Where this comes from")
    parts.append("\n".join(f"- {name}: {value}" for name, value in _provenance(report)))
    if source.data:
        parts.append("\n".join(f"- Rows of {name}: {value}" for name, value in source.data.items()))
    versions = ", ".join(f"{name} {version}" for name, version in source.versions.items())
    parts += [f"Package versions: {versions}.", "## How to read it", *_method(report)]
    return "\n\n".join(parts) + "\n"


def asset(name: str):
    """A file of ours put into the page as it is."""
    import markupsafe

    return markupsafe.Markup((_TEMPLATES / name).read_text(encoding="utf-8"))


def _members(report: Report, group: str) -> list[DatasetResult]:
    return [dataset for dataset in report.datasets if dataset.group == group]


EXTRA_TITLES = {
    "target_length": "divided by target length",
    "calibrated": "calibrated by a content-free input",
}
_TASKS_SHOWN = 10


def extra_names(report: Report) -> list[str]:
    """The definitions that are reported beside T0's."""
    return list(
        dict.fromkeys(
            name for dataset in report.datasets for p in dataset.prompts for name in p.extras
        )
    )


def _slowest_and_longest(report: Report) -> list[TaskCost]:
    """The tasks that took most seconds and those with the longest inputs, each once."""
    slowest = sorted(report.tasks, key=lambda cost: -cost.seconds)[:_TASKS_SHOWN]
    longest = sorted(report.tasks, key=lambda cost: -cost.longest_input)[:_TASKS_SHOWN]
    return list(dict.fromkeys([*slowest, *longest]))


def _count_datasets(report: Report) -> int:
    """Datasets by name: one can be in two groups, by prompts trained on and by held-out ones."""
    return len({dataset.dataset for dataset in report.datasets})


def _written(report: Report) -> str:
    when = datetime.datetime.fromisoformat(report.provenance.created)
    return when.astimezone(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")


def _count_prompts(report: Report) -> int:
    return sum(len(dataset.prompts) for dataset in report.datasets)


def _confidence(report: Report) -> str:
    return f"{100 * report.bootstrap.confidence:g}%"


def _provenance(report: Report) -> list[tuple[str, str]]:
    source = report.provenance
    seconds = source.duration_seconds
    return [
        ("Run", source.label),
        ("Checkpoint", source.checkpoint or "not recorded"),
        ("Checkpoint's hash", source.checkpoint_hash or "not recorded"),
        ("Step", str(source.step)),
        ("Evaluation", source.eval_dir),
        ("Device", source.device or "not recorded"),
        ("Duration", f"{seconds:.1f} s" if seconds is not None else "not recorded"),
        ("Energy", _energy(source)),
        ("Templates' hash", source.templates_hash or "not recorded"),
        ("Rendered data's hash", source.data_revision or "not recorded"),
        ("Code", f"git {source.git_commit}" if source.git_commit else "not a git checkout"),
        ("Report written", _written(report)),
    ]


def _energy(source: Provenance) -> str:
    if source.energy_joules is None:
        return "the device does not tell"
    by = f", counted by {source.energy_source}" if source.energy_source else ""
    return f"{source.energy_joules:.0f} J{by}"


def _unanswerable(report: Report) -> list[tuple[DatasetResult, PromptResult]]:
    """The prompts with examples whose answer is none of the choices."""
    return [
        (dataset, prompt)
        for dataset in report.datasets
        for prompt in dataset.prompts
        if prompt.unanswerable
    ]


def _method(report: Report) -> list[str]:
    """What the figures mean, in sentences."""
    bootstrap = report.bootstrap
    return [
        "A prediction is the answer choice with the highest log-likelihood, summed over its tokens"
        " and EOS; the first choice wins a tie, any right answer counts where there are several,"
        " and an example whose answer is none of its choices (the column not a choice) counts as"
        " wrong.",
        f"Intervals are {_confidence(report)} percentile intervals of {bootstrap.replicates}"
        f" bootstrap resamples of the examples (seed {bootstrap.seed}), the same resample for all"
        " prompts of a dataset; prompts are held fixed. An interval of a perfect or a constant"
        " result has no width.",
        "Clearly above chance means that the interval of the mean over prompts begins above chance,"
        " the mean of one over the number of choices. Majority is the accuracy of always"
        " answering with the choice position that is right most often.",
    ]


# Markdown ----------------------------------------------------------------------------------------


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, the first column to the left."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _range(low: float, high: float) -> str:
    return f"{low:.1f} to {high:.1f}"


def _groups_table(report: Report) -> str:
    header = ["group", "datasets", "prompts", "mean", f"{_confidence(report)} interval"]
    header += ["chance", "majority", "above chance"]
    rows = [
        [
            group.title,
            str(group.datasets),
            str(group.prompts),
            f"{group.mean:.1f}",
            _range(group.interval.low, group.interval.high),
            f"{group.chance:.1f}",
            f"{group.majority:.1f}",
            "clearly" if group.above_chance else "not clearly",
        ]
        for group in report.groups
    ]
    return markdown_table(header, rows)


def _datasets_table(datasets: Sequence[DatasetResult]) -> str:
    header = ["dataset", "group", "prompts", "examples", "mean", "interval", "s.e.", "median"]
    header += ["quartiles", "range", "chance", "majority", "above chance"]
    rows = [
        [
            dataset.dataset,
            GROUP_TITLES[dataset.group],
            str(len(dataset.prompts)),
            str(dataset.examples),
            f"{dataset.accuracy.mean:.1f}",
            _range(dataset.mean_interval.low, dataset.mean_interval.high),
            f"{dataset.standard_error:.2f}",
            f"{dataset.accuracy.median:.1f}",
            _range(dataset.accuracy.lower_quartile, dataset.accuracy.upper_quartile),
            _range(dataset.accuracy.minimum, dataset.accuracy.maximum),
            f"{dataset.chance:.1f}",
            f"{dataset.majority:.1f}",
            "clearly" if dataset.above_chance else "not clearly",
        ]
        for dataset in datasets
    ]
    return markdown_table(header, rows)


def _prompts_table(datasets: Sequence[DatasetResult], extras: Sequence[str]) -> str:
    header = ["dataset", "prompt", "examples", "accuracy", "interval", "chance", "ties"]
    header += ["not a choice", *(EXTRA_TITLES.get(name, name) for name in extras)]
    rows = [
        [
            dataset.dataset,
            prompt.template_name,
            str(prompt.examples),
            f"{prompt.accuracy:.1f}",
            _range(prompt.interval.low, prompt.interval.high),
            f"{prompt.chance:.1f}",
            str(prompt.ties),
            str(prompt.unanswerable),
            *(f"{prompt.extras[n]:.1f}" if n in prompt.extras else "" for n in extras),
        ]
        for dataset in datasets
        for prompt in dataset.prompts
    ]
    return markdown_table(header, rows)


def _diagnostics_parts(report: Report) -> list[str]:
    """Calibration, flips between prompts, published figures and the tasks' cost."""
    parts = [
        "## Sureness and agreement of prompts",
        markdown_table(
            ["dataset", "calibration error", "examples that prompts disagree on"],
            [
                [
                    dataset.dataset,
                    f"{dataset.calibration.error:.1f}" if dataset.calibration else "",
                    f"{dataset.flipped:.1f}%" if len(dataset.prompts) > 1 else "one prompt",
                ]
                for dataset in report.datasets
            ],
        ),
    ]
    if report.published:
        rows = [
            [p.dataset, p.model, p.statistic, f"{p.value:g}", p.source] for p in report.published
        ]
        header = ["dataset", "model", "statistic", "percent", "source"]
        parts += ["## Published figures", markdown_table(header, rows)]
    if report.tasks:
        rows = [
            [c.task, str(c.pairs), str(c.tokens), str(c.longest_input), f"{c.seconds:.1f}"]
            for c in _slowest_and_longest(report)
        ]
        header = ["task", "pairs", "tokens", "longest input", "seconds"]
        parts += ["## Slowest and longest tasks", markdown_table(header, rows)]
    return parts


def _answers_parts(report: Report) -> list[str]:
    """Examples whose answer is none of the choices, and what was decoded."""
    parts = []
    if found := _unanswerable(report):
        header = ["dataset", "prompt", "not a choice", "the first examples"]
        rows = [
            [
                dataset.dataset,
                prompt.template_name,
                f"{prompt.unanswerable} of {prompt.examples}",
                ", ".join(str(entry.example) for entry in prompt.unanswerable_examples),
            ]
            for dataset, prompt in found
        ]
        parts += ["## Answers that are none of the choices", markdown_table(header, rows)]
    if report.generation:
        header = ["dataset", "prompt", "examples", "metrics", "first output"]
        rows = [
            [
                found.dataset,
                found.template_name,
                str(found.examples),
                ", ".join(f"{name} {value:.2f}" for name, value in found.metrics.items()),
                (found.first_output or "")[:80],
            ]
            for found in report.generation
        ]
        parts += ["## Decoded", markdown_table(header, rows)]
    return parts


def _stacks_parts(report: Report) -> list[str]:
    parts: list[str] = []
    if stacks := report.stacks:
        header = ["task", "pairs", "largest difference", "per target token", "flipped"]
        header += [f"accuracy {stacks.label_a}", f"accuracy {stacks.label_b}"]
        rows = [
            [
                task.task,
                str(task.pairs),
                f"{task.max_difference:.1e}",
                f"{task.max_difference_per_token:.1e}",
                str(task.flipped),
                f"{task.metrics_a['accuracy']:.1f}",
                f"{task.metrics_b['accuracy']:.1f}",
            ]
            for task in stacks.tasks
        ]
        parts += [*scores_in_words(stacks), markdown_table(header, rows)]
    if losses := report.losses:
        header = ["step", losses.label_a, losses.label_b, "relative difference"]
        rows = [loss_cells(row) for row in thinned_losses(losses)]
        parts += [losses_in_words(losses), markdown_table(header, rows)]
    return parts
