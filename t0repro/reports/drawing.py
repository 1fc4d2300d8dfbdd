"""Drawings as inline SVG."""

from __future__ import annotations

import dataclasses
import io
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from t0repro.words import printable

Key = TypeVar("Key")


_SVG = "http://www.w3.org/2000/svg"


_XLINK = "http://www.w3.org/1999/xlink"


# Role -> a color that occurs nowhere else in a figure, so that it can be replaced afterward.
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
    ascending = sorted(values, key=lambda key: values[key])
    lowest = 0.0
    # Each label is pushed up by the one below it.
    for key in ascending:
        places[key] = max(values[key], lowest)
        lowest = places[key] + gap
    # Those that were pushed beyond the top push the ones below them down again.
    highest = 100.0
    for key in reversed(ascending):
        places[key] = min(places[key], highest)
        highest = places[key] - gap
    return places


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
    for role, color in ROLES.items():
        text = text.replace(color, f"var(--{role})")
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
