"""What was read of each task of an evaluation, and what it took."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class TaskCost:
    """What was read of a task, and what scoring or decoding it took.

    Attributes:
      pairs: (input, choice) pairs that were scored, or inputs that were decoded.
      tokens: of inputs and targets.
      longest_input: in tokens.
      seconds: of scoring or decoding.
      inputs: distinct inputs; like the fields below, None where it was not recorded.
      available: inputs that the split has; more than `inputs` where a sample was evaluated.
      cut_inputs: inputs that were cut to the sequence length.
      cut_targets: targets, one for each pair, that were cut to theirs.
    """

    task: str
    pairs: int
    tokens: int
    longest_input: int
    seconds: float
    inputs: int | None = None
    available: int | None = None
    cut_inputs: int | None = None
    cut_targets: int | None = None


def task_costs(
    records: Mapping[str, Mapping[str, Any]], tasks: Sequence[str]
) -> tuple[TaskCost, ...]:
    """What each task took, the slowest first, where the evaluation recorded it."""
    costs = [_task_cost(task, records[task]) for task in tasks if task in records]
    return tuple(sorted(costs, key=lambda cost: -cost.seconds))


def _task_cost(task: str, record: Mapping[str, Any]) -> TaskCost:
    return TaskCost(
        task=task,
        pairs=record["pairs"] if "pairs" in record else record["examples"],
        tokens=record["input_tokens"] + record["target_tokens"],
        longest_input=record["longest_input"],
        seconds=record["seconds"],
        inputs=record.get("inputs"),
        available=record.get("available"),
        cut_inputs=record.get("cut_inputs"),
        cut_targets=record.get("cut_targets"),
    )
