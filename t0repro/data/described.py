"""The batches of described tasks, from caches or rows; and why a run may need SeqIO after all.

Their rows hold packed examples, or an example and its answer choices, as ChoiceLoss needs them.

Each `why_*` function returns None, or what in the run needs SeqIO, as a clause.
"""

from __future__ import annotations

import dataclasses
import itertools
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from t0repro import compat
from t0repro.config.run_config import EvalDataConfig, RunConfig
from t0repro.config.t5x import records
from t0repro.config.training_plan import SeqioDataConfig, TrainDataConfig
from t0repro.data.cached import CachedBatches, count_examples
from t0repro.data.eval_examples import why_not_evaluated, why_not_read
from t0repro.data.mixing import FEATURES, HELD, Example, MixedBatches
from t0repro.data.resuming import Batch, ResumableBatches
from t0repro.errors import UserError
from t0repro.tasks.prompted_examples import UNCUT, prompted_examples, shard_of
from t0repro.tasks.task import TaskDescription, find_tasks, prompted_mixtures, task_descriptions
from t0repro.words import counted


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


# ---- What needs SeqIO ----------------------------------------------------------------------------


def why_not_trained(config: RunConfig, vocabularies: tuple[Any, Any]) -> str | None:
    """Why a T5X run's data cannot be read without SeqIO.

    Args:
      config: The run; its tasks are described, and SeqIO is not imported.
      vocabularies: The records of the model's vocabularies of inputs and targets.
    """
    plan = config.plan
    train, evaluation, inferred = plan.train_data, plan.train_eval_data, plan.infer_eval_data
    if reads_rows_alone(config):
        return None
    if "model" in plan.user_classes:
        return "the model is a class of yours, which is given SeqIO's vocabularies"
    if not all(isinstance(each, records.SentencePieceVocabulary) for each in vocabularies):
        return "a vocabulary of the model is no SentencePieceVocabulary"
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


# ---- Batches of answer choices -------------------------------------------------------------------
#
# Examples are rendered from their rows, tokenized and kept in memory; neither a cache nor SeqIO is
# read. t0repro.training.losses has a picture of a row.


@dataclasses.dataclass(frozen=True, eq=False)
class Choices:
    """An example.

    Attributes:
      inputs: The input's token ids.
      choices: Token ids of each choice, the right one first.
    """

    inputs: np.ndarray
    choices: Sequence[np.ndarray]


class ChoiceBatches(ResumableBatches):
    """Endless unpacked batches of a prompted mixture or task.

    The task of each row is sampled by the tasks' rates. Each task's examples are reshuffled for
    every pass over them. Implements `training.start.BatchSource`.

    Args:
      config: A configuration of mode "train" with a `choice_loss`.

    Raises:
      UserError: If a task is not a prompted one or has no answer choices.
    """

    def __init__(self, config: RunConfig):
        data, loss = config.plan.train_data, config.model.choice_loss
        assert data is not None and loss is not None and config.sequence_length is not None
        self._lengths, self._rows = dict(config.sequence_length), config.batch_size
        self._split, self._choices, self._shuffle = data.split, loss.choices, data.shuffle
        self._rates = rates_of(data.mixture_or_task_name)
        super().__init__(data.seed)

    def _arguments(self) -> dict[str, Any]:
        return {
            "choices": self._choices,
            "rates": self._rates,
            "split": self._split,
            "sequence_length": self._lengths,
            "batch_size": self._rows,
            "shuffle": self._shuffle,
        }

    def _to_numpy(self, element: Mapping[str, Any]) -> Batch:
        return dict(element)

    def dataset(self, seed: int, shard: int = 0) -> Iterator[Batch]:
        """Endless batches for a seed; see `ResumableBatches`."""
        del shard  # there is only one
        tasks = [
            list(examples_of(task_descriptions()[name], self._split, self._lengths, self._choices))
            for name in self._rates
        ]
        rates = np.array([*self._rates.values()]) / sum(self._rates.values())
        # A generator for each task: its order must not depend on how often the others are sampled.
        drawn, *orders = np.random.default_rng(seed).spawn(1 + len(tasks))
        streams = [self._passes(each, order) for each, order in zip(tasks, orders, strict=True)]
        while True:
            rows = [next(streams[at]) for at in drawn.choice(len(tasks), self._rows, p=rates)]
            yield to_batch(rows, self._lengths, self._choices)

    def _passes(
        self, examples: Sequence[Choices], random: np.random.Generator
    ) -> Iterator[Choices]:
        for _ in itertools.count():
            order = random.permutation(len(examples)) if self._shuffle else range(len(examples))
            yield from (examples[at] for at in order)


def reads_rows_alone(config: RunConfig) -> bool:
    """Whether a run reads only its tasks' rows, so that SeqIO need not have the tasks."""
    return config.model.choice_loss is not None and config.plan.infer_eval_data is None


def check_choices(config: RunConfig) -> Iterator[str]:
    """Checks the first example of each task that a `choice_loss` is computed on; yields a line.

    Raises:
      UserError: As `rates_of` and `examples_of`.
    """
    data, loss = config.plan.train_data, config.model.choice_loss
    assert data is not None and loss is not None and config.sequence_length is not None
    tasks = [task_descriptions()[name] for name in rates_of(data.mixture_or_task_name)]
    for task in tasks:
        next(examples_of(task, data.split, config.sequence_length, loss.choices))
    yield f"rows have room for the answer choices of {counted(len(tasks), 'task')}"


def rates_of(name: str) -> dict[str, float]:
    """The rate of each task of a mixture of prompted tasks, or of a task of that name.

    Raises:
      UserError: If there is no such mixture or task, or one without answer choices.
    """
    known, mixture = task_descriptions(), prompted_mixtures().get(name)
    names = (name,) if mixture is None else mixture.tasks
    without = [
        each for each in names if each not in known or not known[each].prompt.has_answer_choices
    ]
    if without:
        raise UserError(
            f"A loss over answer choices cannot be computed on {without[0]!r}: it is no prompted"
            " task, or its prompt lists no answer choices.",
            where=f"the training data, {name!r}",
            fix="Train on prompted tasks with answer choices (t0repro tasks ls shows them).",
        )
    return {each: 1.0 if mixture is None else mixture.rate(each) for each in names}


def examples_of(
    task: TaskDescription, split: str, lengths: Mapping[str, int], choices: int
) -> Iterator[Choices]:
    """Yields a split's examples in the order of its rows, except those without a right choice.

    Args:
      task: A task whose prompt has answer choices.
      split: The split to read.
      lengths: Maximum tokens of an input and of a choice.
      choices: Maximum number of choices.

    Raises:
      UserError: If there is no such example, or one has more choices.
    """
    # Only the `_score_eval` twin has an example for each answer choice.
    twin = task if task.prompt.score_eval else task.twin()
    found = False
    # The twin's examples for the choices of one input follow each other.
    of_input = itertools.groupby(
        prompted_examples(twin, split, lengths), key=lambda example: int(example["idx"][0])
    )
    for number, group in of_input:
        rows = list(group)
        right = [row["targets"] for row in rows if row["is_correct"]]
        wrong = [row["targets"] for row in rows if not row["is_correct"]]
        if right and 1 + len(wrong) > choices:
            raise UserError(
                f"Example {number} of {task.prompt.name}, split {split!r}, has"
                f" {counted(len(rows), 'answer choice')}, and a row has room for {choices}.",
                where="ChoiceLoss.choices",
                fix=f"Bind ChoiceLoss.choices = {1 + len(wrong)} or more.",
            )
        if right:
            found = True
            yield Choices(rows[0]["inputs"], (right[0], *wrong))
    if not found:
        raise UserError(
            f"{task.prompt.name} has no example in {split!r} of which an answer choice is right.",
            where="the training data",
            fix="Choose another split, or leave the task out.",
        )


def to_batch(rows: Sequence[Choices], lengths: Mapping[str, int], choices: int) -> Batch:
    """The arrays of a batch: int32 [rows, length], targets `choices` times as long as a choice."""
    inputs = np.zeros((len(rows), lengths["inputs"]), np.int32)
    targets = np.zeros((len(rows), choices, lengths["targets"]), np.int32)
    for at, row in enumerate(rows):
        inputs[at, : len(row.inputs)] = row.inputs
        for number, choice in enumerate(row.choices):
            targets[at, number, : len(choice)] = choice
    # 0 at padding, which belongs to no choice.
    segments = (targets > 0) * np.arange(1, choices + 1, dtype=np.int32)[:, None]
    flat = (len(rows), -1)
    return {
        "inputs": inputs,
        "targets": targets.reshape(flat),
        "targets_segmentation": segments.astype(np.int32).reshape(flat),
    }
