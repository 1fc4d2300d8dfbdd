"""Describes what a cached task was made from, in a file beside it that SeqIO does not read.

Nothing in it depends on when or where the cache was made, so it too can be reproduced byte for
byte.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from typing import Any

import t0repro
from t0repro.tasks.prompt_cache.plan import CachedTask, Prompt

_PACKAGES = ("promptsource", "jinja2", "sentencepiece", "seqio", "t5")
_TRUNCATION = (
    "each variable that the template prints is cut to 2,048 characters by Jinja's truncate, at a"
    " word's end and with '...'; tokens are not cut here but to the sequence lengths of a run"
)


def describe(
    prompt: Prompt, task: CachedTask, seed: int, splits: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """The contents of a task's provenance file.

    Args:
      prompt: The prompt rendered for the task.
      task: The task.
      seed: Seed for the template's draws and the order of the examples.
      splits: Split -> origin of its rows and counts of rows, examples and dropped rows.
    """
    template = prompt.template
    return {
        "task": task.name,
        "dataset": prompt.dataset,
        "subset": prompt.subset,
        "template": {"name": template.name, "id": template.id, "sha256": template.digest()},
        "score_eval": task.score_eval,
        "vocabulary": {"sha256": prompt.vocabulary, "eos": dict(prompt.eos)},
        "seed": seed,
        "truncation": _TRUNCATION,
        "versions": {
            "t0repro": t0repro.__version__,
            **{name: importlib.metadata.version(name) for name in _PACKAGES},
        },
        "splits": dict(splits),
    }
