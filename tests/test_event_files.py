"""TensorBoard's event files give back every point that was written."""

import re
import subprocess
import sys

import numpy as np
import pytest

from t0repro.event_files import event_writer, read_scalars


def test_every_point_of_a_curve_is_read_however_many_there_are(tmp_path):
    values = [float(abs(17 - step)) for step in range(60)]
    writer = event_writer(tmp_path)
    for step, value in enumerate(values):
        writer.write_scalars(step, {"eval/accuracy": value})
    writer.write_texts(0, {"text": "not a number"})
    writer.close()
    assert read_scalars(tmp_path) == {"eval/accuracy": list(enumerate(values))}


def test_summaries_of_tensorflow_1_are_read_too(tmp_path):
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(tmp_path))
    value = Summary.Value(tag="loss", simple_value=0.5)
    writer.add_event(Event(step=3, summary=Summary(value=[value])))
    writer.close()
    assert read_scalars(tmp_path) == {"loss": [(3, pytest.approx(0.5))]}


def test_the_graphs_of_mesh_tensorflows_trainings_are_no_reason_for_a_warning(tmp_path):
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(tmp_path))
    for _ in range(2):
        writer.add_event(Event(graph_def=b""))
        writer.add_event(Event(meta_graph_def=b""))
    writer.close()
    read = f"from t0repro.event_files import read_scalars; print(read_scalars({str(tmp_path)!r}))"
    # In a separate process, because pytest captures this one's log.
    done = subprocess.run([sys.executable, "-c", read], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("{}\n", "")


TAGS = {
    "train/loss": 2.5,
    "zero": 0,
    "integer": 16_777_217,
    "third": np.float64(1 / 3),
    "large": np.float64(1e300),
    "nan": float("nan"),
    "array": np.float32(-0.0),
    "true": True,
}


def events_of(folder):
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    (path,) = folder.iterdir()
    found = [Event.FromString(record) for record in RawEventFileLoader(str(path)).Load()]
    assert all(event.wall_time > 1.7e9 for event in found)
    for event in found:
        event.ClearField("wall_time")
    return path.name, [event.SerializeToString() for event in found]


def write_everything(writer):
    writer.write_scalars(1, TAGS)
    writer.write_texts(0, {"config": "    a = 1\n    b = 'é'\n", "empty": ""})
    writer.write_histograms(2, {"weights": np.linspace(-1, 1, 50)})
    writer.write_images(3, {"picture": np.zeros((4, 4, 3), np.float32)})
    writer.write_audios(3, {"sound": np.zeros((1, 8, 1), np.float32)}, sample_rate=8)
    writer.write_hparams({"rate": 0.5})
    writer.write_summaries(4, {"raw": np.arange(3)})
    writer.write_scalars(5, {"train/loss": 2})
    writer.flush()
    writer.close()


def test_events_are_those_that_clu_writes_byte_for_byte(tmp_path, monkeypatch):
    from clu.metric_writers import SummaryWriter

    monkeypatch.setattr("time.time", lambda: 1.8e9)  # clu's hparams hold the time
    write_everything(event_writer(tmp_path / "ours"))
    write_everything(SummaryWriter(str(tmp_path / "clus")))
    (name, ours), (clus_name, clus) = events_of(tmp_path / "ours"), events_of(tmp_path / "clus")
    assert ours == clus and len(ours) == 2 + len(TAGS) + 2 + 5
    # Equal except for the time and the writer's number in its process.
    varying = r"(?<=tfevents\.)\d{10}(?=\.)|\d+(?=\.v2$)"
    assert re.sub(varying, "", name) == re.sub(varying, "", clus_name) != name


def test_numbers_and_texts_are_written_without_tensorflow(tmp_path):
    script = f"""
import sys
from t0repro.event_files import event_writer

writer = event_writer({str(tmp_path)!r})
writer.write_scalars(1, {{"loss": 0.5}})
writer.write_texts(0, {{"config": "a = 1"}})
writer.close()
print(sorted({{"tensorflow", "clu", "seqio"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")
    assert read_scalars(tmp_path) == {"loss": [(1, 0.5)]}


def test_what_is_no_number_is_refused_and_nothing_of_it_is_written(tmp_path):
    writer = event_writer(tmp_path)
    with pytest.raises(ValueError, match=r"loss is an array of shape \[2\], not a number"):
        writer.write_scalars(1, {"loss": np.ones(2)})
    assert not hasattr(writer, "write_videos")
    writer.close()
    assert read_scalars(tmp_path) == {}
