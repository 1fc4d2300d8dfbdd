"""What the page of a report says."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

from t0repro.reports.accuracy_sections import (
    accuracy_sections,
    prompts_of,
    prompts_sections,
    published_sections,
    verdict,
    verdict_in_words,
)
from t0repro.reports.answer_sections import (
    diagnostic_sections,
    generation_sections,
    unanswerable_sections,
)
from t0repro.reports.page import Card, Cell, Column, Page, Section
from t0repro.reports.prompts import synthetic_warning
from t0repro.reports.provenance_section import provenance_sections
from t0repro.reports.report import Report
from t0repro.reports.results import DatasetResult, GroupResult
from t0repro.reports.task_sections import cost_sections, coverage_in_words, coverage_sections
from t0repro.reports.training_sections import training_sections
from t0repro.words import counted

_NOTICEABLE_TIES = 0.05  # share of a prompt's examples; scores in bfloat16 tie now and then


def report_page(report: Report) -> Page:
    """The report's page: headline figures first, where they come from and what they mean last."""
    return Page(
        title=report.title,
        warning=_warning(report),
        lead=_lead(report),
        notes=(*report.notes, *coverage_in_words(report)),
        cards=tuple(_card(report, group) for group in report.groups),
        sections=(
            *accuracy_sections(report),
            *prompts_sections(report),
            *coverage_sections(report),
            *unanswerable_sections(report),
            *generation_sections(report),
            *diagnostic_sections(report),
            *published_sections(report),
            *cost_sections(report),
            *training_sections(report),
            *provenance_sections(report.provenance, _written(report)),
            Section("How to read it", note="\n".join(_method(report))),
        ),
    )


def brief_page(report: Report) -> Page:
    """The report in brief, for a terminal: datasets and groups, and what was decoded."""
    rows: list[tuple[str | Cell, ...]] = []
    bold = set()
    for group in report.groups:
        rows += [_brief_row(d) for d in report.datasets if d.group == group.group]
        # The group's row comes after its datasets' and is set in bold.
        bold.add(len(rows))
        rows.append(_brief_row(group))
    header = (
        Column("dataset"), "prompts", "examples", "mean, interval", "chance", "majority",
        Column("clearly above"),
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
    return Page(
        report.title,
        (ranked, decoded),
        warning=_warning(report),
        notes=tuple(coverage_in_words(report)),
    )


def _brief_row(result: DatasetResult | GroupResult) -> tuple[str | Cell, ...]:
    if isinstance(result, GroupResult):
        name, prompts, examples = result.title, result.prompts, ""
        mean, interval = result.mean, result.interval
    else:
        name, prompts, examples = result.dataset, len(result.prompts), str(result.examples)
        mean, interval = result.accuracy.mean, result.mean_interval
    return (
        name,
        str(prompts),
        examples,
        f"{mean:.1f} ({interval.low:.1f}-{interval.high:.1f})",
        f"{result.chance:.1f}",
        f"{result.majority:.1f}",
        verdict(result),
    )


def _written(report: Report) -> str:
    """When the report was made, in UTC."""
    when = datetime.datetime.fromisoformat(report.provenance.created)
    return when.astimezone(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")


def _warning(report: Report) -> str:
    results = (*report.datasets, *report.generation)
    synthetic = synthetic_warning([result.dataset for result in results], report.synthetic)
    prompts = [
        (f"{dataset.dataset}, {prompt.template_name}", prompt.ties, prompt.examples)
        for dataset, prompt in prompts_of(report)
    ]
    return " ".join(filter(None, (synthetic, _ties_warning(prompts))))


def _ties_warning(prompts: Sequence[tuple[str, int, int]]) -> str:
    """A warning where many examples' choices score the same; empty where few do.

    Args:
      prompts: (name, ties, examples) of every prompt.
    """
    tied = [entry for entry in prompts if entry[1] >= max(1, _NOTICEABLE_TIES * entry[2])]
    if not tied:
        return ""
    name, ties, examples = max(tied, key=lambda entry: entry[1] / entry[2])
    return (
        f"Ties: under {len(tied)} of {counted(len(prompts), 'prompt')}, the best choices of at"
        f" least {_NOTICEABLE_TIES:.0%} of the examples score the same, and the first of them counts"
        f" as the prediction ({name}: {ties} of {counted(examples, 'example')}). Accuracy then"
        " depends on the order of the choices. Check whether the vocabulary tells the choices"
        " apart, and whether scores were computed in float32."
    )


def _lead(report: Report) -> str:
    # A dataset can be in two groups, with prompts trained on and with held-out ones
    datasets = len({dataset.dataset for dataset in report.datasets})
    prompts = sum(len(dataset.prompts) for dataset in report.datasets)
    decoded = f", {counted(len(report.generation), 'prompt')} decoded" if report.generation else ""
    return (
        f"{report.provenance.label}, step {report.provenance.step}: rank classification of"
        f" {counted(datasets, 'dataset')} under {counted(prompts, 'prompt')}{decoded}."
        f" Written {_written(report)}."
    )


def _card(report: Report, group: GroupResult) -> Card:
    return Card(
        title=group.title,
        figure=f"{group.mean:.1f}%",
        lines=(
            f"{report.bootstrap.percent} interval"
            f" {_range(group.interval.low, group.interval.high)};"
            f" chance {group.chance:.1f}, majority class {group.majority:.1f}",
            f"{counted(group.datasets, 'dataset')}, {counted(group.prompts, 'prompt')}",
        ),
        verdict=verdict_in_words(group),
        tone=verdict(group).tone,
    )


def _method(report: Report) -> list[str]:
    """What the figures mean, in sentences."""
    bootstrap = report.bootstrap
    return [
        "A prediction is the answer choice with the highest log-likelihood, summed over its tokens"
        " and EOS. The first choice wins a tie; any right answer counts where there are several;"
        " an example whose answer is none of its choices (the column not a choice) counts as"
        " wrong.",
        f"Intervals are {bootstrap.percent} intervals over examples by Gaffke's method (for one"
        f" prompt, Clopper and Pearson's), from {bootstrap.replicates:,} random weightings of the"
        f" examples (seed {bootstrap.seed}). Prompts are held fixed and paired by the examples'"
        " index. Few examples make a wide interval, even where all of them are right. Where prompts"
        " err on different examples, an interval holds the truth more often than it says.",
        "Clearly above means that the interval of the mean over prompts begins above it. Chance is"
        " the mean of one over the number of choices. Majority is the accuracy of always"
        " answering with the choice position that is right most often: for fixed choices, the share"
        " of the majority class.",
    ]


def _range(low: float, high: float) -> str:
    return f"{low:.1f} to {high:.1f}"
