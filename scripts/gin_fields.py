"""Fills docs/gin_fields.md in the site: what gin may bind in either dialect, from the code itself.

mkdocs.yml runs this as a hook whenever the site is built, so the page always matches the code.
"""

import dataclasses
import inspect
import re
from collections.abc import Iterator
from typing import Any

from t0repro.config.decoding_config import DecodingConfig
from t0repro.config.mtf.reader import KNOWN_BINDINGS
from t0repro.config.ranges import range_of
from t0repro.config.run_config import (
    AdafactorConfig,
    AdamWeightDecayConfig,
    Layout,
    ModelConfig,
    RunConfig,
)
from t0repro.config.t5x.modules import records_by_module


def cell(text: Any) -> str:
    return " ".join(str(text).split())


def attributes(kind: type) -> dict[str, str]:
    """What a class's docstring says of its attributes."""
    doc = inspect.getdoc(kind) or ""
    section = re.search(r"Attributes:\n(.*)", doc, re.S)
    if not section:
        return {}
    entries = re.findall(r"^ {2}(\w+): (.*?)(?=^ {2}\w+: |\Z)", section[1], re.M | re.S)
    return {name: cell(text) for name, text in entries}


def default_of(field: dataclasses.Field) -> str:
    if field.default is not dataclasses.MISSING:
        return f"`{cell(repr(field.default))}`"
    if field.default_factory is not dataclasses.MISSING:
        return f"`{cell(repr(field.default_factory()))}`"
    return "required"


def type_of(field: dataclasses.Field) -> str:
    # Annotations are strings here; the range has a column of its own.
    text = re.sub(r"^Annotated\[(.*), Range\(.*\)\]$", r"\1", " ".join(str(field.type).split()))
    return f"`{cell(text)}`"


def t5x_tables() -> Iterator[str]:
    yield "## T5X's dialect\n"
    yield "Under each module, what a gin file may name, with T5X's arguments and defaults.\n"
    for module, contents in sorted(records_by_module().items()):
        for name, kind in contents.items():
            yield f"### `{module}.{name}`\n"
            summary = (inspect.getdoc(kind) or "").split("\n\n")[0]
            yield f"{' '.join(summary.split())}\n"
            fields = [each for each in dataclasses.fields(kind) if each.init]
            if not fields:
                yield "It takes no argument.\n"
                continue
            said = attributes(kind)
            yield "| argument | type | default | |\n|---|---|---|---|"
            for field in fields:
                meaning = said.get(field.name, "")
                yield f"| `{field.name}` | {type_of(field)} | {default_of(field)} | {meaning} |"
            yield ""


def mesh_table() -> Iterator[str]:
    yield "## Mesh TensorFlow's dialect\n"
    yield (
        "Whatever else a file or `--gin_param` binds and Mesh TensorFlow would read is refused on"
        " JAX, with its place.\n"
    )
    yield "| configurable | arguments that may be bound |\n|---|---|"
    for name, arguments in sorted(KNOWN_BINDINGS.items()):
        if arguments is ...:
            shown = "all"
        else:
            shown = ", ".join(f"`{each}`" for each in sorted(arguments)) or "only their defaults"
        yield f"| `{name}` | {shown} |"
    yield ""


def range_tables() -> Iterator[str]:
    yield "## Fields of a run, and their ranges\n"
    yield (
        "What both dialects become. A number outside its range is refused with the file and line"
        " that bound it.\n"
    )
    kinds = (RunConfig, ModelConfig, AdafactorConfig, AdamWeightDecayConfig, DecodingConfig, Layout)
    for kind in kinds:
        yield f"### {kind.__name__}\n"
        said = attributes(kind)
        yield "| field | type | range | default | |\n|---|---|---|---|---|"
        for field in dataclasses.fields(kind):
            bounds = range_of(kind, field.name)
            shown = "" if bounds is None else cell(bounds)
            meaning = said.get(field.name, "")
            yield (
                f"| `{field.name}` | {type_of(field)} | {shown} | {default_of(field)} | {meaning} |"
            )
        yield ""


def on_page_markdown(markdown: str, page: Any, **others: Any) -> str:
    """Adds the tables below what docs/gin_fields.md says; MkDocs calls this for every page."""
    if page.file.src_uri != "gin_fields.md":
        return markdown
    return "\n".join([markdown, *mesh_table(), *t5x_tables(), *range_tables()])
