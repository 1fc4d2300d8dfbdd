"""Reads promptsource 0.1.0's templates and renders rows with them, as T0 did."""

from __future__ import annotations

import contextlib
import datetime
import enum
import functools
import random
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jinja2
import jinja2.meta
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils
import yaml

from t0repro import yaml_files
from t0repro.errors import UserError, nearest_names
from t0repro.tasks.catalogue import label, modelled_on

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


class TemplateFailure(Exception):
    """A template cannot render a row; the message is written for the template's author."""


class UndefinedVariable(TemplateFailure):
    """A template reads a variable that the row does not have."""


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


def fixed_choices(template: Any) -> tuple[str, ...] | None:
    """The answer choices if they do not depend on the example, else None."""
    if is_own(template):
        from t0repro.tasks import sandbox

        choices = sandbox.fixed_choices(template.answer_choices or "")
        return choices if template.answer_choices else None
    text = constant_text(promptsource_environment(), template.answer_choices or "")
    # Like promptsource's get_fixed_answer_choices_list, which also returns random choices, once.
    return tuple(choice.strip() for choice in text.split(SEPARATOR)) if text else None


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
        # promptsource also truncates variables by editing the template's text.
        end = f" | string | truncate({module.TEXT_VAR_LENGTH}) }}}}" if cut else "}}"
        self._body = self._compile(template.jinja.replace("}}", end))
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


class Renderer(Protocol):
    """Renders rows with one template, in this process or in the sandbox."""

    name: str

    def render(self, row: Mapping[str, Any], draw_key: str | None = None) -> Rendering | Drop:
        """Renders one row, or returns why it gives no example."""
        ...


def compile_template(template: Any, cut: bool = True) -> Renderer:
    """The renderer for a template: in this process for promptsource's, in the sandbox for others.

    Args:
      template: A promptsource `Template`, or any object with its `name`, `jinja` and
        `answer_choices`.
      cut: Whether to truncate variables to 2,048 characters.

    Raises:
      UserError: If the Jinja cannot be compiled.
    """
    if is_own(template):
        from t0repro.tasks.sandbox import SandboxedTemplate

        return SandboxedTemplate(template, cut)
    return CompiledTemplate(template, cut)


@functools.cache
def compiled(template: Any) -> Renderer:
    """The renderer for a template object, compiled once and cached."""
    return compile_template(template)


def render(template: Any, row: Mapping[str, Any], draw_key: str | None = None) -> Rendering | None:
    """Renders one row as T0 did; returns None if T0 drops the example.

    Hyphens in field names become underscores. Every variable is truncated to 2,048 characters. An
    empty target becomes "<NO LABEL>". A rendering without exactly an input and a target, or with an
    empty input, is dropped.

    Args:
      template: A promptsource `Template`.
      row: Field names -> values.
      draw_key: Seeds the template's filters `choice` and `random`, which promptsource leaves
        unseeded; None uses Python's global generator, as promptsource does.
    """
    rendering = compiled(template).render(row, draw_key)
    return None if isinstance(rendering, Drop) else rendering


# promptsource ----------------------------------------------------------------------------------


@functools.cache
def _promptsource() -> Any:
    """The module promptsource.templates, with its Jinja environment sandboxed and made seedable.

    `promptsource.utils` is never imported: it requests a list of datasets from the network.
    """
    # promptsource finds its folder with pkg_resources, which warns about itself on import. These
    # filters stay: a thread that restored the earlier ones would drop what another has set.
    for message in ("pkg_resources is deprecated", "Deprecated call to .pkg_resources[.]"):
        warnings.filterwarnings("ignore", message=message)
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
    path = _templates_folder() / modelled_on(dataset) / (subset or "") / "templates.yaml"
    if not path.is_file():
        known = [label(*pair) for pair in template_datasets()]
        raise UserError(
            f"promptsource 0.1.0 has no templates for {label(dataset, subset)}.",
            fix=f"Use a dataset that has some; nearest: "
            f"{nearest_names(label(dataset, subset), known)}.",
        )
    content = yaml.load(path.read_text(encoding="utf-8"), Loader=_loader())
    return {template.name: template for template in content["templates"].values()}


# Renderings that repeat ------------------------------------------------------------------------


class PromptEnvironment(jinja2.sandbox.SandboxedEnvironment):
    """A Jinja sandbox in which a rendering depends only on the row and its random seed.

    Python prints some values with their address, which differs in every process; a row's dates can
    read the clock and the time zone; and a set's order differs in every process. All three are
    refused.
    """

    intercepted_binops = frozenset({"-"})

    def take(self, filters: Mapping[str, Any], names: Mapping[str, Any]) -> None:
        """Sets the filters and the global names that templates may use."""
        seeded = {"choice": _choice, "random": _random}
        self.filters = {name: _as_items(each) for name, each in {**filters, **seeded}.items()}
        self.globals = {**names, "cycler": _Cycler, "joiner": _Joiner}
        # It takes random text from Python's global generator. No prompt of promptsource calls it.
        self.globals.pop("lipsum", None)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """As in Jinja; a method can be called, but not printed."""
        return _as_method(super().getattr(obj, attribute), attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """As in Jinja; a method can be called, but not printed."""
        return _as_method(super().getitem(obj, argument), argument)

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        """As in Jinja."""
        function = obj.function if isinstance(obj, _Method) else obj
        return super().call(context, function, *args, **kwargs)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """As in Jinja, without the methods of dates that read the clock or the time zone."""
        if isinstance(obj, datetime.date) and attr in _CLOCK_AND_ZONE:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """As in Jinja, except that a set is refused."""
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, (set, frozenset)):
            raise TemplateFailure(
                "it subtracts the keys of mappings, which gives a set, and a set has no fixed"
                " order; loop over the keys and leave some out with `if` instead"
            )
        return result


_CLOCK_AND_ZONE = frozenset({"now", "today", "utcnow", "fromtimestamp", "timestamp", "astimezone"})


class _NotText:
    """A value that cannot be printed, since Python prints it with its address."""

    advice = "it prints an object that is no text"

    def __repr__(self) -> str:
        raise TemplateFailure(self.advice)

    __str__ = __repr__


class _Method(_NotText):
    """A callable attribute that a template reads; `PromptEnvironment.call` calls it."""

    def __init__(self, function: Callable[..., Any], name: str):
        self.function = function
        self.advice = f"it prints the method {name!r}, not its result; write {name}()"

    def __call__(self) -> Any:
        raise NotImplementedError  # makes it `callable` in Jinja's words


class _Items(_NotText):
    """The items that a filter such as `map` computes one by one."""

    advice = "it prints the result of a filter such as map before | list or | join"

    def __init__(self, items: Iterator[Any]):
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        return self._items

    def __next__(self) -> Any:
        return next(self._items)


class _Cycler(_NotText, jinja2.utils.Cycler):
    """Jinja's cycler."""


class _Joiner(_NotText, jinja2.utils.Joiner):
    """Jinja's joiner."""


def _as_method(found: Any, name: Any) -> Any:
    if callable(found) and not isinstance(found, (jinja2.Undefined, type)):
        return _Method(found, str(name))
    return found


def _as_items(filter_: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(filter_)  # with the marks by which Jinja passes the context
    def filtered(*args: Any, **kwargs: Any) -> Any:
        result = filter_(*args, **kwargs)
        return _Items(result) if isinstance(result, Iterator) else result

    return filtered


def constant_text(environment: jinja2.Environment, jinja: str) -> str | None:
    """The rendering of a Jinja text if it is the same for every row, else None.

    It is the same if the text reads no variable and makes no random choice.
    """
    if jinja2.meta.find_undeclared_variables(environment.parse(jinja)) - set(environment.globals):
        return None
    with _draws_of("") as draws:
        text = environment.from_string(jinja).render()
    return None if draws.made else text


class _Draws:
    """The random choices of one rendering, from a generator created at the first one."""

    def __init__(self, key: str | None):
        self._key, self.made = key, False
        self._generator: random.Random | None = None

    def choice(self, items: Sequence[Any]) -> Any:
        self.made = True
        if self._key is None:
            return random.choice(items)
        # Seeded with a string, Python's generator gives the same choices in every process.
        self._generator = self._generator or random.Random(self._key)
        return self._generator.choice(items)


_drawing = threading.local()


@contextlib.contextmanager
def _draws_of(key: str | None) -> Iterator[_Draws]:
    """Context in which this thread's templates use one generator, seeded with the key."""
    draws = _drawing.draws = _Draws(key)
    try:
        yield draws
    finally:
        del _drawing.draws


def _draws() -> _Draws:
    # promptsource's own `Template.apply` renders outside of this context.
    return getattr(_drawing, "draws", None) or _Draws(None)


# Most templates choose from a constant list. Jinja evaluates a filter of a constant at compile
# time, which would make one choice for all examples, unless the filter takes the context.
@jinja2.pass_context
def _choice(context: jinja2.runtime.Context, items: Sequence[Any]) -> Any:
    """The filter `choice`, which promptsource adds."""
    del context
    return _draws().choice(items)


@jinja2.pass_context
def _random(context: jinja2.runtime.Context, items: Sequence[Any]) -> Any:
    """Jinja's filter `random`, which returns an undefined value for an empty list."""
    if not items:
        return context.environment.undefined("No random item, sequence was empty.")
    return _draws().choice(items)
