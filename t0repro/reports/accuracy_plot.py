"""The plot of accuracies by dataset."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence

from t0repro.reports.decoded_tasks import GenerationResult
from t0repro.reports.drawing import ROLES, Drawing, inline_plot, spread_out
from t0repro.reports.published import PublishedFigure, family_of
from t0repro.reports.report import Report
from t0repro.reports.results import DatasetResult, GroupResult, PromptResult
from t0repro.words import counted, printable, shortened

# Heights above the middle of a row, in inches: the parts of a row from its top to its bottom
_LETTERS, _PUBLISHED, _DOTS, _MEAN = 0.33, (0.16, 0.26), 0.045, -0.2


_LINES = (-0.27, 0.26)


_BOX = 0.22


def accuracy_plot(report: Report, group: GroupResult) -> str:
    """A row per dataset of a group: dots and box over prompts, chance, majority, the mean.

    The plots of a report share one scale at one place, so that readers can compare groups by eye.
    """
    datasets = report.members(group)
    widest = max(len(_name(dataset)) for dataset in report.datasets)

    # inline_plot calls it twice, for a wide and for a narrow screen.
    def draw(drawing: Drawing) -> None:
        names = [_name(dataset) for dataset in datasets]
        # On a narrow screen, put a name above its row, since there is no room beside it.
        pitch, left = (0.92, 0.15) if drawing.narrow else (0.72, 0.3 + 0.085 * widest)
        axes = drawing.axes(0.8 + pitch * len(datasets), left)
        # Put the first dataset at the top, where y is largest.
        for row, (name, dataset) in enumerate(zip(names, datasets, strict=True)):
            y = pitch * (len(datasets) - 1 - row)
            _draw_dataset(drawing, axes, y, row, dataset, report.bootstrap.percent)
            _draw_published(drawing, axes, y, row, dataset, report.published)
            if drawing.narrow:
                axes.text(-1, y + 0.5, name, va="center", color=ROLES["ink"])
        if drawing.narrow:
            axes.set_yticks([])
        else:
            axes.set_yticks([pitch * at for at in range(len(datasets))], names[::-1])
        # Room for the lowest row's interval, and for the letters above the highest.
        axes.set_ylim(-0.34, pitch * (len(datasets) - 1) + (0.62 if drawing.narrow else 0.42))
        axes.set_xlim(-2, 102)
        axes.set_xlabel("accuracy, percent")
        axes.grid(axis="x", linewidth=0.7)

    return inline_plot(draw, f"Accuracy, {group.title}")


def _name(dataset: DatasetResult) -> str:
    return shortened(printable(dataset.dataset), 30)


def published_letters(published: Sequence[PublishedFigure]) -> dict[tuple[str, str], str]:
    """(model, statistic) -> its letter in the plots."""
    kinds = dict.fromkeys((figure.model, figure.statistic) for figure in published)
    # Not strict: there are more letters than kinds; a 27th kind would get none.
    return dict(zip(kinds, string.ascii_lowercase, strict=False))


def _draw_published(
    drawing: Drawing,
    axes,
    y: float,
    row: int,
    dataset: DatasetResult,
    published: Sequence[PublishedFigure],
) -> None:
    """A line with its letter for each figure, solid for a mean and dotted for a median."""
    letters = published_letters(published)
    figures = [figure for figure in published if figure.dataset == family_of(dataset.dataset)]
    gap = 3.2 if drawing.narrow else 2.0  # percent of the axis that a letter covers
    places = spread_out({at: figure.value for at, figure in enumerate(figures)}, gap)
    for number, figure in enumerate(figures):
        name = f"published-{row}-{number}"
        axes.plot(
            [figure.value] * 2,
            [y + height for height in _PUBLISHED],
            color=ROLES["ink"],
            linewidth=1.4,
            linestyle="solid" if figure.statistic == "mean" else (0, (1, 1)),
            gid=name,
        )
        letter = letters.get((figure.model, figure.statistic), "")
        style = {"ha": "center", "va": "center", "fontsize": 10, "color": ROLES["muted"]}
        axes.text(places[number], y + _LETTERS, letter, **style)
        drawing.tips[name] = (
            f"{letter}: {figure.model}, {figure.dataset}: {figure.statistic} {figure.value:g}%"
            f"\n{figure.source}"
        )


def _draw_dataset(
    drawing: Drawing, axes, y: float, row: int, dataset: DatasetResult, confidence: str
) -> None:
    """Chance, the majority class, the box, the dots and, below these, the mean's interval."""
    tips = drawing.tips
    for name, value, dashes in (
        ("chance", dataset.chance, (3, 2)),
        ("majority", dataset.majority, (1, 1.5)),
    ):
        axes.plot(
            [value] * 2,
            [y + height for height in _LINES],
            color=ROLES[name],
            linewidth=1.6,
            linestyle=(0, dashes),
            gid=f"{name}-{row}",
            zorder=2.5,  # above the box, below the dots
        )
    tips[f"chance-{row}"] = f"{dataset.dataset}: chance {dataset.chance:.1f}%"
    tips[f"majority-{row}"] = f"{dataset.dataset}: majority class {dataset.majority:.1f}%"
    # A box of two values would only repeat the dots.
    if len(dataset.prompts) > 2:
        _draw_box(axes, y + _DOTS, dataset)
    for i, prompt in enumerate(dataset.prompts):
        # Shift neighbors by a fixed pattern, so that equal accuracies stay apart.
        shift = 0.065 * ((i * 2) % 5 - 2) / 2 if len(dataset.prompts) > 1 else 0
        name = f"prompt-{row}-{i}"
        axes.plot(
            [prompt.accuracy],
            [y + _DOTS + shift],
            marker="o",
            markersize=6,
            markeredgewidth=0,
            color=ROLES["accent"],
            alpha=0.75,
            gid=name,
            zorder=3,
        )
        tips[name] = prompt_tip(prompt)
    mean, interval, low = dataset.accuracy.mean, dataset.mean_interval, y + _MEAN
    axes.plot([interval.low, interval.high], [low, low], color=ROLES["ink"], linewidth=1.6)
    axes.plot([mean], [low], marker="D", markersize=4.5, color=ROLES["ink"], gid=f"mean-{row}")
    tips[f"mean-{row}"] = (
        f"{dataset.dataset}: mean over prompts {mean:.1f}%,"
        f" {confidence} interval {interval.low:.1f} to {interval.high:.1f}"
    )


def _draw_box(axes, y: float, dataset: DatasetResult) -> None:
    spread = dataset.accuracy
    # The input of bxp: with given quartiles, plot and table cannot differ.
    box: Mapping[str, float] = {
        "med": spread.median,
        "q1": spread.lower_quartile,
        "q3": spread.upper_quartile,
        "whislo": spread.minimum,
        "whishi": spread.maximum,
    }
    line = {"color": ROLES["muted"], "linewidth": 1}
    axes.bxp(
        [box],
        positions=[y],
        orientation="horizontal",
        widths=_BOX,
        showfliers=False,
        patch_artist=True,
        boxprops={"facecolor": ROLES["band"], "edgecolor": ROLES["muted"], "linewidth": 1},
        medianprops={"color": ROLES["ink"], "linewidth": 2},
        whiskerprops=line,
        capprops=line,
        # Otherwise bxp would put ticks of its own at the boxes' positions.
        manage_ticks=False,
    )


def prompt_tip(prompt: PromptResult) -> str:
    """A prompt's tooltip: its figures, its text and one rendering."""
    figures = (
        f"{prompt.template_name}: {prompt.accuracy:.1f}%"
        f" ({prompt.interval.low:.1f} to {prompt.interval.high:.1f}),"
        f" {counted(prompt.examples, 'example')}"
    )
    return "\n\n".join([figures, *text_and_rendering(prompt)])


def text_and_rendering(prompt: PromptResult | GenerationResult) -> list[str]:
    """What is known of a prompt's text, and of its first example, shortened."""
    lines = [shortened(prompt.prompt, 700)] if prompt.prompt else []
    if prompt.first_input:
        lines.append("First input: " + shortened(prompt.first_input, 300))
    return lines
