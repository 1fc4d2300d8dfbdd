"""docs/structure.md draws the house as it is, and as the import contract states it."""

import operator
import re
import tomllib
from pathlib import Path

import pytest

import t0repro

from .walk import walk as walk_from

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
    assert len(named) > 40
    assert [
        name
        for name in sorted(named)
        if not any((ROOT / x / name).exists() for x in (".", "t0repro"))
    ] == []


@pytest.mark.parametrize(
    ("start", "most"),
    [
        (("t0repro.runs.start", "start_training", "config"), (30, 20, 7)),
        (("t0repro.runs.start", "start_configured", "configuration"), (30, 20, 7)),
    ],
)
def test_the_way_from_a_command_to_the_first_update_grows_no_longer(start, most):
    """The counts are in docs/lab_log.md. Who makes the way shorter lowers them here."""
    walk = walk_from(*start)
    way = " ".join(stop.removeprefix("t0repro.") for stop in walk.stops)
    found = len(walk.stops), len(walk.files), walk.climbs
    assert all(map(operator.le, found, most)), f"{found} instead of {most}: {way}"
    assert "training.loop" in way


# Each with what a bucket cannot do as a disk does, or a library of its own.
_ASK_WHAT_A_PATH_IS = {
    "buckets.py": "addresses themselves",
    "working_copies.py": "what is written in a copy",
    "files.py": "local paths and copies behind one name",
    "converters/storage.py": "files that are read in place, and large ones that are written",
    "converters/staging.py": "a directory is renamed, objects have their names from the start",
    "converters/mtf.py": "paths that a `checkpoint` file names",
    "converters/orbax_dir.py": "marks of complete checkpoints",
    "training/checkpoints.py": "how checkpoints become complete and go",
    "jobs/controller.py": "links or leases",
    "config/configuration.py": "what TensorFlow writes to",
    "mtf/hooks.py": "TensorFlow's own gs://",
}


def test_no_other_module_asks_whether_a_path_is_in_a_bucket():
    asks = re.compile(r"\b(is_address|scheme_of|is_remote|orbax_writes_to)\(")
    found = {}
    for root in (ROOT / "t0repro", ROOT / "converters"):
        for path in root.rglob("*.py"):
            name = path.relative_to(root if root.name == "t0repro" else ROOT).as_posix()
            if asks.search(path.read_text()):
                found[name] = path
    unknown = found.keys() - _ASK_WHAT_A_PATH_IS.keys()
    assert not unknown, f"move what differs in {sorted(unknown)} into one of these modules"
    gone = _ASK_WHAT_A_PATH_IS.keys() - found.keys()
    assert not gone, f"take {sorted(gone)} off the list"
