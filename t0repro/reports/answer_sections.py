"""Sections of a report's page: single answers and outputs, calibration, prompt agreement."""

from __future__ import annotations

from t0repro.reports.accuracy_sections import percent, prompts_of
from t0repro.reports.page import Cell, Column, Section
from t0repro.reports.plots import calibration_plot
from t0repro.reports.report import Report
from t0repro.reports.results import UNANSWERABLE_KEPT, GenerationResult, group_name
from t0repro.words import counted, shortened

_INPUT_SHOWN = 240


def unanswerable_sections(report: Report) -> list[Section]:
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
        for dataset, prompt in prompts_of(report)
        if prompt.unanswerable
    ]
    note = (
        "They count as wrong, as in T0. Counts are exact; of each prompt the first"
        f" {UNANSWERABLE_KEPT} examples are listed."
    )
    return [Section("Answers that are none of the choices", note=note), *sections] * bool(sections)


def generation_sections(report: Report) -> list[Section]:
    """The prompts that were decoded; no section where there are none."""
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


def _generation_tip(result: GenerationResult) -> str:
    lines = [shortened(result.prompt, 700)] if result.prompt else []
    if result.first_input:
        lines.append("First input: " + shortened(result.first_input, 300))
    return "\n\n".join(lines) or result.task


def diagnostic_sections(report: Report) -> list[Section]:
    """Calibration, agreement between prompts, and which answers are taken for which."""
    # Reports written before schema 2 have none.
    if not any(dataset.calibration for dataset in report.datasets):
        return []
    agreement = tuple(
        (
            dataset.dataset,
            percent(dataset.calibration.error) if dataset.calibration else "",
            # Sorted by the number, not by the text with its percent sign.
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
