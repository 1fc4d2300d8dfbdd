"""Counts the examples that a split gives, without tokenizing or writing them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from t0repro.tasks.prompt_cache.plan import Prompt
from t0repro.tasks.prompt_cache.shards import compiled_template, reader_of, render_row, rows_of
from t0repro.tasks.templates import Drop


class Count(NamedTuple):
    """Number of examples of a task and of its twin, which has one per answer choice."""

    examples: int
    ranked: int


def count_examples(prompts: Sequence[Prompt], split: str, seed: int = 0) -> dict[str, Count]:
    """Prompt's source -> its count; all prompts must share a dataset, whose rows are read once."""
    if not prompts:
        return {}
    rows = prompts[0].rows[split]
    found: Sequence[tuple[int, Mapping[str, Any]]] = list(rows_of(rows, reader_of(rows)))
    counts = {}
    for prompt in prompts:
        template = compiled_template(prompt)
        examples = ranked = 0
        for number, row in found:
            rendering = render_row(prompt, template, split, number, row, seed)
            if not isinstance(rendering, Drop):
                examples += 1
                ranked += len(rendering.answer_choices or ())
        counts[prompt.source] = Count(examples, ranked)
    return counts
