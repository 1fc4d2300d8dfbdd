"""The size of an evaluated task, and what scoring or decoding it cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class TaskCost:
    """A task's size, and the cost of scoring or decoding it.

    Attributes:
      pairs: (input, choice) pairs that were scored, or inputs that were decoded.
      tokens: tokens of inputs and targets.
      longest_input: tokens of the longest input.
      seconds: time spent scoring or decoding.
      inputs: number of inputs; like the fields below, None if not recorded.
      available: inputs in the split; more than `inputs` if a sample was evaluated.
      cut_inputs: inputs truncated to their sequence length.
      cut_targets: targets, one per pair, truncated to their sequence length.
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
    """Costs of the tasks that the evaluation recorded, slowest first."""
    costs = [_task_cost(task, records[task]) for task in tasks if task in records]
    return tuple(sorted(costs, key=lambda cost: -cost.seconds))


def _task_cost(task: str, record: Mapping[str, Any]) -> TaskCost:
    return TaskCost(
        task=task,
        # A decoded task has examples but no pairs.
        pairs=record["pairs"] if "pairs" in record else record["examples"],
        tokens=record["input_tokens"] + record["target_tokens"],
        longest_input=record["longest_input"],
        seconds=record["seconds"],
        inputs=record.get("inputs"),
        available=record.get("available"),
        cut_inputs=record.get("cut_inputs"),
        cut_targets=record.get("cut_targets"),
    )
