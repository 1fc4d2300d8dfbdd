"""What a report's page says of where its numbers come from."""

from __future__ import annotations

from t0repro.reports.page import Section
from t0repro.reports.provenance import Provenance


def provenance_sections(source: Provenance, written: str) -> list[Section]:
    """Run, checkpoint, device, hashes; then versions and the configuration, folded."""
    # What is missing is listed by name too: a reader should not have to notice a gap.
    known = [(name, value) for name, value in _facts(source) if value]
    missing = [name for name, value in _facts(source) if not value]
    facts = [
        ("Run", source.label),
        ("Step", str(source.step)),
        ("Evaluation", source.eval_dir),
        *known,
        ("Code", f"git {source.git_commit}" if source.git_commit else "not a git checkout"),
        ("Report written", written),
    ]
    if missing:
        facts.append(("Not recorded by the evaluation", ", ".join(missing).lower()))
    sections = [Section("Where this comes from", facts=tuple(facts))]
    if source.data:
        rows = tuple((f"Rows of {name}", value) for name, value in source.data.items())
        sections.append(Section("Data", facts=rows, level=3, folded=True))
    versions = tuple(source.versions.items())
    sections.append(Section("Package versions", facts=versions, level=3, folded=True))
    if source.operative_config:
        text = source.operative_config.rstrip("\n")
        sections.append(Section("Operative configuration", text=text, level=3, folded=True))
    return sections


def _facts(source: Provenance) -> list[tuple[str, str | None]]:
    """What an evaluation may record; None where it did not."""
    seconds = source.duration_seconds
    return [
        ("Checkpoint", source.checkpoint),
        ("Hash of the checkpoint", source.checkpoint_hash),
        ("Device", source.device),
        ("Duration", None if seconds is None else f"{seconds:.1f} s"),
        ("Energy", _energy(source)),
        ("Hash of the templates", source.templates_hash),
        ("Hash of the rendered data", source.data_revision),
    ]


def _energy(source: Provenance) -> str | None:
    if source.energy_joules is None:
        return None
    by = f", measured by {source.energy_source}" if source.energy_source else ""
    return f"{source.energy_joules:.0f} J{by}"
