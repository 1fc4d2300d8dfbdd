"""A run's batches as numpy arrays: of described tasks without SeqIO, of others from t5's functions.

Both stacks get their data from t5.models.mesh_transformer (mesh_train_dataset_fn and
mesh_eval_dataset_fn) with the same arguments, so with a seed they see the same packed batches in
the same order. In a packed batch each row has the tokens of several examples, padded with 0:

    inputs               [batch, inputs_length]   3  8  5  1  7  2  9  1  0  0
    inputs_segmentation                           1  1  1  1  2  2  2  2  0  0
    inputs_position                               0  1  2  3  0  1  2  3  0  0
    targets              [batch, targets_length]  ...with targets_segmentation, targets_position

Unpacked batches have only inputs and targets.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from t0repro import compat
from t0repro.config.data import EvalDataConfig, TrainDataConfig
from t0repro.config.run import MeshEvalRun, to_seqio_config
from t0repro.data.checks import missing_split_error
from t0repro.data.described_batches import make_mesh_batches, make_mesh_rows
from t0repro.data.resuming import Batch
from t0repro.errors import UserError
from t0repro.tasks.registry import find_tasks, is_described

# The features that Mesh TensorFlow's model reads
# (mesh_tensorflow.transformer.utils._MODEL_FEATURES).
MODEL_FEATURES = (
    "inputs",
    "inputs_position",
    "inputs_segmentation",
    "targets",
    "targets_position",
    "targets_segmentation",
)


@dataclasses.dataclass(frozen=True)
class EvalTask:
    """One task of an evaluation: its examples, and how to score them.

    Attributes:
      name: The task's name.
      examples: Dicts with `inputs` and `targets` (int32 [length], padded with 0 when lengths are
        given) and the task's other features. Each iteration reads them again.
      postprocess: Turns a score or a decoded text into the metrics' input.
      metric_fns: Each is called as metric(targets, predictions) -> {name: value}.
    """

    name: str
    examples: Iterable[dict[str, Any]]
    postprocess: Callable[..., Any]
    metric_fns: Sequence[Callable[..., Mapping[str, float]]]


def eval_tasks(
    data: EvalDataConfig, sequence_length: Mapping[str, int] | None
) -> Iterator[EvalTask]:
    """Yields, one at a time, the mixture's tasks that have both the split and metrics.

    Args:
      data: The evaluation mixture, its split and its reading options.
      sequence_length: Tokens per feature; None leaves examples unpadded.

    Source: mesh_tensorflow.transformer.utils.eval_model.
    """
    for dataset in _mesh_eval_datasets(data, sequence_length):
        if not dataset.metric_fns:
            continue
        yield EvalTask(
            name=dataset.name,
            examples=_Examples(dataset.dataset_fn),
            postprocess=dataset.postprocess_fn,
            metric_fns=dataset.metric_fns,
        )


class _Examples:
    """A dataset's examples as numpy arrays."""

    def __init__(self, dataset_fn: Callable[[], Any]):
        self._dataset_fn = dataset_fn

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self._dataset_fn().as_numpy_iterator()


def perplexity_batches(config: MeshEvalRun) -> list[tuple[str, list[Batch]]]:
    """Up to perplexity_eval_steps batches of each task, with its name: int32 [batch_size, length].

    If a task runs out of examples, its last batch is padded with empty rows; no batch is entirely
    empty. Without an evaluation dataset, the training dataset is evaluated under the name "eval".

    Source: mesh_tensorflow.transformer.utils.run, mode perplexity_eval.

    Raises:
      UserError: If neither dataset is bound.
    """
    evaluates = isinstance(config.eval_data, EvalDataConfig)
    named = _eval_rows(config) if evaluates else [("eval", _train_rows(config))]
    return [(name, list(_batches(rows, config))) for name, rows in named]


def list_scored_examples(config: MeshEvalRun) -> list[Batch]:
    """The padded examples of all of score_from_dataset's datasets, one dataset after another."""
    # One flat list: all scores go to one file, in this order.
    return [row for _, rows in _eval_rows(config) for row in rows]


def _eval_rows(config: MeshEvalRun) -> list[tuple[str, Iterator[Batch]]]:
    """Each task's padded or packed examples: int32 [length] by feature."""
    data, lengths = config.eval_data, config.sequence_length
    assert isinstance(data, EvalDataConfig) and lengths is not None
    rows_by_task: list[tuple[str, Iterator[Batch]]]
    if is_described(data.mixture_or_task_name):
        named = make_mesh_rows(data, lengths)
        rows_by_task = [(name, map(_take_row, rows)) for name, rows in named]
    else:
        datasets = _mesh_eval_datasets(data, lengths)
        rows_by_task = [(each.name, _to_numpy(each.dataset_fn())) for each in datasets]
    if not rows_by_task:
        where = config.provenance.get("eval_data.split") or "run.dataset_split"
        raise missing_split_error(data.mixture_or_task_name, data.split, where)
    return rows_by_task


def _take_row(batch: Batch) -> Batch:
    return {name: x[0] for name, x in batch.items()}


def _to_numpy(dataset: Any) -> Iterator[Batch]:
    for example in dataset.as_numpy_iterator():
        yield {
            name: np.asarray(example[name], np.int32) for name in MODEL_FEATURES if name in example
        }


def _mesh_eval_datasets(data: EvalDataConfig, lengths: Mapping[str, int] | None) -> Any:
    # compat has to be installed before anything imports t5 or seqio.
    compat.install()
    from t5.models import mesh_transformer

    return mesh_transformer.mesh_eval_dataset_fn(
        mixture_or_task_name=data.mixture_or_task_name,
        sequence_length=None if lengths is None else dict(lengths),
        dataset_split=data.split,
        num_eval_examples=data.num_eval_examples,
        use_cached=data.use_cached,
        pack=data.pack,
        shuffle_eval_examples=data.shuffle_eval_examples,
        seed=data.seed,
    )


def _train_rows(config: MeshEvalRun) -> Iterator[Batch]:
    """The training dataset's rows, in the order in which a run reads them."""
    data, lengths = config.eval_data, config.sequence_length
    if not isinstance(data, TrainDataConfig) or lengths is None:
        raise UserError(
            "A perplexity evaluation needs run.eval_dataset_fn or run.train_dataset_fn.",
            where=config.provenance.get("mode"),
            fix="Add --gin_file=perplexity_eval.gin.",
        )
    if is_described(data.mixture_or_task_name):
        # One row a batch: `_batches` puts rows together itself and pads the last batch.
        alone = dataclasses.replace(to_seqio_config(data, config), batch_size=1, num_shards=1)
        return map(_take_row, make_mesh_batches(alone, data.seed))
    return _to_numpy(mesh_train_dataset(data, lengths, data.seed))


def mesh_train_dataset(data: TrainDataConfig, lengths: Mapping[str, int], seed: int | None) -> Any:
    """The examples of t5's mesh_train_dataset_fn, as a tf.data.Dataset; not the data's own seed."""
    compat.install()
    from t5.models import mesh_transformer

    from t0repro.tasks.seqio_tasks import read_without_seed

    # Mesh TensorFlow gives dataset functions no seed unless one is bound, and some take none.
    unseeded = find_tasks(data.mixture_or_task_name) if data.seed is None else []
    with read_without_seed(unseeded):
        return mesh_transformer.mesh_train_dataset_fn(
            mixture_or_task_name=data.mixture_or_task_name,
            sequence_length=dict(lengths),
            dataset_split=data.split,
            shuffle=data.shuffle,
            seed=seed,
            use_cached=data.use_cached,
            pack=data.pack,
        )


def _batches(rows: Iterator[Batch], config: MeshEvalRun) -> Iterator[Batch]:
    size = config.batch_size
    for _ in range(config.perplexity_eval_steps):
        chunk = list(itertools.islice(rows, size))
        if not chunk:
            return
        # Rows of padding (token 0) carry no loss weight, so they add nothing to the sums.
        padding = ((0, size - len(chunk)), (0, 0))
        yield {name: np.pad([row[name] for row in chunk], padding) for name in chunk[0]}
