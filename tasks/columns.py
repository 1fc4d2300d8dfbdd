"""Which columns of a dataset its templates read."""

from __future__ import annotations

import functools
from typing import Any

import jinja2
import jinja2.meta

from t0repro.errors import UserError
from t0repro.tasks.templates import load_template, template_names


def columns_read(template: Any) -> frozenset[str]:
    """The variables of a template and of its answer choices, spelled as the template spells them.

    Columns with hyphens are spelled with underscores there. A template that is not valid Jinja
    reads nothing; rendering it says so.
    """
    if template is None:
        return frozenset()
    return _variables(template.jinja) | _variables(template.answer_choices or "")


@functools.cache
def columns_of_dataset(dataset: str, subset: str | None) -> frozenset[str]:
    """What any of promptsource's templates of a dataset reads; nothing where it has none."""
    try:
        names = template_names(dataset, subset)
    except UserError:
        return frozenset()
    return frozenset().union(
        *(columns_read(load_template(dataset, subset, name)) for name in names)
    )


@functools.cache
def _variables(jinja: str) -> frozenset[str]:
    environment = jinja2.Environment()
    # Filters of promptsource's own need not exist to see what a template reads.
    environment.filters = _AnyFilter(environment.filters)
    try:
        found = jinja2.meta.find_undeclared_variables(environment.parse(jinja))
    except jinja2.TemplateSyntaxError:
        return frozenset()
    # Globals of Jinja, and what promptsource adds.
    return frozenset(found) - set(environment.globals) - {"answer_choices"}


class _AnyFilter(dict):
    def __contains__(self, name: object) -> bool:
        return True
