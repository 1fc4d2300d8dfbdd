"""What the page of a report says, section by section."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

from t0repro.reports.accuracy_plot import accuracy_plot, prompt_tip, published_letters
from t0repro.reports.comparison_page import flips_section, losses_section, scores_section
from t0repro.reports.dataset_result import UNANSWERABLE_KEPT, DatasetResult, PromptResult
from t0repro.reports.generation_result import GenerationResult
from t0repro.reports.group_result import GROUP_TITLES, GroupResult
from t0repro.reports.page import Card, Cell, Column, Page, Section
from t0repro.reports.plots import calibration_plot, loss_plot
from t0repro.reports.provenance_section import provenance_sections
from t0repro.reports.report import Report
from t0repro.reports.task_cost import TaskCost
from t0repro.words import counted, shortened

EXTRA_TITLES = {
    "target_length": "divided by target length",
    "calibrated": "calibrated by a content-free input",
}
_TASKS_SHOWN = 10
_INPUT_SHOWN = 240

Rows = tuple[tuple[str | Cell, ...], ...]


def report_page(report: Report) -> Page:
    """The report's page: headline figures first, where they come from and what they mean last."""
    return Page(
        title=report.title,
        lead=_lead(report),
        notes=report.notes,
        cards=tuple(_card(report, group) for group in report.groups),
        sections=(
            *_accuracy_sections(report),
            _prompts_section(report),
            *_unanswerable_sections(report),
            *_generation_sections(report),
            *_diagnostic_sections(report),
            *_published_sections(report),
            *_cost_sections(report),
            *_training_sections(report),
            *provenance_sections(report.provenance, written(report)),
            Section("How to read it", note="\n".join(_method(report))),
        ),
    )


def brief_page(report: Report) -> Page:
    """The report in brief, for a terminal: datasets and groups, and what was decoded."""
    rows: list[tuple[str | Cell, ...]] = []
    bold = set()
    for group in report.groups:
        rows += [_brief_row(d) for d in report.datasets if d.group == group.group]
        bold.add(len(rows))
        rows.append(_brief_row(group))
    header = (
        Column("dataset"), "prompts", "examples", "mean", "interval", "median", "chance",
        "majority", Column("above chance"),
    )  # fmt: skip
    title = f"{report.title}: {report.provenance.label}, step {report.provenance.step}"
    ranked = Section(title, header=header, rows=tuple(rows), bold=frozenset(bold))
    decoded = Section(
        "Decoded",
        header=(Column("dataset"), "examples", Column("prompt"), Column("metrics")),
        rows=tuple(
            (
                result.dataset,
                str(result.examples),
                result.template_name,
                ", ".join(f"{name} {value:.2f}" for name, value in result.metrics.items()),
            )
            for result in report.generation
        ),
    )
    return Page(report.title, (ranked, decoded))


def _brief_row(result: DatasetResult | GroupResult) -> tuple[str | Cell, ...]:
    if isinstance(result, GroupResult):
        interval, mean = result.interval, result.mean
        name, prompts, examples, median = result.title, result.prompts, "", ""
    else:
        interval, mean = result.mean_interval, result.accuracy.mean
        name, prompts, examples = result.dataset, len(result.prompts), str(result.examples)
        median = f"{result.accuracy.median:.1f}"
    return (
        name,
        str(prompts),
        examples,
        f"{mean:.1f}",
        f"{interval.low:.1f}-{interval.high:.1f}",
        median,
        f"{result.chance:.1f}",
        f"{result.majority:.1f}",
        verdict(result),
    )


def written(report: Report) -> str:
    """When the report was made, in UTC."""
    when = datetime.datetime.fromisoformat(report.provenance.created)
    return when.astimezone(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")


def verdict(result: DatasetResult | GroupResult) -> Cell:
    """What the interval of the mean lies clearly above."""
    return Cell("clearly", tone="good") if result.above_chance else Cell("not clearly", tone="bad")


def _lead(report: Report) -> str:
    # A dataset can be in two groups, with prompts trained on and with held-out ones
    datasets = len({dataset.dataset for dataset in report.datasets})
    prompts = sum(len(dataset.prompts) for dataset in report.datasets)
    decoded = f", {counted(len(report.generation), 'prompt')} decoded" if report.generation else ""
    return (
        f"{report.provenance.label}, step {report.provenance.step}: rank classification of"
        f" {counted(datasets, 'dataset')} under {counted(prompts, 'prompt')}{decoded}."
        f" Written {written(report)}."
    )


def _card(report: Report, group: GroupResult) -> Card:
    return Card(
        title=group.title,
        figure=f"{group.mean:.1f}%",
        lines=(
            f"{_confidence(report)} interval {_range(group.interval.low, group.interval.high)};"
            f" chance {group.chance:.1f}, majority class {group.majority:.1f}",
            f"{counted(group.datasets, 'dataset')}, {counted(group.prompts, 'prompt')}",
        ),
        verdict=f"{verdict(group).text} above chance",
        tone=verdict(group).tone,
    )


# Accuracy ----------------------------------------------------------------------------------------


def _accuracy_sections(report: Report) -> list[Section]:
    plots = []
    for group in report.groups:
        members = [dataset for dataset in report.datasets if dataset.group == group.group]
        plot = accuracy_plot(members, f"Accuracy, {group.title}", report.published)
        plots.append(Section(group.title, plot=plot, level=3, legend=_legend(report)))
    if not plots:
        return []
    header = (
        Column("dataset"), Column("group"), "prompts", "examples", "mean", "interval", "s.e.",
        "chance", "majority", Column("above chance"), "median", "quartiles", "range",
    )  # fmt: skip
    rows = tuple(_dataset_row(dataset) for dataset in report.datasets)
    table = Section("By dataset", header=header, rows=rows, level=3)
    return [Section("Accuracy by dataset"), *plots, table]


def _legend(report: Report) -> tuple[tuple[str, str], ...]:
    entries = [
        ("dot", "a prompt (hover for its text)"),
        ("box", "quartiles, median and range over prompts"),
        ("mean", f"mean over prompts and its {_confidence(report)} interval"),
        ("line", "chance"),
        ("majority", "majority class"),
    ]
    letters = published_letters(report.published)
    entries += [
        ("letter", f"{letter}: {model}, {statistic}")
        for (model, statistic), letter in letters.items()
    ]
    return tuple(entries)


def _dataset_row(dataset: DatasetResult) -> tuple[str | Cell, ...]:
    spread = dataset.accuracy
    return (
        dataset.dataset,
        GROUP_TITLES[dataset.group],
        str(len(dataset.prompts)),
        str(dataset.examples),
        _percent(spread.mean),
        _interval(dataset.mean_interval.low, dataset.mean_interval.high),
        f"{dataset.standard_error:.2f}",
        _percent(dataset.chance),
        _percent(dataset.majority),
        verdict(dataset),
        _percent(spread.median),
        _interval(spread.lower_quartile, spread.upper_quartile),
        _interval(spread.minimum, spread.maximum),
    )


def _prompts_section(report: Report) -> Section:
    extras = _extra_names(report)
    header = (
        Column("dataset"), Column("prompt"), "examples", "accuracy", "interval", "s.e.", "chance",
        "majority", "ties", "not a choice",
        *(EXTRA_TITLES.get(name, name) for name in extras),
    )  # fmt: skip
    rows = tuple(
        (
            dataset.dataset,
            Cell(prompt.template_name, tip=prompt_tip(prompt)),
            str(prompt.examples),
            _percent(prompt.accuracy),
            _interval(prompt.interval.low, prompt.interval.high),
            f"{prompt.standard_error:.2f}",
            _percent(prompt.chance),
            _percent(prompt.majority),
            str(prompt.ties),
            str(prompt.unanswerable),
            *(_percent(prompt.extras[name]) if name in prompt.extras else "" for name in extras),
        )
        for dataset, prompt in _prompts(report)
    )
    return Section("Prompts", header=header, rows=rows)


def _extra_names(report: Report) -> list[str]:
    """The definitions of accuracy that are reported beside T0's."""
    return list(dict.fromkeys(name for _, prompt in _prompts(report) for name in prompt.extras))


def _prompts(report: Report) -> list[tuple[DatasetResult, PromptResult]]:
    return [(dataset, prompt) for dataset in report.datasets for prompt in dataset.prompts]


# Answers, outputs and diagnostics ----------------------------------------------------------------


def _unanswerable_sections(report: Report) -> list[Section]:
    """The prompts with examples whose answer is none of the choices."""
    sections = [
        Section(
            f"{dataset.dataset}, {prompt.template_name}: {prompt.unanswerable} of"
            f" {counted(prompt.examples, 'example')}",
            header=("example", Column("input", wide=True)),
            rows=tuple(
                (str(entry.example), shortened(entry.first_input or "", _INPUT_SHOWN))
                for entry in prompt.unanswerable_examples
            ),
            level=3,
            folded=True,
        )
        for dataset, prompt in _prompts(report)
        if prompt.unanswerable
    ]
    note = (
        "They count as wrong, as with T0. Counts are exact; of each prompt the first"
        f" {UNANSWERABLE_KEPT} examples are listed."
    )
    return [Section("Answers that are none of the choices", note=note), *sections] * bool(sections)


def _generation_sections(report: Report) -> list[Section]:
    if not report.generation:
        return []
    header = (
        Column("dataset"), Column("prompt"), Column("group"), "examples",
        Column("metrics", wide=True), Column("first output", wide=True),
        Column("its target", wide=True),
    )  # fmt: skip
    rows = tuple(
        (
            result.dataset,
            Cell(result.template_name, tip=_generation_tip(result)),
            GROUP_TITLES[result.group],
            str(result.examples),
            ", ".join(f"{name} {value:.2f}" for name, value in result.metrics.items()),
            shortened(result.first_output or "", 160),
            shortened(result.first_target or "", 160),
        )
        for result in report.generation
    )
    note = (
        "Prompts without answer choices, decoded greedily and judged by their templates' metrics"
        " over all examples; no interval is given, since most of these metrics are not means over"
        " examples."
    )
    return [Section("Decoded", note=note, header=header, rows=rows)]


def _generation_tip(result: GenerationResult) -> str:
    lines = [shortened(result.prompt, 700)] if result.prompt else []
    if result.first_input:
        lines.append("First input: " + shortened(result.first_input, 300))
    return "\n\n".join(lines) or result.task


def _diagnostic_sections(report: Report) -> list[Section]:
    """Calibration, agreement between prompts, and which answers are taken for which."""
    if not any(dataset.calibration for dataset in report.datasets):
        return []
    agreement = tuple(
        (
            dataset.dataset,
            _percent(dataset.calibration.error) if dataset.calibration else "",
            Cell(f"{dataset.flipped:.1f}%", dataset.flipped)
            if len(dataset.prompts) > 1
            else "one prompt",
        )
        for dataset in report.datasets
    )
    return [
        Section(
            "Calibration and prompt agreement",
            note="Confidence is the predicted choice's share of the probability of all choices. On"
            " the dashed line, a confidence of 80% is right in 80% of the cases.",
            plot=calibration_plot(report.datasets, "Calibration"),
            header=(
                Column("dataset"),
                "calibration error",
                "examples that prompts disagree on",
            ),  # fmt: skip
            rows=agreement,
        ),
        *_flip_sections(report),
        *_confusion_sections(report),
    ]


def _flip_sections(report: Report) -> list[Section]:
    header = (
        Column("dataset"), "example", "right under", Column("first prompt's input", wide=True),
    )  # fmt: skip
    rows = tuple(
        (
            dataset.dataset,
            str(flip.example),
            f"{flip.right} of {counted(flip.prompts, 'prompt')}",
            shortened(flip.first_input or "", _INPUT_SHOWN),
        )
        for dataset in report.datasets
        for flip in dataset.flips
    )
    title = "Examples that prompts disagree on most"
    return [Section(title, header=header, rows=rows, level=3)] * bool(rows)


def _confusion_sections(report: Report) -> list[Section]:
    sections = [
        Section(
            f"{dataset.dataset} ({counted(found.prompts, 'prompt')})",
            header=(Column("answer"), *found.labels),
            rows=tuple(
                (label, *map(str, counts))
                for label, counts in zip(found.labels, found.counts, strict=True)
            ),
            level=3,
            folded=True,
        )
        for dataset in report.datasets
        if (found := dataset.confusion)
    ]
    note = (
        "Rows are right answers, columns predictions, summed over the prompts of a dataset that"
        " have its usual number of fixed choices, in the first prompt's wording."
    )
    return [Section("Answers and predictions", note=note), *sections] * bool(sections)


# Published figures, cost, training ---------------------------------------------------------------


def _published_sections(report: Report) -> list[Section]:
    letters = published_letters(report.published)
    header = (
        Column("dataset"), Column("letter"), Column("model"), Column("statistic"), "percent",
        Column("source", wide=True),
    )  # fmt: skip
    rows = tuple(
        (
            figure.dataset,
            letters.get((figure.model, figure.statistic), ""),
            figure.model,
            f"{figure.statistic} over prompts",
            Cell(f"{figure.value:g}", figure.value),
            figure.source,
        )
        for figure in report.published
    )
    return [Section("Published figures", header=header, rows=rows)] * bool(rows)


def _cost_sections(report: Report) -> list[Section]:
    """The tasks that took most seconds and those with the longest inputs, each once."""
    slowest = sorted(report.tasks, key=lambda cost: -cost.seconds)[:_TASKS_SHOWN]
    longest = sorted(report.tasks, key=lambda cost: -cost.longest_input)[:_TASKS_SHOWN]
    shown: Sequence[TaskCost] = list(dict.fromkeys([*slowest, *longest]))
    header = (Column("task"), "pairs", "tokens", "longest input", "seconds")
    rows = tuple(
        (
            cost.task,
            str(cost.pairs),
            str(cost.tokens),
            str(cost.longest_input),
            Cell(f"{cost.seconds:.1f}", cost.seconds),
        )
        for cost in shown
    )
    return [Section("Slowest and longest tasks", header=header, rows=rows)] * bool(rows)


def _training_sections(report: Report) -> list[Section]:
    """The training's losses, the other stack's scores and losses, and a conversion's result."""
    sections = []
    if curve := report.loss_curve:
        total = counted(curve.total_steps, "step")
        sections.append(
            Section(
                "Training loss",
                note=f"{curve.label}, {total}.",
                plot=loss_plot(curve, "Training loss by step"),
            )
        )
    if report.stacks or report.losses:
        sections.append(Section("The two stacks"))
    if report.stacks:
        title = "Scores of the same checkpoint"
        sections += [scores_section(report.stacks, title), *flips_section(report.stacks)]
    if report.losses:
        title = "Losses from one checkpoint and the same gin parameters"
        sections.append(losses_section(report.losses, title, level=3))
    if report.conversion:
        sections.append(Section("Conversion", text=report.conversion))
    return sections


# Wording -----------------------------------------------------------------------------------------


def _method(report: Report) -> list[str]:
    """What the figures mean, in sentences."""
    bootstrap = report.bootstrap
    return [
        "A prediction is the answer choice with the highest log-likelihood, summed over its tokens"
        " and EOS. The first choice wins a tie; any right answer counts where there are several;"
        " an example whose answer is none of its choices (the column not a choice) counts as"
        " wrong.",
        f"Intervals are {_confidence(report)} percentile intervals of {bootstrap.replicates:,}"
        f" bootstrap resamples of the examples (seed {bootstrap.seed}), the same resample for all"
        " prompts of a dataset; prompts are held fixed. An interval of a perfect or a constant"
        " result has no width.",
        "Clearly above chance means that the interval of the mean over prompts begins above chance,"
        " the mean of one over the number of choices. Majority is the accuracy of always"
        " answering with the choice position that is right most often.",
    ]


def _confidence(report: Report) -> str:
    return f"{100 * report.bootstrap.confidence:g}%"


def _percent(value: float) -> Cell:
    return Cell(f"{value:.1f}", value)


def _range(low: float, high: float) -> str:
    return f"{low:.1f} to {high:.1f}"


def _interval(low: float, high: float) -> Cell:
    return Cell(f"{low:.1f}\u2013{high:.1f}", low)
