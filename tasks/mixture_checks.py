"""Checks of mixtures: tasks that fit together, and rates that give examples."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from t0repro.errors import UserError
from t0repro.tasks.vocabulary import (
    VOCABULARY_VARIABLE,
    address_of,
    are_same,
    default_vocabulary,
    shown,
)
from t0repro.words import some

if TYPE_CHECKING:
    import seqio


def check_alike(mixture: str, tasks: Sequence[Any]) -> None:
    """Checks that the tasks of a mixture have the same features, of one vocabulary and type each.

    A vocabulary that cannot be read here is not compared: whatever needs its tokens says so.

    Raises:
      UserError: If two tasks differ; names both, and how to have one vocabulary.
    """
    # SeqIO compares them too, but only once a run reads its first examples.
    _check_same(mixture, "features", {task.name: tuple(task.output_features) for task in tasks})
    for feature in tasks[0].output_features if tasks else ():
        own = {task.name: task.output_features[feature] for task in tasks}
        types = {name: getattr(each, "dtype", "int32") for name, each in own.items()}
        _check_same(mixture, f"types of {feature}", types)
        vocabularies = {name: getattr(each, "vocabulary", None) for name, each in own.items()}
        found = _kinds(vocabularies, may_be_same)
        if len(found) > 1:
            raise _several_vocabularies(mixture, feature, found)


def _check_same(mixture: str, what: str, of_tasks: Mapping[str, Any]) -> None:
    found = _kinds(of_tasks, operator.eq)
    if len(found) > 1:
        sides = [
            f"{', '.join(own) if isinstance(own, tuple) else getattr(own, 'name', own)} in"
            f" {some(names, 2)}"
            for own, names in found
        ]
        raise UserError(
            f"The tasks of mixture {mixture!r} have different {what}: {'; '.join(sides)}.",
            fix="Mix only tasks with the same output_features; a prompted task has inputs and"
            " targets, of int32.",
        )


def _kinds(
    of_tasks: Mapping[str, Any], same: Callable[[Any, Any], bool]
) -> list[tuple[Any, list[str]]]:
    """The different values of tasks, each with the names of those that have it."""
    found: list[tuple[Any, list[str]]] = []
    for task, own in of_tasks.items():
        names = next((names for known, names in found if same(known, own)), None)
        if names is None:
            found.append((own, [task]))
        else:
            names.append(task)
    return found


def may_be_same(one: Any, other: Any) -> bool:
    """Whether two vocabularies are the same, or one cannot be read here."""
    try:
        return are_same(one, other)
    except (UserError, OSError):
        return True


def _several_vocabularies(
    mixture: str, feature: str, found: Sequence[tuple[Any, list[str]]]
) -> UserError:
    default = default_vocabulary()
    sides = [f"{shown(vocabulary)} in {some(names, 2)}" for vocabulary, names in found]
    fix = "Register the tasks with one vocabulary"
    # Only tasks with the default vocabulary can be given another one from outside.
    others = [address_of(own) for own, _ in found if not may_be_same(own, default)]
    if len(others) == len(found) - 1 == 1 and others[0]:
        fix = f"Give all the same: {VOCABULARY_VARIABLE}={others[0]}; or register them with one"
    return UserError(
        f"The tasks of mixture {mixture!r} have different vocabularies of {feature}:"
        f" {'; '.join(sides)}.",
        fix=f"{fix} (vocabulary=, in a SeqIO task its output_features), or mix only tasks that"
        " share one.",
    )


def check_rates(mixture: str, rates: Mapping[str, float]) -> None:
    """Checks that a mixture's rates are finite, not negative, and not all 0.

    Raises:
      UserError: If they are not; names the task.
    """
    for task, rate in rates.items():
        if not 0 <= rate < math.inf:
            raise UserError(
                f"The rate of {task} in mixture {mixture!r} is {rate}.",
                fix="Give a number of examples, 0 or more.",
            )
    # SeqIO never samples a task with rate 0, so such a mixture would be silently empty.
    if rates and not any(rates.values()):
        raise UserError(
            f"No task of mixture {mixture!r} has a rate above 0, so it has no examples.",
            where=", ".join(list(rates)[:5]) + (", ..." if len(rates) > 5 else ""),
            fix="Give at least one of its tasks a rate above 0.",
        )


def check_seqio_rates(mixture: seqio.Mixture) -> None:
    """Checks the rates of a mixture that is SeqIO's, and those of the mixtures in it."""
    rates = mixture.rate_per_task_name
    for part in mixture._sub_mixtures:
        if callable(rates[part.name]):
            raise UserError(
                f"The rate of mixture {part.name!r} in mixture {mixture.name!r} is a function,"
                " which SeqIO has for tasks alone.",
                fix="Give it a number.",
            )
        check_seqio_rates(part)
    # What a function returns may need the rows.
    check_rates(mixture.name, {name: 1 if callable(r) else r for name, r in rates.items()})
