"""`python -m t0repro`: the command t0repro."""

from t0repro.cli.app import main

main()
