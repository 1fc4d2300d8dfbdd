"""What score_eval holds in memory: a window of examples, whatever the number and size of tasks."""

import dataclasses
import weakref

import numpy as np
import pytest

from t0repro.config.data import EvalDataConfig
from t0repro.data.batches import EvalTask
from t0repro.errors import UserError
from t0repro.evaluation import reading
from t0repro.evaluation.task_output import explain_incomplete_inputs
from t0repro.runs import task_writer as score_eval

from ..helpers.tiny_models import eval_run, run_config

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
    return eval_run(run_config("a_model_dir", 1), eval_data=data)


def chunks(read_buffers):
    return [
        [(int(chunk.task[-1]), len(chunk.examples), chunk.last) for chunk in w]
        for w in read_buffers
    ]


def test_windows_are_whole_tasks_and_parts_of_those_that_are_larger(read, config, monkeypatch):
    monkeypatch.setattr(score_eval, "EXAMPLES_IN_MEMORY", 8)
    monkeypatch.setattr(reading, "CHUNKS_IN_BUFFER", 2)
    read_buffers = score_eval.TaskBuffers(config)
    # A task's parts are the same whatever shares their window.
    expected = [
        [(0, 3, True), (1, 4, True)],
        [(2, 2, True), (3, 4, False)],
        [(3, 4, False), (3, 1, True), (4, 1, True), (5, 1, True)],
    ]
    assert chunks(read_buffers) == expected
    assert chunks(read_buffers) == expected  # for another checkpoint
    assert len(read) == 2 * sum(SIZES) and len(read_buffers.judges) == len(SIZES)


def test_only_a_window_is_held_though_a_task_is_larger(read, config, monkeypatch):
    monkeypatch.setattr(score_eval, "EXAMPLES_IN_MEMORY", 4)
    held = []
    for read_buffer in score_eval.TaskBuffers(config):
        here = sum(len(chunk.examples) for chunk in read_buffer)
        del read_buffer
        held.append((here, sum(at() is not None for at in read)))
    assert len(held) == sum(SIZES) / 4
    # The part that begins the next window, one example here, has been read to see that it does not
    # fit, with the input after it, and the one after that to see where its choices end.
    assert all(total <= here + 3 for here, total in held)


def test_what_fits_in_one_window_is_read_once(read, config):
    read_buffers = score_eval.TaskBuffers(config)
    assert (
        chunks(read_buffers)
        == chunks(read_buffers)
        == [[(n, s, True) for n, s in enumerate(SIZES)]]
    )
    assert len(read) == sum(SIZES)


@pytest.mark.parametrize("read_buffer", [7, 100])
def test_without_bound_lengths_all_tasks_have_those_of_the_longest(
    read, config, monkeypatch, read_buffer
):
    monkeypatch.setattr(score_eval, "EXAMPLES_IN_MEMORY", read_buffer)
    read_buffers = score_eval.TaskBuffers(dataclasses.replace(config, sequence_length=None))
    assert read_buffers.lengths == {"inputs": 12, "targets": 9}  # task 3's last example
    assert score_eval.TaskBuffers(config).lengths == config.sequence_length


def test_only_t5s_error_about_cut_off_choices_is_explained():
    with (
        pytest.raises(UserError, match="5 pairs cannot be ranked: each input has 2 choices"),
        explain_incomplete_inputs(5),
    ):
        raise AssertionError("5 % 2 != 0")
    for limit, error in ((None, AssertionError("5 % 2 != 0")), (5, AssertionError("another"))):
        with pytest.raises(AssertionError), explain_incomplete_inputs(limit):
            raise error


@pytest.mark.parametrize(("suffix", "name"), [(None, "e"), ("", "e_"), ("a", "e_a")])
def test_files_are_in_mesh_tensorflows_folder(tmp_path, suffix, name):
    changes = {"eval_summary_dir": str(tmp_path / "e"), "eval_dir_suffix": suffix}
    config = eval_run(run_config(tmp_path, 1), **changes)
    assert score_eval.evaluation_folder(config) == tmp_path / name
