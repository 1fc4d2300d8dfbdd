"""Reads promptsource 0.1.0's templates and renders rows with them, as T0 did."""

from __future__ import annotations

import contextlib
import enum
import functools
import importlib
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import jinja2.meta
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils
import yaml

from t0repro import yaml_files
from t0repro.errors import UserError, nearest_names
from t0repro.tasks.catalog import label, modeled_on
from t0repro.tasks.prompt_environment import PromptEnvironment, _draws_of, constant_text

SEPARATOR = "|||"
"""Separates a template's input from its target, and answer choices from each other."""

NO_LABEL = "<NO LABEL>"
"""T0's target for a rendering with an empty target, as hidden labels give."""


class Rendering(NamedTuple):
    """A prompted example; `answer_choices` is None if the template has none."""

    inputs: str
    targets: str
    answer_choices: list[str] | None


class Drop(enum.Enum):
    """Why a row gives no example; the last two reasons apply only to users' own prompts."""

    NOT_A_PAIR = "the template does not render it to one input and one target"
    EMPTY_INPUT = "its input is empty"
    NO_TARGET = "its target is empty"
    NO_LABEL = "its label is hidden (-1 or empty) or null"


def task_name(dataset: str, subset: str | None, template_name: str) -> str:
    """T0's task name: runs of characters other than letters, digits, `.` and `_` become one `_`."""
    middle = f"_{subset}_" if subset is not None else "_"
    return re.sub(r"[^\w.]+", "_", f"{dataset}{middle}{template_name}")


def template_datasets() -> list[tuple[str, str | None]]:
    """The (dataset, subset) pairs with templates, sorted, from folder names alone."""
    pairs = []
    for path in _templates_folder().rglob("templates.yaml"):
        # A user's dataset is in a folder `user/dataset`, which this misreads; T0 has none of these.
        dataset, *subset = path.parent.relative_to(_templates_folder()).parts
        pairs.append((dataset, "/".join(subset) or None))
    return sorted(pairs, key=str)


def template_names(dataset: str, subset: str | None) -> list[str]:
    """Names of a dataset's templates in T0's order, that is, sorted.

    Raises:
      UserError: If the dataset has no templates.
    """
    return sorted(_read_templates(dataset, subset))


def load_template(dataset: str, subset: str | None, name: str) -> Any:
    """The promptsource `Template` of that name.

    Raises:
      UserError: If the dataset or the template does not exist; lists the nearest names.
    """
    templates = _read_templates(dataset, subset)
    if name not in templates:
        raise UserError(
            f"{label(dataset, subset)} has no template {name!r}.",
            fix=f"Use one of its {len(templates)} templates; nearest: "
            f"{nearest_names(name, templates)}.",
        )
    return templates[name]


def make_template(
    name: str,
    jinja: str,
    answer_choices: str | None,
    metadata: Mapping[str, Any],
    *,
    identifier: str,
    reference: str,
) -> Any:
    """Makes a promptsource `Template` from a user's own, which only the sandbox will render."""
    kind = _promptsource().Template
    template = kind(name, jinja, reference, kind.Metadata(**metadata), answer_choices)
    template.id = identifier
    template.own = True
    return template


def is_own(template: Any) -> bool:
    """Whether a template is a user's own rather than one that comes with promptsource 0.1.0."""
    return getattr(template, "own", False)


def truncate_variables(jinja: str) -> str:
    """A template whose variables are cut to 2,048 characters; promptsource also edits the text."""
    return jinja.replace("}}", f" | string | truncate({_promptsource().TEXT_VAR_LENGTH}) }}}}")


class CompiledTemplate:
    """A template compiled once; constant answer choices are also rendered only once.

    Every rendering equals that of promptsource's `Template.apply` and `get_answer_choices_list`
    byte for byte, but those compile the template again for each row.

    Args:
      template: A promptsource `Template`, or any object with its `name`, `jinja` and
        `answer_choices`.
      cut: Whether to truncate variables to 2,048 characters; False shows what is removed.
      environment: Jinja environment; defaults to promptsource's.

    Raises:
      UserError: If the Jinja cannot be compiled.
    """

    def __init__(
        self, template: Any, cut: bool = True, environment: jinja2.Environment | None = None
    ):
        module = _promptsource()
        self.name: str = template.name
        self._environment = environment or module.env
        # Replaces `|||` in the data while the two halves are split.
        self._escaped = module.Template.pipe_protector
        self._body = self._compile(truncate_variables(template.jinja) if cut else template.jinja)
        self._choices: Callable[[dict[str, Any]], list[str] | None] = lambda fields: None
        if template.answer_choices is not None:
            choices = self._compile(template.answer_choices)
            self._choices = lambda fields: self._split(choices.render(fields))
            constant = constant_text(self._environment, template.answer_choices)
            if constant is not None:
                fixed = self._split(constant)
                self._choices = lambda fields: list(fixed)

    def render(self, row: Mapping[str, Any], draw_key: str | None = None) -> Rendering | Drop:
        """Renders one row as the function `render` does, or returns why T0 drops the example."""
        fields = {}
        for name, value in row.items():
            if "-" in name:
                name = name.replace("-", "_")
            # A separator in the data must not split the rendering; `_split` restores it.
            if type(value) is str and SEPARATOR in value:
                value = value.replace(SEPARATOR, self._escaped)
            fields[name] = value
        if "answer_choices" in fields:
            raise ValueError("a field is named answer_choices, which templates use themselves")
        # Both the choices and the body may use random choices: keep promptsource's order.
        with _draws_of(draw_key):
            choices = fields["answer_choices"] = self._choices(fields)
            parts = self._split(self._body.render(fields))
        if len(parts) != 2:
            return Drop.NOT_A_PAIR
        if not parts[0]:
            return Drop.EMPTY_INPUT
        return Rendering(parts[0], parts[1] or NO_LABEL, choices)

    def _compile(self, jinja: str) -> jinja2.Template:
        try:
            return self._environment.from_string(jinja)
        except jinja2.TemplateError as error:
            raise UserError(
                f"Template {self.name!r} is not valid Jinja: {error}.",
                where=f"line {getattr(error, 'lineno', 1)} of the template",
                fix="Fix the template; promptsource's Jinja has no includes or macros of others.",
            ) from error

    def _split(self, rendered: str) -> list[str]:
        parts = rendered.split(SEPARATOR)
        if self._escaped in rendered:
            parts = [part.replace(self._escaped, SEPARATOR) for part in parts]
        return [part.strip() for part in parts]


@contextlib.contextmanager
def _pandas_on_demand() -> Iterator[None]:
    """Lets a module import pandas, which then is imported at its first use, if it is installed.

    promptsource.templates needs it for one table of all templates, which t0repro does not ask for.
    """
    if "pandas" in sys.modules:
        yield
        return
    on_demand: Any = types.ModuleType("pandas")

    def make_way() -> None:
        if sys.modules.get("pandas") is on_demand:
            del sys.modules["pandas"]

    def get(name: str) -> Any:
        make_way()
        return getattr(importlib.import_module("pandas"), name)

    on_demand.__getattr__ = get
    sys.modules["pandas"] = on_demand
    try:
        yield
    finally:
        make_way()


@functools.cache
def _promptsource() -> Any:
    """The module promptsource.templates, with its Jinja environment sandboxed and made seedable.

    `promptsource.utils` is never imported: it requests a list of datasets from the network.
    """
    # promptsource finds its folder with pkg_resources, which warns about itself on import. These
    # filters stay: a thread that restored the earlier ones would drop what another has set.
    for message in ("pkg_resources is deprecated", "Deprecated call to .pkg_resources[.]"):
        warnings.filterwarnings("ignore", message=message)
    with _pandas_on_demand():
        import promptsource.templates as module

    sandboxed = PromptEnvironment(loader=jinja2.BaseLoader())
    sandboxed.take({**sandboxed.filters, **module.env.filters}, module.env.globals)
    module.env = sandboxed
    return module


def promptsource_environment() -> jinja2.Environment:
    """The Jinja environment of promptsource's templates, with its filters."""
    return _promptsource().env


def _templates_folder() -> Path:
    return Path(_promptsource().TEMPLATES_FOLDER_PATH)


@functools.cache
def _loader() -> type:
    """PyYAML's safe loader with promptsource's two classes and no other, parsing in C if it can."""
    _promptsource()

    safe: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    loader: Any = type("Loader", (yaml_files.Bounded, safe), {})
    for tag in ("!Template", "!TemplateMetadata"):
        # promptsource's constructors, under a loader that knows no other classes.
        loader.add_constructor(tag, yaml.FullLoader.yaml_constructors[tag])
    return loader


@functools.cache
def _read_templates(dataset: str, subset: str | None) -> dict[str, Any]:
    path = _templates_folder() / modeled_on(dataset) / (subset or "") / "templates.yaml"
    if not path.is_file():
        known = [label(*pair) for pair in template_datasets()]
        raise UserError(
            f"promptsource 0.1.0 has no templates for {label(dataset, subset)}.",
            fix=f"Use a dataset that has some; nearest: "
            f"{nearest_names(label(dataset, subset), known)}.",
        )
    content = yaml.load(path.read_text(encoding="utf-8"), Loader=_loader())
    return {template.name: template for template in content["templates"].values()}
