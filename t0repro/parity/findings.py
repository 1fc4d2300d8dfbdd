"""Compares two stacks' results quantity by quantity, in the order of computation.

The stacks agree, in float32 without dropout, if: the loss differs by a relative error of at most
1e-5 at the first step and 1e-4 over twenty; after one step, every entry of every parameter and slot
is within 1e-5 of its tensor's RMS or of itself, whichever is larger; log-likelihoods are within
1e-4 per target token; and metrics are equal. Activations and gradients, for which nothing is
promised, depart if the RMS of the difference exceeds 1e-5 of their RMS. In bfloat16, differences
are reported but not judged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import numpy as np

from t0repro.converters.tensors import FlatTree
from t0repro.parity.jax_run import StackResult

FIRST_LOSS, LOSSES, TENSOR, PER_TOKEN = 1e-5, 1e-4, 1e-5, 1e-4
STEPS_JUDGED = 20  # losses of later steps are only reported
QUANTILES = (0.5, 0.9, 0.99, 1.0)


@dataclasses.dataclass(frozen=True)
class Finding:
    """The difference of one quantity between the JAX stack and Mesh TensorFlow.

    Attributes:
      kind: activation, loss, gradient, first step, last step, log-likelihood or metric.
      name: name of the tensor, steps or task.
      size: number of values compared.
      reference_rms: root mean square of Mesh TensorFlow's values.
      difference_rms: root mean square of the differences.
      quantiles: the entries' absolute differences, relative to `measure`, at QUANTILES.
      measure: the reference of the relative differences.
      error: the number to judge.
      tolerance: the largest error allowed; None if it is only reported.
    """

    kind: str
    name: str
    size: int
    reference_rms: float
    difference_rms: float
    quantiles: tuple[float, ...]
    measure: str
    error: float
    tolerance: float | None

    @property
    def passes(self) -> bool:
        """Whether it is within its tolerance, if it has one. A NaN never is."""
        # `<=` is false for NaN.
        return self.tolerance is None or self.error <= self.tolerance


def compare_results(
    reference: StackResult, ours: StackResult, *, float32: bool, tokens: np.ndarray | None = None
) -> list[Finding]:
    """Compares everything that both results contain, in the order of computation.

    Args:
      reference: Mesh TensorFlow's results.
      ours: the JAX stack's results.
      float32: whether the tolerances apply.
      tokens: number of target tokens in each scored row.

    Raises:
      ValueError: if the results have different tensors, or tensors of different shapes.
    """
    found = list(_findings(reference, ours, tokens))
    if float32:
        return found
    return [dataclasses.replace(finding, tolerance=None) for finding in found]


def _findings(
    reference: StackResult, ours: StackResult, tokens: np.ndarray | None
) -> Iterator[Finding]:
    yield from _tensors("activation", reference.activations, ours.activations)
    if reference.token_losses is not None and ours.token_losses is not None:
        yield _absolute("log-likelihood", "targets of the first batch", reference.token_losses,
                        ours.token_losses, np.ones_like(reference.token_losses))  # fmt: skip
    yield relative("loss", "step 1", reference.losses[:1], ours.losses[:1], FIRST_LOSS)
    yield from _tensors("gradient", reference.gradients, ours.gradients)
    # Step 0 is the start, equal by construction.
    first, *later = sorted(reference.trees.keys() & ours.trees.keys() - {0})
    yield from _trees("first step", reference.trees[first], ours.trees[first], TENSOR)
    # Later steps accumulate the differences of all before them; the tolerance is defined for 20.
    judged = slice(0, STEPS_JUDGED)
    last = min(STEPS_JUDGED, len(reference.losses))
    if last > 1:
        name = f"steps 1 to {last}"
        yield relative("loss", name, reference.losses[judged], ours.losses[judged], LOSSES)
    if len(reference.losses) > STEPS_JUDGED:
        name = f"all {len(reference.losses)} steps"
        yield relative("loss", name, reference.losses, ours.losses, None)
    for step in later:
        yield from _trees("last step", reference.trees[step], ours.trees[step], None)
    if reference.scores is not None and ours.scores is not None and tokens is not None:
        name = "evaluation, for each target token"
        yield _absolute("log-likelihood", name, reference.scores, ours.scores, tokens)


def _tensors(
    kind: str, reference: Mapping[str, np.ndarray], ours: Mapping[str, np.ndarray]
) -> Iterator[Finding]:
    """Findings judged by the RMS of the difference over the RMS."""
    for name, expected, value in _pairs(kind, reference, ours):
        scale = _rms(expected)
        difference = _difference(expected, value)
        # Show entries relative to the RMS; judge the tensor by its own.
        errors, error = np.abs(difference) / max(scale, _TINY), _ratio(_rms(difference), scale)
        measure = "the tensor's RMS"
        yield _finding(kind, name, expected, difference, errors, measure, error, TENSOR)


def _trees(
    kind: str, reference: FlatTree, ours: FlatTree, tolerance: float | None
) -> Iterator[Finding]:
    """Findings judged by their worst entry, relative to the tensor's RMS or the entry if larger."""
    for name, expected, value in _pairs(kind, _used(reference), _used(ours)):
        difference = _difference(expected, value)
        # The scale is zero only if the whole tensor is; any difference is then infinite.
        scale = np.maximum(_rms(expected), np.abs(expected.astype(np.float64)))
        errors = np.divide(
            np.abs(difference), scale, out=np.where(difference == 0, 0.0, np.inf), where=scale > 0
        )
        measure = "the tensor's RMS or the entry"
        error = float(np.max(errors)) if errors.size else 0.0
        yield _finding(kind, name, expected, difference, errors, measure, error, tolerance)


def _used(tree: FlatTree) -> dict[str, np.ndarray]:
    """A tree without the zeros of shape (1,) that represent unused slots."""
    return {name: x for name, x in tree.items() if x.shape != (1,) or x[0] != 0}


def relative(
    kind: str, name: str, expected: np.ndarray, value: np.ndarray, tolerance: float | None
) -> Finding:
    """A finding judged by the largest difference of an entry relative to that entry."""
    expected, value = np.asarray(expected), np.asarray(value)
    difference = _difference(expected, value)
    errors = np.abs(difference) / np.maximum(np.abs(expected.astype(np.float64)), _TINY)
    return _finding(kind, name, expected, difference, errors, "the value itself",
                    float(np.max(errors)), tolerance)  # fmt: skip


def _absolute(
    kind: str, name: str, expected: np.ndarray, value: np.ndarray, tokens: np.ndarray
) -> Finding:
    """A finding judged by the largest absolute difference per target token."""
    difference = _difference(expected, value)
    errors = np.abs(difference) / np.maximum(tokens, 1)
    return _finding(kind, name, expected, difference, errors, "one target token",
                    float(np.max(errors)), PER_TOKEN)  # fmt: skip


def metrics_finding(
    task: str, reference: Mapping[str, float], ours: Mapping[str, float], *, float32: bool
) -> Finding:
    """A finding for a task's metrics, which must be equal."""
    names = sorted(reference)
    expected = np.array([reference[name] for name in names])
    value = np.array([ours[name] for name in names])
    # A metric that is undefined on both stacks counts as equal.
    both_undefined = np.isnan(expected) & np.isnan(value)
    difference = np.where(both_undefined, 0.0, value - expected)
    return _finding("metric", f"{task}: {', '.join(names)}", np.nan_to_num(expected), difference,
                    np.abs(difference), "one percentage point", float(np.max(np.abs(difference))),
                    0.0 if float32 else None)  # fmt: skip


# Keeps a division by zero finite, and is smaller than any compared number.
_TINY = 1e-38


def _pairs(
    kind: str, reference: Mapping[str, np.ndarray], ours: Mapping[str, np.ndarray]
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    if reference.keys() != ours.keys():
        odd = sorted(reference.keys() ^ ours.keys())
        raise ValueError(f"Only one stack has the {kind} {', '.join(odd[:5])}.")
    for name, expected in reference.items():
        if expected.shape != ours[name].shape:
            shapes = f"{expected.shape} and {ours[name].shape}"
            raise ValueError(f"The {kind} {name} has the shapes {shapes}.")
        yield name, expected, ours[name]


def _difference(expected: np.ndarray, value: np.ndarray) -> np.ndarray:
    # Use float64, so that the difference itself is not rounded.
    return value.astype(np.float64) - expected.astype(np.float64)


def _rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64)))) if x.size else 0.0


def _ratio(difference: float, scale: float) -> float:
    if scale > 0 or np.isnan(scale):
        return difference / scale
    return 0.0 if difference == 0 else float("inf")


def _finding(
    kind: str,
    name: str,
    expected: np.ndarray,
    difference: np.ndarray,
    errors: np.ndarray,
    measure: str,
    error: float,
    tolerance: float | None,
) -> Finding:
    spread = np.quantile(errors, QUANTILES) if errors.size else np.zeros(len(QUANTILES))
    return Finding(
        kind=kind,
        name=name,
        size=int(expected.size),
        reference_rms=_rms(expected),
        difference_rms=_rms(difference),
        quantiles=tuple(float(x) for x in spread),
        measure=measure,
        error=error,
        tolerance=tolerance,
    )
