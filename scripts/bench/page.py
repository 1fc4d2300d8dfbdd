"""Writes the tables of docs/evidence/benchmarks.md and a picture for each, from benchmarks.json.

To publish new figures, put them into the JSON file and run

    python -P scripts/bench/page.py
"""

from __future__ import annotations

import html
import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[2] / "docs"

# Each picture has its own background, so that it is readable on light and dark pages.
STYLE = """<style>
text{font:12px system-ui,sans-serif;fill:#1d2b33}.n{font-weight:600}.r{fill:#fff}
.o{fill:#00695c}.x{fill:#a9b8bd}.l{stroke:#1d2b33;stroke-dasharray:3 3}
@media(prefers-color-scheme:dark){text{fill:#e8eef0}.r{fill:#1e2429}.o{fill:#4db6ac}
.x{fill:#52626a}.l{stroke:#e8eef0}}
</style>"""
LEFT, RIGHT, HEIGHT = 400, 700, 26


def ratio(row: dict[str, Any]) -> float:
    """How many times as fast as the other program a row's program is."""
    return row["ratio"] if "ratio" in row else row["other"] / row["value"]


def shown(number: float) -> str:
    """A ratio with as many digits as the figures carry."""
    return f"{number:.0f}x" if number >= 10 else f"{number:.2g}x"


def script(row: dict[str, Any], question: dict[str, Any]) -> str:
    """The program that measured a row: the first one that its command names."""
    command = row.get("command", question["command"])
    return re.findall(r"\w+\.py|t0repro \w+", command)[0]


def table(question: dict[str, Any]) -> Iterator[str]:
    """The lines of a question's table."""
    yield "| what | against | ratio | command | machine | date | commit |"
    yield "|---|---|---|---|---|---|---|"
    for row in question["rows"]:
        what, against = row["what"], row["against"]
        if "value" in row:
            unit = question["unit"]
            what, against = f"{what}, {row['value']} {unit}", f"{against}, {row['other']} {unit}"
        yield (
            f"| {what} | {against} | **{shown(ratio(row))}** | `{script(row, question)}`"
            f" | {row['machine']} | {row['date']} | `{row['commit']}` |"
        )


def picture(question: dict[str, Any]) -> str:
    """A bar for each row: how many times as fast as the other program."""
    ratios = [ratio(row) for row in question["rows"]]
    scale = (RIGHT - LEFT) / max(ratios)
    height = 40 + HEIGHT * len(ratios)
    title = html.escape(question["title"])
    width = RIGHT + 60
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
        f' viewBox="0 0 {width} {height}" role="img" aria-label="{title}"><title>{title}</title>',
        STYLE,
        f'<rect class="r" width="{width}" height="{height}" rx="4"/>',
        f'<text class="n" x="12" y="20">{title}</text>',
    ]
    for at, (row, times) in enumerate(zip(question["rows"], ratios, strict=True)):
        top = 32 + HEIGHT * at
        label = f"{row['what']} / {row['against']}" + (
            ", huge pages" if "huge pages" in row["machine"] else ""
        )
        bar = "o" if times >= 1 else "x"
        lines += [
            f'<text x="12" y="{top + 16}">{html.escape(label)}</text>',
            f'<rect class="{bar}" x="{LEFT}" y="{top + 3}" width="{times * scale:.1f}"'
            f' height="{HEIGHT - 8}"/>',
            f'<text class="n" x="{LEFT + times * scale + 6:.1f}" y="{top + 16}">'
            f"{shown(times)}</text>",
        ]
    line = f"{LEFT + scale:.1f}"
    lines.append(f'<line class="l" x1="{line}" x2="{line}" y1="30" y2="{height - 4}"/>')
    return "\n".join([*lines, "</svg>", ""])


def section(question: dict[str, Any]) -> str:
    """A question's section of the page."""
    name, title = question["name"], question["title"]
    return "\n".join(
        [
            f"## {title}",
            "",
            textwrap.fill(question["text"], 150),
            "",
            f"Command: `{question['command']}`",
            "",
            f"![{title}](../images/bench_{name}.svg)",
            "",
            *table(question),
            "",
        ]
    )


def files(docs: Path = DOCS) -> dict[Path, str]:
    """The page with its tables renewed, and every picture, by path."""
    found = json.loads((docs / "evidence" / "benchmarks.json").read_text())
    page = docs / "evidence" / "benchmarks.md"
    machines = "\n".join(f"| {name} | {what} |" for name, what in found["machines"].items())
    body = "\n".join(
        [
            *map(section, found["questions"]),
            f"## Machines\n\n| name | what it is |\n|---|---|\n{machines}\n",
        ]
    )
    begin, end = "<!-- scripts/bench/page.py writes from here -->", "<!-- to here -->"
    text = re.sub(
        f"{begin}.*{end}",
        lambda _: f"{begin}\n\n{body}\n{end}",
        page.read_text(),
        flags=re.S,
    )
    pictures = {
        docs / "images" / f"bench_{each['name']}.svg": picture(each) for each in found["questions"]
    }
    return {page: text, **pictures}


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text)
