"""Comparisons and histories as Markdown and as one self-contained page in the report's style."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

from t0repro.files import write_atomically
from t0repro.reports.compare_runs import RunComparison, to_json
from t0repro.reports.history import History
from t0repro.reports.plots import history_plot
from t0repro.reports.render import asset, markdown_table, template_environment


@dataclasses.dataclass(frozen=True)
class Section:
    """A heading, sentences, a plot (SVG) and a table; all but the heading may be empty."""

    title: str
    lines: tuple[str, ...] = ()
    plot: str = ""
    header: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()


def comparison_sections(comparisons: Sequence[RunComparison]) -> list[Section]:
    """What a page of comparisons shows."""
    sections = []
    for found in comparisons:
        a, b = found.label_a, found.label_b
        header = ("dataset", "prompts", "examples", a, b, "difference", "95% interval")
        header += ("McNemar p", f"only {a} right", f"only {b} right", "agreement")
        rows = tuple(
            (
                entry.dataset,
                str(entry.prompts),
                str(entry.examples),
                f"{entry.accuracy_a:.1f}",
                f"{entry.accuracy_b:.1f}",
                f"{entry.difference:+.1f}",
                f"{entry.interval.low:+.1f} to {entry.interval.high:+.1f}",
                f"{entry.p_value:.3g}",
                str(entry.only_a),
                str(entry.only_b),
                f"{entry.agreement:.1f}%",
            )
            for entry in found.datasets
        )
        lines = [
            f"Only {label} has: {', '.join(tasks)}."
            for label, tasks in ((a, found.only_a), (b, found.only_b))
            if tasks
        ]
        sections.append(Section(f"{a} and {b}", tuple(lines), header=header, rows=rows))
        if found.flips:
            shown = f", the first {len(found.flips)}" if len(found.flips) < found.flipped else ""
            sections.append(
                Section(
                    f"Predicted differently: {found.flipped} examples{shown}",
                    header=("task", "example", f"choice {a}", f"choice {b}", "right"),
                    rows=tuple(
                        (
                            flip.task,
                            str(flip.example),
                            str(flip.predicted_a),
                            str(flip.predicted_b),
                            a if flip.right_a else b if flip.right_b else "neither",
                        )
                        for flip in found.flips
                    ),
                )
            )
    method = (
        "The difference is that of the means over prompts, percentage points; its interval"
        " resamples examples, the same for both runs. McNemar's test takes an example with all of"
        " its prompts as one cluster. No correction is made for looking at several datasets.",
    )
    return [*sections, Section("How to read it", method)]


def history_sections(history: History) -> list[Section]:
    """What a page of a history shows."""
    lines = [f"Not at every step: {', '.join(history.skipped)}."] if history.skipped else []
    rows = tuple(
        (name, f"{history.chance[name]:.1f}", *(f"{value:.1f}" for value in values))
        for name, values in history.curves.items()
    )
    plot = history_plot(history.steps, history.curves, "Accuracy by step")
    header = ("dataset", "chance", *map(str, history.steps))
    return [Section("Mean accuracy over prompts, by step", tuple(lines), plot, header, rows)]


def write_comparison(
    comparisons: Sequence[RunComparison], out: str | os.PathLike[str]
) -> list[Path]:
    """Writes compare.json, compare.md and compare.html; returns their paths."""
    sections = comparison_sections(comparisons)
    return write_page("compare", "Runs compared", sections, to_json(comparisons), out)


def write_history(history: History, out: str | os.PathLike[str]) -> list[Path]:
    """Writes history.json, history.md and history.html; returns their paths."""
    return write_page(
        "history", "Accuracy by checkpoint", history_sections(history), history.to_json(), out
    )


def render_page(title: str, sections: Sequence[Section]) -> str:
    """The page, with its style, script and plots inside it: it requests nothing."""
    return (
        template_environment()
        .get_template("sections.html")
        .render(title=title, sections=sections, css=asset("report.css"), script=asset("report.js"))
    )


def write_page(
    name: str, title: str, sections: Sequence[Section], content: str, out: str | os.PathLike[str]
) -> list[Path]:
    """Writes <name>.json with the content, and the sections as <name>.md and <name>.html."""
    parts = [f"# {title}"]
    for section in sections:
        parts += [f"## {section.title}", *section.lines]
        if section.rows:
            parts.append(markdown_table(section.header, section.rows))
    contents = {
        f"{name}.json": content,
        f"{name}.md": "\n\n".join(parts) + "\n",
        f"{name}.html": render_page(title, sections),
    }
    paths = [Path(out) / file for file in contents]
    for path in paths:
        write_atomically(path, contents[path.name])
    return paths
