"""The plots of a comparison, in the report's style."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from t0repro.parity.findings import Finding
from t0repro.parity.run import Parity
from t0repro.reports.plots import ROLES, new_figure, plot_settings, to_inline_svg

_SMALLEST = 1e-9  # errors below it are drawn as this, equality among them
_MOST_BARS = 60


def losses_plot(parity: Parity) -> str:
    """Training loss by step: JAX's line over Mesh TensorFlow's, which is the wider one."""
    from matplotlib.ticker import MaxNLocator

    steps = parity.start_step + 1 + np.arange(len(parity.mesh_losses))
    with plot_settings():
        figure, axes = new_figure(3.0, left=0.09)
        band = {"color": ROLES["band"], "linewidth": 6, "solid_capstyle": "round"}
        axes.plot(steps, parity.mesh_losses, label="Mesh TensorFlow", **band)
        axes.plot(steps, parity.jax_losses, color=ROLES["accent"], linewidth=1.4, label="JAX")
        axes.set_xlabel("step")
        axes.set_ylabel("training loss")
        axes.grid(axis="y", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.tick_params(length=0)
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        axes.ticklabel_format(axis="x", style="plain", useOffset=False)
        axes.legend(frameon=False, labelcolor=ROLES["ink"])
        return to_inline_svg(figure, "Training loss of both stacks", {})


def error_plot(findings: Sequence[Finding], label: str) -> str:
    """A bar of the judged error for each tensor on a logarithmic axis, the tolerance as a line.

    The worst _MOST_BARS are drawn, in the order of the computation.
    """
    worst = sorted(findings, key=lambda finding: -finding.error)[:_MOST_BARS]
    shown = [finding for finding in findings if finding in worst]
    with plot_settings():
        figure, axes = new_figure(0.9 + 0.2 * len(shown), left=0.5)
        tips = {}
        for row, finding in enumerate(reversed(shown)):
            error = float(np.clip(np.nan_to_num(finding.error, nan=1e3), _SMALLEST, 1e3))
            colour = ROLES["accent"] if finding.passes else ROLES["chance"]
            (bar,) = axes.barh([row], [error - _SMALLEST], left=_SMALLEST, height=0.7, color=colour)
            bar.set_gid(f"error-{row}")
            tips[f"error-{row}"] = (
                f"{finding.name}: {finding.error:.2e}, RMS {finding.reference_rms:.2e}"
            )
        tolerance = shown[0].tolerance
        if tolerance is not None:
            style = {"linewidth": 1.6, "linestyle": (0, (3, 2))}
            axes.axvline(tolerance, color=ROLES["chance"], **style)
        axes.set_xscale("log")
        axes.set_xlim(_SMALLEST, max(1e-4, *(min(f.error * 2, 2e3) for f in shown if f.error > 0)))
        axes.set_yticks(range(len(shown)), [_short(f.name) for f in reversed(shown)], fontsize=7.5)
        axes.set_ylim(-0.6, len(shown) - 0.4)
        axes.set_xlabel("relative error")
        axes.grid(axis="x", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.tick_params(length=0)
        return to_inline_svg(figure, label, tips)


def _short(name: str) -> str:
    name = name.removeprefix("state/").removeprefix("param_states/").removeprefix("target/")
    return name if len(name) <= 52 else f"…{name[-51:]}"
