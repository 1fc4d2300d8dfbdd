"""The report's plots as inline SVG that takes its colours from the page, light or dark.

Matplotlib draws in stand-in colours; each is then replaced by the page's CSS variable of that role,
and what an inline SVG has no use for (metadata, its own style sheet, ids) is taken out.
"""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from typing import Any

from t0repro.reports.published import family_of
from t0repro.reports.report import (
    DatasetResult,
    GenerationResult,
    LossCurve,
    PromptResult,
    PublishedFigure,
)

_SVG = "http://www.w3.org/2000/svg"
_XLINK = "http://www.w3.org/1999/xlink"

# Role -> a colour that occurs nowhere else in a figure, so that it can be told apart afterwards.
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


def plot_settings():
    """A context in which Matplotlib draws in the page's style."""
    import matplotlib

    return matplotlib.rc_context(_SETTINGS)


def accuracy_plot(
    datasets: Sequence[DatasetResult], label: str, published: Sequence[PublishedFigure] = ()
) -> str:
    """A row per dataset: box and dots over prompts, chance, majority, mean with its interval.

    Args:
      datasets: at least one.
      label: what assistive technology reads.
      published: figures to draw as lines in the rows of their datasets.
    """
    with plot_settings():
        names = [_shortened(dataset.dataset, 30) for dataset in datasets]
        # A character of a label takes about 1.25% of the figure's width
        left = 0.03 + 0.0125 * max(10, *map(len, names))
        figure, axes = new_figure(0.9 + 0.62 * len(datasets), left)
        tips: dict[str, str] = {}
        for row, dataset in enumerate(datasets):
            _draw_dataset(axes, len(datasets) - 1 - row, dataset, row, tips)
            _draw_published(axes, len(datasets) - 1 - row, dataset, row, published, tips)
        axes.set_yticks(range(len(datasets)), names[::-1])
        axes.set_ylim(-0.6, len(datasets) - 0.4)
        axes.set_xlim(-2, 102)
        axes.set_xlabel("accuracy, percent")
        axes.grid(axis="x", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.tick_params(length=0)
        return to_inline_svg(figure, label, tips)


def _draw_published(
    axes,
    y: float,
    dataset: DatasetResult,
    row: int,
    published: Sequence[PublishedFigure],
    tips: dict[str, str],
) -> None:
    """A line above the row's box for each figure, solid for a mean and dotted for a median."""
    figures = [found for found in published if found.dataset == family_of(dataset.dataset)]
    for number, found in enumerate(figures):
        name = f"published-{row}-{number}"
        axes.plot(
            [found.value] * 2,
            [y + 0.24, y + 0.44],
            color=ROLES["ink"],
            linewidth=1.4,
            linestyle="solid" if found.statistic == "mean" else (0, (1, 1)),
            gid=name,
        )
        tips[name] = (
            f"{found.model}, {found.dataset}: {found.statistic} {found.value:g}%\n{found.source}"
        )


def calibration_plot(datasets: Sequence[DatasetResult], label: str) -> str:
    """Accuracy against confidence, a dot for each dataset's bin; the diagonal is perfect."""
    with plot_settings():
        figure, axes = new_figure(3.6, left=0.09)
        axes.plot([0, 100], [0, 100], color=ROLES["chance"], linewidth=1.2, linestyle="--")
        tips: dict[str, str] = {}
        for row, dataset in enumerate(datasets):
            for at, found in enumerate(dataset.calibration.bins if dataset.calibration else ()):
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
                tips[name] = (
                    f"{dataset.dataset}: {found.accuracy:.1f}% right at a confidence of"
                    f" {found.confidence:.1f}%, {found.examples} predictions"
                )
        axes.set_xlim(-2, 102)
        axes.set_ylim(-4, 104)
        axes.set_xlabel("confidence, percent")
        axes.set_ylabel("accuracy, percent")
        axes.grid(linewidth=0.7)
        axes.set_axisbelow(True)
        axes.tick_params(length=0)
        return to_inline_svg(figure, label, tips)


def history_plot(steps: Sequence[int], curves: Mapping[str, Sequence[float]], label: str) -> str:
    """Mean accuracy over prompts by step, a line for each dataset, named at its end."""
    from matplotlib.ticker import MaxNLocator

    with plot_settings():
        figure, axes = new_figure(0.9 + max(2.8, 0.25 * len(curves)), left=0.09)
        box = axes.get_position()
        axes.set_position((box.x0, box.y0, box.width - 0.22, box.height))
        tips: dict[str, str] = {}
        places = _spread({name: values[-1] for name, values in curves.items()}, 100 / 24)
        for number, (name, values) in enumerate(curves.items()):
            axes.plot(steps, values, color=ROLES["accent"], linewidth=1.4, alpha=0.75)
            for at, (step, value) in enumerate(zip(steps, values, strict=True)):
                mark = f"history-{number}-{at}"
                axes.plot(
                    [step], [value], marker="o", markersize=4, color=ROLES["accent"], gid=mark
                )
                tips[mark] = f"{name}, step {step}: {value:.1f}%"
            axes.annotate(
                _shortened(name, 24),
                (steps[-1], values[-1]),
                (1.02, places[name] / 100),
                textcoords="axes fraction",
                va="center",
                color=ROLES["muted"],
            )
        axes.set_ylim(0, 100)
        axes.set_xlabel("step")
        axes.set_ylabel("accuracy, percent")
        axes.grid(axis="y", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.tick_params(length=0)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.ticklabel_format(axis="x", style="plain", useOffset=False)
        return to_inline_svg(figure, label, tips)


def _spread(values: Mapping[str, float], gap: float) -> dict[str, float]:
    """Places for labels, near their values and at least `gap` apart where there is room."""
    places: dict[str, float] = {}
    low = 0.0
    for name in sorted(values, key=lambda name: values[name]):
        places[name] = max(values[name], low)
        low = places[name] + gap
    beyond = max(places.values()) - 100
    return {name: place - max(beyond, 0) for name, place in places.items()}


def loss_plot(curve: LossCurve, label: str) -> str:
    """Training loss by step."""
    from matplotlib.ticker import MaxNLocator

    with plot_settings():
        figure, axes = new_figure(2.9, left=0.09)
        marker = "o" if len(curve.steps) < 30 else ""
        axes.plot(
            curve.steps,
            curve.losses,
            color=ROLES["accent"],
            linewidth=1.6,
            marker=marker,
            markersize=3.5,
        )
        axes.set_xlabel("step")
        axes.set_ylabel("training loss")
        axes.grid(axis="y", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.tick_params(length=0)
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        axes.ticklabel_format(axis="x", style="plain", useOffset=False)
        return to_inline_svg(figure, label, {})


def new_figure(height: float, left: float):
    """A figure 7.6 inches wide and its axes; pyplot, with its global state, is not involved."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.6, height))
    FigureCanvasSVG(figure)
    figure.patch.set_alpha(0)
    bottom = 0.55 / height
    axes = figure.add_axes((left, bottom, 0.98 - left, 0.94 - bottom))
    axes.patch.set_alpha(0)
    return figure, axes


def _draw_dataset(axes, y: float, dataset: DatasetResult, row: int, tips: dict[str, str]) -> None:
    """Chance, the majority class, the box, the dots and, below them, the mean's interval."""
    for name, value, dashes in (
        ("chance", dataset.chance, (3, 2)),
        ("majority", dataset.majority, (1, 1.5)),
    ):
        axes.plot(
            [value] * 2,
            [y - 0.42, y + 0.42],
            color=ROLES[name],
            linewidth=1.6,
            linestyle=(0, dashes),
            gid=f"{name}-{row}",
            zorder=2.5,  # over the box, under the dots
        )
    tips[f"chance-{row}"] = f"{dataset.dataset}: chance {dataset.chance:.1f}%"
    tips[f"majority-{row}"] = f"{dataset.dataset}: majority class {dataset.majority:.1f}%"
    if len(dataset.prompts) > 2:
        _draw_box(axes, y + 0.08, dataset)
    for i, prompt in enumerate(dataset.prompts):
        # Neighbours are shifted by a fixed pattern, so that equal accuracies stay apart.
        shift = 0.08 + 0.1 * ((i * 2) % 5 - 2) / 2 if len(dataset.prompts) > 1 else 0.08
        name = f"prompt-{row}-{i}"
        axes.plot(
            [prompt.accuracy],
            [y + shift],
            marker="o",
            markersize=6,
            markeredgewidth=0,
            color=ROLES["accent"],
            alpha=0.75,
            gid=name,
            zorder=3,
        )
        tips[name] = prompt_tip(prompt)
    mean, interval, low = dataset.accuracy.mean, dataset.mean_interval, y - 0.3
    axes.plot([interval.low, interval.high], [low, low], color=ROLES["ink"], linewidth=1.6)
    axes.plot([mean], [low], marker="D", markersize=4.5, color=ROLES["ink"], gid=f"mean-{row}")
    tips[f"mean-{row}"] = (
        f"{dataset.dataset}: mean over prompts {mean:.1f}%,"
        f" 95% interval {interval.low:.1f} to {interval.high:.1f}"
    )


def _draw_box(axes, y: float, dataset: DatasetResult) -> None:
    spread = dataset.accuracy
    box = {
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
        widths=0.36,
        showfliers=False,
        patch_artist=True,
        boxprops={"facecolor": ROLES["band"], "edgecolor": ROLES["muted"], "linewidth": 1},
        medianprops={"color": ROLES["ink"], "linewidth": 2},
        whiskerprops=line,
        capprops=line,
        manage_ticks=False,
    )


def prompt_tip(prompt: PromptResult) -> str:
    """What hovering over a prompt shows: its figures, its text and one rendering."""
    lines = [
        f"{prompt.template_name}: {prompt.accuracy:.1f}%"
        f" ({prompt.interval.low:.1f} to {prompt.interval.high:.1f}), {prompt.examples} examples"
    ]
    if prompt.prompt:
        lines.append(_shortened(prompt.prompt, 700))
    if prompt.first_input:
        lines.append("First input: " + _shortened(prompt.first_input, 300))
    return "\n\n".join(lines)


def generation_tip(found: GenerationResult) -> str:
    """What hovering over a decoded prompt shows: its text and its first example."""
    lines = [_shortened(found.prompt, 700)] if found.prompt else []
    if found.first_input:
        lines.append("First input: " + _shortened(found.first_input, 300))
    return "\n\n".join(lines) or found.task


def _shortened(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1].rstrip() + "\u2026"


def to_inline_svg(figure, label: str, tips: Mapping[str, str]) -> str:
    """The figure as an <svg> element that fits its page; `tips` are shown on hover by group id."""
    buffer = io.StringIO()
    # No creator, no date: nothing that names an address or differs between equal reports
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    root = ElementTree.fromstring(buffer.getvalue())
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.endswith(("}metadata", "}style")) or child.tag in ("metadata", "style"):
                parent.remove(child)
    _add_tips(root, tips)
    _tidy_ids(root, prefix=re.sub(r"\W+", "-", label.lower()))
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    root.set("role", "group")
    root.set("aria-label", label)
    ElementTree.register_namespace("", _SVG)
    text = ElementTree.tostring(root, encoding="unicode")
    for role, colour in ROLES.items():
        text = text.replace(colour, f"var(--{role})")
    # The page's font; the size stays
    return re.sub(r"(font(?:-family)?: (?:[\w.]+px )?)[^;\"]+", r"\1var(--font)", text)


def _add_tips(root: ElementTree.Element, tips: Mapping[str, str]) -> None:
    for element in root.iter():
        tip = tips.get(element.get("id", ""))
        if tip is not None:
            element.set("data-tip", tip)
            title = ElementTree.Element(f"{{{_SVG}}}title")
            title.text = tip
            element.insert(0, title)


def _tidy_ids(root: ElementTree.Element, prefix: str) -> None:
    """Keeps only the ids that are referred to, made unique to this figure on its page."""
    link = f"{{{_XLINK}}}href"
    used = set()
    for element in root.iter():
        if link in element.attrib:
            used.add(element.attrib[link].removeprefix("#"))
        for value in element.attrib.values():
            used.update(re.findall(r"url\(#([^)]+)\)", value))
    for element in root.iter():
        name = element.attrib.pop("id", None)
        if name in used:
            element.set("id", f"{prefix}-{name}")
        if link in element.attrib:
            target = element.attrib.pop(link).removeprefix("#")
            element.set("href", f"#{prefix}-{target}")
        for key, value in element.attrib.items():
            element.set(key, re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}-\1)", value))
