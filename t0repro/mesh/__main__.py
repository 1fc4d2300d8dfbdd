"""Runs a module of t5, Mesh TensorFlow or SeqIO as a program, with compat's patches applied.

    python -m t0repro.mesh t5.scripts.parse_tb --summary_dir=DIR --out_file=FILE

does what `python -m t5.scripts.parse_tb ...` did on the TensorFlow and pandas of t5's own time.
"""

from __future__ import annotations

import runpy
import sys

from t0repro import compat


def main() -> None:
    """Runs the module named by the first argument with the remaining arguments."""
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python -m t0repro.mesh MODULE [the module's own arguments]")
    # The module must see its own name and arguments, as if it had been started directly.
    del sys.argv[0]
    compat.install()
    compat.sum_up_metrics_with_current_pandas()
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
