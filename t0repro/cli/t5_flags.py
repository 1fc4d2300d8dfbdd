"""Defines the flags of t5's command without importing t5; replaces them by t5's if needed."""

from __future__ import annotations

from absl import flags

from t0repro.config.mtf.stand_ins import recorded


def define() -> str:
    """Defines the recorded flags, without help texts; returns the name of their module."""
    for flag in recorded()["flags"]:
        more = {"enum_values": flag["choices"]} if "choices" in flag else {}
        make = getattr(flags, f"DEFINE_{flag['kind']}")
        make(name=flag["name"], default=flag["default"], help="", **more)
    return __name__


def exchange() -> None:
    """Imports t5's command, which defines the flags; values that are already parsed are kept."""
    from t0repro import compat

    values = flags.FLAGS
    given = {flag["name"]: values[flag["name"]] for flag in recorded()["flags"]}
    for name in given:
        delattr(values, name)  # no flag may be defined twice
    # Before t5's command is imported: without the patches that import fails.
    compat.install()
    from t5.models import mesh_transformer_main  # noqa: F401

    for name, flag in given.items():
        if flag.present:
            values[name].value, values[name].present = flag.value, flag.present
