"""Which figure stands for a job, and what an interrupted publication leaves."""

import pytest
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from t0repro.jobs.controller import main_metric, publish_events
from t0repro.jobs.journal import Point

from .trainings import curve


def log(folder, step=3, **values):
    """One event file with a step's scalars; `eval__accuracy` is the tag eval/accuracy."""
    writer = EventFileWriter(str(folder))
    scalars = [
        Summary.Value(tag=tag.replace("__", "/"), simple_value=value)
        for tag, value in values.items()
    ]
    writer.add_event(Event(step=step, summary=Summary(value=scalars)))
    writer.close()


@pytest.mark.parametrize(
    ("wanted", "metric"),
    [
        (None, ("mean eval/accuracy of 2 tasks", 0.5)),
        ("eval/f1", ("eval/f1", 0.1)),
        ("loss", ("loss", 9.0)),
        ("no such tag", None),
    ],
)
def test_the_accuracy_of_all_evaluated_tasks_is_the_main_metric(tmp_path, wanted, metric):
    """SeqIO has a folder for each task, all with the same tags; a training run logs one, too."""
    log(tmp_path / "inference_eval" / "a", eval__accuracy=0.25, eval__f1=0.1)
    log(tmp_path / "inference_eval" / "b", eval__accuracy=0.75)
    log(tmp_path / "train", accuracy=1.0, loss=9.0)
    assert main_metric(tmp_path, wanted) == (metric and (metric[0], pytest.approx(metric[1])))


def test_without_an_accuracy_the_first_tag_is_shown(tmp_path):
    log(tmp_path, loss=2.0, bleu=1.0)
    assert main_metric(tmp_path) == ("bleu", 1.0)
    assert main_metric(tmp_path / "nothing") is None


def test_a_publication_that_was_interrupted_goes_on_without_losing_or_doubling_a_file(tmp_path):
    output, model_dir = tmp_path / "output", tmp_path / "model"
    log(output / "task", accuracy=0.25)
    first = next((output / "task").iterdir())
    publish_events(Point(3, "m"), output, model_dir)
    log(output / "task", accuracy=0.5)
    second = next((output / "task").iterdir())
    second.rename(second.with_name(f"{first.name}.2"))  # written in the same second
    publish_events(Point(3, "m"), output, model_dir)
    assert curve(model_dir / "task") == [(3, 0.25), (3, 0.5)]
    assert not list(output.rglob("*tfevents*"))
