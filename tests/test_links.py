"""The links of the pages: each leads to a file and a heading, or has the form of an address."""

import re
from collections import Counter
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from .helpers.docs_commands import ROOT


def prose(text: str) -> str:
    """A page without its code, in which brackets are no links."""
    text = re.sub(r"^(```|~~~).*?^\1", "", text, flags=re.M | re.S)
    return re.sub(r"`[^`\n]*`", "``", text)


def links(text: str) -> list[str]:
    """The targets of a page's links and pictures, those of HTML and of references too."""
    text = prose(text)
    inline = re.findall(r"\]\(<?([^\s()<>]*(?:\([^\s()]*\)[^\s()]*)*)>?(?:\s+\"[^\"]*\")?\)", text)
    references = re.findall(r"^\[[^\]]+\]:\s*(\S+)", text, re.M)
    return [*inline, *references, *re.findall(r"""(?:href|src)=["']([^"']+)["']""", text)]


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub and MkDocs make them, and its own ids."""
    text = re.sub(r"^(```|~~~).*?^\1", "", text, flags=re.M | re.S)
    found, seen = set(re.findall(r"""(?:id|name)=["']([^"']+)["']""", text)), Counter()
    found |= set(re.findall(r"\{\s*#([\w-]+)", text))
    for heading in re.findall(r"^#{1,6} +(.+?)(?:\s*\{[^}]*\})?\s*$", text, re.M):
        shown = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\s-]", "", shown.replace("`", "")).strip().lower()
        slug = re.sub(r"\s", "-", slug)
        found |= {slug, re.sub(r"-+", "-", slug)}
        if seen[slug]:
            found |= {f"{slug}-{seen[slug]}", f"{slug}_{seen[slug]}"}
        seen[slug] += 1
    return found


def broken(page: Path, target: str) -> str | None:
    """What is wrong with a link of a page; None if nothing is. No network is asked."""
    parts = urlsplit(target)
    if parts.scheme:
        web = parts.scheme in ("http", "https") and re.fullmatch(r"[\w-]+(\.[\w-]+)+", parts.netloc)
        return None if web else "is no address"
    file = page.parent / unquote(parts.path) if parts.path else page
    if not file.exists():
        return "leads to no file"
    if not file.resolve().is_relative_to(ROOT):
        return "leads out of the repository"
    if not parts.fragment or file.suffix != ".md":
        return None
    return None if parts.fragment in anchors(file.read_text()) else "leads to no heading"


def linked_pages() -> list[Path]:
    """Every page and notebook of the repository."""
    docs = ROOT / "docs"
    return sorted([*ROOT.glob("*.md"), *docs.rglob("*.md"), *docs.rglob("*.ipynb")])


def test_every_link_of_every_page_leads_to_a_file_and_a_heading_or_is_an_address():
    found = [(page, target) for page in linked_pages() for target in links(page.read_text())]
    assert len(found) > 200
    faults = [f"{page.relative_to(ROOT)}: {target} {fault_of}" for page, target in found
              if (fault_of := broken(page, target))]  # fmt: skip
    assert faults == []


@pytest.mark.parametrize(
    ("link", "what"),
    [
        ("absent.md", "leads to no file"),
        ("docs/t5x.md#absent", "leads to no heading"),
        ("#absent", "leads to no heading"),
        ("http://", "is no address"),
        ("https://one two", "is no address"),
        ("../elsewhere.md", "leads to no file"),
        ("docs/index.md", None),
        ("#quick-start", None),
        ("https://arxiv.org/abs/2110.08207", None),
    ],
)
def test_the_check_of_links_can_fail(link, what):
    assert broken(ROOT / "README.md", link) == what


def test_links_are_found_in_prose_pictures_references_and_html_and_not_in_code():
    text = "[a](b.md) ![c](d.png) <img src='e.svg'>\n[f]: g.md\n`[h](i.md)`\n```\n[j](k.md)\n```\n"
    assert sorted(links(text)) == ["b.md", "d.png", "e.svg", "g.md"]
