"""`python -m t0repro.mesh`, which is `python -m t0repro.mtf` under its earlier name."""

from t0repro.mtf.__main__ import main

if __name__ == "__main__":
    main()
