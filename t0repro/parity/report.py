"""A comparison of the stacks as parity.json, parity.md and one self-contained parity.html."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from t0repro.evaluation.evaluation_facts import package_versions
from t0repro.parity.run import Finding, Job, Parity, to_json
from t0repro.reports.drawing import ROLES, Drawing, inline_plot, integer_steps
from t0repro.reports.page import Column, Page, Section
from t0repro.reports.provenance import git_commit
from t0repro.reports.report_files import write_page
from t0repro.words import counted

# Kinds that have their own section, in the order of the computation, with its title.
TITLES = {
    "activation": "Activations of the first batch",
    "gradient": "Gradients of the first batch",
    "first step": "Parameters and slots after the first step",
    "last step": "Parameters and slots after the last step",
}


def write_report(parity: Parity, job: Job) -> list[Path]:
    """Writes the three files into the job's folder and returns their paths."""
    facts: dict[str, Any] = {
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "gin_files": list(job.inputs.gin_files),
        "gin_params": list(job.inputs.gin_params),
        "eval_task": None if job.task is None else job.task.judge.task,
        "git_commit": git_commit(),
        "versions": package_versions(),
    }
    page = Page("Mesh TensorFlow and JAX, compared", tuple(sections(parity, job, facts)))
    return write_page("parity", page, to_json(parity, facts), job.out)


def verdict(parity: Parity) -> str:
    """States the outcome in one sentence."""
    if not parity.float32:
        return "In bfloat16 differences are reported, not judged."
    if parity.passed:
        judged = sum(finding.tolerance is not None for finding in parity.findings)
        return f"The stacks agree: all {judged} quantities are within their tolerances."
    first, count = parity.departures[0], len(parity.departures)
    return (
        f"The stacks first differ at the {first.kind} {first.name}: {first.error:.2e}, where"
        f" {first.tolerance:g} is allowed; {count} of {len(parity.findings)} quantities exceed"
        " their tolerances."
    )


def sections(parity: Parity, job: Job, facts: dict[str, Any]) -> list[Section]:
    """The sections of the report, from the outcome to the sources."""
    lines = [verdict(parity)]
    if parity.injected:
        lines.append(f"The error {parity.injected} was put into the JAX side.")
    lines.append(
        f"{counted(len(parity.mesh_losses), 'step')} from step {parity.start_step};"
        f" start: {parity.start}."
    )
    kinds = dict.fromkeys(finding.kind for finding in parity.findings)
    rows = [_summary(kind, [f for f in parity.findings if f.kind == kind]) for kind in kinds]
    header = (Column("quantity"), "compared", Column("worst", wide=True), "error", "tolerance",
              "departing")  # fmt: skip
    found = [Section("Outcome", tuple(lines), header=header, rows=tuple(rows))]
    found.append(
        Section("Training loss of both stacks", plot=losses_plot(parity), **_losses(parity))
    )
    for kind, title in TITLES.items():
        of_kind = [finding for finding in parity.findings if finding.kind == kind]
        if of_kind:
            plot = error_plot(of_kind, title)
            found.append(Section(title, plot=plot, **_table(of_kind)))
    rest = [finding for finding in parity.findings if finding.kind not in TITLES]
    found.append(Section("Losses, log-likelihoods and metrics", **_table(rest)))
    found.append(_sources(facts))
    return found


def _summary(kind: str, findings: Sequence[Finding]) -> tuple[str, ...]:
    # Quantities of one kind may have different tolerances: the worst has the largest error relative
    # to its own.
    worst = max(findings, key=lambda f: f.error / (f.tolerance or 1.0))
    departing = sum(not finding.passes for finding in findings)
    return (kind, str(len(findings)), worst.name, f"{worst.error:.2e}", _tolerance(worst),
            str(departing))  # fmt: skip


def _tolerance(finding: Finding) -> str:
    return "reported" if finding.tolerance is None else f"{finding.tolerance:g}"


def _table(findings: Sequence[Finding]) -> dict[str, Any]:
    header = (
        Column("name"),
        "values",
        "RMS",
        "RMS of the difference",
        "median",
        "90%",
        "99%",
        "largest",
    )
    rows = tuple(
        (
            finding.name,
            str(finding.size),
            f"{finding.reference_rms:.3e}",
            f"{finding.difference_rms:.1e}",
            *(f"{x:.1e}" for x in finding.quantiles),
            f"{finding.error:.2e}",
            _tolerance(finding),
            "yes" if finding.passes else "NO",
        )
        for finding in findings
    )
    measures = "; ".join(dict.fromkeys(finding.measure for finding in findings))
    line = f"Median to largest: an entry's difference relative to {measures}."
    return {"lines": (line,), "header": (*header, "judged", "tolerance", "within"), "rows": rows}


_ROWS_SHOWN = 40


def _losses(parity: Parity) -> dict[str, Any]:
    mesh, ours = parity.mesh_losses, parity.jax_losses
    # Evenly spaced, first and last included.
    chosen = np.unique(np.linspace(0, len(mesh) - 1, _ROWS_SHOWN).astype(int))
    rows = tuple(
        (
            str(parity.start_step + int(at) + 1),
            f"{mesh[at]:#.7g}",
            f"{ours[at]:#.7g}",
            f"{(ours[at] - mesh[at]) / mesh[at]:+.1e}",
        )
        for at in chosen
    )
    return {"header": ("step", "Mesh TensorFlow", "JAX", "relative difference"), "rows": rows}


def _sources(facts: dict[str, Any]) -> Section:
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    lines = (
        f"Written {facts['created']}; code: {facts['git_commit'] or 'not a git checkout'}.",
        f"gin files: {', '.join(facts['gin_files'])}.",
        *(f"{param}" for param in facts["gin_params"]),
        f"Versions: {versions}.",
    )
    return Section("Where this comes from", lines)


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
        integer_steps(axes, 5 if drawing.narrow else 8)
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
        from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

        # On a narrow screen names go above their bars, because there is no room beside them.
        pitch, left = (0.36, 0.15) if drawing.narrow else (0.2, 3.6)
        axes = drawing.axes(0.9 + pitch * len(shown), left, 0.3)
        names = [_short(finding.name) for finding in reversed(shown)]
        for row, (name, finding) in enumerate(zip(names, reversed(shown), strict=True)):
            _draw_error(drawing, axes, row, finding)
            if drawing.narrow:
                axes.text(_SMALLEST, row + 0.5, f" {name}", va="center", color=ROLES["ink"])
        if tolerance is not None and drawing.narrow:  # beside the bars: it would cross the names
            rows = np.arange(len(shown))
            line = {"color": ROLES["chance"], "linewidth": 1.6}
            axes.vlines([tolerance] * len(shown), rows - 0.3, rows + 0.3, **line)
        elif tolerance is not None:
            axes.axvline(tolerance, color=ROLES["chance"], linewidth=1.6, linestyle=(0, (3, 2)))
        axes.set_xscale("log")
        # Bars end at 1e3, where NaN and infinity are drawn too.
        axes.set_xlim(
            _SMALLEST, max([1e-4, *(min(f.error * 2, 2e3) for f in shown if f.error > 0)])
        )
        if drawing.narrow:
            axes.set_yticks([])
        else:
            axes.set_yticks(range(len(shown)), names, fontsize=9)
        axes.set_ylim(-0.6, len(shown) - (0.1 if drawing.narrow else 0.4))
        # Matplotlib labels powers of ten in TeX, which an SVG without math shows as it is.
        axes.xaxis.set_major_locator(LogLocator(numticks=5 if drawing.narrow else 9))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda error, _: f"{error:.0e}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("relative error")
        axes.grid(axis="x", linewidth=0.7)

    return inline_plot(draw, label)


def _draw_error(drawing: Drawing, axes, row: int, finding: Finding) -> None:
    """Draws a finding's bar, in another color if it departs."""
    # NaN and infinity are drawn at the right edge.
    error = float(np.clip(np.nan_to_num(finding.error, nan=1e3), _SMALLEST, 1e3))
    color = ROLES["accent"] if finding.passes else ROLES["chance"]
    height = 0.3 if drawing.narrow else 0.7
    # `left` with a logarithmic axis: bars begin at the smallest error, not at 0.
    (bar,) = axes.barh([row], [error - _SMALLEST], left=_SMALLEST, height=height, color=color)
    bar.set_gid(f"error-{row}")
    drawing.tips[f"error-{row}"] = (
        f"{finding.name}: {finding.error:.2e}, RMS {finding.reference_rms:.2e}"
    )


def _short(name: str) -> str:
    """Shortens a name to its end, which is what tells tensors apart."""
    name = name.removeprefix("state/").removeprefix("param_states/").removeprefix("target/")
    return name if len(name) <= 48 else f"…{name[-47:]}"
