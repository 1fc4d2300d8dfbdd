"""What a program gives to `t0repro.score` and `t0repro.encode`: lists of texts."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from t0repro.errors import UserError
from t0repro.evaluation.opened import Checkpoint


def check_model(model: Any, where: str) -> None:
    """Raises UserError for what is no checkpoint, such as texts that stand in its place."""
    if not isinstance(model, str | os.PathLike | Checkpoint):
        raise UserError(
            f"The model is of type {type(model).__name__}, not a path.",
            where=where,
            fix="Give the checkpoint first, then the texts.",
        )


def list_texts(texts: Any, name: str, where: str) -> list[Any]:
    """The elements of a list, an array, a column of a table or anything else that has an order.

    Raises:
      UserError: If it is a single text, or iterating over it gives keys, names or no order.
    """
    if isinstance(texts, str | bytes):
        what = "a single string"
    elif isinstance(texts, Mapping | AbstractSet) or hasattr(texts, "columns"):
        what = f"of type {type(texts).__name__}, which is no list"
    elif not isinstance(texts, Iterable) or getattr(texts, "ndim", 1) == 0:
        what = f"{texts!r}, which is no list"
    else:
        return list(texts)
    raise UserError(
        f"The {name} are {what}.",
        where=where,
        fix="Give a list of texts, or one column of a table.",
    )


def check_text(text: str, where: str) -> None:
    """Raises UserError for half of a pair of surrogates, which no vocabulary encodes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"The text has {text[error.start]!r} at character {error.start}, half of a pair of"
            " surrogates, which is no character.",
            where=where,
            fix="Read its source as UTF-8, or replace it: text.encode(errors='replace').decode().",
        ) from error
