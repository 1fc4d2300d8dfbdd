"""`python -m t0repro.precompile`: `t0repro precompile`, under the name of T5X's script."""

import sys

from t0repro.cli.app import main

if __name__ == "__main__":
    sys.argv[1:1] = ["precompile"]
    main()
