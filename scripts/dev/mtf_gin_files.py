"""Records the bindings of Mesh TensorFlow's and t5's gin files, from the real packages.

    python scripts/dev/mtf_gin_files.py

It writes gin/mtf/, which stands in for the packages' folders of gin files where they are not
installed. Run it after an update of mesh_tensorflow or t5; tests/config/test_gin_imports.py
compares each file with the installed one, statement by statement.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gin import config_parser
from t0repro.config.gin.folders import DEFAULTS, package_folder

FOLDER = Path(__file__).parents[2] / "gin" / "mtf"


class _Text(str):
    """A reference or macro, whose representation is its text in a gin file."""

    def __repr__(self) -> str:
        return str(self)


class _AsText:
    """A parser delegate that keeps references and macros as they are written."""

    def configurable_reference(self, name: str, evaluate: bool) -> _Text:
        return _Text(f"@{name}{'()' if evaluate else ''}")

    def macro(self, name: str) -> _Text:
        return _Text(f"%{name}")


def statements(path: Path) -> list[str]:
    """A gin file's statements in order, each in one form however it is laid out."""
    with path.open(encoding="utf-8") as file:
        return [_text(each) for each in config_parser.ConfigParser(file, _AsText())]


def _text(statement: Any) -> str:
    if isinstance(statement, config_parser.IncludeStatement):
        return f"include {statement.filename!r}"
    if isinstance(statement, config_parser.ImportStatement):
        return f"import {statement.module}"
    scope = f"{statement.scope}/" if statement.scope else ""
    argument = f".{statement.arg_name}" if statement.arg_name else ""
    return f"{scope}{statement.selector}{argument} = {statement.value!r}"


def sources() -> Iterator[tuple[str, str, Path]]:
    """Path below gin/mtf/, package and file of each gin file."""
    mesh, t5 = package_folder("mesh_tensorflow"), package_folder("t5")
    assert mesh is not None and t5 is not None, "install the reference tier"
    yield DEFAULTS, "mesh-tensorflow", mesh / "transformer" / "gin" / DEFAULTS
    for path in sorted((t5 / "models" / "gin").rglob("*.gin")):
        yield str(path.relative_to(t5 / "models" / "gin")), "t5", path


def main() -> None:
    """Writes all files."""
    for name, package, path in sources():
        target = FOLDER / name
        target.parent.mkdir(parents=True, exist_ok=True)
        lines = [
            f"# The bindings of {package} {version(package)}'s {name}, as recorded by"
            " scripts/dev/mtf_gin_files.py."
        ]
        target.write_text("\n".join([*lines, *statements(path)]) + "\n", encoding="utf-8")
    print(FOLDER)


if __name__ == "__main__":
    main()
