"""What a training run's sequence lengths cut off, judged by the first examples of each task."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from t0repro.data.cached import read_in_turns, shards_of
from t0repro.data.mixing import FEATURES
from t0repro.progress import say
from t0repro.tasks.availability import lacks_cache
from t0repro.tasks.prompt_cache.records import integers
from t0repro.tasks.prompted_examples import UNCUT, prompted_examples
from t0repro.tasks.registry import task_descriptions
from t0repro.words import counted, some

EXAMPLES = 20
"""Examples of a task that are looked at."""
TASKS = 40
"""Tasks that are looked at, evenly spaced, since each opens a file or renders a prompt."""


def note_truncation(
    tasks: Sequence[Any], split: str, lengths: Mapping[str, int] | None, *, use_cached: bool
) -> None:
    """Reports in one line which share of each task's inputs and targets loses tokens, if any does.

    Args:
      tasks: The tasks of a training run that have the split; their rows or caches are here.
      split: The split.
      lengths: The run's tokens per feature; None truncates nothing.
      use_cached: Whether the run reads caches.
    """
    if lengths is None:
        return
    passes = [task for task in tasks if not _fits(task, split, lengths, use_cached)]
    sampled = passes[:: -(-len(passes) // TASKS) or 1]
    cut: dict[str, dict[str, float]] = {feature: {} for feature in FEATURES}
    for task in sampled:
        examples = list(itertools.islice(_examples(task, split, lengths, use_cached), EXAMPLES))
        for feature, shares in cut.items():
            sequences = [example[feature] for example in examples if feature in example]
            longer = sum(len(tokens) > lengths.get(feature, len(tokens)) for tokens in sequences)
            if longer:
                shares[task.name] = longer / len(sequences)
    parts = [_describe(feature, lengths, shares) for feature, shares in cut.items() if shares]
    if parts:
        of = "" if len(sampled) == len(passes) else f"{len(sampled)} of {len(passes)} tasks, "
        say(f"note: {'; '.join(parts)} ({of}first {EXAMPLES} examples of each)")


def _describe(feature: str, lengths: Mapping[str, int], shares: Mapping[str, float]) -> str:
    worst = sorted(shares, key=lambda task: (-shares[task], task))
    named = some([f"{100 * shares[task]:.0f}% of {task}" for task in worst])
    return f"{feature} of more than {counted(lengths[feature], 'token')} lose their end: {named}"


def _fits(task: Any, split: str, lengths: Mapping[str, int], use_cached: bool) -> bool:
    """Whether the statistics of a task's cache show that no example is too long."""
    if not _reads_cache(task, use_cached):
        return False
    file = Path(task.cache_dir) / f"stats.{split}.json"
    stats = json.loads(file.read_text()) if file.is_file() else {}
    most = {feature: stats.get(f"{feature}_max_tokens") for feature in FEATURES}
    return all(
        tokens is not None and tokens <= lengths.get(feature, tokens)
        for feature, tokens in most.items()
    )


def _reads_cache(task: Any, use_cached: bool) -> bool:
    """Whether the cache has a task's final tokens: a prompted task's does."""
    return use_cached and task.name in task_descriptions() and not lacks_cache(task)


def _examples(
    task: Any, split: str, lengths: Mapping[str, int], use_cached: bool
) -> Iterator[Mapping[str, Any]]:
    """A task's examples, with the tokens that `lengths` would cut."""
    described = task_descriptions().get(task.name)
    if _reads_cache(task, use_cached):
        folder = Path(task.cache_dir)
        for record in read_in_turns([folder / name for name in shards_of(folder, split)]):
            yield integers(record, FEATURES, folder)
    elif described is not None and described.sp_model is not None:
        # Only the rows that are needed, since blocks of them are tokenized together.
        yield from prompted_examples(
            described, split, UNCUT, lambda rendered: itertools.islice(rendered, EXAMPLES)
        )
    elif hasattr(task, "get_dataset"):
        yield from _seqio_examples(task, split, lengths, use_cached)


def _seqio_examples(
    task: Any, split: str, lengths: Mapping[str, int], use_cached: bool
) -> list[Mapping[str, Any]]:
    """The first examples of SeqIO's own task, untrimmed."""
    import tensorflow as tf
    import tensorflow_datasets as tfds

    # Mesh TensorFlow's runs build graphs; these examples must not become part of theirs.
    with contextlib.nullcontext() if tf.executing_eagerly() else tf.Graph().as_default():
        dataset = task.get_dataset(
            lengths,
            split,
            use_cached=use_cached and task.supports_caching,
            shuffle=False,
            trim_output_features=False,
        )
        return list(tfds.as_numpy(dataset.take(EXAMPLES)))
