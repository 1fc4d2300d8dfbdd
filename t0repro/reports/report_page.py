"""The content of a report's page."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

from t0repro.reports.comparison_page import (
    flips_section,
    history_section,
    losses_section,
    scores_section,
)
from t0repro.reports.page import Card, Cell, Column, Page, Section
from t0repro.reports.plots import loss_plot
from t0repro.reports.prompts import synthetic_warning
from t0repro.reports.provenance import Provenance
from t0repro.reports.report import Report
from t0repro.reports.results import DatasetResult, GroupResult
from t0repro.reports.sections import (
    accuracy_sections,
    diagnostic_sections,
    generation_sections,
    prompts_of,
    prompts_sections,
    published_sections,
    unanswerable_sections,
    verdict,
    verdict_in_words,
    wrong_sections,
)
from t0repro.reports.task_costs import TaskCost
from t0repro.words import counted

_NOTICEABLE_TIES = 0.05  # share of a prompt's examples; bfloat16 scores occasionally tie


def report_page(report: Report) -> Page:
    """The report's page: headline figures first, their origin and meaning last."""
    return Page(
        title=report.title,
        warning=_warning(report),
        lead=_lead(report),
        notes=(*report.notes, *_coverage_in_words(report)),
        cards=tuple(_card(report, group) for group in report.groups),
        sections=(
            *accuracy_sections(report),
            *((history_section(report.history),) if report.history else ()),
            *prompts_sections(report),
            *_coverage_sections(report),
            *unanswerable_sections(report),
            *wrong_sections(report),
            *generation_sections(report),
            *diagnostic_sections(report),
            *published_sections(report),
            *_cost_sections(report),
            *_training_sections(report),
            *_provenance_sections(report.provenance, _format_time(report)),
            Section("How to read it", note="\n".join(_method(report))),
        ),
    )


def brief_page(report: Report) -> Page:
    """A brief report for a terminal: datasets and groups, and decoded tasks."""
    rows: list[tuple[str | Cell, ...]] = []
    bold = set()
    for group in report.groups:
        rows += [_brief_row(d) for d in report.datasets if d.group == group.group]
        # The group's row follows its datasets' and is bold.
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
        (ranked, decoded, *((history_section(report.history),) if report.history else ())),
        warning=_warning(report),
        notes=(*report.notes, *_coverage_in_words(report)),
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


def _format_time(report: Report) -> str:
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
    """A warning if many examples' choices tie; empty if few do.

    Args:
      prompts: (name, ties, examples) of every prompt.
    """
    # At least one: of a few examples, that share is less than one.
    tied = [entry for entry in prompts if entry[1] >= max(1, _NOTICEABLE_TIES * entry[2])]
    if not tied:
        return ""
    name, ties, examples = max(tied, key=lambda entry: entry[1] / entry[2])
    return (
        f"Ties: under {len(tied)} of {counted(len(prompts), 'prompt')}, the best choices of at"
        f" least {_NOTICEABLE_TIES:.0%} of the examples score the same, and the first of them"
        f" counts as the prediction ({name}: {ties} of {counted(examples, 'example')}). Accuracy"
        " then depends on the order of the choices. Check whether the vocabulary tells the choices"
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
        f" Written {_format_time(report)}."
    )


def _card(report: Report, group: GroupResult) -> Card:
    return Card(
        title=group.title,
        figure=f"{group.mean:.1f}%",
        lines=(
            f"{report.bootstrap.percent} interval"
            f" {group.interval.low:.1f} to {group.interval.high:.1f};"
            f" chance {group.chance:.1f}, majority class {group.majority:.1f}",
            f"{counted(group.datasets, 'dataset')}, {counted(group.prompts, 'prompt')}",
        ),
        verdict=verdict_in_words(group),
        tone=verdict(group).tone,
    )


def _method(report: Report) -> list[str]:
    """The meaning of the figures, in sentences."""
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
        "Clearly above means a one-sided p-value of at most 0.025 by Holm's correction over the"
        " datasets, so that the chance of a single false claim is at most that. For groups it means"
        " that the interval begins above it.",
        "Prompts as a sample is the interval for the mean over all prompts that could have been"
        " written: five prompts count as five. It is on the logit scale, with Satterthwaite's"
        " degrees of freedom. Detectable is the smallest difference, in points, that is found with"
        " a power of 80% between two models whose errors are unrelated.",
        "Chance is"
        " the mean of one over the number of choices. Majority is the accuracy of always"
        " answering with the choice position that is right most often: for fixed choices, the share"
        " of the majority class.",
    ]


_TASKS_SHOWN = 10


def _coverage_in_words(report: Report) -> list[str]:
    """Sentences: how many of how many inputs were evaluated, and how many were truncated."""
    return [*_describe_sample(report.tasks), *_truncation_in_words(report.tasks)]


def _describe_sample(tasks: Sequence[TaskCost]) -> list[str]:
    # Only tasks with both numbers known can be summed.
    known = [
        (cost.inputs, cost.available)
        for cost in tasks
        if cost.inputs is not None and cost.available is not None
    ]
    if not known:
        return []
    inputs, available = (sum(numbers) for numbers in zip(*known, strict=True))
    unknown = len(tasks) - len(known)
    rest = f"; of {counted(unknown, 'task')} it was not recorded" if unknown else ""
    if inputs == available:
        return [f"Evaluated on all inputs, {available:,} over all tasks{rest}."]
    return [
        f"Evaluated on a sample: {inputs:,} of {counted(available, 'input')} over all tasks{rest}."
    ]


def _truncation_in_words(tasks: Sequence[TaskCost]) -> list[str]:
    known = [cost for cost in tasks if cost.cut_inputs is not None]
    if not known:
        return []
    inputs = sum(cost.cut_inputs or 0 for cost in known)
    targets = sum(cost.cut_targets or 0 for cost in known)
    if not inputs + targets:
        return ["No input or target was cut to the sequence lengths."]
    total = sum(cost.inputs or 0 for cost in known)
    return [
        f"Cut to the sequence lengths: {inputs:,} of {counted(total, 'input')} and"
        f" {counted(targets, 'target')}. A cut input may lack its question; longer sequence"
        " lengths may give other results."
    ]


def _coverage_sections(report: Report) -> list[Section]:
    """The tasks of which only a sample was evaluated, or whose texts were truncated."""
    header = (Column("task"), "inputs", "of", "inputs cut", "targets cut")
    rows = tuple(
        (
            cost.task,
            _number(cost.inputs),
            _number(cost.available),
            _number(cost.cut_inputs),
            _number(cost.cut_targets),
        )
        for cost in report.tasks
        # In older evaluations both numbers are None, and thus equal.
        if cost.cut_inputs or cost.cut_targets or cost.inputs != cost.available
    )
    return [Section("Sampled and cut tasks", header=header, rows=rows)] * bool(rows)


def _number(value: int | None) -> str:
    return "not recorded" if value is None else str(value)


def _cost_sections(report: Report) -> list[Section]:
    """The slowest tasks and those with the longest inputs, each listed once."""
    slowest = sorted(report.tasks, key=lambda cost: -cost.seconds)[:_TASKS_SHOWN]
    longest = sorted(report.tasks, key=lambda cost: -cost.longest_input)[:_TASKS_SHOWN]
    # A task may be in both lists; show it once.
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
    """The training run's losses, the other stack's scores and losses, and a conversion's result."""
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
    # A heading alone: its two parts are sections of level 3 below it.
    if report.stacks or report.losses:
        sections.append(Section("Compared with another run"))
    if compared := report.stacks:
        # Only equal hashes prove it; users may compare with any second run.
        same = " (the same checkpoint)" if compared.same_checkpoint else ""
        title = f"Scores of {compared.label_a} and {compared.label_b}{same}"
        sections += [scores_section(compared, title), *flips_section(compared)]
    if losses := report.losses:
        sections.append(losses_section(losses, level=3))
    if report.conversion:
        sections.append(Section("Conversion", text=report.conversion))
    return sections


def _provenance_sections(source: Provenance, written: str) -> list[Section]:
    """Run, checkpoint, device, hashes; then versions and the configuration, folded."""
    # List missing facts by name too, so that readers notice the gap.
    known = [(name, value) for name, value in _facts(source) if value]
    missing = [name for name, value in _facts(source) if not value]
    facts = [
        ("Run", source.label),
        ("Step", str(source.step)),
        ("Evaluation", source.eval_dir),
        *known,
        ("Code", f"git {source.git_commit}" if source.git_commit else "not a git checkout"),
        ("Report written", written),
    ]
    if missing:
        facts.append(("Not recorded by the evaluation", ", ".join(missing).lower()))
    sections = [Section("Where this comes from", facts=tuple(facts))]
    if source.data:
        rows = tuple((f"Rows of {name}", value) for name, value in source.data.items())
        sections.append(Section("Data", facts=rows, level=3, folded=True))
    versions = tuple(source.versions.items())
    sections.append(Section("Package versions", facts=versions, level=3, folded=True))
    if source.operative_config:
        text = source.operative_config.rstrip("\n")
        sections.append(Section("Operative configuration", text=text, level=3, folded=True))
    return sections


def _facts(source: Provenance) -> list[tuple[str, str | None]]:
    """The facts that an evaluation may record; None for those that it did not."""
    seconds = source.duration_seconds
    return [
        ("Checkpoint", source.checkpoint),
        ("Hash of the checkpoint", source.checkpoint_hash),
        ("Device", source.device),
        ("Duration", None if seconds is None else f"{seconds:.1f} s"),
        ("Hash of the templates", source.templates_hash),
        ("Hash of the rendered data", source.data_revision),
        ("SHA-256 of the scores", source.scores_sha256),
    ]
