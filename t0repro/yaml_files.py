"""Loads users' YAML, unless its aliases repeat parts without end or a key is there twice.

An alias (`*name`) repeats another part of the file. Ten lines of ten aliases each stand for 10**10
parts, and an alias inside its own part for infinitely many. A program that walks through or prints
the values would run out of memory. Of a key that is there twice, PyYAML takes the last value.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml

from t0repro.errors import UserError

_MOST_REPEATED = 10_000
_DEEPEST = 100
_TOO_DEEP = "its lists and mappings are nested too deeply"


class Bounded:
    """A mixin for PyYAML's loaders: checks a document before any value is made of it.

    Raises:
      yaml.YAMLError: From `yaml.load`, if aliases repeat too much, lists are nested too deeply, or
        a mapping has a key twice.
    """

    def get_single_node(self) -> Any:
        """The document's node; PyYAML calls this before it constructs values."""
        try:
            node = super().get_single_node()  # pyright: ignore[reportAttributeAccessIssue]
            if node is not None:
                _check(node)
        except RecursionError as error:
            # PyYAML composes nested lists by recursion.
            raise yaml.YAMLError(_TOO_DEEP) from error
        return node


class Loader(Bounded, yaml.SafeLoader):
    """PyYAML's safe loader, bounded."""


def load(text: str) -> Any:
    """The content of a YAML document, in plain values.

    Raises:
      yaml.YAMLError: If it is not YAML, or see `Bounded`.
    """
    return yaml.load(text, Loader=Loader)


def read(file: str | os.PathLike[str], what: str) -> Any:
    """The content of a YAML file, in plain values.

    Args:
      file: Its path.
      what: What the file is, for the message.

    Raises:
      UserError: If it cannot be read or is not YAML, with the line, or see `Bounded`.
    """
    where, fix = os.fspath(file), "Name a file of YAML that can be read."
    try:
        return load(Path(file).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        cause, reason = error, getattr(error, "strerror", None) or str(error)
    except yaml.YAMLError as error:
        # Only some of PyYAML's errors know their place in the text.
        mark = getattr(error, "problem_mark", None)
        parts = [part for name in ("context", "problem") if (part := getattr(error, name, None))]
        cause, reason = error, ": ".join(parts) or " ".join(str(error).split())
        where, fix = f"{where}:{mark.line + 1}" if mark else where, "Correct the file there."
    raise UserError(f"{what} cannot be read: {reason}.", where=where, fix=fix) from cause


def _check(root: yaml.Node) -> None:
    parts: dict[int, int] = {}
    repeated = _count(root, parts, set()) - len(parts)
    if repeated > _MOST_REPEATED:
        what = f"its aliases repeat {repeated:,} parts"
        raise yaml.composer.ComposerError(None, None, what, root.start_mark)


def _count(node: yaml.Node, parts: dict[int, int], above: set[int]) -> int:
    """The number of parts of a node, itself included, repeated ones as often as they are.

    Args:
      node: The node.
      parts: Receives the number for each node, by its identity.
      above: The nodes that this one is part of.
    """
    if id(node) in above:
        what = "an alias stands inside the part that it stands for"
        raise yaml.composer.ComposerError(None, None, what, node.start_mark)
    if len(above) == _DEEPEST:
        raise yaml.composer.ComposerError(None, None, _TOO_DEEP, node.start_mark)
    if isinstance(node, yaml.MappingNode):
        _check_keys(node)
    # Each part once: counting repeated parts again would take as long as walking through them.
    if id(node) not in parts:
        above.add(id(node))
        parts[id(node)] = 1 + sum(_count(each, parts, above) for each in _children(node))
        above.remove(id(node))
    return parts[id(node)]


def _check_keys(mapping: yaml.MappingNode) -> None:
    lines: dict[str, int] = {}
    for key, _ in mapping.value:
        # `<<` merges other mappings, any number of them.
        if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
            continue
        if key.value in lines:
            context = f"key {key.value!r} of line {lines[key.value]}"
            raise yaml.composer.ComposerError(context, None, "is there twice", key.start_mark)
        lines[key.value] = key.start_mark.line + 1


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [each for pair in node.value for each in pair]
    return node.value if isinstance(node, yaml.SequenceNode) else []
