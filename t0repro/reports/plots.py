"""The plots: accuracies by dataset, calibration, accuracy by step, training losses and curves.

They are inline SVG that takes its colors from the page, light or dark. Matplotlib draws in
placeholder colors, each of which is then replaced by the page's CSS variable for that role. Parts
that an inline SVG does not need are removed (metadata, style sheet, unused ids). Every plot is
drawn twice, for wide and for narrow screens, because text that scales with the plot would be
unreadable on a narrow one; the page's style sheet shows the one that fits.
"""

from __future__ import annotations

import dataclasses
import io
import os
import re
import string
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from t0repro.reports.losses import LossCurve
from t0repro.reports.report import PublishedFigure, Report, family_of
from t0repro.reports.results import DatasetResult, GroupResult, PromptResult
from t0repro.words import counted, printable, shortened

Key = TypeVar("Key")

_SVG = "http://www.w3.org/2000/svg"
_XLINK = "http://www.w3.org/1999/xlink"

# Role -> a color that occurs nowhere else in a figure, so that it can be replaced afterwards.
ROLES = {
    "ink": "#010203",
    "muted": "#040506",
    "grid": "#070809",
    "accent": "#0a0b0c",
    "band": "#0d0e0f",
    "chance": "#101112",
    "majority": "#131415",
}
_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: searchable, and in the page's font
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
    "svg.hashsalt": "t0repro",  # the same figure gives the same bytes
    "font.family": "sans-serif",
    "font.size": 10.5,
    "text.color": ROLES["ink"],
    "axes.edgecolor": ROLES["grid"],
    "xtick.color": ROLES["muted"],
    "ytick.color": ROLES["muted"],
    "xtick.labelcolor": ROLES["muted"],
    "ytick.labelcolor": ROLES["ink"],
    "axes.labelcolor": ROLES["muted"],
    "grid.color": ROLES["grid"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
}


@dataclasses.dataclass
class Drawing:
    """A figure while it is being drawn.

    Attributes:
      narrow: whether it is for a narrow screen.
      figure: Matplotlib's figure, once `axes` has been called.
      tips: group id of an artist -> its tooltip.
    """

    narrow: bool
    figure: Any = None
    tips: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def inches(self) -> float:
        """The figure's width; text of 10.5 points is then at least 10 px high on its screens."""
        return 4.7 if self.narrow else 7.6

    def axes(self, height: float, left: float, right: float = 0.15):
        """New axes on a new figure, all sizes in inches; does not use pyplot and its global state.

        Args:
          height: Height of the figure.
          left: room for labels to the left of the axes.
          right: room to the right of them.
        """
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure

        self.figure = Figure(figsize=(self.inches, height))
        # A canvas attaches itself to its figure, which savefig then draws with.
        FigureCanvasSVG(self.figure)
        # Transparent, so that the page's background shows.
        self.figure.patch.set_alpha(0)
        # Leave room for the axis's label below, and a little above.
        bottom, top = 0.48 / height, 1 - 0.08 / height
        width = (self.inches - left - right) / self.inches
        axes = self.figure.add_axes((left / self.inches, bottom, width, top - bottom))
        axes.patch.set_alpha(0)
        axes.set_axisbelow(True)
        axes.tick_params(length=0)
        return axes


def inline_plot(draw: Callable[[Drawing], None], label: str) -> str:
    """A plot as HTML: its SVG for wide screens and its SVG for narrow ones.

    Args:
      draw: draws the plot, with `Drawing.axes`.
      label: text for assistive technology.
    """
    import matplotlib

    parts = []
    for name in ("wide", "narrow"):
        drawing = Drawing(narrow=name == "narrow")
        with matplotlib.rc_context(_SETTINGS):
            draw(drawing)
            svg = _inline_svg(drawing, label, f"{name} {label}")
        parts.append(f'<div class="{name}">{svg}</div>')
    return "".join(parts)


def integer_steps(axes, count: int) -> None:
    """Labels the horizontal axis with about `count` integer steps, written out."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(count, integer=True))
    # Otherwise Matplotlib writes large steps as powers of ten, or relative to an offset.
    axes.ticklabel_format(axis="x", style="plain", useOffset=False)


def spread_out(values: Mapping[Key, float], gap: float) -> dict[Key, float]:
    """Positions for labels in 0 to 100, near their values, at least `gap` apart where possible."""
    places: dict[Key, float] = {}
    lowest = 0.0
    # Ascending: each label is pushed up by the one below it.
    for key in sorted(values, key=lambda key: values[key]):
        places[key] = max(values[key], lowest)
        lowest = places[key] + gap
    # If labels were pushed beyond the top, move all of them down together.
    beyond = max(places.values(), default=0) - 100
    return {key: place - max(beyond, 0) for key, place in places.items()}


def _inline_svg(drawing: Drawing, label: str, prefix: str) -> str:
    """The figure as an <svg> element that fits its page; its ids start with the prefix."""
    buffer = io.StringIO()
    # Omit creator and date: nothing may name an address or differ between equal reports.
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    drawing.figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    root = ElementTree.fromstring(buffer.getvalue())
    # As lists, because removing elements during the iteration would skip others.
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.endswith(("}metadata", "}style")) or child.tag in ("metadata", "style"):
                parent.remove(child)
    _add_tips(root, drawing.tips)
    _tidy_ids(root, prefix=re.sub(r"\W+", "-", prefix.lower()))
    # Without a size of its own, the SVG fills the width that the page allots.
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    root.set("role", "group")
    root.set("aria-label", label)
    # Otherwise ElementTree writes tags such as ns0:svg, which HTML does not show as SVG.
    ElementTree.register_namespace("", _SVG)
    text = ElementTree.tostring(root, encoding="unicode")
    # Matplotlib writes colors in lower case, as in ROLES.
    for role, colour in ROLES.items():
        text = text.replace(colour, f"var(--{role})")
    # Use the page's font but keep the size.
    return re.sub(r"(font(?:-family)?: (?:[\w.]+px )?)[^;\"]+", r"\1var(--font)", text)


def _add_tips(root: ElementTree.Element, tips: Mapping[str, str]) -> None:
    for element in root.iter():
        tip = tips.get(element.get("id", ""))
        if tip is not None:
            tip = printable(tip, keep="\n")  # XML cannot represent control characters
            element.set("data-tip", tip)
            title = ElementTree.Element(f"{{{_SVG}}}title")
            title.text = tip
            element.insert(0, title)


def _tidy_ids(root: ElementTree.Element, prefix: str) -> None:
    """Keeps only referenced ids, made unique to this figure on its page."""
    link = f"{{{_XLINK}}}href"
    used = set()
    for element in root.iter():
        if link in element.attrib:
            used.add(element.attrib[link].removeprefix("#"))
        for value in element.attrib.values():
            used.update(re.findall(r"url\(#([^)]+)\)", value))
    # A second pass, since references are known only now.
    for element in root.iter():
        name = element.attrib.pop("id", None)
        if name in used:
            element.set("id", f"{prefix}-{name}")
        if link in element.attrib:
            target = element.attrib.pop(link).removeprefix("#")
            element.set("href", f"#{prefix}-{target}")
        for key, value in element.attrib.items():
            element.set(key, re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}-\1)", value))


# Plots --------------------------------------------------------------------------------------------

_LEFT = 0.68  # inches for the numbers and the name of a vertical axis


def calibration_plot(datasets: Sequence[DatasetResult], label: str) -> str:
    """Accuracy against confidence, a dot for each dataset's bin; the diagonal is ideal."""

    def draw(drawing: Drawing) -> None:
        axes = drawing.axes(3.6, _LEFT)
        axes.plot([0, 100], [0, 100], color=ROLES["chance"], linewidth=1.2, linestyle="--")
        for row, dataset in enumerate(datasets):
            for at, found in enumerate(dataset.calibration.bins if dataset.calibration else ()):
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


_COLOURS, _STYLES = ("accent", "chance", "majority", "ink"), ("-", "--", ":", "-.")
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
        right = 0.2 + 0.085 * max(map(len, names))
        axes = drawing.axes(height, _LEFT, right)
        for number, (name, points) in enumerate(curves.items()):
            # Four colors with four dashes distinguish sixteen curves; then they repeat.
            color = ROLES[_COLOURS[number % 4]]
            axes.plot(*zip(*points, strict=True), color=color, linewidth=1.4, alpha=0.75,
                      linestyle=_STYLES[number // 4 % 4])  # fmt: skip
            for at, (step, value) in enumerate(points if len(points) <= _MARKED else points[-1:]):
                mark = f"history-{number}-{at}"
                axes.plot([step], [value], marker="o", markersize=4, color=color, gid=mark)
                drawing.tips[mark] = f"{name}, step {step}: {form.format(value)}"
        # Set limits before placing the names, whose heights depend on them.
        if limits:
            axes.set_ylim(*limits)
        _name_ends(axes, names, [points[-1] for points in curves.values()], height)
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
    """Truncates names: at their ends or, if that would make two equal, in the middle."""
    shown = [printable(name) for name in names]
    short = [shortened(name, length) for name in shown]
    if len(set(short)) == len(short):
        return short
    ending = os.path.commonprefix([name[::-1] for name in shown])  # common to all
    shown = [name[: len(name) - len(ending)] for name in shown]
    half = (length - 1) // 2
    return [n if len(n) <= length else f"{n[:half]}…{n[-half:]}" for n in shown]


def _name_ends(
    axes, names: Sequence[str], ends: Sequence[tuple[int, float]], height: float
) -> None:
    """Writes curves' names right of the axes, near the curves' ends but without overlap."""
    low, high = axes.get_ylim()
    heights = {at: 100 * (value - low) / (high - low) for at, (_, value) in enumerate(ends)}
    # A line of text is a quarter of an inch high
    places = spread_out(heights, 25 / (height - 0.56))
    for at, (name, end) in enumerate(zip(names, ends, strict=True)):
        axes.annotate(
            name,
            end,
            (1.02, places[at] / 100),
            textcoords="axes fraction",
            va="center",
            color=ROLES["muted"],
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
        axes.set_ylabel("training loss")
        axes.grid(axis="y", linewidth=0.7)
        integer_steps(axes, 5 if drawing.narrow else 8)

    return inline_plot(draw, label)


# ---- Accuracies by dataset -----------------------------------------------------------------------


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
    lines = [
        f"{prompt.template_name}: {prompt.accuracy:.1f}%"
        f" ({prompt.interval.low:.1f} to {prompt.interval.high:.1f}),"
        f" {counted(prompt.examples, 'example')}"
    ]
    if prompt.prompt:
        lines.append(shortened(prompt.prompt, 700))
    if prompt.first_input:
        lines.append("First input: " + shortened(prompt.first_input, 300))
    return "\n\n".join(lines)
