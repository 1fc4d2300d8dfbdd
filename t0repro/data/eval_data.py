"""Batches for perplexity evaluation, and the examples that score_from_dataset scores.

They come from the same functions that Mesh TensorFlow's stack calls, as in t0repro.data.batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from t0repro.config.run_config import RunConfig
from t0repro.data.batches import MODEL_FEATURES
from t0repro.data.checks import no_task_has
from t0repro.errors import UserError

Batch = dict[str, np.ndarray]


def perplexity_batches(config: RunConfig) -> list[tuple[str, list[Batch]]]:
    """Up to perplexity_eval_steps batches of each task, with its name: int32 [batch_size, length].

    If a task runs out of examples, its last batch is filled up with empty rows; no batch is all
    empty. Without an evaluation dataset, the training dataset is evaluated under the name "eval".

    Source: mesh_tensorflow.transformer.utils.run, mode perplexity_eval.

    Raises:
      UserError: If neither dataset is bound.
    """
    named = _eval_datasets(config) if config.eval_data else [("eval", _train_dataset(config))]
    return [(name, list(_batches(dataset, config))) for name, dataset in named]


def scored_examples(config: RunConfig) -> list[Batch]:
    # One flat list: all scores go to one file, in this order.
    """The padded examples of all of score_from_dataset's datasets, one dataset after another."""
    return [
        {name: np.asarray(example[name], np.int32) for name in MODEL_FEATURES if name in example}
        for _, dataset in _eval_datasets(config)
        for example in dataset.as_numpy_iterator()
    ]


def _eval_datasets(config: RunConfig) -> list[tuple[str, Any]]:
    from t0repro import compat

    compat.install()
    from t5.models import mesh_transformer

    data, lengths = config.eval_data, config.sequence_length
    assert data is not None and lengths is not None
    datasets = mesh_transformer.mesh_eval_dataset_fn(
        mixture_or_task_name=data.mixture_or_task_name,
        sequence_length=dict(lengths),
        dataset_split=data.split,
        num_eval_examples=data.num_eval_examples,
        use_cached=data.use_cached,
        pack=data.pack,
        shuffle_eval_examples=data.shuffle_eval_examples,
        seed=data.seed,
    )
    if not datasets:
        where = config.provenance.get("eval_data.split") or "run.dataset_split"
        raise no_task_has(data.mixture_or_task_name, data.split, where)
    return [(dataset.name, dataset.dataset_fn()) for dataset in datasets]


def _train_dataset(config: RunConfig) -> Any:
    from t0repro import compat

    compat.install()
    from t5.models import mesh_transformer

    data, lengths = config.plan.train_data, config.sequence_length
    if data is None or lengths is None:
        raise UserError(
            "A perplexity evaluation needs run.eval_dataset_fn or run.train_dataset_fn.",
            where=config.provenance.get("mode"),
            fix="Add --gin_file=perplexity_eval.gin.",
        )
    return mesh_transformer.mesh_train_dataset_fn(
        mixture_or_task_name=data.mixture_or_task_name,
        sequence_length=dict(lengths),
        dataset_split=data.split,
        shuffle=data.shuffle,
        seed=data.seed,
        use_cached=data.use_cached,
        pack=data.pack,
    )


def _batches(dataset: Any, config: RunConfig) -> Iterator[Batch]:
    dataset = dataset.batch(config.batch_size).take(config.perplexity_eval_steps)
    for batch in itertools.islice(dataset.as_numpy_iterator(), config.perplexity_eval_steps):
        yield {
            name: _filled(batch[name].astype(np.int32), config.batch_size)
            for name in MODEL_FEATURES
            if name in batch
        }


def _filled(x: np.ndarray, rows: int) -> np.ndarray:
    # Rows of padding (token 0) carry no loss weight, so they add nothing to the sums.
    return np.pad(x, ((0, rows - len(x)), (0, 0)))
