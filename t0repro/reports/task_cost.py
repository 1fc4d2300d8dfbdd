"""What each task of an evaluation took."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class TaskCost:
    """What a task took: its pairs, their tokens (inputs and choices), and seconds of scoring."""

    task: str
    pairs: int
    tokens: int
    longest_input: int
    seconds: float


def task_costs(
    records: Mapping[str, Mapping[str, Any]], tasks: Sequence[str]
) -> tuple[TaskCost, ...]:
    """What each task took, the slowest first, where the evaluation recorded it."""
    costs = [
        TaskCost(
            task=task,
            pairs=records[task]["pairs"],
            tokens=records[task]["input_tokens"] + records[task]["target_tokens"],
            longest_input=records[task]["longest_input"],
            seconds=records[task]["seconds"],
        )
        for task in tasks
        if task in records
    ]
    return tuple(sorted(costs, key=lambda cost: -cost.seconds))
