"""The files that docs/contributing.md names for each change: one of its kind is in no other."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# The change, as the page calls it -> words that occur in the code only for one of that kind.
SPECIMENS = {
    "An argument of T5X's": r"keep_checkpoints_without_metrics|keep_without_metric",
    "An optimizer": r"MomentumConfig|MOMENTUM_SLOTS|momentum_v|_momentum\(gradient",
    "An attention kernel": r"gpu_attention",
    "A checkpoint format": r"t5x_msgpack|MsgpackReader",
    "A dataset or prompts": r"\b(cosmos_qa|quartz|wiki_hop)\b",
    "A task metric": r"rouge",
    "A report section": r"TaskCost|task_costs|_cost_sections",
    "A flag of T0's command": r"options\.vocab\b|DEFINE_string\('vocab'",
    "An engine": r"gcluster",
    "A tracker": r"mlflow",
}


def changes() -> dict[str, list[str]]:
    """Each change of the page and the files that it names; * stands for any word."""
    page = (ROOT / "docs/contributing.md").read_text()
    found = {}
    for paragraph in page.partition("## How to add")[2].partition("\n## ")[0].split("\n\n"):
        title = re.match(r"\*\*(.*?)\.\*\*", paragraph)
        files = re.search(r"Files: (.*?)\. Tests:", paragraph.replace("\n", " "))
        if title and files:
            found[title[1]] = re.findall(r"`([\w/.*]+)`", files[1])
    return found


def code_of(path: Path) -> str:
    """A module without comments and docstrings."""
    tree = ast.parse(path.read_text())
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, kinds) and ast.get_docstring(node, clean=False) is not None:
            node.body[0] = ast.Pass()
    return ast.unparse(tree)


@pytest.fixture(scope="module")
def code() -> dict[str, str]:
    folders = ("t0repro", "tasks", "converters")
    paths = [ROOT / "setup.py", *(path for each in folders for path in (ROOT / each).rglob("*.py"))]
    return {str(path.relative_to(ROOT)): code_of(path) for path in paths}


@pytest.mark.parametrize("change", SPECIMENS)
def test_one_of_a_kind_is_in_the_files_that_the_page_names_for_it(change, code):
    named = changes()[change]
    for name in named:
        assert "*" in name or (ROOT / name).is_file(), name
    patterns = [re.escape(name).replace(r"\*", r"\w+") for name in named]
    files = [name for name, text in code.items() if re.search(SPECIMENS[change], text)]
    assert [x for x in files if not any(re.fullmatch(each, x) for each in patterns)] == []


def test_every_change_but_a_format_is_in_at_most_three_files_of_code():
    for change, files in changes().items():
        modules = [name for name in files if name.endswith(".py")]
        assert len(modules) <= 3 or change == "A checkpoint format", change
    assert {*SPECIMENS} <= {*changes()}
