#!/usr/bin/env python3
"""Prints a random sample of the pages' sentences, each marked in its paragraph, for a reader.

    python scripts/dev/sample_sentences.py --seed 1 --number 300

docs/evidence/prose.md says what the reader does with it.
"""

import argparse
import random
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def user_pages() -> list[Path]:
    """README.md and the pages of docs/, without evidence and generated pages."""
    generated = {"api.md", "gin_fields.md"}
    return [ROOT / "README.md", *sorted(page for page in (ROOT / "docs").glob("*.md")
                                        if page.name not in generated)]  # fmt: skip


def paragraphs(text: str) -> Iterator[str]:
    """A page's paragraphs and list items, each on one line; no code, table, heading or picture."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    text = re.sub(r"(?:^\n)(?: {4,}.*\n)+", "\n", text, flags=re.M)
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.|:) )", text):
        line = " ".join(block.split())
        if re.search(r"[.:?!)*]$", line) and not re.match(r"[#|!]|`[^`]*`$", line):
            yield line


def sentences(paragraph: str) -> list[str]:
    """A paragraph's sentences."""
    return re.split(r"(?<=[.?!:])(?:\*\*)? (?=[`*\[(A-Z0-9])", paragraph)


def main() -> None:
    """Prints the sample."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--number", type=int, default=300)
    arguments = parser.parse_args()
    every = [(page, paragraph, sentence)
             for page in user_pages() for paragraph in paragraphs(page.read_text())
             for sentence in sentences(paragraph) if len(sentence.split()) > 3]  # fmt: skip
    chosen = random.Random(arguments.seed).sample(range(len(every)), arguments.number)
    print(f"{arguments.number} of {len(every)} sentences")
    for number, index in enumerate(sorted(chosen), 1):
        page, paragraph, sentence = every[index]
        print(f"\n{number} {page.name}\n{paragraph.replace(sentence, f'>>> {sentence} <<<', 1)}")


if __name__ == "__main__":
    main()
