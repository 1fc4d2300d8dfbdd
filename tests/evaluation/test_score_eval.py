"""What score_eval holds in memory: a window of examples, whatever the number and size of tasks."""

import dataclasses
import gc
import weakref

import numpy as np
import pytest

from t0repro.config.run_config import EvalDataConfig
from t0repro.data.batches import EvalTask
from t0repro.errors import UserError
from t0repro.evaluation import reading
from t0repro.evaluation.task_output import explaining_incomplete_inputs
from t0repro.runs import evaluate as score_eval

from ..tiny_models import run_config

SIZES = (3, 4, 2, 9, 1, 1)


class Example(dict):
    """An example that can be watched."""


class Examples:
    """Examples that are read again in each iteration."""

    def __init__(self, number, read):
        self.number, self.read = number, read

    def __iter__(self):
        for at in range(SIZES[self.number]):
            example = Example(inputs=np.ones(self.number + at + 1), targets=np.ones(at + 1))
            self.read.append(weakref.ref(example))
            yield example
            del example


@pytest.fixture
def read(monkeypatch):
    """References to all examples that have been read."""
    read = []

    def eval_tasks(data, sequence_length):
        for number in range(len(SIZES)):
            yield EvalTask(f"task_{number}", Examples(number, read), str, ())

    monkeypatch.setattr(score_eval, "eval_tasks", eval_tasks)
    return read


@pytest.fixture
def config():
    data = EvalDataConfig("any", "validation", False, False, -1, False, None)
    return run_config("a_model_dir", 1, eval_data=data)


def parts(windows):
    return [[(int(part.task[-1]), len(part.examples), part.last) for part in w] for w in windows]


def test_windows_are_whole_tasks_and_parts_of_those_that_are_larger(read, config, monkeypatch):
    monkeypatch.setattr(score_eval, "EXAMPLES_IN_MEMORY", 8)
    monkeypatch.setattr(reading, "PARTS_IN_WINDOW", 2)
    windows = score_eval.TaskWindows(config)
    # A task's parts are the same whatever shares their window.
    expected = [
        [(0, 3, True), (1, 4, True)],
        [(2, 2, True), (3, 4, False)],
        [(3, 4, False), (3, 1, True), (4, 1, True), (5, 1, True)],
    ]
    assert parts(windows) == expected
    assert parts(windows) == expected  # for another checkpoint
    assert len(read) == 2 * sum(SIZES) and len(windows.judges) == len(SIZES)


def test_only_a_window_is_held_though_a_task_is_larger(read, config, monkeypatch):
    monkeypatch.setattr(score_eval, "EXAMPLES_IN_MEMORY", 4)
    held = []
    for window in score_eval.TaskWindows(config):
        here = sum(len(part.examples) for part in window)
        del window
        gc.collect()
        held.append((here, sum(at() is not None for at in read)))
    assert len(held) == sum(SIZES) / 4
    # The part that begins the next window, one example here, has been read to see that it does not
    # fit, with the input after it, and the one after that to see where its choices end.
    assert all(total <= here + 3 for here, total in held)


def test_what_fits_in_one_window_is_read_once(read, config):
    windows = score_eval.TaskWindows(config)
    assert parts(windows) == parts(windows) == [[(n, s, True) for n, s in enumerate(SIZES)]]
    assert len(read) == sum(SIZES)


@pytest.mark.parametrize("window", [7, 100])
def test_without_bound_lengths_all_tasks_have_those_of_the_longest(
    read, config, monkeypatch, window
):
    monkeypatch.setattr(score_eval, "EXAMPLES_IN_MEMORY", window)
    windows = score_eval.TaskWindows(dataclasses.replace(config, sequence_length=None))
    assert windows.lengths == {"inputs": 12, "targets": 9}  # task 3's last example
    assert score_eval.TaskWindows(config).lengths == config.sequence_length


def test_only_t5s_error_about_cut_off_choices_is_explained():
    with (
        pytest.raises(UserError, match="5 pairs cannot be ranked: each input has 2 choices"),
        explaining_incomplete_inputs(5),
    ):
        raise AssertionError("5 % 2 != 0")
    for limit, error in ((None, AssertionError("5 % 2 != 0")), (5, AssertionError("another"))):
        with pytest.raises(AssertionError), explaining_incomplete_inputs(limit):
            raise error


@pytest.mark.parametrize(("suffix", "name"), [(None, "e"), ("", "e_"), ("a", "e_a")])
def test_files_are_in_mesh_tensorflows_folder(tmp_path, suffix, name):
    config = run_config(tmp_path, 1, eval_summary_dir=str(tmp_path / "e"), eval_dir_suffix=suffix)
    assert score_eval.evaluation_folder(config) == tmp_path / name
