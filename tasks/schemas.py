"""The compiled schema of each dataset of the catalogue, shared by templates that read the same."""

from __future__ import annotations

import functools

from t0repro.tasks.catalogue import catalogue, features_of
from t0repro.tasks.columns import columns_of_dataset
from t0repro.tasks.schema import Schema


@functools.cache
def schema_of(
    dataset: str,
    subset: str | None,
    read: frozenset[str],
    class_names: tuple[tuple[str, tuple[str, ...]], ...],
) -> Schema | None:
    """The schema of a dataset, or None where the catalogue has none.

    Args:
      dataset: the Hugging Face name.
      subset: the configuration, or None.
      read: what a template reads besides what promptsource's templates of the dataset do.
      class_names: columns of the data and the names of their classes, as far as it tells them.
    """
    features = features_of(dataset, subset)
    if features is None:
        return None
    return _compiled(dataset, subset, read | columns_of_dataset(dataset, subset), class_names)


@functools.cache
def _compiled(
    dataset: str,
    subset: str | None,
    read: frozenset[str],
    class_names: tuple[tuple[str, tuple[str, ...]], ...],
) -> Schema:
    # One object for all templates of a dataset that read no more than promptsource's do.
    required = [
        column for column in features_of(dataset, subset) or {} if column.replace("-", "_") in read
    ]
    aliases = catalogue()[dataset, subset].aliases
    return Schema(features_of(dataset, subset) or {}, required, aliases, dict(class_names))
