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
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from t0repro import compat
from t0repro.config.run_config import EvalDataConfig, RunConfig
from t0repro.config.t5x import records
from t0repro.config.training_plan import SeqioDataConfig, TrainDataConfig
from t0repro.data.cached import CachedBatches, count_examples
from t0repro.data.checks import no_task_has
from t0repro.data.eval_examples import why_not_evaluated, why_not_read
from t0repro.data.fingerprints import Fingerprint, of_rows
from t0repro.data.mixing import FEATURES, HELD, Example, MixedBatches
from t0repro.data.resuming import Batch
from t0repro.errors import UserError
from t0repro.tasks.prompted_examples import UNCUT, prompted_examples, shard_of
from t0repro.tasks.task import find_tasks, is_described, prompted_mixtures, task_descriptions

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


# ---- Batches for perplexity evaluation, and the examples that score_from_dataset scores ----------


def perplexity_batches(config: RunConfig) -> list[tuple[str, list[Batch]]]:
    """Up to perplexity_eval_steps batches of each task, with its name: int32 [batch_size, length].

    If a task runs out of examples, its last batch is padded with empty rows; no batch is entirely
    empty. Without an evaluation dataset, the training dataset is evaluated under the name "eval".

    Source: mesh_tensorflow.transformer.utils.run, mode perplexity_eval.

    Raises:
      UserError: If neither dataset is bound.
    """
    named = _eval_rows(config) if config.eval_data else [("eval", _train_rows(config))]
    return [(name, list(_batches(rows, config))) for name, rows in named]


def scored_examples(config: RunConfig) -> list[Batch]:
    # One flat list: all scores go to one file, in this order.
    """The padded examples of all of score_from_dataset's datasets, one dataset after another."""
    return [row for _, rows in _eval_rows(config) for row in rows]


def _eval_rows(config: RunConfig) -> list[tuple[str, Iterator[Batch]]]:
    """Each task's padded or packed examples: int32 [length] by feature."""
    data, lengths = config.eval_data, config.sequence_length
    assert data is not None and lengths is not None
    found: list[tuple[str, Iterator[Batch]]]
    if is_described(data.mixture_or_task_name):
        named = mesh_described_rows(data, lengths)
        found = [(name, map(_of_one_row, rows)) for name, rows in named]
    else:
        found = [(name, _as_numpy(dataset)) for name, dataset in _eval_datasets(data, lengths)]
    if not found:
        where = config.provenance.get("eval_data.split") or "run.dataset_split"
        raise no_task_has(data.mixture_or_task_name, data.split, where)
    return found


def _of_one_row(batch: Batch) -> Batch:
    return {name: x[0] for name, x in batch.items()}


def _as_numpy(dataset: Any) -> Iterator[Batch]:
    for example in dataset.as_numpy_iterator():
        yield {
            name: np.asarray(example[name], np.int32) for name in MODEL_FEATURES if name in example
        }


def _eval_datasets(data: EvalDataConfig, lengths: Mapping[str, int]) -> list[tuple[str, Any]]:
    from t0repro import compat

    compat.install()
    from t5.models import mesh_transformer

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
    return [(dataset.name, dataset.dataset_fn()) for dataset in datasets]


def _train_rows(config: RunConfig) -> Iterator[Batch]:
    """The training dataset's rows, in the order in which a run reads them."""
    data, lengths = config.plan.train_data, config.sequence_length
    if not isinstance(data, TrainDataConfig) or lengths is None:
        raise UserError(
            "A perplexity evaluation needs run.eval_dataset_fn or run.train_dataset_fn.",
            where=config.provenance.get("mode"),
            fix="Add --gin_file=perplexity_eval.gin.",
        )
    if is_described(data.mixture_or_task_name):
        # One row a batch: `_batches` puts rows together itself and pads the last batch.
        alone = dataclasses.replace(as_seqio(data, config), batch_size=1, num_shards=1)
        return map(_of_one_row, mesh_described_batches(alone, data.seed))
    from t0repro import compat

    compat.install()
    from t5.models import mesh_transformer

    return _as_numpy(
        mesh_transformer.mesh_train_dataset_fn(
            mixture_or_task_name=data.mixture_or_task_name,
            sequence_length=dict(lengths),
            dataset_split=data.split,
            shuffle=data.shuffle,
            seed=data.seed,
            use_cached=data.use_cached,
            pack=data.pack,
        )
    )


def _batches(rows: Iterator[Batch], config: RunConfig) -> Iterator[Batch]:
    for _ in range(config.perplexity_eval_steps):
        held = list(itertools.islice(rows, config.batch_size))
        if not held:
            return
        yield {name: _filled([row[name] for row in held], config.batch_size) for name in held[0]}


def _filled(x: Sequence[np.ndarray], rows: int) -> np.ndarray:
    # Rows of padding (token 0) carry no loss weight, so they add nothing to the sums.
    return np.pad(np.stack(x), ((0, rows - len(x)), (0, 0)))


# ---- Batches of described tasks, from caches or rows ---------------------------------------------


class RenderedBatches(MixedBatches):
    """Endless training batches of described tasks; implements `training.start.BatchSource`.

    They equal SeqIO's (t0repro.data.mixing) of the same tasks with `use_cached = False`. A task of
    fewer than 10,000 rows for each shard stays in memory; a larger one is rendered again in each
    epoch, with the same random choices.

    Args:
      rates: Name of each task -> its rate in the mixture.
      sequence_length: Tokens per row of `inputs` and of `targets`; longer examples are truncated.
      batch_size: Rows in a batch.
      **options: As for `MixedBatches`.
    """

    def __init__(
        self,
        rates: Mapping[str, float],
        sequence_length: Mapping[str, int],
        batch_size: int,
        **options: Any,
    ):
        # By name, as SeqIO orders a mixture's tasks; their order decides what is sampled.
        self._tasks = {name: task_descriptions()[name] for name in sorted(rates)}
        in_order = {name: rates[name] for name in self._tasks}
        super().__init__(in_order, sequence_length, batch_size, **options)

    def _arguments(self) -> dict[str, Any]:
        return {"rendered": self._rates, **super()._arguments()}

    def made_of(self) -> Fingerprint:
        """See `ResumableBatches`."""
        return {name: of_rows(task, self._split) for name, task in self._tasks.items()}

    def _epochs(self, task: str, seed: int, shard: int) -> Iterator[Iterator[Example]]:
        del seed  # which decides nothing before examples are shuffled
        # Counting also checks all rows: an error in them comes before the first step.
        held = self._tasks[task].rows.num_input_examples(self._split) < HELD * self.num_shards
        return self._held(task, shard) if held else self._read_again(task, shard)

    def _read_again(self, task: str, shard: int) -> Iterator[Iterator[Example]]:
        while True:
            yield self._read(task, shard)

    def _held(self, task: str, shard: int) -> Iterator[Iterator[Example]]:
        """The same, rendered during the first epoch."""
        # tee keeps what `first` yields until `again` is read, so that no row is rendered twice.
        first, again = itertools.tee(self._read(task, shard))
        yield first
        examples = list(again)
        while True:
            yield iter(examples)

    def _read(self, task: str, shard: int) -> Iterator[Example]:
        own = shard_of(shard, self.num_shards)
        for example in prompted_examples(self._tasks[task], self._split, UNCUT, own):
            yield {name: example[name][: self._lengths[name]] for name in FEATURES}


def described_batches(data: SeqioDataConfig, seed: int | None) -> MixedBatches:
    """The batches of a described mixture or task, from its caches or from its rows."""
    assert data.sequence_length is not None
    mixture = prompted_mixtures().get(data.mixture_or_task_name)
    rates = {
        task: 1.0 if mixture is None else mixture.rate(task.name)
        for task in find_tasks(data.mixture_or_task_name)
        if data.split in task.splits
    }
    options: dict[str, Any] = {
        "split": data.split,
        "pack": data.pack,
        "shuffle": data.shuffle,
        "seed": seed,
        "num_shards": data.num_shards,
    }
    of_lengths = data.sequence_length, data.batch_size
    if data.use_cached:
        folders = {task.cache_dir: rate for task, rate in rates.items() if task.cache_dir}
        return CachedBatches(folders, *of_lengths, **options)
    return RenderedBatches(
        {task.name: rate for task, rate in rates.items()}, *of_lengths, **options
    )


def mesh_described_batches(
    data: SeqioDataConfig, seed: int | None, shard: int = 0
) -> Iterator[Batch]:
    """Mesh TensorFlow's batches of described tasks, without end; None draws a seed."""
    seed = _drawn(seed)
    batches = described_batches(data, seed).dataset(seed, shard)
    return _with_eos(batches, data.mixture_or_task_name)


def mesh_described_rows(
    data: EvalDataConfig, lengths: Mapping[str, int]
) -> list[tuple[str, Iterator[Batch]]]:
    """The rows of an evaluation as mesh_eval_dataset_fn makes them, by task: int32 [1, length].

    Args:
      data: The evaluation's data; its tasks are described.
      lengths: Tokens per row of each feature.
    """
    limit = data.num_eval_examples
    # In t5, num_eval_examples = -1 takes all.
    if limit is not None and limit < 0:
        limit = None
    seed = _drawn(data.seed)
    found = []
    for task in find_tasks(data.mixture_or_task_name):
        if data.split in task.splits:
            of_task = SeqioDataConfig(
                task.name,
                lengths,
                data.split,
                1,
                data.shuffle_eval_examples,
                seed,
                use_cached=data.use_cached,
                pack=data.pack,
            )
            rows = described_batches(of_task, seed).epoch(seed)
            found.append((task.name, itertools.islice(_with_eos(rows, task.name), limit)))
    return found


def _drawn(seed: int | None) -> int:
    return secrets.randbits(31) if seed is None else seed


def _with_eos(batches: Iterator[Batch], name: str) -> Iterator[Batch]:
    """In Mesh TensorFlow, EOS replaces a full row's last token, if the task adds EOS."""
    features = find_tasks(name)[0].output_features
    ends = [feature for feature in FEATURES if features[feature].add_eos]
    for batch in batches:
        for feature in ends:
            # Padding is 0 and EOS is 1, so this turns the last token of a full row alone into EOS.
            np.minimum(batch[feature][:, -1], 1, out=batch[feature][:, -1])
        yield batch


# ---- Why a run may need SeqIO after all: None, or what in the run needs it, as a clause ----------


def why_not_trained(config: RunConfig, vocabularies: tuple[Any, Any]) -> str | None:
    """Why a T5X run's data cannot be read without SeqIO.

    Args:
      config: The run; its tasks are described, and SeqIO is not imported.
      vocabularies: The records of the model's vocabularies of inputs and targets.
    """
    plan = config.plan
    train, evaluation, inferred = plan.train_data, plan.train_eval_data, plan.infer_eval_data
    if _reads_rows_alone(config):
        return None
    if "model" in plan.user_classes:
        return "the model is a class of yours, which is given SeqIO's vocabularies"
    if not all(isinstance(each, records.PIECES_OR_BYTES) for each in vocabularies):
        return "a vocabulary of the model is neither of pieces nor of bytes"
    if not isinstance(train, SeqioDataConfig):
        return "train's dataset function is not T5X's"
    if why := _why_not_batched(train):
        return why
    if train.use_cached and plan.save is not None and plan.save.data and compat.is_installed():
        return "checkpoints hold the state of SeqIO's pipeline"
    if evaluation is not None:
        if evaluation.seed is None or evaluation.shuffle:
            return "train_eval's data has no seed or is shuffled"
        if why := _why_not_batched(evaluation):
            return f"of train_eval, {why}"
    if inferred is not None and (
        why := why_not_evaluated(
            inferred.mixture_or_task_name, inferred.split, use_cached=inferred.use_cached
        )
    ):
        return f"of infer_eval, {why}"
    return None


def _reads_rows_alone(config: RunConfig) -> bool:
    """Whether a run reads only its tasks' rows, so that SeqIO need not have the tasks."""
    return config.model.choice_loss is not None and config.plan.infer_eval_data is None


def why_not_run_by_mesh(config: RunConfig) -> str | None:
    """The same for a run of Mesh TensorFlow's dialect, in any mode."""
    data = config.eval_data
    if config.mode in ("infer", "score_from_strings"):
        return None  # lines of text, and the vocabularies of a described mixture
    if config.mode == "train" or config.mode == "perplexity_eval" and data is None:
        return _why_not_trained_by_mesh(config)
    if data is None:
        return f"mode {config.mode} has no mesh_eval_dataset_fn"
    name, split, use_cached = data.mixture_or_task_name, data.split, data.use_cached
    if config.mode in ("perplexity_eval", "score_from_dataset"):
        return why_not_read(name, split, use_cached=use_cached)
    if data.pack or data.shuffle_eval_examples:
        return f"mode {config.mode} reads packed or shuffled examples"
    return why_not_evaluated(name, split, use_cached=use_cached)


def _why_not_trained_by_mesh(config: RunConfig) -> str | None:
    data = config.plan.train_data
    if not isinstance(data, TrainDataConfig):
        return "run.train_dataset_fn is not mesh_train_dataset_fn"
    if data.checkpoint_input_pipeline and data.use_cached and compat.is_installed():
        return "checkpoints hold the state of tf.data's pipeline"
    return _why_not_batched(as_seqio(data, config))


def as_seqio(data: TrainDataConfig, config: RunConfig) -> SeqioDataConfig:
    """Mesh TensorFlow's training data as T5X's configuration describes it."""
    return SeqioDataConfig(
        data.mixture_or_task_name,
        config.sequence_length,
        data.split,
        config.batch_size,
        data.shuffle,
        data.seed,
        use_cached=data.use_cached,
        pack=data.pack,
        num_shards=data.num_shards,
    )


def _why_not_batched(data: SeqioDataConfig) -> str | None:
    """Why the batches of a dataset are SeqIO's alone."""
    lengths = data.sequence_length
    if lengths is None or not {*FEATURES} <= {*lengths}:
        return "the lengths of inputs and targets are not both given"
    if not data.trim_output_features:
        return "trim_output_features is False"
    if why := why_not_read(data.mixture_or_task_name, data.split, use_cached=data.use_cached):
        return why
    if not data.use_cached:
        return None
    for task in find_tasks(data.mixture_or_task_name):
        # The checks that follow refuse a task without a cache, or one with a damaged cache.
        if data.split in task.splits and task.cache_dir is not None:
            try:
                if not count_examples(Path(task.cache_dir), data.split):
                    return f"the cache of {task.name} has no example in {data.split!r}"
            except UserError:
                continue
    return None
