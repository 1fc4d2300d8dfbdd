"""A training run on the demo's data that the tests of resuming stop and continue with.

As a program it trains like `run`, and kills itself with SIGKILL behind a step:

    python resume_run.py MODEL_DIR LAST_STEP KILL_BEHIND_STEP CACHE_DIR
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from pathlib import Path

from t0repro.data.train_data import TrainBatches
from t0repro.progress import heard_by
from t0repro.runs.train import train
from t0repro.training.checkpoints import list_checkpoints
from t0repro.training.loop import Hook
from t0repro.training.train_state import to_flat_tree

sys.path.append(str(Path(__file__).resolve().parents[1]))
import helpers.tiny_models as tiny  # noqa: E402

TASK = "demo_synthetic_glue_mrpc_paraphrase"
LAST_STEP = 7


class Behind(Hook):
    """Does something once a step is done."""

    def __init__(self, step, do):
        self._step, self._do = step, do

    def after_step(self, trainer):
        if trainer.step == self._step:
            self._do()


def config(model_dir, last_step=LAST_STEP, **data):
    """A small model with dropout; a checkpoint at steps 2, 4 and 6."""
    base = tiny.run_config(model_dir, last_step)
    return dataclasses.replace(
        base,
        model=dataclasses.replace(base.model, vocab_size=1408, dropout_rate=0.1),
        plan=tiny.mesh_plan(
            tiny.train_data(TASK, **{"use_cached": False, "seed": None, **data}),
            save_checkpoints_steps=2,
        ),
        sequence_length={"inputs": 64, "targets": 8},
    )


def run(model_dir, *hooks, last_step=LAST_STEP, **data):
    """Trains as the command does; returns the final state as a flat tree and what was said."""
    import t0repro.tasks.demo  # noqa: F401 (registers the task)

    said = []
    settings = config(model_dir, last_step, **data)
    source = TrainBatches(settings, has_checkpoint=bool(list_checkpoints(model_dir)))
    with heard_by(said.append):
        state = train(settings, source, hooks=hooks)
    return to_flat_tree(state), said


def losses(model_dir):
    """Loss by step."""
    lines = (Path(model_dir) / "metrics.jsonl").read_text().splitlines()
    return {row["step"]: row["loss"] for row in map(json.loads, lines)}


def use_cache(folder):
    """Lets the task be read from a cache; "" for none."""
    import seqio

    import t0repro.tasks.demo  # noqa: F401

    seqio.set_global_cache_dirs([str(folder)] if folder else [])


def main():
    model_dir, last_step, kill_behind, cache = sys.argv[1:]
    use_cache(cache)
    kill = Behind(int(kill_behind), lambda: os.kill(os.getpid(), signal.SIGKILL))
    run(model_dir, kill, last_step=int(last_step), use_cached=bool(cache), seed=3)


if __name__ == "__main__":
    main()
