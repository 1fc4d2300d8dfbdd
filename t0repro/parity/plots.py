"""The plots of a comparison, in the report's style."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from t0repro.parity.findings import Finding
from t0repro.parity.run import Parity
from t0repro.reports.svg import ROLES, Drawing, inline_plot, whole_steps

_SMALLEST = 1e-9  # smaller errors, zero included, are drawn as this on the logarithmic axis
_MOST_BARS = 60


def losses_plot(parity: Parity) -> str:
    """Plots training loss by step: JAX's thin line over Mesh TensorFlow's wide one."""
    steps = parity.start_step + 1 + np.arange(len(parity.mesh_losses))

    def draw(drawing: Drawing) -> None:
        axes = drawing.axes(3.0, left=0.68)
        band = {"color": ROLES["band"], "linewidth": 6, "solid_capstyle": "round"}
        axes.plot(steps, parity.mesh_losses, label="Mesh TensorFlow", **band)
        axes.plot(steps, parity.jax_losses, color=ROLES["accent"], linewidth=1.4, label="JAX")
        axes.set_xlabel("step")
        axes.set_ylabel("training loss")
        axes.grid(axis="y", linewidth=0.7)
        whole_steps(axes, 5 if drawing.narrow else 8)
        axes.legend(frameon=False, labelcolor=ROLES["ink"])

    return inline_plot(draw, "Training loss of both stacks")


def error_plot(findings: Sequence[Finding], label: str) -> str:
    """Plots each tensor's judged error as a bar on a logarithmic axis, the tolerance as a line.

    Only the worst _MOST_BARS are drawn, in the order of the computation.
    """
    # The worst are the ones to look at; more bars than this cannot be read.
    worst = sorted(findings, key=lambda finding: -finding.error)[:_MOST_BARS]
    shown = [finding for finding in findings if finding in worst]
    tolerance = shown[0].tolerance

    def draw(drawing: Drawing) -> None:
        # On a narrow screen names go above their bars, because there is no room beside them.
        pitch, left = (0.36, 0.15) if drawing.narrow else (0.2, 3.6)
        axes = drawing.axes(0.9 + pitch * len(shown), left)
        names = [_short(finding.name) for finding in reversed(shown)]
        for row, (name, finding) in enumerate(zip(names, reversed(shown), strict=True)):
            _draw_error(drawing, axes, row, finding)
            if drawing.narrow:
                axes.text(_SMALLEST, row + 0.5, f" {name}", va="center", color=ROLES["ink"])
        if tolerance is not None:
            style = {"linewidth": 1.6, "linestyle": (0, (3, 2))}
            axes.axvline(tolerance, color=ROLES["chance"], **style)
        axes.set_xscale("log")
        axes.set_xlim(_SMALLEST, max(1e-4, *(min(f.error * 2, 2e3) for f in shown if f.error > 0)))
        if drawing.narrow:
            axes.set_yticks([])
        else:
            axes.set_yticks(range(len(shown)), names, fontsize=9)
        axes.set_ylim(-0.6, len(shown) - (0.1 if drawing.narrow else 0.4))
        axes.set_xlabel("relative error")
        axes.grid(axis="x", linewidth=0.7)

    return inline_plot(draw, label)


def _draw_error(drawing: Drawing, axes, row: int, finding: Finding) -> None:
    """Draws a finding's bar, in another colour if it departs."""
    # NaN and infinity are drawn at the right edge.
    error = float(np.clip(np.nan_to_num(finding.error, nan=1e3), _SMALLEST, 1e3))
    colour = ROLES["accent"] if finding.passes else ROLES["chance"]
    height = 0.3 if drawing.narrow else 0.7
    # `left` with a logarithmic axis: bars begin at the smallest error, not at 0.
    (bar,) = axes.barh([row], [error - _SMALLEST], left=_SMALLEST, height=height, color=colour)
    bar.set_gid(f"error-{row}")
    drawing.tips[f"error-{row}"] = (
        f"{finding.name}: {finding.error:.2e}, RMS {finding.reference_rms:.2e}"
    )


def _short(name: str) -> str:
    """Shortens a name to its end, which is what tells tensors apart."""
    name = name.removeprefix("state/").removeprefix("param_states/").removeprefix("target/")
    return name if len(name) <= 48 else f"…{name[-47:]}"
