"""Mixtures of prompted tasks: which are registered, their rates, and choosing tasks by them."""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from t0repro.errors import UserError, nearest_names
from t0repro.tasks.task import PromptedTask, prompted_tasks, task_descriptions

if TYPE_CHECKING:
    from t0repro.tasks.source import PromptedRows


@dataclasses.dataclass(frozen=True)
class PromptedMixture:
    """A mixture of prompted tasks.

    Attributes:
      name: of the mixture.
      tasks: their names.
      rates: task -> its rate, in examples.
      default_rate: a task's rows -> the rate of one that is not among `rates`.
    """

    name: str
    tasks: tuple[str, ...]
    rates: Mapping[str, float]
    default_rate: Callable[[PromptedRows], float] | None

    def rate(self, task: str) -> float:
        """A task's rate.

        Raises:
          UserError: if it is the number of rows, and these are missing.
        """
        if task in self.rates or self.default_rate is None:
            return self.rates[task]
        return self.default_rate(task_descriptions()[task].rows)


_mixtures: dict[str, PromptedMixture] = {}


def prompted_mixtures() -> Mapping[str, PromptedMixture]:
    """Every mixture of prompted tasks registered so far, by name."""
    return types.MappingProxyType(_mixtures)


def record_mixture(mixture: PromptedMixture) -> None:
    """Adds a mixture."""
    _mixtures[mixture.name] = mixture


def registered_mixtures() -> Mapping[str, Sequence[str]]:
    """Name of each mixture -> its tasks, those that only SeqIO knows included."""
    found: dict[str, Sequence[str]] = {
        name: mixture.tasks for name, mixture in prompted_mixtures().items()
    }
    seqio = sys.modules.get("seqio")
    if seqio is not None:
        for name in seqio.MixtureRegistry.names():
            found[name] = [task.name for task in seqio.MixtureRegistry.get(name).tasks]
    return found


def tasks_of_mixture(name: str, option: str = "--mixture") -> Sequence[str]:
    """Names of a mixture's tasks.

    Args:
      name: of the mixture.
      option: of the command line, that named it.

    Raises:
      UserError: if there is no such mixture; the nearest names are listed.
    """
    mixtures = registered_mixtures()
    if name not in mixtures:
        raise UserError(
            f"There is no mixture {name!r}.",
            where=option,
            fix=f"Nearest: {nearest_names(name, mixtures)}; or name its --module_import.",
        )
    return mixtures[name]


def select_tasks(mixture: str | None = None, dataset: str | None = None) -> list[str]:
    """Names of prompted tasks, sorted.

    Args:
      mixture: only its tasks.
      dataset: only this one's, `dataset` or `dataset/subset`.

    Raises:
      UserError: if the mixture or the dataset is not there; the nearest names are listed.
    """
    known = prompted_tasks()
    names: Iterable[str] = known
    if mixture is not None:
        names = set(tasks_of_mixture(mixture)) & set(known)
    if dataset is not None:
        names = [name for name in names if dataset in _labels(known[name])]
        if not names:
            everywhere = sorted({label for task in known.values() for label in _labels(task)})
            inside = f" in {mixture}" if mixture else ""
            raise UserError(
                f"There is no task of dataset {dataset!r}{inside}.",
                where="--dataset",
                fix=f"Nearest: {nearest_names(dataset, everywhere)}.",
            )
    return sorted(names)


def _labels(task: PromptedTask) -> tuple[str, ...]:
    label = task.dataset if task.subset is None else f"{task.dataset}/{task.subset}"
    return (task.dataset, label)
