"""Batches of answer choices.

Examples are rendered from their rows, tokenized and kept in memory; neither a cache nor SeqIO is
read. t0repro.training.choice_losses has a picture of a row.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from t0repro.config.run import TrainRun
from t0repro.data.fingerprints import Fingerprint, fingerprint_rows
from t0repro.data.resuming import Batch, ResumableBatches
from t0repro.errors import UserError
from t0repro.tasks.prompted_examples import prompted_examples
from t0repro.tasks.registry import prompted_mixtures, task_descriptions
from t0repro.tasks.task import TaskDescription
from t0repro.words import counted


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
    every pass over them. Implements `training.feed.BatchSource`.

    Args:
      config: A configuration of mode "train" with a `choice_loss`.

    Raises:
      UserError: If a task is not a prompted one or has no answer choices.
    """

    def __init__(self, config: TrainRun):
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

    def fingerprint(self) -> Fingerprint:
        """See `ResumableBatches`."""
        return {
            name: fingerprint_rows(task_descriptions()[name], self._split) for name in self._rates
        }

    def dataset(self, seed: int, shard: int = 0) -> Iterator[Batch]:
        """Endless batches for a seed; see `ResumableBatches`."""
        del shard  # there is only one
        tasks = [
            list(read_choices(task_descriptions()[name], self._split, self._lengths, self._choices))
            for name in self._rates
        ]
        rates = np.array([*self._rates.values()]) / sum(self._rates.values())
        # A generator for each task: its order must not depend on how often the others are sampled.
        drawn, *orders = np.random.default_rng(seed).spawn(1 + len(tasks))
        streams = [self._passes(each, order) for each, order in zip(tasks, orders, strict=True)]
        while True:
            rows = [next(streams[at]) for at in drawn.choice(len(tasks), self._rows, p=rates)]
            yield make_choice_batch(rows, self._lengths, self._choices)

    def _passes(
        self, examples: Sequence[Choices], random: np.random.Generator
    ) -> Iterator[Choices]:
        for _ in itertools.count():
            order = random.permutation(len(examples)) if self._shuffle else range(len(examples))
            yield from (examples[at] for at in order)


def check_choices(config: TrainRun) -> Iterator[str]:
    """Checks the first example of each task that a `choice_loss` is computed on; yields a line.

    Raises:
      UserError: As `rates_of` and `read_choices`.
    """
    data, loss = config.plan.train_data, config.model.choice_loss
    assert data is not None and loss is not None and config.sequence_length is not None
    tasks = [task_descriptions()[name] for name in rates_of(data.mixture_or_task_name)]
    for task in tasks:
        next(read_choices(task, data.split, config.sequence_length, loss.choices))
    yield f"rows have room for the answer choices of {counted(len(tasks), 'task')}"


def rates_of(name: str) -> dict[str, float]:
    """The rate of each task of a mixture of prompted tasks, or of a task of that name.

    Raises:
      UserError: If there is no such mixture or task, or one without answer choices.
    """
    descriptions, mixture = task_descriptions(), prompted_mixtures().get(name)
    names = (name,) if mixture is None else mixture.tasks
    unusable = [
        each
        for each in names
        if each not in descriptions or not descriptions[each].prompt.has_answer_choices
    ]
    if unusable:
        raise UserError(
            f"A loss over answer choices cannot be computed on {unusable[0]!r}: it is not a"
            " prompted task, or its prompt lists no answer choices.",
            where=f"the training data, {name!r}",
            fix="Train on prompted tasks with answer choices (t0repro tasks ls shows them).",
        )
    return {each: 1.0 if mixture is None else mixture.rate(each) for each in names}


def read_choices(
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
    score_eval_task = task if task.prompt.score_eval else task.twin()
    any_found = False
    # The twin's examples for the choices of one input follow each other.
    by_input = itertools.groupby(
        prompted_examples(score_eval_task, split, lengths),
        key=lambda example: int(example["idx"][0]),
    )
    for number, group in by_input:
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
            any_found = True
            yield Choices(rows[0]["inputs"], (right[0], *wrong))
    if not any_found:
        raise UserError(
            f"{task.prompt.name} has no example in {split!r} of which an answer choice is right.",
            where="the training data",
            fix="Choose another split, or leave the task out.",
        )


def make_choice_batch(rows: Sequence[Choices], lengths: Mapping[str, int], choices: int) -> Batch:
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
