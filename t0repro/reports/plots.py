"""The plots: accuracies by dataset, calibration, accuracy by step, training losses and curves.

They are inline SVG that takes its colors from the page, light or dark. Matplotlib draws in
placeholder colors, each of which is then replaced by the page's CSS variable for that role. Parts
that an inline SVG does not need are removed (metadata, style sheet, unused ids). Every plot is
drawn twice, for wide and for narrow screens, because text that scales with the plot would be
unreadable on a narrow one; the page's style sheet shows the one that fits.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from t0repro.reports.drawing import ROLES, Drawing, inline_plot, integer_steps, spread_out
from t0repro.reports.losses import LossCurve
from t0repro.reports.results import DatasetResult
from t0repro.words import counted, printable, shortened

_LEFT = 0.68  # inches for the numbers and the name of a vertical axis


def calibration_plot(datasets: Sequence[DatasetResult], label: str) -> str:
    """Accuracy against confidence, a dot for each dataset's bin; the diagonal is ideal."""

    def draw(drawing: Drawing) -> None:
        axes = drawing.axes(3.6, _LEFT)
        axes.plot([0, 100], [0, 100], color=ROLES["chance"], linewidth=1.2, linestyle="--")
        for row, dataset in enumerate(datasets):
            for at, found in enumerate(dataset.calibration.bins):
                # The SVG element's id, by which it gets its tip.
                name = f"bin-{row}-{at}"
                axes.plot(
                    [found.confidence],
                    [found.accuracy],
                    marker="o",
                    markersize=4 + min(found.examples, 1000) ** 0.5 / 5,
                    markeredgewidth=0,
                    alpha=0.6,
                    color=ROLES["accent"],
                    gid=name,
                )
                drawing.tips[name] = (
                    f"{dataset.dataset}: {found.accuracy:.1f}% right at a confidence of"
                    f" {found.confidence:.1f}%, {counted(found.examples, 'prediction')}"
                )
        # Room for complete dots at 0 and 100 percent.
        axes.set_xlim(-2, 102)
        axes.set_ylim(-4, 104)
        axes.set_xlabel("confidence, percent")
        axes.set_ylabel("accuracy, percent")
        axes.grid(linewidth=0.7)

    return inline_plot(draw, label)


def history_plot(steps: Sequence[int], curves: Mapping[str, Sequence[float]], label: str) -> str:
    """Mean accuracy over prompts by step, a line for each dataset, named at its end."""
    points = {name: list(zip(steps, values, strict=True)) for name, values in curves.items()}
    return curves_plot(points, label, "accuracy, percent", limits=(0, 100), form="{:.1f}%")


_COLORS, _STYLES = ("accent", "chance", "majority", "ink"), ("-", "--", ":", "-.")
_MARKED = 30  # a longer curve has a mark at its last point only


def curves_plot(
    curves: Mapping[str, Sequence[tuple[int, float]]],
    label: str,
    values: str,
    *,
    limits: tuple[float, float] | None = None,
    form: str = "{:.4g}",
) -> str:
    """Curves by step, each named at its end.

    Args:
      curves: name -> (step, value), ascending.
      label: text for assistive technology.
      values: the vertical axis's label.
      limits: of the vertical axis; None fits them to the values.
      form: the format of a value at the pointer.
    """

    def draw(drawing: Drawing) -> None:
        height = 0.9 + max(2.8, 0.25 * len(curves))
        names = _short_names(list(curves), 14 if drawing.narrow else 26)
        right = 0.2 + 0.09 * max(map(len, names))
        axes = drawing.axes(height, _LEFT, right)
        # Four colors with four dashes distinguish sixteen curves; then they repeat.
        colors = [ROLES[_COLORS[number % 4]] for number in range(len(curves))]
        for number, (name, points) in enumerate(curves.items()):
            color = colors[number]
            axes.plot(*zip(*points, strict=True), color=color, linewidth=1.4, alpha=0.75,
                      linestyle=_STYLES[number // 4 % 4])  # fmt: skip
            for at, (step, value) in enumerate(points if len(points) <= _MARKED else points[-1:]):
                mark = f"history-{number}-{at}"
                axes.plot([step], [value], marker="o", markersize=4, color=color, gid=mark)
                drawing.tips[mark] = f"{name}, step {step}: {form.format(value)}"
        # Set limits before placing the names, whose heights depend on them.
        if limits:
            axes.set_ylim(*limits)
        _name_ends(axes, names, [points[-1] for points in curves.values()], colors, height)
        axes.set_xlabel("step")
        axes.set_ylabel(values)
        axes.grid(axis="y", linewidth=0.7)
        steps = sorted({step for points in curves.values() for step, _ in points})
        if len(steps) <= (4 if drawing.narrow else 8):
            axes.set_xticks(steps)
        else:
            integer_steps(axes, 4 if drawing.narrow else 8)

    return inline_plot(draw, label)


def _short_names(names: Sequence[str], length: int) -> list[str]:
    """Truncates names: at their ends or, if that would make two equal, to what distinguishes them.

    A name may be a run's and a task's, `a: task`.
    """
    shown = [printable(name) for name in names]
    short = [shortened(name, length) for name in shown]
    if len(set(short)) == len(short):
        return short
    runs = ["".join(name.rpartition(": ")[:2]) for name in shown]
    tasks = [name.rpartition(": ")[2] for name in shown]
    # Words, and what is between them; those with which all tasks begin or end are left out.
    words = [re.findall(r"[^\W_]+|[\W_]+", task) for task in tasks]
    begin = len(os.path.commonprefix(words))
    end = len(os.path.commonprefix([each[::-1] for each in words]))
    own = ["".join(each[begin : len(each) - end]).strip("_ /") for each in words]
    shown = [run + (part or task) for run, part, task in zip(runs, own, tasks, strict=True)]
    half = (length - 1) // 2
    return [n if len(n) <= length else f"{n[:half]}…{n[-half:]}" for n in shown]


def _name_ends(
    axes,
    names: Sequence[str],
    ends: Sequence[tuple[int, float]],
    colors: Sequence[str],
    height: float,
) -> None:
    """Writes curves' names right of the axes in their colors, near their ends, not overlapping."""
    low, high = axes.get_ylim()
    heights = {at: 100 * (value - low) / (high - low) for at, (_, value) in enumerate(ends)}
    # A line of text is a quarter of an inch high
    places = spread_out(heights, 25 / (height - 0.56))
    for at, (name, end, color) in enumerate(zip(names, ends, colors, strict=True)):
        axes.annotate(
            name,
            end,
            (1.02, places[at] / 100),
            textcoords="axes fraction",
            va="center",
            color=color,
        )


def loss_plot(curve: LossCurve, label: str) -> str:
    """Training loss by step."""

    def draw(drawing: Drawing) -> None:
        axes = drawing.axes(2.9, _LEFT)
        axes.plot(
            curve.steps,
            curve.losses,
            color=ROLES["accent"],
            linewidth=1.6,
            marker="o" if len(curve.steps) < 30 else "",
            markersize=3.5,
        )
        axes.set_xlabel("step")
        axes.set_ylabel(curve.unit)
        axes.grid(axis="y", linewidth=0.7)
        integer_steps(axes, 5 if drawing.narrow else 8)

    return inline_plot(draw, label)
