"""How long it takes to import T0's tasks and mixtures, after SeqIO's own import; prints both.

    .venv/bin/python -P scripts/bench/import_t0.py --times 3

Each measurement starts a new process. The medians are printed last.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys

MEASURE = """
import time
start = time.perf_counter()
import seqio
middle = time.perf_counter()
import t0repro.tasks.t0
end = time.perf_counter()
print(middle - start, end - middle, len(seqio.TaskRegistry.names()))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--times", type=int, default=3)
    arguments = parser.parse_args()
    both = []
    for _ in range(arguments.times):
        done = subprocess.run(
            [sys.executable, "-P", "-c", MEASURE], capture_output=True, text=True, check=True
        )
        seqio, t0, tasks = map(float, done.stdout.split())
        print(f"seqio {seqio:.2f} s, then t0repro.tasks.t0 {t0:.2f} s ({tasks:.0f} tasks)")
        both.append((seqio, t0))
    medians = [statistics.median(column) for column in zip(*both, strict=True)]
    print(f"median: seqio {medians[0]:.2f} s, then t0repro.tasks.t0 {medians[1]:.2f} s")


if __name__ == "__main__":
    main()
