"""Sections of a report's page: the training, the other stack, and a conversion."""

from __future__ import annotations

from t0repro.reports.comparison_page import flips_section, losses_section, scores_section
from t0repro.reports.page import Section
from t0repro.reports.plots import loss_plot
from t0repro.reports.report import Report
from t0repro.words import counted


def training_sections(report: Report) -> list[Section]:
    """The training's losses, the other stack's scores and losses, and a conversion's result."""
    sections = []
    if curve := report.loss_curve:
        total = counted(curve.total_steps, "step")
        sections.append(
            Section(
                "Training loss",
                note=f"{curve.label}, {total}.",
                plot=loss_plot(curve, "Training loss by step"),
            )
        )
    # A heading alone: its two parts are sections of level 3 below it.
    if report.stacks or report.losses:
        sections.append(Section("Compared with another run"))
    if compared := report.stacks:
        # Only equal hashes show it; any second run may have been named.
        same = " (the same checkpoint)" if compared.same_checkpoint else ""
        title = f"Scores of {compared.label_a} and {compared.label_b}{same}"
        sections += [scores_section(compared, title), *flips_section(compared)]
    if losses := report.losses:
        title = f"Losses of {losses.label_a} and {losses.label_b}"
        sections.append(losses_section(losses, title, level=3))
    if report.conversion:
        sections.append(Section("Conversion", text=report.conversion))
    return sections
