"""What requirements/ locks, and how to hide from a process what is not the core's."""

import importlib.metadata
import importlib.util
import re
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "requirements"
TIERS = ("core", "reference", "tests")

# Python imports sitecustomize when it starts. What is hidden is as if it were not installed.
HIDING = """
import importlib.metadata
from importlib.machinery import PathFinder

find, version = PathFinder.find_spec, importlib.metadata.version


def find_spec(name, path=None, target=None):
    return None if name.partition(".")[0] in HIDDEN else find(name, path, target)


def version_of(package):
    if package.replace("-", "_") in HIDDEN:
        raise importlib.metadata.PackageNotFoundError(package)
    return version(package)


PathFinder.find_spec = find_spec
importlib.metadata.version = version_of
"""


def locked(tier: str) -> dict[str, str]:
    """What a tier's lock adds: package -> its entry, with version, markers and hashes."""
    text = (FOLDER / f"{tier}.lock").read_text()
    return {entry.partition("==")[0]: entry for entry in re.split(r"\n(?=\S)", text.strip())}


def normal_name(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()


def beyond_the_core() -> set[str]:
    """Installed modules whose packages only the later tiers' locks name."""
    setuptools = importlib.util.find_spec("setuptools").submodule_search_locations[0]
    # setuptools, which promptsource imports, has some packages of its own in this folder.
    vendored = {path.stem for path in Path(setuptools, "_vendor").iterdir()}
    later = (locked("reference").keys() | locked("tests").keys()) - locked("core").keys()
    return {
        module
        for module, packages in importlib.metadata.packages_distributions().items()
        if later.issuperset(map(normal_name, packages)) and module not in vendored
    }


def hide_all_but_the_core(folder: Path) -> None:
    """Writes a sitecustomize that hides them from every Python with `folder` on its PYTHONPATH."""
    hidden = sorted(beyond_the_core())
    (folder / "sitecustomize.py").write_text(f"HIDDEN = {hidden}\n{HIDING}")
