"""Renderers: in this process for promptsource's templates, in the sandbox for a user's own."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Protocol

from t0repro.tasks.prompt_environment import constant_text
from t0repro.tasks.templates import (
    SEPARATOR,
    CompiledTemplate,
    Drop,
    Rendering,
    is_own,
    promptsource_environment,
)


def fixed_choices(template: Any) -> tuple[str, ...] | None:
    """The answer choices if they do not depend on the example, else None."""
    if is_own(template):
        from t0repro.tasks import sandbox

        choices = sandbox.fixed_choices(template.answer_choices or "")
        return choices if template.answer_choices else None
    text = constant_text(promptsource_environment(), template.answer_choices or "")
    # Like promptsource's get_fixed_answer_choices_list, which also returns random choices, once.
    return tuple(choice.strip() for choice in text.split(SEPARATOR)) if text else None


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
