"""Lets `python -m t0repro.cli` run the command t0repro."""

from t0repro.cli.app import main

main()
