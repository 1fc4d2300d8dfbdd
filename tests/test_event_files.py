"""TensorBoard's event files give back every point that was written."""

import subprocess
import sys

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
    # A process of its own: pytest catches what is logged in this one.
    done = subprocess.run([sys.executable, "-c", read], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("{}\n", "")
