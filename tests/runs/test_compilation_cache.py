"""With JAX_COMPILATION_CACHE_DIR, the second start of a run finds its programs compiled."""

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import collections, sys
import jax
import helpers.tiny_models as tiny
from t0repro.runs.train import train

events = collections.Counter()
jax.monitoring.register_event_listener(lambda name, **_: events.update([name]))
train(tiny.run_config(sys.argv[1], 1), tiny.batches(1))
print(*(events[f"/jax/compilation_cache/cache_{kind}"] for kind in ("hits", "misses")))
"""


def test_a_second_start_compiles_nothing(tmp_path):
    env = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[1]),
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "programs"),
        # Tiny programs compile in less than the second from which JAX keeps them.
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    counts = []
    for name in ("first", "second"):
        command = [sys.executable, "-c", PROGRAM, str(tmp_path / name)]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        counts.append([int(number) for number in done.stdout.split()])
    (_, missed), (found, missed_again) = counts
    assert missed > 0 and missed_again == 0 and found >= missed
