"""Reads promptsource 0.1.0's templates and renders rows with them as T0 did."""

from __future__ import annotations

import functools
import random
import re
import threading
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import jinja2.runtime
import yaml

from t0repro.errors import UserError, nearest_names

NO_LABEL = "<NO LABEL>"
"""T0's target for a rendering whose target is empty, as hidden labels give."""


class Rendering(NamedTuple):
    """A prompted example; `answer_choices` is None where the template has none."""

    inputs: str
    targets: str
    answer_choices: list[str] | None


def task_name(dataset: str, subset: str | None, template_name: str) -> str:
    """T0's task name: a run of characters other than letters, digits, `.` and `_` is one `_`."""
    middle = f"_{subset}_" if subset is not None else "_"
    return re.sub(r"[^\w.]+", "_", f"{dataset}{middle}{template_name}")


def template_datasets() -> list[tuple[str, str | None]]:
    """The (dataset, subset) pairs that have templates, sorted; from folder names alone."""
    pairs = []
    for path in _templates_folder().rglob("templates.yaml"):
        # Two users' datasets of promptsource are `user/dataset`; none of them is T0's.
        dataset, *subset = path.parent.relative_to(_templates_folder()).parts
        pairs.append((dataset, "/".join(subset) or None))
    return sorted(pairs, key=str)


def template_names(dataset: str, subset: str | None) -> list[str]:
    """Names of a dataset's templates in T0's order, which is sorted.

    Raises:
      UserError: if the dataset has no templates.
    """
    return sorted(_read_templates(dataset, subset))


def load_template(dataset: str, subset: str | None, name: str) -> Any:
    """The promptsource `Template` of that name.

    Raises:
      UserError: if the dataset or the template does not exist; the nearest names are listed.
    """
    templates = _read_templates(dataset, subset)
    if name not in templates:
        raise UserError(
            f"{_label(dataset, subset)} has no template {name!r}.",
            fix=f"Use one of its {len(templates)} templates; nearest: "
            f"{nearest_names(name, templates)}.",
        )
    return templates[name]


def fixed_choices(template: Any) -> tuple[str, ...] | None:
    """The answer choices where they do not depend on the example, else None."""
    choices = template.get_fixed_answer_choices_list()
    return tuple(choices) if choices else None


def render(template: Any, row: Mapping[str, Any], draw_key: str | None = None) -> Rendering | None:
    """Renders one row as T0 did, or returns None where T0 drops the example.

    Hyphens in field names become underscores; every variable is cut at 2,048 characters; an empty
    target becomes "<NO LABEL>"; a rendering that is not exactly an input and a target, or whose
    input is empty, is dropped. This is the seam for a faster renderer: nothing else applies
    templates.

    Args:
      template: a promptsource `Template`.
      row: field names to values.
      draw_key: decides what the template's `choice` filters draw, which promptsource leaves
        unseeded; None draws from Python's global generator, as promptsource does.
    """
    fields = {name.replace("-", "_"): value for name, value in row.items()}
    with _draws_from(draw_key):
        parts = template.apply(fields)
    with _draws_from(draw_key):
        choices = template.get_answer_choices_list(fields)
    if len(parts) != 2 or not parts[0]:
        return None
    inputs, targets = parts
    return Rendering(inputs, targets or NO_LABEL, choices or None)


# promptsource ----------------------------------------------------------------------------------


@functools.cache
def _promptsource() -> Any:
    """promptsource.templates, its one Jinja environment made seedable and quick.

    `promptsource.utils` is never imported: it asks the network for a list of datasets.
    """
    with warnings.catch_warnings():
        # It finds its folder by pkg_resources, which warns about itself on import.
        warnings.simplefilter("ignore")
        import promptsource.templates as module
    module.env.filters["choice"] = _choice
    # `Template.apply` compiles its Jinja for each example: 2.1 ms against 21 us when kept.
    module.env.from_string = functools.lru_cache(maxsize=None)(module.env.from_string)
    return module


def _templates_folder() -> Path:
    return Path(_promptsource().TEMPLATES_FOLDER_PATH)


@functools.cache
def _read_templates(dataset: str, subset: str | None) -> dict[str, Any]:
    path = _templates_folder() / dataset / (subset or "") / "templates.yaml"
    if not path.is_file():
        known = [_label(*pair) for pair in template_datasets()]
        raise UserError(
            f"promptsource 0.1.0 has no templates for {_label(dataset, subset)}.",
            fix=f"Use a dataset that has some; nearest: "
            f"{nearest_names(_label(dataset, subset), known)}.",
        )
    # The file's tags name promptsource's classes, which its import registers for this loader.
    content = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.FullLoader)
    return {template.name: template for template in content["templates"].values()}


def _label(dataset: str, subset: str | None) -> str:
    return dataset if subset is None else f"{dataset}/{subset}"


# The `choice` filter ---------------------------------------------------------------------------

_drawing = threading.local()


class _draws_from:
    """While it lasts, `choice` filters in this thread draw from a generator seeded by the key."""

    def __init__(self, key: str | None):
        self._key = key

    def __enter__(self) -> None:
        _drawing.key, _drawing.generator = self._key, None

    def __exit__(self, *exception: object) -> None:
        _drawing.key, _drawing.generator = None, None


@jinja2.pass_context
def _choice(context: jinja2.runtime.Context, items: Sequence[Any]) -> Any:
    # Most templates draw from a constant list. Jinja folds a filter of a constant into the compiled
    # template, one draw for all examples, unless the filter asks for the context.
    del context
    key = getattr(_drawing, "key", None)
    if key is None:
        return random.choice(items)
    if _drawing.generator is None:
        # Seeded by a string, Python's generator repeats itself in every process.
        _drawing.generator = random.Random(key)
    return _drawing.generator.choice(items)
