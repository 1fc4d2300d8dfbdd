"""The manager loses no value, raises every error, and never hangs."""

import contextlib
import json
import time

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t0repro.errors import UserError
from t0repro.event_files import event_writer
from t0repro.training.metric_classes import (
    Average,
    AveragePerStep,
    LastValue,
    StepsPerTime,
    Sum,
    Time,
    TimeRate,
    compute_values,
    copy_to_host,
    fill_in_steps,
    merge_metrics,
)
from t0repro.training.metrics import SplitMetrics
from t0repro.training.metrics_manager import MetricsManager

from .test_metrics import read_events


def one_step(loss):
    return {"loss": AveragePerStep(np.float32(loss)), "seqs": Sum(np.float32(4))}


@pytest.fixture
def files(tmp_path):
    files = SplitMetrics(tmp_path, None)
    yield files
    files.close()


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_summary_is_over_all_that_was_added_since_the_last(tmp_path, files):
    manager = MetricsManager("train", files=files)
    for loss in (1.0, 2.0, 6.0):
        manager.add(one_step(loss))
    first = manager.write_summary(3)
    manager.add(one_step(5.0))
    second = manager.write_summary(4)
    nothing = manager.write_summary(5)
    manager.close()
    assert first.result() == {"loss": 3.0, "seqs": 12.0}
    assert second.result() == {"loss": 5.0, "seqs": 4.0} and nothing.result() == {}
    assert [row["step"] for row in lines(tmp_path)] == [3, 4]
    manager.close()  # again is nothing


def test_a_merged_window_is_written_as_t5x_hands_it_in(files):
    manager = MetricsManager("train", files=files)
    merged = merge_metrics(copy_to_host(one_step(1.0)), copy_to_host(one_step(3.0)))
    with pytest.raises(ValueError, match="start_duration_timer"):
        manager.write_metrics_summary(merged, 2, 2)
    manager.start_duration_timer()
    values = manager.write_metrics_summary(merged, 2, 2).result()
    assert values == {"loss": 2.0, "seqs": 8.0} and values["loss"].value == 2.0
    manager.start_duration_timer()
    assert manager.write_metrics_summary(None, 2, 0).result() == {}
    manager.close()


def test_everything_handed_in_is_there_after_flush(tmp_path, files):
    manager = MetricsManager("train", files=files)
    for step in range(200):
        manager.write_scalar("x", step, step)
    manager.flush()
    assert [row["x"] for row in lines(tmp_path)] == list(range(200))
    manager.close()


class Full:
    """A writer to a disk that is full at one step."""

    def write_scalars(self, step, scalars):
        if step == 2:
            raise UserError("The disk is full.")

    def flush(self):
        pass

    close = flush


def test_an_error_is_raised_once_and_what_comes_after_it_is_written_all_the_same(tmp_path):
    files = SplitMetrics(tmp_path, None, lambda split: Full())
    manager = MetricsManager("train", files=files)
    for step in (1, 2, 3):
        manager.add(one_step(step))
        manager.write_summary(step)
    with pytest.raises(UserError, match="full"):
        manager.flush()
    manager.flush()
    assert [row["step"] for row in lines(tmp_path)] == [1, 2, 3]
    manager.write_summary(4)
    manager.close()
    files.close()


def test_durations_are_from_the_end_of_one_step_to_the_end_of_the_next():
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 60, lambda _, y: jnp.tanh(y @ y), x).sum())
    x = jnp.ones((300, 300))
    slow(x).block_until_ready()
    manager = MetricsManager("train")
    manager.start_duration_timer()
    begun = time.perf_counter()
    futures = [manager.add({"loss": Sum(slow(x))}) for _ in range(3)]
    called = time.perf_counter() - begun
    seconds = [future.result().seconds for future in futures]
    elapsed = time.perf_counter() - begun
    manager.close()
    assert min(seconds) > 0 and sum(seconds) == pytest.approx(elapsed, abs=0.05 + called)


def test_a_pause_is_no_part_of_a_duration():
    manager = MetricsManager("train")
    manager.start_duration_timer()
    manager.add(one_step(1.0)).result()
    time.sleep(0.5)
    manager.start_duration_timer()
    assert manager.add(one_step(1.0)).result().seconds < 0.4
    manager.close()


def test_a_timer_on_a_buffer_that_was_donated_does_not_fail():
    state = jnp.ones(3)
    jax.jit(lambda x: x + 1, donate_argnums=0)(state)
    manager = MetricsManager("train")
    manager.start_duration_timer(block_on={"params": state})
    assert manager.add(one_step(1.0)).result().seconds >= 0
    manager.close()


def test_event_files_and_metrics_jsonl_agree(tmp_path):
    files = SplitMetrics(tmp_path, None, lambda split: event_writer(tmp_path / split))
    manager = MetricsManager("training_eval/a_task", files=files)
    for step in (1, 2):
        manager.add(one_step(step / 3))
        manager.write_summary(step)
    manager.close()
    files.close()
    events = {(step, tag): x for step, tag, x in read_events(tmp_path / "training_eval/a_task")}
    written = {
        (row["step"], name): np.float32(row[name])
        for row in lines(tmp_path)
        for name in ("loss", "seqs")
    }
    assert events == written


def test_an_average_counts_an_entry_once_or_not_at_all_and_a_row_by_its_one_mask():
    assert Average.from_model_output([2.0, 4.0, 9.0], mask=[0.5, 0.25, 0.0]).compute() == 3.0
    rows = [[1.0, 3.0], [100.0, 100.0]]
    assert Average.from_model_output(rows, mask=[1, 0]).compute() == 2.0


def test_metrics_merge_and_compute_as_their_names_say():
    first = {
        "average": Average.from_model_output([1.0, 5.0], mask=[1, 0]),
        "last": LastValue.from_model_output(1.0),
        "rate": TimeRate.from_model_output(6.0),
        "time": Time.from_model_output(),
        "speed": StepsPerTime.from_model_output(),
    }
    second = {
        "average": Average.from_model_output([3.0]),
        "last": LastValue.from_model_output([2.0]),
        "rate": TimeRate.from_model_output([2.0, 2.0]),
        "time": Time.from_model_output(),
        "speed": StepsPerTime.from_model_output(),
    }
    both = fill_in_steps(copy_to_host(merge_metrics(first, second)), 2, 4.0)
    assert compute_values(both) == {
        "average": 2.0, "last": 2.0, "rate": 2.5, "time": 4.0, "speed": 0.5,
    }  # fmt: skip
    with pytest.raises(ValueError, match="filled in"):
        second["rate"].compute()


def test_a_manager_of_its_own_folder_writes_as_t5xs_does(tmp_path):
    """T5X's arguments; texts, arrays and clu's own metrics; what is not a number is named."""
    import clu.metrics
    import clu.values

    class Text(clu.metrics.Metric):
        def merge(self, other):
            return other

        def compute_value(self):
            return clu.values.Text("a sentence")

    written = []

    class Writer:
        def write_scalars(self, step, scalars):
            written.append(dict(scalars))

        def write_texts(self, step, texts):
            written.append(texts)

        def write_histograms(self, step, arrays):
            written.append({name: x.tolist() for name, x in arrays.items()})

        def flush(self):
            pass

        close = flush

    manager = MetricsManager("eval", str(tmp_path), open_writer=lambda folder: Writer())
    assert manager.summary_dir == f"{tmp_path}/eval"
    manager.summary_writer.write_scalars(1, {"direct": 1.0})
    manager.write_scalar("x", 2.0, jnp.int32(3))
    manager.start_duration_timer()
    for value in (1.0, 4.0):
        average = clu.metrics.Average.from_model_output(jnp.float32([value]))
        manager.add({"theirs": average, "each": Each(jnp.float32([value, 0.0])), "text": Text()})
    values = manager.write_summary(4).result()
    assert values["theirs"] == 2.5 and values["theirs"].value == 2.5
    manager.close()
    assert {"text": "a sentence"} in written and {"each": [5.0, 0.0]} in written
    last = lines(tmp_path)[-1]
    assert last["left_out"] == {"each": "array [2]", "text": "Text"} and last["theirs"] == 2.5


@flax.struct.dataclass
class Each(Sum):
    """The sum of each entry."""


def test_every_process_knows_the_folder_and_the_first_alone_makes_it(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with contextlib.closing(MetricsManager("eval", str(tmp_path))) as manager:
        manager.write_scalar("loss", 1.0, 1)
    assert manager.summary_dir == f"{tmp_path}/eval" and not list(tmp_path.iterdir())
    assert MetricsManager("eval").summary_dir is None
