"""The content of the pages of comparisons and of a history."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from t0repro.reports.comparison import SETTINGS, RunComparison, RunFacts
from t0repro.reports.history import History
from t0repro.reports.losses import LossComparison, LossRow, thin_losses
from t0repro.reports.models import DatasetModels, Models
from t0repro.reports.page import Cell, Column, Page, Section
from t0repro.reports.plots import history_plot
from t0repro.reports.prompts import synthetic_datasets, synthetic_warning
from t0repro.reports.statistics import describe_detectable
from t0repro.words import counted


def comparison_page(
    comparisons: Sequence[RunComparison],
    models: Models | None = None,
    runs: Sequence[RunFacts] = (),
) -> Page:
    """Compares runs with the first one: accuracies, scores, and examples whose predictions differ.

    Models and where the runs are from, if they are given, come first.
    """
    sections = [] if models is None else models_sections(models)
    sections += [_runs_section(runs)] * bool(runs)
    for compared in comparisons:
        sections += [accuracy_section(compared), scores_section(compared, "Scores, task by task")]
        sections += flips_section(compared)
    sections.append(Section("How to read it", note=_METHOD))
    # One warning covers the whole page; with mixed data it names the synthetic datasets.
    datasets = [entry.dataset for compared in comparisons for entry in compared.datasets]
    return Page("Runs compared", tuple(sections), warning=_warning(datasets))


def _runs_section(runs: Sequence[RunFacts]) -> Section:
    header = (
        Column("run"), "step", Column("scores written, UTC"), Column("folder", wide=True),
        Column("checkpoint", wide=True),
    )  # fmt: skip
    rows = tuple(
        (run.label, f"{run.step:,}", run.written, run.folder, run.checkpoint or "not recorded")
        for run in runs
    )
    return Section("Runs", header=header, rows=rows)


_METHOD = (
    "The difference is that between the means over prompts, in percentage points. Its interval is"
    " Gaffke's over examples, paired by row: the low end counts one further example that only the"
    " first run gets right, the high end one that only the second does. So runs that agree on few"
    " examples may still differ, and an interval may contain 0 although McNemar's test tells the"
    " runs apart. McNemar's test takes an example with all of its prompts as one"
    " cluster. Corrected p-values are Holm's over all datasets and all pairs of models. Two models"
    " differ significantly if their corrected p-value is at most one minus the intervals'"
    " confidence, 0.05 for 95%. Models listed together may still differ by less than these examples"
    " can show."
)


def models_sections(models: Models) -> list[Section]:
    """Models without significant differences, by dataset; with seeds, each pair's difference."""
    labels = list(models.seeds)
    rows = tuple(
        (
            entry.dataset,
            *(_mean_and_spread(entry, label) for label in labels),
            sets_in_words(entry.alike),
        )
        for entry in models.datasets
    )
    heads = [
        f"{label} ({counted(count, 'seed')})" if count > 1 else label
        for label, count in models.seeds.items()
    ]
    lines = (
        f"On no dataset told apart: {sets_in_words(models.never_apart)}."
        if models.never_apart
        else "Every two models are told apart on at least one dataset.",
    )
    lines += tuple(
        f"Clearly below chance on {entry.dataset}: {', '.join(entry.below_chance)}."
        for entry in models.datasets
        if entry.below_chance
    )
    header = (Column("dataset"), *heads, Column("cannot be told apart", wide=True))
    sections = [Section("Models", lines=lines, header=header, rows=rows)]
    pairs = tuple(
        (
            entry.dataset,
            f"{pair.a} and {pair.b}",
            f"{pair.difference:+.1f}",
            # HTML sorts by the number: as texts, +10.0 would come before +2.0.
            Cell(f"{pair.interval.low:+.1f} to {pair.interval.high:+.1f}", pair.interval.low),
            f"{pair.p_value:.3g}",
            f"{pair.p_adjusted:.3g}",
        )
        for entry in models.datasets
        for pair in entry.pairs
        # Two models with one run each are compared below, run by run.
        if pair.interval is not None
    )
    if pairs:
        header = (
            Column("dataset"), Column("models"), "difference",
            f"{models.bootstrap.percent} interval", "p", "p, corrected",
        )  # fmt: skip
        sections.append(Section("Differences over seeds", note=_SEEDS, header=header, rows=pairs))
    return sections


_SEEDS = (
    "Examples, prompts and seeds are all random here: the interval is of the difference between"
    " the two ways to train, with any seed and any prompt. It is a t interval with Satterthwaite's"
    " degrees of freedom; seeds are taken to vary equally in both models."
)


def _mean_and_spread(entry: DatasetModels, label: str) -> Cell:
    mean, spread = entry.accuracy[label], entry.over_seeds.get(label)
    return Cell(f"{mean:.1f}" + ("" if spread is None else f" (sd {spread:.1f})"), mean)


def sets_in_words(sets: Sequence[Sequence[str]]) -> str:
    """The sets of models that do not differ significantly; sets of one model are omitted."""
    return "; ".join(" = ".join(each) for each in sets if len(each) > 1) or "none"


def losses_page(comparisons: Sequence[LossComparison]) -> Page:
    """Training losses compared with the first run's."""
    sections = (losses_section(compared) for compared in comparisons)
    return Page("Training losses compared", tuple(sections))


def history_page(history: History) -> Page:
    """Accuracy by checkpoint."""
    sections = (history_section(history),)
    return Page("Accuracy by checkpoint", sections, warning=_warning(list(history.curves)))


def history_section(history: History) -> Section:
    """Accuracy by checkpoint: a curve for each dataset, and their values."""
    lines = (f"Missing at some steps: {', '.join(history.skipped)}.",) if history.skipped else ()
    rows = tuple(
        (name, f"{history.chance[name]:.1f}", *(f"{value:.1f}" for value in values))
        for name, values in history.curves.items()
    )
    return Section(
        "Mean accuracy over prompts, by step",
        lines=lines,
        plot=history_plot(history.steps, history.curves, "Accuracy by step"),
        header=(Column("dataset"), "chance", *map(str, history.steps)),
        rows=rows,
    )


def _warning(datasets: Sequence[str]) -> str:
    return synthetic_warning(datasets, synthetic_datasets(datasets))


def accuracy_section(compared: RunComparison) -> Section:
    """Accuracies by dataset, with the difference's interval and McNemar's test."""
    a, b = compared.label_a, compared.label_b
    interval = f"{compared.bootstrap.percent} interval"
    header = (
        Column("dataset"), "prompts", "examples", a, b, "difference", interval, "McNemar p",
        "p, corrected", "detectable", f"only {a} right", f"only {b} right", "agreement",
    )  # fmt: skip
    rows = tuple(
        (
            entry.dataset,
            str(entry.prompts),
            str(entry.examples),
            f"{entry.accuracy_a:.1f}",
            f"{entry.accuracy_b:.1f}",
            f"{entry.difference:+.1f}",
            Cell(f"{entry.interval.low:+.1f} to {entry.interval.high:+.1f}", entry.interval.low),
            f"{entry.p_value:.3g}",
            "" if entry.p_adjusted is None else f"{entry.p_adjusted:.3g}",
            describe_detectable(entry.detectable),
            str(entry.only_a),
            str(entry.only_b),
            Cell(f"{entry.agreement:.1f}%", entry.agreement),
        )
        for entry in compared.datasets
    )
    return Section(f"{a} and {b}", header=header, rows=rows)


def scores_section(compared: RunComparison, title: str) -> Section:
    """The largest difference of each task's scores, and both runs' accuracies."""
    header = (
        Column("task"), "pairs", "largest difference", "per target token", "flipped",
        f"accuracy {compared.label_a}", f"accuracy {compared.label_b}",
    )  # fmt: skip
    rows = tuple(
        (
            task.task,
            str(task.pairs),
            Cell(f"{task.max_difference:.1e}", task.max_difference),
            Cell(f"{task.max_difference_per_token:.1e}", task.max_difference_per_token),
            str(task.flipped),
            f"{task.metrics_a['accuracy']:.2f}",
            f"{task.metrics_b['accuracy']:.2f}",
        )
        for task in compared.tasks
    )
    # Bold rows have flips, however small their score differences.
    bold = frozenset(at for at, task in enumerate(compared.tasks) if task.flipped)
    lines = tuple(scores_in_words(compared))
    return Section(title, lines=lines, header=header, rows=rows, bold=bold, level=3)


def scores_in_words(compared: RunComparison) -> list[str]:
    """Sentences: where predictions differ, the largest differences, tasks in one run only."""
    worst = compared.worst
    lines = [checkpoints_in_words(compared), *settings_in_words(compared)]
    if compared.alike is not None:
        alike, every = compared.alike, len(compared.alike) == len(compared.datasets)
        names = "any dataset" if every else ", ".join(alike)
        found = f"cannot be told apart on {names}" if alike else "are told apart on every dataset"
        lines.append(
            f"{compared.label_a} and {compared.label_b} {found} ({compared.bootstrap.percent}"
            " confidence, McNemar's test, Holm's correction)."
        )
    where = f"on {counted(compared.flipped, 'example')}" if compared.flipped else "nowhere"
    points, task, metric = compared.worst_metric
    lines += [
        f"Predictions differ: {where} ({counted(compared.pairs, 'pair')} of"
        f" {counted(len(compared.tasks), 'task')}).",
        f"Largest difference between scores: {compared.max_difference:.2e};"
        f" per target token {worst.max_difference_per_token:.2e}"
        f" ({worst.task}, example {worst.at[0]}, choice {worst.at[1]});"
        f" between metrics: {points:.2e} points ({task}, {metric}).",
    ]
    if compared.unpaired:
        lines.append(
            f"{counted(compared.unpaired, 'pair')} of these tasks could not be compared: only one"
            " run has them, or their targets differ in length."
        )
    for dataset, what in compared.left_out.items():
        lines.append(f"Not compared, {dataset}: the runs have {what}.")
    for label, tasks in ((compared.label_a, compared.only_a), (compared.label_b, compared.only_b)):
        if tasks:
            lines.append(f"Only {label} has: {', '.join(tasks)}.")
    return lines


def checkpoints_in_words(compared: RunComparison) -> str:
    """One sentence: whether both runs scored the same checkpoint, by the hashes they recorded."""
    a, b = compared.label_a, compared.label_b
    if compared.same_checkpoint is None:
        hashes = ((a, compared.checkpoint_a), (b, compared.checkpoint_b))
        missing = " and ".join(label for label, found in hashes if not found)
        return (
            f"It is not known whether both runs scored the same checkpoint: {missing} recorded no"
            " hash of its parameters."
        )
    if compared.same_checkpoint:
        return f"Both runs scored the same checkpoint (hash {compared.checkpoint_a})."
    return (
        f"The runs scored different checkpoints: {a} has the hash {compared.checkpoint_a}, {b}"
        f" {compared.checkpoint_b}."
    )


def settings_in_words(compared: RunComparison) -> list[str]:
    """A sentence: which settings of the two evaluations differ; none if they have the same."""
    if not compared.settings:
        return []
    named = []
    for name, values in compared.settings.items():
        # Of vocabularies and code the records have digests.
        is_digest = name in ("vocabulary", "rendering", "code")
        a, b = map(str, values)
        named.append(SETTINGS[name] if is_digest else f"{SETTINGS[name]} ({a} and {b})")
    return [
        f"The two evaluations differ in {', '.join(named)}: differences between their scores and"
        " accuracies may be due to that."
    ]


def flips_section(compared: RunComparison) -> list[Section]:
    """The examples whose predictions differ; no section if there are none."""
    a, b = compared.label_a, compared.label_b
    header = (
        Column("task"), "example", Column("input", wide=True), Column(f"choice of {a}"),
        Column(f"choice of {b}"), f"margin of {a}", f"margin of {b}", Column("right"),
    )  # fmt: skip
    rows = tuple(
        (
            flip.task,
            str(flip.example),
            flip.input or "",
            flip.choice_a,
            flip.choice_b,
            # None: a single choice has no second best.
            "" if flip.margin_a is None else Cell(f"{flip.margin_a:.2e}", flip.margin_a),
            "" if flip.margin_b is None else Cell(f"{flip.margin_b:.2e}", flip.margin_b),
            _right(flip.right_a, flip.right_b, a, b),
        )
        for flip in compared.flips
    )
    # A comparison counts all flips and keeps the first MAX_FLIPS.
    shown = f", the first {len(rows)}" if len(rows) < compared.flipped else ""
    title = f"Predicted differently: {counted(compared.flipped, 'example')}{shown}"
    return [Section(title, header=header, rows=rows, level=3, terminal_rows=5)] * bool(rows)


def _right(right_a: bool, right_b: bool, a: str, b: str) -> str:
    return "both" if right_a and right_b else a if right_a else b if right_b else "neither"


def losses_section(compared: LossComparison, level: Literal[2, 3] = 2) -> Section:
    """Two training runs' losses, thinned if there are many; the largest difference is bold."""
    shown, steps = thin_losses(compared), counted(len(compared.rows), "step")
    of = f"{len(shown)} of {steps}" if len(shown) < len(compared.rows) else steps
    return Section(
        f"{compared.label_a} and {compared.label_b}: {compared.unit}, {of}",
        lines=(losses_in_words(compared),),
        header=("step", compared.label_a, compared.label_b, "relative difference"),
        rows=tuple(_loss_cells(row) for row in shown),
        bold=frozenset(at for at, row in enumerate(shown) if row is compared.worst),
        level=level,
    )


def _loss_cells(row: LossRow) -> tuple[str, str, str, Cell]:
    """A row as text: losses to seven digits, the precision of float32."""
    difference = Cell(f"{row.relative_difference:.2e}", row.relative_difference)
    # `#` keeps trailing zeros: seven digits in every row.
    return str(row.step), f"{row.loss_a:#.7g}", f"{row.loss_b:#.7g}", difference


def losses_in_words(compared: LossComparison) -> str:
    """The largest difference and where, what could not be compared, and which seeds differ."""
    worst = compared.worst
    text = (
        f"Largest relative difference: {worst.relative_difference:.2e} at step {worst.step}"
        f" ({counted(len(compared.rows), 'step')} compared)."
    )
    if alone := compared.only_a + compared.only_b:
        text += f" {counted(alone, 'more step is', 'more steps are')} in one run only."
    if compared.seeds:
        text += f" The runs have other seeds: {', '.join(compared.seeds)}."
    return text
