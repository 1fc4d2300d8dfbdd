"""Computes the figures of docs/parity.md from the output of scripts/bench/long_run.sh.

    .venv/bin/python -P scripts/bench/long_run.py runs/long_run docs/images/long_run.png

Prints the losses of both stacks, how far apart they are, and the accuracies by rank classification,
and draws both loss curves into the file given as the second argument.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from t0repro.reports.comparison import compare_runs
from t0repro.reports.page_markdown import markdown_table
from t0repro.reports.run import Run

WINDOW = 20  # steps that a curve is averaged over
STACKS = {"mtf": "Mesh TensorFlow", "jax": "JAX"}


def main() -> None:
    """Prints the tables and draws the curves."""
    run = Path(sys.argv[1])
    losses = {stack: read_losses(run / stack) for stack in STACKS}
    print(losses_table(losses["mtf"], losses["jax"]))
    print()
    print(accuracy_table(run))
    if len(sys.argv) > 2:
        draw(losses, Path(sys.argv[2]))


def read_losses(model_dir: Path) -> np.ndarray:
    """Training losses, float64 [steps]."""
    rows = map(json.loads, (model_dir / "metrics.jsonl").read_text().splitlines())
    found = {row["step"]: row["loss"] for row in rows if row["split"] == "train"}
    return np.array([found[step] for step in range(1, len(found) + 1)])


def losses_table(mtf: np.ndarray, jax: np.ndarray) -> str:
    """Mean losses, mostly per hundred steps, and relative differences at single steps."""
    bounds = [0, 1, 20, *range(100, len(mtf) + 1, 100)]
    rows = []
    for first, last in zip(bounds, bounds[1:], strict=False):
        apart = np.abs(jax[first:last] / mtf[first:last] - 1)
        rows.append(
            [
                f"{first + 1} to {last}" if last > first + 1 else str(last),
                f"{mtf[first:last].mean():.5f}",
                f"{jax[first:last].mean():.5f}",
                f"{np.median(apart):.1e}",
                f"{apart.max():.1e}",
            ]
        )
    header = [
        "steps",
        "Mesh TensorFlow, mean loss",
        "JAX, mean loss",
        "difference, median",
        "difference, largest",
    ]
    return markdown_table(header, rows)


def accuracy_table(run: Path) -> str:
    """Each task's accuracy on both stacks, and how many examples they predict differently."""
    mtf, jax = (Run(stack, run / stack / "validation_eval") for stack in STACKS)
    compared = compare_runs(mtf, jax, same_pairs=True)
    rows = [
        [
            task.task.removeprefix("small_").removesuffix("_score_eval"),
            str(task.pairs),
            f"{task.metrics_a['accuracy']:.1f}",
            f"{task.metrics_b['accuracy']:.1f}",
            str(task.flipped),
        ]
        for task in compared.tasks
    ]
    means = [
        np.mean([getattr(task, name)["accuracy"] for task in compared.tasks])
        for name in ("metrics_a", "metrics_b")
    ]
    total = [str(compared.pairs), *(f"{mean:.1f}" for mean in means), str(compared.flipped)]
    rows.append(["mean of the tasks", *total])
    return markdown_table(["task", "pairs", "Mesh TensorFlow", "JAX", "flipped"], rows)


def draw(losses: dict[str, np.ndarray], path: Path) -> None:
    """Draws both curves, averaged over WINDOW steps, above the differences at single steps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    widths = {"mtf": 5.0, "jax": 1.3}
    colors = {"mtf": "#b9cfe8", "jax": "#2563a8"}
    for stack, values in losses.items():
        smooth = np.convolve(values, np.ones(WINDOW) / WINDOW, "valid")
        steps = np.arange(WINDOW, len(values) + 1)
        style = {"linewidth": widths[stack], "color": colors[stack]}
        upper.plot(steps, smooth, label=STACKS[stack], **style)
    upper.set_ylabel(f"loss, mean of {WINDOW} steps")
    upper.set_yscale("log")
    upper.legend(frameon=False)
    apart = np.abs(losses["jax"] / losses["mtf"] - 1)
    lower.plot(np.arange(1, len(apart) + 1), np.maximum(apart, 1e-8), ".", ms=2, color="#5b6371")
    lower.axhline(1e-4, color="#b4531a", linewidth=1, linestyle="--")
    lower.set_yscale("log")
    lower.set_ylabel("relative difference")
    lower.set_xlabel("step")
    for axes in (upper, lower):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", linewidth=0.5, color="#dfe1e5")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    print(f"\n{path}")


if __name__ == "__main__":
    main()
