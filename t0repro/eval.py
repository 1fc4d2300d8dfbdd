"""`python -m t0repro.eval`: `t0repro eval`, under the name of T5X's script."""

import sys

from t0repro.cli.app import main

if __name__ == "__main__":
    # As if `eval` had been the first word of the command line.
    sys.argv[1:1] = ["eval"]
    main()
