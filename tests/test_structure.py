"""docs/structure.md draws the house as it is, and as the import contract states it."""

import ast
import re
import tomllib
from pathlib import Path

import t0repro
from t0repro import converters, tasks

ROOT = Path(__file__).resolve().parents[1]


def drawn_layers() -> list[str]:
    """The names at the left of the first drawing, from the top down."""
    drawing = re.search(r"```\nt0repro/\n(.*?)```", (ROOT / "docs/structure.md").read_text(), re.S)
    assert drawing
    layers = []
    for line in drawing[1].splitlines():
        if re.match(r"  \S", line):
            layers.append(re.split(r"\s{2,}", line.strip())[0])
    return layers


def test_the_drawing_has_the_contracts_layers_in_its_order():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (contract,) = [each for each in settings["contracts"] if each["id"] == "layers"]
    assert drawn_layers() == contract["layers"]


def test_the_drawing_names_every_package_and_module_and_no_other():
    inside = Path(t0repro.__file__).parent
    modules = {path.stem for path in inside.glob("*.py")} - {"__init__"}
    packages = {path.parent.name for path in inside.glob("*/__init__.py")}
    mapped = {"tasks", "converters", "gin"}
    drawn = {name for layer in drawn_layers() for name in layer.split(" | ")}
    assert drawn == modules | packages | mapped


def test_every_file_that_these_pages_name_exists():
    named = {
        name
        for page in ("structure.md", "contributing.md", "glossary.md")
        for name in re.findall(r"`([\w.]+/[\w/]+\.py)`", (ROOT / "docs" / page).read_text())
    }
    assert named
    assert [
        name
        for name in sorted(named)
        if not any((ROOT / x / name).exists() for x in (".", "t0repro"))
    ] == []


def test_every_error_says_what_to_do_next():
    """As docs/troubleshooting.md claims; two errors repeat others' texts, which have it."""
    without = []
    packages = [Path(each.__file__).parent for each in (t0repro, tasks, converters)]
    for path in sorted(path for folder in packages for path in folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "UserError":
                if "fix" not in {each.arg for each in node.keywords}:
                    without.append(f"{path.parent.name}/{path.name}")
    assert without == ["jobs/commands.py", "runs/checks.py"]
