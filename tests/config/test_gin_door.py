"""One module alone touches gin's private state and follows its macros."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOOR = ROOT / "t0repro" / "config" / "gin" / "door.py"
# What gin calls its references, by which a macro could be followed.
OF_REFERENCES = {"ConfigurableReference", "config_key", "scoped_configurable_fn", "scoped_selector"}


def touched(text: str) -> Iterator[str]:
    """What a module reaches of gin beside its public names."""
    tree = ast.parse(text)
    names = {"gin"}  # and what else gin is called in the module
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {each.asname or "gin" for each in node.names if each.name == "gin"}
            yield from (each.name for each in node.names if each.name.startswith("gin.config"))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "gin":
            of_gin = [f"{node.module}.{each.name}" for each in node.names]
            # The parser is public.
            yield from (each for each in of_gin if not each.startswith("gin.config_parser"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            of_gin = isinstance(node.value, ast.Name) and node.value.id in names
            if node.attr in OF_REFERENCES or (of_gin and node.attr == "config"):
                yield ast.unparse(node)
            if of_gin and node.attr.startswith("_"):
                yield ast.unparse(node)
        elif isinstance(node, ast.Constant) and node.value == "gin.macro":
            yield "'gin.macro'"


def test_only_the_door_touches_gins_private_state():
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for folder in ("t0repro", "tasks", "converters")
        for path in (ROOT / folder).rglob("*.py")
        if path != DOOR
        for name in touched(path.read_text())
    }
    assert not found
    assert set(touched(DOOR.read_text())) > {"gin.config", "'gin.macro'"}


@pytest.mark.parametrize(
    "text",
    [
        "import gin.config",
        "import gin.config as state",
        "from gin import config",
        "from gin.config import _CONFIG",
        "import gin as g\ng.config.x",
        "import gin\ngin._x",
        "value.scoped_configurable_fn()",
        "key == 'gin.macro'",
    ],
)
def test_each_way_in_is_seen(text):
    assert list(touched(text))


def test_what_is_public_may_be_used_everywhere():
    text = "import gin\nfrom gin import config_parser\ngin.bind_parameter('a.b', gin.REQUIRED)"
    assert not list(touched(text))
