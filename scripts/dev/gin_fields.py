"""Fills docs/gin_fields.md in the site with the bindings of both dialects, read from the code.

mkdocs.yml runs this as a hook whenever the site is built, so the page always matches the code.
"""

import ast
import dataclasses
import inspect
import re
from collections.abc import Iterator
from typing import Any

import gin
from t0repro.config.decoding import DecodingConfig
from t0repro.config.model import Layout, ModelConfig
from t0repro.config.mtf import stand_ins
from t0repro.config.mtf.optimizer import SCHEDULES
from t0repro.config.mtf.refusals import known_bindings
from t0repro.config.optimizer import AdafactorConfig, AdamWeightDecayConfig
from t0repro.config.run import EvalRun, InferRun, MeshEvalRun, TextRun, TrainRun
from t0repro.config.settings import arguments_of, range_of
from t0repro.config.t5x.arguments import MODULES, REQUIRED, parameters_of


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
    # Annotations are strings here; ranges and gin names have their own columns.
    hint = ast.parse(" ".join(str(field.type).split()), mode="eval").body
    if isinstance(hint, ast.Subscript) and ast.unparse(hint.value) == "Annotated":
        hint = hint.slice.elts[0]
    return f"`{cell(ast.unparse(hint))}`"


def t5x_tables() -> Iterator[str]:
    yield "## T5X's dialect\n"
    yield "Under each module, what a gin file may name, with T5X's arguments and defaults.\n"
    for module, contents in sorted(MODULES.items()):
        for name, configurable in contents.items():
            yield f"### `{module}.{name}`\n"
            parameters = parameters_of(configurable)
            if not parameters:
                yield "It takes no argument.\n"
                continue
            yield "| argument | type | default | |\n|---|---|---|---|"
            for argument, each in parameters.items():
                default = (
                    "required" if each.default is REQUIRED else f"`{cell(repr(each.default))}`"
                )
                note = f"only its default: {each.why}" if each.why else ""
                yield f"| `{argument}` | {cell(each.type_in_words)} | {default} | {note} |"
            yield ""


def mesh_tables() -> Iterator[str]:
    yield "## Mesh TensorFlow's dialect\n"
    yield (
        "Under each configurable, the arguments that may be bound, with the defaults of Mesh"
        " TensorFlow 0.1.21 and t5 0.9.4. Whatever else a file or `--gin_param` binds and Mesh"
        " TensorFlow would read may only be bound to its default on JAX; another value is refused"
        " with its place.\n"
    )
    for name, known in sorted(known_bindings().items()):
        yield f"### `{name}`\n"
        parameters = stand_ins.signature_of(name).parameters
        # A schedule's are those of the function's that a run may bind; all schedules share a list.
        arguments = set(parameters if known is ... else known) - {"self"}
        if name in SCHEDULES:
            arguments &= parameters.keys()
        if not arguments:
            yield "Only its defaults.\n"
            continue
        yield "| argument | default |\n|---|---|"
        for argument in sorted(arguments):
            shown = gin_default(parameters[argument]) if argument in parameters else "passed on"
            yield f"| `{argument}` | {shown} |"
        yield ""


def gin_default(parameter: inspect.Parameter) -> str:
    if parameter.default in (inspect.Parameter.empty, gin.REQUIRED):
        return "required, or given by the caller"
    if named := getattr(parameter.default, "__name__", None):
        return f"`@{named}`"
    shown = repr(parameter.default)
    # An object without its own repr: print its type, not its address.
    return f"a `{type(parameter.default).__name__}`" if " at 0x" in shown else f"`{cell(shown)}`"


def range_tables() -> Iterator[str]:
    yield "## Fields of a run, and their ranges\n"
    yield (
        "What both dialects become. A number outside its range is refused with the file and line"
        " that bound it.\n"
    )
    kinds = (TrainRun, EvalRun, InferRun, MeshEvalRun, TextRun, ModelConfig, AdafactorConfig)
    kinds += (AdamWeightDecayConfig, DecodingConfig, Layout)
    for kind in kinds:
        yield f"### {kind.__name__}\n"
        said = attributes(kind)
        head = "field | type | range | default | T5X | Mesh TensorFlow | "
        yield f"| {head} |\n|{6 * '---|'}---|"
        names = [arguments_of(kind, dialect) for dialect in ("t5x", "mtf")]
        for field in dataclasses.fields(kind):
            bounds = range_of(kind, field.name)
            shown = "" if bounds is None else cell(bounds)
            meaning = said.get(field.name, "")
            bound = [f"`{of[field.name].name}`" if field.name in of else "" for of in names]
            cells = (f"`{field.name}`", type_of(field), shown, default_of(field), *bound, meaning)
            yield f"| {' | '.join(cells)} |"
        yield ""


def on_page_markdown(markdown: str, page: Any, **others: Any) -> str:
    """Adds the tables below what docs/gin_fields.md says; MkDocs calls this for every page."""
    if page.file.src_uri != "gin_fields.md":
        return markdown
    return "\n".join([markdown, *mesh_tables(), *t5x_tables(), *range_tables()])
