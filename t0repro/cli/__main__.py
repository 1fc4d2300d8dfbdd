"""`python -m t0repro.cli` is the command t0repro."""

from t0repro.cli.app import main

main()
