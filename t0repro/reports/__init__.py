"""Reports on runs: summaries, plots, pages, terminal tables, comparisons, history.

`load_report` is exported for users and imported on first use, to keep the package fast to import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from t0repro.reports.report import load_report

__all__ = ["load_report"]


def __getattr__(name: str) -> object:
    if name == "load_report":
        from t0repro.reports.report import load_report

        return load_report
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
