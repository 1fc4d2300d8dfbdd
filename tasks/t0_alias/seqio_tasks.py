"""Registers T0's tasks and mixtures on import, as `t0.seqio_tasks` of T0's own package does."""

import t0repro.tasks.t0  # noqa: F401 - registers
