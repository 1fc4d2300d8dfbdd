"""A comparison of the stacks as parity.json, parity.md and one self-contained parity.html."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from t0repro.evaluation.evaluation_facts import package_versions
from t0repro.parity.findings import Finding
from t0repro.parity.plots import error_plot, losses_plot
from t0repro.parity.run import Job, Parity, to_json
from t0repro.reports.page import Page, Section
from t0repro.reports.provenance import git_commit
from t0repro.reports.write import write_page
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
    header = ("quantity", "compared", "worst", "error", "tolerance", "departing")
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
    header = ("name", "values", "RMS", "RMS of the difference", "median", "90%", "99%", "largest")
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
            f"{mesh[at]:.7g}",
            f"{ours[at]:.7g}",
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
