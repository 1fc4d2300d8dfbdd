"""docs/t5x_names.md has every public name of T5X's modules, and its "same" rows hold.

`t5x_names.json` records the names and the arguments of google-research/t5x at cc342d4: a list for a
function, a constructor or a method, null for a property.
"""

import importlib
import inspect
import json
import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
NAMES = json.loads((HERE / "t5x_names.json").read_text())
DOCS = (HERE.parents[1] / "docs/t5x_names.md").read_text()
STATES = ("same", "moved: `", "differs: ", "absent: ")


def sections():
    """T5X's module -> (the module here, {name: state})."""
    found = {}
    for section in DOCS.split("\n## t5x.")[1:]:
        heading, _, body = section.partition("\n")
        theirs, ours = heading.split(": ")
        body = body.partition("\n## ")[0]
        rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| (.*) \|$", body, re.MULTILINE)
        states = {name: state for names, state in rows for name in re.findall(r"\w+", names)}
        found[theirs] = (ours, states)
    return found


def test_every_name_is_there():
    assert {module: set(rows) for module, (_, rows) in sections().items()} == {
        module: set(names) for module, names in NAMES.items()
    }
    for _, rows in sections().values():
        assert all(state.startswith(STATES) for state in rows.values())


def accepts(function, arguments):
    """Whether a callable takes T5X's arguments, by name and in T5X's order."""
    parameters = inspect.signature(function).parameters
    named = [name for name in arguments if not name.startswith("*")]
    ours = [name for name in parameters if name in named]
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return ours == [name for name in named if name in parameters] and (
        takes_all or set(named) <= set(parameters)
    )


@pytest.mark.parametrize("module", list(NAMES))
def test_what_is_the_same_takes_t5xs_arguments(module):
    ours, rows = sections()[module]
    here, wrong = importlib.import_module(ours), []
    for name, state in rows.items():
        if state != "same":
            continue
        recorded, found = NAMES[module][name], getattr(here, name)
        if "arguments" in recorded and not accepts(found, recorded["arguments"]):
            wrong.append(name)
        for method, arguments in recorded.get("methods", {}).items():
            attribute = inspect.getattr_static(found, method, None)
            if attribute is None and method in getattr(found, "__annotations__", {}):
                continue  # a field
            if attribute is None or (
                arguments is not None and not accepts(getattr(found, method), arguments)
            ):
                wrong.append(f"{name}.{method}")
    assert not wrong


def test_what_has_moved_is_there():
    for _, rows in sections().values():
        for state in rows.values():
            if state.startswith("moved: "):
                module, _, name = state.removeprefix("moved: ").strip("`").rpartition(".")
                assert hasattr(importlib.import_module(module), name)
