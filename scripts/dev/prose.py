"""Finds private words in the pages, help texts, messages, docstrings and comments.

    python scripts/dev/prose.py [FOLDER ...]      # file:line, the word, what to write instead

`WORDS` pairs each pattern with what engineers of this field write. No test runs this.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
KINDS = (".md", ".py", ".sh")
PAGES = ("README.md", "docs")
CODE = ("t0repro", "tasks", "converters", "scripts")

# After "training", these make a compound that the field uses.
_KIND = (
    r"(?! (?:runs?|steps?|sets?|splits?|jobs?|loops?|batch|batches|examples?|mixtures?|tasks?"
    r"|commands?|rows?|data|datasets?|process|processes|program|prompts?|curves?|tokens?|loss"
    r"|losses|mode|time|state|package|config|configuration|sequences?|script|pipeline|input|speed"
    r"|folder|checkpoints?|stack|metrics?|gin)\b)"
)
WORDS: dict[str, str] = {
    r"\b(?:products? of matrices|matrix products?|product's (?:rate|throughput))\b": "matmul",
    r"\b(?:layers in a loop|a loop of layers)\b": "scanned layers",
    r"\b(?:computed|made) again\b": "recomputed, rematerialized",
    r"\b(?:parameters|weights|order) (?:is|are|was|were) drawn\b": "initialized; random order",
    r"\bnew parameters\b": "initial parameters",
    r"\banew\b": "again; from scratch",
    r"\btrainings\b": "training runs",
    rf"\b(?:an?|each|every|one|another|no|this) training\b{_KIND}": "training run",
    r"\b(?:the|a|an|each|another) (?:earlier |other |same )?training's\b": "the run's",
    r"\bnot finite\b": "non-finite (NaN or Inf)",
    r"\bwhole batch(?:es)?\b": "full batch",
    r"\b(?:no|not a) whole (?:checkpoint|record)\b": "complete",
    r"\bhalf (?:a|of a|of the) (?:file|checkpoint|record|folder)\b": "partial",
    r"\btaken for (?!granted)": "mistaken for",
    r"\bdivided (?:among|along|over)\b": "sharded across",
    r"\b(?:operations|FLOPs?) a second\b": "FLOP/s",
    r"\b(?:tokens|examples|pairs|steps|bytes|rows) a second\b": "per second",
    r"\bmemory beside\b|\bbeside the state\b": "activation memory, temporaries",
    r"\b(?:programs kept|kept programs)\b": "compilation cache",
    r"\b(?:two|between) looks\b": "polling interval",
    r"\b(?:sureness|surety)\b": "confidence",
    r"\b(?:hold|holds|held) (?:\w+ )?against\b": "compare with",
    r"\btold\b(?! apart)": "reported, printed",
    r"\b(?:program|command|code|module|stack)s? knows?\b": "supports",
    r"\bhard life\b": "fault injection",
    r"\bbut for\b": "except for",
    r"\bwhoever\b": "the process that, the caller",
    r"\blearnt\b": "learned",
    r"\bat hand\b": "available",
    r"\bhas not(?=[.,;:)]|$)": "does not have",
    r"\b(?:is|are) not one (?=row|example|task|file)": "has no",
    r"\bwithout a word\b": "silently",
    r"\b(?:go|goes|went|going|gone) on (?!one|all|a |the )\b": "continue, resume",
    r"\bof one's own\b": "of your own, custom",
    r"\bwithout effect\b": "ignored",
    r"\b(?:is|are) not here\b": "is missing, not installed",
}
_PATTERNS = [(re.compile(pattern, re.I), write) for pattern, write in WORDS.items()]


class Hit(NamedTuple):
    """A private word: where it is, what it is, and what to write."""

    where: str
    word: str
    write: str


def hits(text: str, where: str) -> Iterator[Hit]:
    """The private words of a text, which may break lines."""
    joined = " ".join(text.split())
    for pattern, write in _PATTERNS:
        for match in pattern.finditer(joined):
            around = joined[max(0, match.start() - 30) : match.end() + 30]
            yield Hit(where, f"{match[0]!r} in …{around}…", write)


def paragraphs(page: str) -> Iterator[tuple[int, str]]:
    """The paragraphs of a page with the line that each begins at, code blanked out."""
    page = re.sub(r"^```.*?^```", lambda m: "\n" * m[0].count("\n"), page, flags=re.M | re.S)
    page = re.sub(r"^(?: {4}.*\n)+", lambda m: "\n" * m[0].count("\n"), page, flags=re.M)
    page = re.sub(r"`[^`]*`", "`…`", page)
    line = 1
    for part in re.split(r"(\n\s*\n|\n(?=[|*-]))", page):
        yield line, part
        line += part.count("\n")


def comments_and_strings(source: str) -> Iterator[tuple[int, str]]:
    """The comments (joined where they are adjacent) and strings of a module, with their lines."""
    comment: list[str] = []
    begin = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if comment and token.start[0] != last + 1:
                yield begin, " ".join(comment)
                comment = []
            begin = begin if comment else token.start[0]
            last = token.start[0]
            comment.append(token.string.lstrip("# "))
    if comment:
        yield begin, " ".join(comment)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            parts = (each.value if isinstance(each, ast.Constant) else "…" for each in node.values)
            yield node.lineno, "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, re.sub(r"`[^`]*`", "`…`", node.value)


def check(path: Path) -> list[Hit]:
    """The private words of a page, a module or a shell script's comments."""
    text = path.read_text()
    if path.suffix == ".sh":
        text = "".join(re.findall(r"^# ?(.*\n)", text, re.M))
    parts = comments_and_strings(text) if path.suffix == ".py" else paragraphs(text)
    name = path.relative_to(ROOT)
    found = {hit: None for line, part in parts for hit in hits(part, f"{name}:{line}")}
    return list(found)


def files(folders: tuple[str, ...]) -> list[Path]:
    """Every page, module and shell script below the folders, except this file."""
    found = []
    for each in (ROOT / folder for folder in folders):
        found += [each] if each.is_file() else [x for x in each.rglob("*.*") if x.suffix in KINDS]
    return sorted(path for path in found if path != Path(__file__).resolve())


if __name__ == "__main__":
    every = [hit for path in files(tuple(sys.argv[1:]) or PAGES + CODE) for hit in check(path)]
    for hit in every:
        print(f"{hit.where}: {hit.word}: write {hit.write}")
    sys.exit(bool(every))
