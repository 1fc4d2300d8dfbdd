"""What score_eval holds in memory: a window of tasks, whatever their number."""

import gc
import weakref

import pytest

from t0repro.config.run_config import EvalDataConfig
from t0repro.data.batches import EvalTask
from t0repro.evaluation import score_eval

from ..tiny_models import run_config

SIZES = (3, 4, 2, 9, 1, 1)


class Examples(list):
    """A list that can be watched."""


@pytest.fixture
def read(monkeypatch):
    """The examples that tasks were read with, and how often each was."""
    read = []

    def eval_tasks(data, sequence_length):
        for number, size in enumerate(SIZES):
            examples = Examples({"inputs": [number]} for _ in range(size))
            read.append(weakref.ref(examples))
            yield EvalTask(f"task_{number}", examples, str, ())
            del examples

    monkeypatch.setattr(score_eval, "eval_tasks", eval_tasks)
    return read


@pytest.fixture
def config():
    data = EvalDataConfig("any", "validation", False, False, -1, False, None)
    return run_config("a_model_dir", 1, eval_data=data)


def names(windows):
    return [[int(task.name[-1]) for task in window] for window in windows]


def test_windows_are_whole_tasks_in_their_order(read, config, monkeypatch):
    monkeypatch.setattr(score_eval, "EXAMPLES_IN_MEMORY", 7)
    windows = score_eval.TaskWindows(config)
    assert names(windows) == [[0, 1], [2], [3], [4, 5]]
    assert names(windows) == [[0, 1], [2], [3], [4, 5]]  # for another checkpoint
    assert len(read) == 2 * len(SIZES)


def test_only_a_window_is_held(read, config, monkeypatch):
    monkeypatch.setattr(score_eval, "EXAMPLES_IN_MEMORY", 7)
    held = []
    for window in score_eval.TaskWindows(config):
        here = sum(len(task.examples) for task in window)
        del window
        gc.collect()
        # The task that begins the next window has been read to see that it does not fit.
        held.append((here, sum(len(at()) for at in read if at() is not None)))
    assert held[0] == (7, 9) and held[-1] == (2, 2)
    assert all(total <= here + max(SIZES) for here, total in held)


def test_what_fits_in_one_window_is_read_once(read, config):
    windows = score_eval.TaskWindows(config)
    assert names(windows) == names(windows) == [list(range(len(SIZES)))]
    assert len(read) == len(SIZES)
