"""Runs a module of t5's, Mesh TensorFlow's or SeqIO's as a program, with compat's patches in place.

    python -m t0repro.mesh t5.scripts.parse_tb --summary_dir=DIR --out_file=FILE

does what `python -m t5.scripts.parse_tb ...` does on the TensorFlow and pandas of t5's own year.
"""

from __future__ import annotations

import runpy
import sys

from t0repro.mesh import compat


def main() -> None:
    """Runs the module that the first argument names; the others are the module's own."""
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python -m t0repro.mesh MODULE [the module's own arguments]")
    del sys.argv[0]
    compat.install()
    compat.sum_up_metrics_with_current_pandas()
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
