"""The plots of calibration, of accuracy by step and of training losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from t0repro.reports.dataset_result import DatasetResult
from t0repro.reports.losses import LossCurve
from t0repro.reports.svg import ROLES, Drawing, inline_plot, spread_out, whole_steps
from t0repro.words import counted, printable, shortened

_LEFT = 0.68  # inches for the numbers and the name of a vertical axis


def calibration_plot(datasets: Sequence[DatasetResult], label: str) -> str:
    """Accuracy against confidence, a dot for each dataset's bin; the diagonal is perfect."""

    def draw(drawing: Drawing) -> None:
        axes = drawing.axes(3.6, _LEFT)
        axes.plot([0, 100], [0, 100], color=ROLES["chance"], linewidth=1.2, linestyle="--")
        for row, dataset in enumerate(datasets):
            for at, found in enumerate(dataset.calibration.bins if dataset.calibration else ()):
                name = f"bin-{row}-{at}"
                axes.plot(
                    [found.confidence],
                    [found.accuracy],
                    marker="o",
                    markersize=4 + min(found.examples, 1000) ** 0.5 / 5,
                    markeredgewidth=0,
                    alpha=0.6,
                    color=ROLES["accent"],
                    gid=name,
                )
                drawing.tips[name] = (
                    f"{dataset.dataset}: {found.accuracy:.1f}% right at a confidence of"
                    f" {found.confidence:.1f}%, {counted(found.examples, 'prediction')}"
                )
        axes.set_xlim(-2, 102)
        axes.set_ylim(-4, 104)
        axes.set_xlabel("confidence, percent")
        axes.set_ylabel("accuracy, percent")
        axes.grid(linewidth=0.7)

    return inline_plot(draw, label)


def history_plot(steps: Sequence[int], curves: Mapping[str, Sequence[float]], label: str) -> str:
    """Mean accuracy over prompts by step, a line for each dataset, named at its end."""

    def draw(drawing: Drawing) -> None:
        height = 0.9 + max(2.8, 0.25 * len(curves))
        names = {name: shortened(printable(name), 14 if drawing.narrow else 26) for name in curves}
        right = 0.2 + 0.085 * max(map(len, names.values()))
        axes = drawing.axes(height, _LEFT, right)
        # A line of text is a quarter of an inch high
        # In percent of the axis, which is less high than the figure by its margins.
        places = spread_out(
            {name: values[-1] for name, values in curves.items()}, 25 / (height - 0.56)
        )
        for number, (name, values) in enumerate(curves.items()):
            axes.plot(steps, values, color=ROLES["accent"], linewidth=1.4, alpha=0.75)
            for at, (step, value) in enumerate(zip(steps, values, strict=True)):
                mark = f"history-{number}-{at}"
                axes.plot(
                    [step], [value], marker="o", markersize=4, color=ROLES["accent"], gid=mark
                )
                drawing.tips[mark] = f"{name}, step {step}: {value:.1f}%"
            axes.annotate(
                names[name],
                (steps[-1], values[-1]),
                (1.02, places[name] / 100),
                textcoords="axes fraction",
                va="center",
                color=ROLES["muted"],
            )
        axes.set_ylim(0, 100)
        axes.set_xlabel("step")
        axes.set_ylabel("accuracy, percent")
        axes.grid(axis="y", linewidth=0.7)
        if len(steps) <= (4 if drawing.narrow else 8):
            axes.set_xticks(steps)
        else:
            whole_steps(axes, 4 if drawing.narrow else 8)

    return inline_plot(draw, label)


def loss_plot(curve: LossCurve, label: str) -> str:
    """Training loss by step."""

    def draw(drawing: Drawing) -> None:
        axes = drawing.axes(2.9, _LEFT)
        axes.plot(
            curve.steps,
            curve.losses,
            color=ROLES["accent"],
            linewidth=1.6,
            marker="o" if len(curve.steps) < 30 else "",
            markersize=3.5,
        )
        axes.set_xlabel("step")
        axes.set_ylabel("training loss")
        axes.grid(axis="y", linewidth=0.7)
        whole_steps(axes, 5 if drawing.narrow else 8)

    return inline_plot(draw, label)
