"""A planned training that kills itself with SIGKILL at a moment, for the tests of interruptions.

python planned_run.py MODEL_DIR MOMENT STEP
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import tests.helpers.tiny_models as tiny  # noqa: E402
from t0repro.config.run import EarlyStoppingConfig
from t0repro.runs.train import train  # noqa: E402
from t0repro.training.hooks.evaluate import Evaluations
from t0repro.training.loop import Hook  # noqa: E402

LAST_STEP = 30
WHILE_WRITTEN = "while a checkpoint is being written"
MOMENTS = (
    "behind a step",
    "inside a save",
    "before an evaluation",
    "inside an evaluation",
    WHILE_WRITTEN,
)
BATCHES = tiny.batches(LAST_STEP)
# The metric gets no better after step 12, so early stopping ends the run at step 18.
ROUGE = {0: 1.0, 3: 2.0, 6: 3.0, 9: 2.0, 12: 4.0, 15: 4.0, 18: 3.0, 21: 9.0}


class Source:
    """The batches, with a position; `on_save` is called while a checkpoint is being written."""

    def __init__(self, on_save):
        self._on_save = on_save

    def open(self, step, saved):
        self.step = step
        return self._batches()

    def _batches(self):
        while self.step < LAST_STEP:
            self.step += 1
            yield BATCHES[self.step - 1]

    def save(self, folder):
        (folder / "position").write_text(str(self.step))
        self._on_save(self.step)


class Evaluated:
    """Two batches of an evaluation; `on_start` is called before the first."""

    def __init__(self, on_start):
        self._on_start = on_start

    def __iter__(self):
        self._on_start()
        return iter(BATCHES[:2])


class Behind(Hook):
    """Does something once a step is done."""

    def __init__(self, do):
        self._do = do

    def after_step(self, loop):
        self._do(loop.step)


def run(folder, moment=None, step=0, do=lambda: None, patience=2, last_step=LAST_STEP):
    """Trains; calls `do` at a moment of a step. Returns the last state."""
    now = [0]

    def at(name, here):
        now[0] = here
        if (name, here) == (moment, step):
            do()

    def infer_eval(loop):
        at("inside an evaluation", loop.step)
        return {"a_task": {"rouge": ROUGE.get(loop.step, 0.0)}}

    stop = EarlyStoppingConfig("a_task", "rouge", "max", patience, 0.0, 0.0, "best")
    plan = dataclasses.replace(tiny.PLAN, actions={"INFER_EVAL": (stop,)})
    config = tiny.run_config(folder, last_step, plan=plan, num_microbatches=1)
    model = dataclasses.replace(config.model, dropout_rate=0.2)
    evaluated = Evaluated(lambda: at("before an evaluation", now[0]))

    def on_save(here):
        at("inside a save", here)
        at(WHILE_WRITTEN, here)

    return train(
        dataclasses.replace(config, model=model),
        Source(on_save),
        evaluations=Evaluations(train_eval={"a_task": evaluated}, infer_eval=infer_eval),
        hooks=[Behind(lambda here: at("behind a step", here))],
    )


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def kill_once_written_to(folder, step):
    """Kills the process as soon as Orbax has written a file of a step's checkpoint."""
    pattern = f".checkpoint_{step}.*.tmp/.checkpoint_{step}.*/**/*"

    def watch():
        while not any(path.is_file() for path in folder.glob(pattern)):
            pass
        kill()

    threading.Thread(target=watch, daemon=True).start()


def main():
    folder, moment, step = sys.argv[1:]
    folder, step = Path(folder), int(step)
    die = kill if moment != WHILE_WRITTEN else lambda: kill_once_written_to(folder, step)
    run(folder, moment, step, die)


if __name__ == "__main__":
    main()
