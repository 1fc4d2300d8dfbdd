"""Sections of a report's page: accuracies, published figures, single answers and outputs."""

from __future__ import annotations

from t0repro.reports.accuracy_plot import (
    accuracy_plot,
    prompt_tip,
    published_letters,
    text_and_rendering,
)
from t0repro.reports.page import Cell, Column, Section
from t0repro.reports.plots import calibration_plot
from t0repro.reports.published import PublishedFigure, family_of
from t0repro.reports.report import Report
from t0repro.reports.results import (
    MAX_UNANSWERABLE,
    MAX_WRONG,
    DatasetResult,
    GroupResult,
    PromptResult,
    group_name,
)
from t0repro.reports.statistics import describe_detectable
from t0repro.words import counted, shortened

EXTRA_TITLES = {
    "target_length": "divided by target length",
    "calibrated": "calibrated by a content-free input",
    "without_overlap": "without rows shared with training",
}


def verdict(result: DatasetResult | GroupResult) -> Cell:
    """The baselines that the mean's interval lies above: chance, and the majority class."""
    if result.below_chance:
        return Cell("neither: below chance", tone="bad")
    if not result.above_chance:
        return Cell("neither", tone="bad")
    if not result.above_majority:
        return Cell("chance only", tone="bad")
    return Cell("chance and majority", tone="good")


def verdict_in_words(result: DatasetResult | GroupResult) -> str:
    """The verdict as a clause of a sentence."""
    if result.below_chance:
        return "clearly below chance"
    if not result.above_chance:
        return "not clearly above chance"
    if not result.above_majority:
        return "above chance, but not clearly above always answering with the majority class"
    return "clearly above chance and the majority class"


def accuracy_sections(report: Report) -> list[Section]:
    """A plot for each group, and the table of datasets."""
    # Groups and datasets come from the same results: either both exist or neither.
    if not report.groups:
        return []
    header = (
        Column("dataset"), Column("group"), "prompts", "examples", "mean", "interval", "s.e.",
        "chance", "majority", Column("clearly above"), "prompts as a sample", "detectable",
        "median", "quartiles", "range",
    )  # fmt: skip
    rows = tuple(_dataset_row(dataset) for dataset in report.datasets)
    return [
        Section("Accuracy by dataset", legend=_legend(report)),
        *(_plot_section(report, group) for group in report.groups),
        Section("By dataset", header=header, rows=rows, level=3),
    ]


def _legend(report: Report) -> tuple[tuple[str, str], ...]:
    return (
        ("dot", "a prompt (hover or tap for its text)"),
        ("box", "quartiles, median and range over prompts"),
        ("mean", f"mean over prompts and its {report.bootstrap.percent} interval"),
        ("line", "chance"),
        ("majority", "majority class"),
    )


def _plot_section(report: Report, group: GroupResult) -> Section:
    """The group's plot, with a legend of the published figures drawn in it."""
    # The legend only lists this plot's figures; letters are the same in all plots.
    families = {family_of(dataset.dataset) for dataset in report.members(group)}
    drawn = {
        (figure.model, figure.statistic)
        for figure in report.published
        if figure.dataset in families
    }
    legend = tuple(
        ("letter", f"{letter}: {model}, {statistic}")
        for (model, statistic), letter in published_letters(report.published).items()
        if (model, statistic) in drawn
    )
    plot = accuracy_plot(report, group)
    return Section(group.title, plot=plot, level=3, legend=legend)


def _dataset_row(dataset: DatasetResult) -> tuple[str | Cell, ...]:
    spread, sampled = dataset.accuracy, dataset.random_prompts_interval
    return (
        dataset.dataset,
        group_name(dataset.group),
        str(len(dataset.prompts)),
        str(dataset.examples),
        percent(spread.mean),
        _interval(dataset.mean_interval.low, dataset.mean_interval.high),
        f"{dataset.standard_error:.2f}",
        percent(dataset.chance),
        percent(dataset.majority),
        verdict(dataset),
        # A single prompt is not a sample of prompts.
        "" if sampled is None else _interval(sampled.low, sampled.high),
        describe_detectable(dataset.detectable),
        percent(spread.median),
        _interval(spread.lower_quartile, spread.upper_quartile),
        _interval(spread.minimum, spread.maximum),
    )


def prompts_sections(report: Report) -> list[Section]:
    """Every prompt; HTML shows its text on hover. No section if none was ranked."""
    # The definitions of accuracy besides T0's.
    extras = list(dict.fromkeys(name for _, prompt in prompts_of(report) for name in prompt.extras))
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
            percent(prompt.accuracy),
            _interval(prompt.interval.low, prompt.interval.high),
            f"{prompt.standard_error:.2f}",
            percent(prompt.chance),
            percent(prompt.majority),
            str(prompt.ties),
            str(prompt.unanswerable),
            # A task may lack a definition: calibration needs the score for a content-free input.
            *(percent(prompt.extras[name]) if name in prompt.extras else "" for name in extras),
        )
        for dataset, prompt in prompts_of(report)
    )
    return [Section("Prompts", header=header, rows=rows)] * bool(rows)


def prompts_of(report: Report) -> list[tuple[DatasetResult, PromptResult]]:
    """Every prompt with its dataset."""
    return [(dataset, prompt) for dataset in report.datasets for prompt in dataset.prompts]


def published_sections(report: Report) -> list[Section]:
    """The published figures shown in the plots; no section if there are none."""
    letters = published_letters(report.published)
    header = (
        Column("dataset"), Column("model"), "percent", "here", "interval", Column("within"),
        Column("source", wide=True),
    )  # fmt: skip
    rows = []
    for figure in report.published:
        here, low, high = _same_figure(report, figure)
        rows.append(
            (
                figure.dataset,
                f"{letters.get((figure.model, figure.statistic), '')}: {figure.model},"
                f" {figure.statistic} over prompts",
                # Keep the source's decimals instead of the single one used for our figures.
                Cell(f"{figure.value:g}", figure.value),
                percent(here),
                _interval(low, high),
                "yes" if low <= figure.value <= high else "no",
                figure.source,
            )
        )
    # Without rows, return no section.
    return [Section("Published figures", header=header, rows=tuple(rows))] * bool(rows)


def _same_figure(report: Report, figure: PublishedFigure) -> tuple[float, float, float]:
    """A published figure's counterpart in this report: value, and the ends of its interval.

    ANLI's rounds are published as one dataset: these are the means over them, whose ends are too
    wide for a mean of independent figures rather than too narrow.
    """
    found = [
        (dataset.accuracy.mean, dataset.mean_interval)
        if figure.statistic == "mean"
        else (dataset.accuracy.median, dataset.median_interval)
        for dataset in report.datasets
        if family_of(dataset.dataset) == figure.dataset
    ]
    ends = [(value, interval.low, interval.high) for value, interval in found]
    value, low, high = (sum(values) / len(ends) for values in zip(*ends, strict=True))
    return value, low, high


def percent(value: float) -> Cell:
    """A percentage with one decimal."""
    return Cell(f"{value:.1f}", value)


def _interval(low: float, high: float) -> Cell:
    return Cell(f"{low:.1f}\u2013{high:.1f}", low)


_INPUT_SHOWN = 240


def unanswerable_sections(report: Report) -> list[Section]:
    """The prompts with examples whose answer is not among the choices."""
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
        for dataset, prompt in prompts_of(report)
        if prompt.unanswerable
    ]
    note = (
        "They count as wrong, as in T0. Counts are exact; of each prompt the first"
        f" {MAX_UNANSWERABLE} examples are listed."
    )
    return [Section("Answers that are none of the choices", note=note), *sections] * bool(sections)


def wrong_sections(report: Report) -> list[Section]:
    """The first wrong answers of each prompt, for a reader who asks what the model gets wrong."""
    sections = [
        Section(
            f"{dataset.dataset}, {prompt.template_name}",
            header=("example", Column("input", wide=True), Column("predicted"), Column("right")),
            rows=tuple(
                (str(entry.example), entry.input or "", entry.predicted, entry.right)
                for entry in prompt.wrong_examples
            ),
            level=3,
            folded=True,
        )
        for dataset, prompt in prompts_of(report)
        if prompt.wrong_examples
    ]
    note = (
        f"Of each prompt the first {MAX_WRONG}. A choice has a number where a prompt's choices"
        " vary, or where its task's module was not named."
    )
    return [Section("Wrong answers", note=note), *sections] * bool(sections)


def generation_sections(report: Report) -> list[Section]:
    """The decoded prompts; no section if there are none."""
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
            Cell(result.template_name, tip="\n\n".join(text_and_rendering(result)) or result.task),
            group_name(result.group),
            str(result.examples),
            # No percent sign: not every template's metric is a percentage.
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


def diagnostic_sections(report: Report) -> list[Section]:
    """Calibration, agreement between prompts, and which answers get confused."""
    if not report.datasets:
        return []
    agreement = tuple(
        (
            dataset.dataset,
            percent(dataset.calibration.error),
            # Sort by the number, not by the text with its percent sign.
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
            header=(Column("dataset"), "calibration error", "examples that prompts disagree on"),
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
