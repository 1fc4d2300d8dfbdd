"""`python -m t0repro`: the command t0repro."""

from t0repro.cli.start import t0repro

t0repro()
