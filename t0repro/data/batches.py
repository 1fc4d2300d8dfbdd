"""A run's batches as numpy arrays, from the same functions that Mesh TensorFlow's stack calls.

Both stacks get their data from t5.models.mesh_transformer (mesh_train_dataset_fn and
mesh_eval_dataset_fn) with the same arguments, so with a seed they see the same packed batches in
the same order. In a packed batch each row holds the tokens of several examples, padded with 0:

    inputs               [batch, inputs_length]   3  8  5  1  7  2  9  1  0  0
    inputs_segmentation                           1  1  1  1  2  2  2  2  0  0
    inputs_position                               0  1  2  3  0  1  2  3  0  0
    targets              [batch, targets_length]  ...with targets_segmentation, targets_position

Unpacked batches have only inputs and targets.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from t0repro.config.run_config import EvalDataConfig

# What Mesh TensorFlow feeds its model (mesh_tensorflow.transformer.utils._MODEL_FEATURES).
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
    """One task of an evaluation: its examples and how they are scored.

    Attributes:
      name: The task's name.
      examples: Dicts with `inputs` and `targets` (int32 [length], padded with 0 when lengths are
        given) and the task's other features. Each iteration reads them again.
      postprocess: Turns a score or a decoded text into what the metrics compare.
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
      data: The evaluation mixture, its split and how it is read.
      sequence_length: Tokens per feature; None leaves examples unpadded.

    Source: mesh_tensorflow.transformer.utils.eval_model.
    """
    # compat has to be installed before anything imports t5 or seqio.
    from t0repro import compat

    compat.install()
    from t5.models import mesh_transformer

    datasets = mesh_transformer.mesh_eval_dataset_fn(
        mixture_or_task_name=data.mixture_or_task_name,
        sequence_length=None if sequence_length is None else dict(sequence_length),
        dataset_split=data.split,
        num_eval_examples=data.num_eval_examples,
        use_cached=data.use_cached,
        pack=data.pack,
        shuffle_eval_examples=data.shuffle_eval_examples,
        seed=data.seed,
    )
    for dataset in datasets:
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


def targets_vocabulary(data: EvalDataConfig) -> Any:
    """The SeqIO vocabulary that the evaluation's targets are encoded with."""
    import seqio

    provider = seqio.get_mixture_or_task(data.mixture_or_task_name)
    return provider.output_features["targets"].vocabulary
