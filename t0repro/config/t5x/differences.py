"""What a run reads but does differently from T5X without changing its results."""

from __future__ import annotations

from t0repro.config.t5x import layout
from t0repro.config.t5x.gin_files import Parsed
from t0repro.config.t5x.places import Places


def differences(parsed: Parsed) -> list[str]:
    """A line for each argument that is done differently here, with the place that sets it."""
    program, places = parsed.program, Places.of(parsed.values)
    lines = list(layout.differences(program.partitioner, places))
    if getattr(program, "use_hardware_rng", False):
        lines.append(
            f"{places.place('train.use_hardware_rng')}: train.use_hardware_rng = True: JAX's"
            " default generator is used all the same, whose numbers are the same on every device"
        )
    return lines
