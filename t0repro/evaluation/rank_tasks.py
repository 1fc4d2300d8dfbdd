"""The tasks of a mixture that answers are ranked for, read through SeqIO one at a time."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from t0repro.data.batches import EvalTask
from t0repro.errors import UserError
from t0repro.evaluation.training_tasks import subtasks

# Mesh TensorFlow pads the vocabulary to a multiple of this (vocab_divisor).
VOCABULARY_MULTIPLE = 128


def ranked_tasks(mixture: str, split: str) -> list[str]:
    """Names of the mixture's tasks that have the split.

    Raises:
      UserError: if there is no such mixture or task, if a task ranks no answers, or if no task has
        the split.
    """
    tasks = sorted(subtasks(mixture, "--mixture"), key=lambda task: task.name)
    others = [task.name for task in tasks if not _ranks(task)]
    if others:
        more = f" and {len(others) - 5} more" if len(others) > 5 else ""
        raise UserError(
            f"No answer choices to rank: {', '.join(others[:5])}{more}.",
            where=mixture,
            fix="Evaluate tasks whose name ends in _score_eval; the others are decoded"
            " (t5_mesh_transformer with eval.gin).",
        )
    names = [task.name for task in tasks if split in task.splits]
    if not names:
        there = sorted({name for task in tasks for name in task.splits})
        raise UserError(
            f"No task of {mixture!r} has a split {split!r}.",
            where="--split",
            fix=f"Splits there: {', '.join(there)}.",
        )
    return names


def _ranks(task: Any) -> bool:
    """Whether a task's metric is t5's rank_classification, partial application allowed."""
    names = set()
    for metric in task.metric_fns:
        while isinstance(metric, functools.partial):
            metric = metric.func
        names.add(getattr(metric, "__name__", ""))
    return "rank_classification" in names


def read_task(
    name: str, split: str, lengths: Mapping[str, int], limit: int | None, use_cached: bool = False
) -> EvalTask:
    """A task's (input, choice) pairs as Mesh TensorFlow's mode score_eval reads them.

    Args:
      name: the task's.
      split: of the task.
      lengths: tokens per feature; what is longer is cut, targets keep their EOS.
      limit: the most inputs, each with all of its choices; None takes all.
      use_cached: read the cached task.
    """
    from t0repro.mesh import compat

    compat.install()
    from t5.models import mesh_transformer

    (dataset,) = mesh_transformer.mesh_eval_dataset_fn(
        mixture_or_task_name=name,
        sequence_length=dict(lengths),
        dataset_split=split,
        use_cached=use_cached,
    )
    rows = map(_without_padding, dataset.dataset_fn().as_numpy_iterator())
    if limit is not None:
        rows = itertools.takewhile(lambda row: row["idx"][0] < limit, rows)
    examples = list(rows)
    return EvalTask(
        name=name,
        examples=examples,
        targets=[_postprocessed(dataset.postprocess_fn, example) for example in examples],
        postprocess=dataset.postprocess_fn,
        metric_fns=dataset.metric_fns,
    )


def _without_padding(example: Mapping[str, Any]) -> dict[str, Any]:
    """An example without the zeros that fill its sequences, which are most of its bytes."""
    row = dict(example)
    for name in ("inputs", "targets"):
        row[name] = np.trim_zeros(row[name], "b").astype(np.int32)
    return row


def _postprocessed(postprocess: Any, example: Mapping[str, Any]) -> Any:
    text = example["targets_pretokenized"].decode("utf-8")
    return postprocess(text, example=example, is_target=True)


def check_vocabulary(names: Sequence[str], rows: int, where: str) -> Any:
    """The tasks' vocabulary, which must be the checkpoint's in size.

    Args:
      names: tasks.
      rows: of the checkpoint's embedding.
      where: the checkpoint's path, for the message.

    Raises:
      UserError: naming both sizes.
    """
    import seqio

    vocabulary: Any = None
    for name in names:
        vocabulary = seqio.get_mixture_or_task(name).output_features["targets"].vocabulary
        padded = -(-vocabulary.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
        if padded != rows:
            raise UserError(
                f"The checkpoint has a vocabulary of {rows} and {name} one of"
                f" {vocabulary.vocab_size} ({padded} when padded).",
                where=where,
                fix="Evaluate with the vocabulary that the checkpoint was trained with"
                " (T0REPRO_VOCAB).",
            )
    return vocabulary
