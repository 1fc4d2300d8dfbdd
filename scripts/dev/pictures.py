"""Draws the diagrams of the pages: docs/images/NAME.svg from docs/images/NAME.txt.

    python scripts/dev/pictures.py

The first line of a text is the title. In the others, `[a / b]` is a box with one line for each
part, and `-words->` an arrow to the next box. A line without a box is a caption. house.svg has no
text: it is the layers of the import contract in pyproject.toml.
"""

import html
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Its own background makes a picture readable on light and dark pages.
STYLE = """<style>
text{font:13px system-ui,sans-serif;fill:#1d2b33;text-anchor:middle}
.t{font-weight:600;text-anchor:start}.n{text-anchor:start}.l{font-size:11px}.g{fill:#fff}.b{fill:#e3f1ef;stroke:#3f6b73}
line{stroke:#3f6b73;stroke-width:1.4;marker-end:url(#m)}path{fill:#3f6b73}
@media(prefers-color-scheme:dark){text{fill:#e8eef0}.g{fill:#1e2429}.b{fill:#22413f;stroke:#7fb3ad}
line{stroke:#7fb3ad}path{fill:#7fb3ad}}
</style>
<defs><marker id="m" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"
 orient="auto"><path d="M0,0L8,4L0,8z"/></marker></defs>"""
WIDTH, BOX, ROW, BAND, TOP = 900, 200, 66, 28, 40


def box(x: float, y: float, lines: list[str]) -> Iterator[str]:
    """A box at a place, with its lines of text in the middle."""
    yield f'<rect class="b" x="{x:.0f}" y="{y}" width="{BOX}" height="44" rx="5"/>'
    for at, line in enumerate(lines):
        below = 27 if len(lines) == 1 else 19 + 16 * at
        yield f'<text x="{x + BOX / 2:.0f}" y="{y + below}">{html.escape(line)}</text>'


def row(text: str, y: int) -> Iterator[str]:
    """A row of boxes and the arrows between them."""
    boxes = re.findall(r"\[(.*?)\]", text)
    labels = re.findall(r"\] -(.*?)-> \[", text)
    gap = (WIDTH - 24 - BOX * len(boxes)) / max(len(boxes) - 1, 1)
    for at, content in enumerate(boxes):
        x = 12 + at * (BOX + gap)
        yield from box(x, y, content.split(" / "))
        if at < len(labels):
            end, middle = x + BOX + gap, x + BOX + gap / 2
            yield f'<line x1="{x + BOX + 3:.0f}" x2="{end - 3:.0f}" y1="{y + 22}" y2="{y + 22}"/>'
            label = html.escape(labels[at])
            yield f'<text class="l" x="{middle:.0f}" y="{y + 15}">{label}</text>'


def framed(title: str, height: int, parts: list[str]) -> str:
    """An SVG of a height, with its title on top."""
    name = html.escape(title, quote=True)
    begin = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}"'
        f' viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{name}"><title>{name}</title>'
    )
    ground = f'<rect class="g" width="{WIDTH}" height="{height}" rx="4"/>'
    heading = f'<text class="t" x="12" y="24">{name}</text>'
    return "\n".join([begin, STYLE, ground, heading, *parts, "</svg>", ""])


def svg_of(text: str) -> str:
    """The SVG of a text."""
    title, *lines = text.strip().splitlines()
    parts, y = [], TOP
    for line in lines:
        if line.startswith("["):
            parts += row(line, y)
            y += ROW
        else:
            parts.append(f'<text class="n" x="12" y="{y + 12}">{html.escape(line)}</text>')
            y += BAND
    return framed(title, y, parts)


def import_layers(root: Path = ROOT) -> str:
    """The SVG of the packages, each layer above the layers that it may import."""
    linter = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"]
    (layers,) = (each["layers"] for each in linter["contracts"] if each["id"] == "layers")
    parts = []
    for at, layer in enumerate(layers):
        y = TOP + BAND * at
        names = html.escape(layer.replace(" | ", " · "))
        parts += [
            f'<rect class="b" x="12" y="{y}" width="{WIDTH - 24}" height="{BAND - 4}" rx="5"/>',
            f'<text x="{WIDTH // 2}" y="{y + 17}">{names}</text>',
        ]
    title = "The packages: each imports only packages below it"
    return framed(title, TOP + BAND * len(layers) + 8, parts)


def pictures(root: Path = ROOT) -> dict[Path, str]:
    """Every picture that has a text, and that of the packages, by path."""
    images = root / "docs" / "images"
    texts = {path.with_suffix(".svg"): path.read_text() for path in sorted(images.glob("*.txt"))}
    return {
        **{path: svg_of(text) for path, text in texts.items()},
        images / "house.svg": import_layers(root),
    }


if __name__ == "__main__":
    for path, svg in pictures().items():
        path.write_text(svg)
