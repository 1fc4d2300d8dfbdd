"""The tasks of a mixture, to rank or to decode, read one at a time."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from t0repro.data.batches import EvalTask
from t0repro.errors import UserError, nearest_names
from t0repro.evaluation.records import digest_of_texts
from t0repro.tasks.prompted_examples import prompted_examples
from t0repro.tasks.task import task_descriptions

# Mesh TensorFlow pads the vocabulary to a multiple of this (vocab_divisor).
VOCABULARY_MULTIPLE = 128


@dataclasses.dataclass(frozen=True)
class Selection:
    """What of a mixture is evaluated.

    Attributes:
      ranked: tasks whose answers are ranked.
      generated: tasks that are decoded.
      left_out: tasks that lack the split, or its rows, each with why.
    """

    ranked: tuple[str, ...]
    generated: tuple[str, ...]
    left_out: dict[str, str]


def subtasks(mixture: str, option: str) -> Sequence[Any]:
    """The seqio tasks of a registered mixture or task.

    Args:
      mixture: its name.
      option: of the command line, that named it.

    Raises:
      UserError: if it is not registered; the nearest names are listed.
    """
    import seqio

    try:
        return seqio.get_subtasks(seqio.get_mixture_or_task(mixture))
    except ValueError as error:
        known = [*seqio.MixtureRegistry.names(), *seqio.TaskRegistry.names()]
        raise UserError(
            f"There is no mixture or task {mixture!r}.",
            where=option,
            fix=f"Nearest names: {nearest_names(mixture, known)}; or name its --module-import.",
        ) from error


def select_tasks(
    mixture: str,
    split: str,
    modes: Sequence[str],
    *,
    use_cached: bool = False,
    at_hand: bool = False,
) -> Selection:
    """The mixture's tasks that have the split: those to rank, and those to decode.

    With both modes, a task whose answers can be ranked (it has a twin, `_score_eval`) is ranked and
    the others are decoded. With `generate` alone, whatever does not rank answers is decoded.

    Args:
      mixture: a registered mixture or task.
      split: of every task.
      modes: of rank_eval.MODES.
      use_cached: whether cached tasks are read.
      at_hand: leave out tasks whose rows are not here; otherwise they are an error when read.

    Raises:
      UserError: if there is no such mixture or task, if a task cannot be evaluated in these modes,
        or if no task has the split.
    """
    tasks = sorted(subtasks(mixture, "--mixture"), key=lambda task: task.name)
    if set(modes) == {"rank", "generate"}:
        tasks = [_ranking_twin(task) for task in tasks]
    ranked = [task for task in tasks if _ranks(task)]
    others = [task for task in tasks if not _ranks(task)]
    _check_modes(mixture, modes, ranked, others)
    left_out = _left_out(mixture, tasks, split, only_at_hand=at_hand and not use_cached)
    names = [[t.name for t in kind if t.name not in left_out] for kind in (ranked, others)]
    return Selection(tuple(names[0]), tuple(names[1]), left_out)


def _check_modes(
    mixture: str, modes: Sequence[str], ranked: Sequence[Any], others: Sequence[Any]
) -> None:
    """Refuses tasks that none of the modes evaluates."""
    if "generate" not in modes and others:
        raise UserError(
            f"No answer choices to rank: {_some(others)}.",
            where=mixture,
            fix="Evaluate tasks whose name ends in _score_eval; decode the others with"
            " --modes rank,generate.",
        )
    if "rank" not in modes and ranked:
        raise UserError(
            f"Answer choices to rank: {_some(ranked)}.", where=mixture, fix="Add the mode rank."
        )
    without = [task for task in others if not task.metric_fns]
    if without:
        raise UserError(
            f"No metric for what is decoded: {_some(without)}.",
            where=mixture,
            fix="Evaluate tasks that name metrics.",
        )


def _left_out(mixture: str, tasks: Sequence[Any], split: str, only_at_hand: bool) -> dict[str, str]:
    """Tasks that lack the split, or its rows where these are asked for; each with why."""
    if not any(split in task.splits for task in tasks):
        there = sorted({name for task in tasks for name in task.splits})
        raise UserError(
            f"No task of {mixture!r} has a split {split!r}.",
            where="--split",
            fix=f"Splits there: {', '.join(there)}.",
        )
    left_out = {task.name: f"no split {split}" for task in tasks if split not in task.splits}
    if only_at_hand:
        missing = [task for task in tasks if task.name not in left_out and not _has(task, split)]
        left_out |= {task.name: "rows not at hand" for task in missing}
    if len(left_out) == len(tasks):
        raise UserError(
            f"Of no task of {mixture!r} the rows of split {split!r} are at hand.",
            fix="Set T0REPRO_DATA_DIR (or --data) to the folder of the datasets.",
        )
    return left_out


def _has(task: Any, split: str) -> bool:
    """Whether the rows of a task's split can be read; a task of another kind has its own."""
    if not hasattr(task.source, "reader"):
        return True
    try:
        task.source.reader(split)
    except UserError:
        return False
    return True


def _ranking_twin(task: Any) -> Any:
    """The task that ranks the same prompt's answers, if there is one, else the task itself."""
    import seqio

    name = f"{task.name}_score_eval"
    return seqio.TaskRegistry.get(name) if name in seqio.TaskRegistry.names() else task


def _some(tasks: Sequence[Any]) -> str:
    more = f" and {len(tasks) - 5} more" if len(tasks) > 5 else ""
    return ", ".join(task.name for task in tasks[:5]) + more


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
    import seqio

    description = None if use_cached else task_descriptions().get(name)
    if description is None or description.sp_model is None:
        rows = _rows_of_seqio(name, split, lengths, use_cached)
        examples = list(rows if limit is None else _limited(rows, limit))
    else:
        examples = prompted_examples(description, split, lengths, limit)
    task: Any = seqio.TaskRegistry.get(name)
    return EvalTask(
        name=name,
        examples=examples,
        targets=[_postprocessed(task.postprocess_fn, example) for example in examples],
        postprocess=task.postprocess_fn,
        metric_fns=task.metric_fns,
    )


def _rows_of_seqio(
    name: str, split: str, lengths: Mapping[str, int], use_cached: bool
) -> Iterator[dict[str, Any]]:
    from t0repro.mesh import compat

    compat.install()
    from t5.models import mesh_transformer

    (dataset,) = mesh_transformer.mesh_eval_dataset_fn(
        mixture_or_task_name=name,
        sequence_length=dict(lengths),
        dataset_split=split,
        use_cached=use_cached,
    )
    return map(_without_padding, dataset.dataset_fn().as_numpy_iterator())


def _limited(rows: Iterable[dict[str, Any]], limit: int) -> Iterator[dict[str, Any]]:
    """The first `limit` inputs, with all of their choices where answers are ranked."""
    for count, row in enumerate(rows):
        if (row["idx"][0] if "idx" in row else count) >= limit:
            return
        yield row


def data_origin(name: str, split: str, use_cached: bool) -> dict[str, Any] | None:
    """Which version of which rows a task's split is made of; None where nothing tells.

    A local file is known by its size and checksum, not by where it lies; rows of the hub by
    repository and commit; a cached task by the digest of what its cache says of itself.
    """
    import seqio

    task = seqio.TaskRegistry.get(name)
    if use_cached and task.cache_dir:
        files = sorted(Path(task.cache_dir).glob(f"*.{split}.json"))
        return {"cache": digest_of_texts(path.read_text(encoding="utf-8") for path in files)}
    source = task.source
    if not hasattr(source, "origin"):
        return None
    hidden = ("path", "modified_ns")
    origin = {key: value for key, value in source.origin(split).items() if key not in hidden}
    subset = f"/{source.subset}" if source.subset else ""
    return {"dataset": f"{source.dataset}{subset}", **origin}


def vocabulary_digest(name: str) -> str | None:
    """16 hexadecimal digits that stand for a task's SentencePiece model; None where it has none."""
    import seqio

    vocabulary = seqio.get_mixture_or_task(name).output_features["targets"].vocabulary
    model = getattr(vocabulary, "sp_model", None)
    return None if model is None else hashlib.blake2b(model, digest_size=8).hexdigest()


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
