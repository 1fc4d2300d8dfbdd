"""Which axes of a parameter Adafactor averages over, by their lengths or by T5X's rules.

Mesh TensorFlow factors the two longest axes of a parameter of any rank. T5X wants a rule for every
parameter with more than two axes, and ignores it for most others. A rule is text here:

    unfactored        the second moment is not factored (in T5X, None)
    heuristic         the two longest axes, as in Mesh TensorFlow; at most two axes
    batch row column column
                      a word for each axis. v_row is the mean over all columns and v_col the mean
                      over all rows. Along a batch axis the parameter is a stack of parameters that
                      are scaled and clipped by themselves. "none" leaves an axis out.

Source: t5x/adafactor.py, `Adafactor._parse_rule`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from t0repro.errors import UserError
from t0repro.parameters import layout

UNFACTORED, HEURISTIC = "unfactored", "heuristic"
AXIS_WORDS = ("row", "column", "batch", "none")
# T5X's rules for an Adafactor without a factor map.
ALL_HEURISTIC: tuple[tuple[str, str], ...] = ((".*", HEURISTIC),)


class FactorRuleError(UserError, ValueError):
    """A parameter that has no rule, or one that does not suit it."""


class Factoring(NamedTuple):
    """The axes of one parameter over which Adafactor averages.

    Attributes:
      dropped: the axes that v_row lacks, and those that v_col lacks; None if it is not factored.
      scaled: the axes over which its size and its update's size are taken; None for all.
    """

    dropped: tuple[tuple[int, ...], tuple[int, ...]] | None
    scaled: tuple[int, ...] | None = None

    def slot_shapes(self, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """The shapes of the second moment's slots."""
        if self.dropped is None:
            return {"v": tuple(shape)}
        return {
            slot: tuple(size for axis, size in enumerate(shape) if axis not in dropped)
            for slot, dropped in zip(("v_row", "v_col"), self.dropped, strict=True)
        }


class Options(Protocol):
    """The options of Adafactor that say what is factored."""

    @property
    def factored(self) -> bool:
        """Whether any parameter is."""
        ...

    @property
    def min_dim_size_to_factor(self) -> int:
        """The two longest axes are averaged over if both are as long."""
        ...

    @property
    def factor_map(self) -> Sequence[tuple[str, str]]:
        """Regular expressions, found anywhere in a path, and their rules; the first match counts.

        Empty for Mesh TensorFlow's rule.
        """
        ...


def factoring(path: str, shape: Sequence[int], options: Options) -> Factoring:
    """How Adafactor factors the parameter of a path and a shape.

    Raises:
      FactorRuleError: if no expression matches, or the rule does not suit the number of axes.
    """
    if not options.factored:
        return Factoring(None)
    rule = rule_of(path, options.factor_map) if options.factor_map else HEURISTIC
    if rule == UNFACTORED:
        return Factoring(None)
    if rule == HEURISTIC:
        if options.factor_map and len(shape) > 2:
            raise FactorRuleError(
                f"{path} of shape {list(shape)} has more than two axes and no factor rule.",
                where="adafactor.Adafactor.factor_map",
                fix="Give it a word for each axis (row, column, batch or none), or None.",
            )
        return _of_longest_axes(shape, options.min_dim_size_to_factor)
    words = rule.split()
    if len(words) != len(shape):
        raise FactorRuleError(
            f"The factor rule of {path} is for {len(words)} axes, and its shape is {list(shape)}.",
            where="adafactor.Adafactor.factor_map",
            fix="Give a word for each axis.",
        )
    rows, columns, batch = (
        tuple(axis for axis, word in enumerate(words) if word == kind)
        for kind in ("row", "column", "batch")
    )
    # T5X ignores a rule where there is no choice.
    if len(shape) <= 2 and not batch:
        return _of_longest_axes(shape, options.min_dim_size_to_factor)
    scaled = tuple(axis for axis in range(len(shape)) if axis not in batch)
    return Factoring((columns, rows) if rows or columns else None, scaled if batch else None)


def rule_of(path: str, factor_map: Sequence[tuple[str, str]]) -> str:
    """The rule of a parameter.

    Raises:
      FactorRuleError: if no expression of the map matches its path.
    """
    for pattern, rule in factor_map:
        if re.search(pattern, path):
            return rule
    raise FactorRuleError(
        f"No factor rule matches {path}.",
        where="adafactor.Adafactor.factor_map",
        fix="End the rules with ('.*', 'heuristic').",
    )


def _of_longest_axes(shape: Sequence[int], least: int) -> Factoring:
    if len(shape) < 2:
        return Factoring(None)
    dropped = layout.t5x_dropped_axes(shape)
    row, column = dropped["v_row"], dropped["v_col"]
    return Factoring(((row,), (column,)) if shape[column] >= least else None)
