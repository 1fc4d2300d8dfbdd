"""Runs a pickled plan: python run_plan.py PLAN WORKERS; a process to kill, without TensorFlow."""

import contextlib
import pickle
import sys
from pathlib import Path

from t0repro.errors import UserError
from t0repro.tasks.prompt_cache.cache import cache_tasks


def silent(total):
    """Shows no progress."""
    return contextlib.nullcontext(lambda count: None)


if __name__ == "__main__":
    plan, request = pickle.loads(Path(sys.argv[1]).read_bytes())
    try:
        print("planned", flush=True)
        cache_tasks(request, int(sys.argv[2]), silent, lambda _: plan)
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
