"""Checks of a run before it starts, the cheapest first."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterable, Sequence

from t0repro.errors import UserError

Report = Callable[[str], None]


class Cost(enum.IntEnum):
    """What a check costs, the cheapest first."""

    NAMES = 0  # opens nothing
    FILES = 1  # reads small files of this machine: gin, credentials
    TASKS = 2  # imports TensorFlow and the tasks' modules; reads names and sizes of data files
    INDEX = 3  # reads a checkpoint's names and shapes, over the network for one in a bucket
    COMPILE = 4  # runs the compiler: minutes


@dataclasses.dataclass(frozen=True)
class Check:
    """One check of a list.

    Attributes:
      name: Its name in the table above.
      cost: Its cost.
      run: Raises a UserError for a fault; may yield lines about what it found.
    """

    name: str
    cost: Cost
    run: Callable[[], Iterable[str] | None]


def run_checks(
    checks: Sequence[Check], report: Callable[[str, str], None], *, all_at_once: bool = True
) -> None:
    """Runs a list of checks in order.

    Args:
      checks: The list.
      report: Receives a check's name and each of its lines.
      all_at_once: Whether all checks run before their faults are raised together; otherwise the
        first fault ends the list.

    Raises:
      UserError: If a check finds a fault.
    """
    # A misspelled name must not be reported only after minutes of compiling.
    assert [check.cost for check in checks] == sorted(check.cost for check in checks)
    # By their texts: the three datasets of a training run may lack one vocabulary.
    errors: dict[str, UserError] = {}
    for check in checks:
        try:
            for line in check.run() or ():
                report(check.name, line)
        except UserError as error:
            if not all_at_once:
                raise
            errors.setdefault(str(error), error)
    if len(errors) == 1:
        raise next(iter(errors.values()))
    if errors:
        raise UserError("\n".join(errors))
