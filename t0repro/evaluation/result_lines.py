"""What evaluations print at the end: results, their files, the command for a report."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path

from t0repro.words import counted, rename_for_reader


def print_results(
    metrics: Mapping[str, Mapping[str, float]], step: int, folder: str | os.PathLike[str]
) -> None:
    """Prints each task's metrics, the tasks' files, and the command for a report.

    Args:
      metrics: task -> metric name -> value.
      step: the checkpoint's step.
      folder: the `<split>_eval` folder that holds the files, or a model_dir without any.
    """
    print("\n".join(map(rename_for_reader, result_lines(metrics, step, Path(folder)))), flush=True)


def result_lines(metrics: Mapping[str, Mapping[str, float]], step: int, folder: Path) -> list[str]:
    """The lines that `print_results` prints."""
    width = max(map(len, metrics), default=0)
    lines = [f"step {step}"]
    for task, values in sorted(metrics.items()):
        words = "  ".join(f"{name} {_format_value(value)}" for name, value in values.items())
        lines.append(f"  {task:{width}}  {words}")
    written = [
        path
        for task in metrics
        for path in (
            folder / f"{task}_inputs",
            folder / f"{task}_targets",
            folder / f"{task}_{step}_predictions",
        )
        if path.is_file()
    ]
    if written:
        out = shlex.quote(str(folder.parent / "report"))
        lines.append(
            f"wrote {counted(len(written), 'file')} into {folder}: inputs, targets, predictions"
        )
        lines.append(
            f"for a report: t0repro report make {shlex.quote(str(folder))} --out {out}"
            " (with --module_import and the tasks' module, grouped by dataset)"
        )
    return lines


def _format_value(value: float) -> str:
    # Percentages to two places; losses, and fractions of tokens, to four digits.
    return f"{value:.4g}" if 0 < abs(value) < 10 else f"{value:.2f}"
