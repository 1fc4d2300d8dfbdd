"""Rank classification of a score evaluation's outputs, comparisons of two runs, and the report.

`load_report` is here for users; it is imported when asked for, since the JAX scorer, which lives in
this package too, runs where the report's dependencies may be missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from t0repro.evaluation.report import load_report

__all__ = ["load_report"]


def __getattr__(name: str) -> object:
    if name == "load_report":
        from t0repro.evaluation.report import load_report

        return load_report
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
