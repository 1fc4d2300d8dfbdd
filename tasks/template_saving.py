"""Saves one template into a user's file of prompts, which otherwise stays as it is."""

from __future__ import annotations

import dataclasses
import hashlib
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from t0repro import storage
from t0repro.errors import UserError
from t0repro.tasks.template_files import TemplateFile, read_template_file


class _Dumper(yaml.SafeDumper):
    """Writes promptsource's tags, and texts of several lines as blocks."""


class _Tagged(dict[str, Any]):
    """A mapping with one of promptsource's tags."""

    def __init__(self, tag: str, **content: Any):
        super().__init__(content)
        self.tag = tag


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(_Tagged, lambda dumper, each: dumper.represent_mapping(each.tag, each))
_Dumper.add_representer(str, _represent_text)


def digest(template: Any) -> str:
    """What tells whether a template was changed: its name, Jinja, choices and metadata."""
    metadata = template.metadata
    facts = (metadata.original_task, metadata.choices_in_prompt, metadata.metrics)
    content = (template.name, template.jinja, template.answer_choices, *facts)
    return hashlib.sha256(repr(content).encode()).hexdigest()[:16]


def save_template(
    path: Path, dataset: str, subset: str | None, template: Any, base: str | None = None
) -> TemplateFile:
    """Writes a template into a file in promptsource's form, atomically.

    The lines of other templates, of mixtures and of comments outside the template stay as they are.

    Args:
      path: The file; it is made if there is none.
      dataset: The dataset that a new file names.
      subset: Its configuration, or None.
      template: The template; it replaces the one of its `id`.
      base: `digest` of the template that was edited; None for a new one.

    Returns:
      The file's new content.

    Raises:
      UserError: If the file is broken or of another dataset, the template was changed on disk since
        it was read, or the file would not be a valid one.
    """
    before = read_template_file(path) if path.exists() else None
    templates = list(before.templates) if before else []
    if before and (before.dataset, before.subset) != (dataset, subset):
        raise UserError(
            f"The file has prompts of {before.dataset!r}, and this one is of {dataset!r}.",
            where=str(path),
            fix="Name another file: --templates FILE.yaml.",
        )
    known = {each.id: each for each in templates}
    if template.id in known and digest(known[template.id]) != base:
        raise UserError(
            f"Template {template.name!r} was changed in the file since this page read it.",
            where=str(path),
            fix="Copy your text, reload the page, and edit the new one.",
        )
    text = path.read_text(encoding="utf-8") if before else ""
    starts = _starts(text, path) if before else {}
    content = _put_entry(text, template, starts, dataset, subset)
    after = _read(content, path)
    expected = {**known, template.id: template}
    if {each.id: digest(each) for each in after.templates} != {
        key: digest(each) for key, each in expected.items()
    }:
        raise _cannot_edit(path)
    storage.write_atomically(path, content)
    return after


def _cannot_edit(path: Path) -> UserError:
    return UserError(
        "The file is written in a way that this page cannot edit.",
        where=str(path),
        fix="Below templates:, write each template as `<id>: !Template` with its keys on lines of"
        " their own.",
    )


def _read(content: str, path: Path) -> TemplateFile:
    with storage.scratch_folder() as folder:
        trial = folder / path.name
        trial.write_text(content, encoding="utf-8")
        try:
            return dataclasses.replace(read_template_file(trial), path=path)
        except UserError as error:
            raise UserError(error.what, where=str(path), fix=error.fix) from error


def _entry(template: Any) -> str:
    """A template as an entry of a file, in the order of promptsource's own files."""
    metadata = template.metadata
    tagged = _Tagged(
        "!Template",
        answer_choices=template.answer_choices,
        id=template.id,
        jinja=template.jinja,
        metadata=_Tagged(
            "!TemplateMetadata",
            choices_in_prompt=metadata.choices_in_prompt,
            metrics=list(metadata.metrics or []),
            original_task=metadata.original_task,
        ),
        name=template.name,
        reference=template.reference or "",
    )
    return _dump({template.id: tagged})


def _dump(content: Any) -> str:
    # No width: a long line stays one.
    return yaml.dump(content, Dumper=_Dumper, allow_unicode=True, sort_keys=False, width=2**31)


def _put_entry(
    text: str, template: Any, starts: dict[str, int], dataset: str, subset: str | None
) -> str:
    """The file's text with the lines of one template replaced or added."""
    if not starts:
        head = _dump({"dataset": dataset, "subset": subset})
        return f"{head}templates:\n{textwrap.indent(_entry(template), '  ')}"
    lines = text.splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += "\n"
    own = starts.get(template.id)
    if own is None:  # after the last one
        own = end = _end(lines, starts, max(starts.values()))
    else:
        end = _end(lines, starts, own)
    indent = " " * _indent_of(lines[min(starts.values())])
    return "".join([*lines[:own], textwrap.indent(_entry(template), indent), *lines[end:]])


def _starts(text: str, path: Path) -> dict[str, int]:
    """Id of each template -> the line of its entry, from 0."""
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    assert isinstance(root, yaml.MappingNode)
    (templates,) = [value for key, value in root.value if key.value == "templates"]
    if root.flow_style or templates.flow_style:
        raise _cannot_edit(path)
    found = {}
    for key, value in templates.value:
        fields = {each.value: content.value for each, content in value.value}
        found[str(fields.get("id") or key.value)] = key.start_mark.line
    return found


def _end(lines: Sequence[str], starts: dict[str, int], start: int) -> int:
    """The line after an entry's last: comments and empty lines behind it belong to what follows."""
    indent, end = _indent_of(lines[start]), start + 1
    for number in range(start + 1, len(lines)):
        is_comment = lines[number].lstrip().startswith("#")
        if not lines[number].strip() or (is_comment and _indent_of(lines[number]) <= indent):
            continue
        if number in starts.values() or _indent_of(lines[number]) <= indent:
            break
        end = number + 1
    return end


def _indent_of(line: str) -> int:
    return len(line) - len(line.lstrip(" "))
