"""TensorBoard has every point of a job, however slowly or brokenly they are sent."""

import contextlib
import time

import grpc
import pytest

from t0repro.cloud.vertex.tensorboard import upload_in_background
from t0repro.event_files import event_writer
from t0repro.progress import heard_by
from tests.cloud.services import TENSORBOARD, Refused


@pytest.fixture
def write(cloud):
    """Writes points of a curve where the job would."""

    def points(run, tag, **curve):
        writer = event_writer(cloud.bucket / "model" / run)
        for step, value in curve.items():
            writer.write_scalars(int(step.removeprefix("at_")), {tag: value})
        writer.close()

    return points


@contextlib.contextmanager
def upload(cloud, said, **options):
    where = ("gs://bucket/model", "t5", "small-1", TENSORBOARD)
    with (
        heard_by(said.append),
        upload_in_background(*where, cloud.place, **{"every": 0.05} | options),
    ):
        yield


def test_points_are_uploaded_as_they_come_and_the_last_ones_after_the_end(cloud, experiment, write):
    said = []
    write("train", "loss", at_1=3.0)
    curve = cloud.services.points["small-1-train", "loss"]
    with upload(cloud, said, every=0.1):
        until(lambda: curve or said)
        assert not said
        assert curve == {1: 3.0}
        write("train", "loss", at_2=2.0)
        until(lambda: len(curve) == 2)
        # Written after the last look that began before the end.
        write("train", "loss", at_3=1.0)
    assert curve == {1: 3.0, 2: 2.0, 3: 1.0} and not said


def test_googles_buttons_for_notebooks_stay_off_the_terminal(cloud, experiment, write, capsys):
    import IPython  # noqa: F401  # Google's client takes its presence for a notebook

    write("train", "loss", at_1=3.0)
    with upload(cloud, []):
        pass
    assert cloud.services.points["small-1-train", "loss"]
    assert "IPython" not in capsys.readouterr().out


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_what_fails_is_said_and_sent_again(cloud, experiment, write):
    said = []
    write("inference_eval/task", "eval/accuracy", at_1=50.0, at_2=60.0)
    cloud.services.faults["WriteTensorboardExperimentData"] = [
        Refused(grpc.StatusCode.UNAVAILABLE, "the connection was lost"),
        Refused(grpc.StatusCode.UNKNOWN, "the stream was removed"),
    ]
    with upload(cloud, said):
        until(lambda: len(said) == 2)
    curve = cloud.services.points["small-1-inference-eval-task", "eval/accuracy"]
    assert curve == {1: 50.0, 2: 60.0}
    assert "connection was lost" in said[0] and "stream was removed" in said[1]


def test_an_upload_that_never_succeeds_ends_all_the_same(cloud, experiment, write):
    said = []
    write("train", "loss", at_1=3.0)
    cloud.services.faults["GetTensorboard"] = 50 * [
        Refused(grpc.StatusCode.PERMISSION_DENIED, "aiplatform.tensorboards.get denied")
    ]
    with upload(cloud, said):
        pass
    assert said[-1] == "TensorBoard: not all is uploaded."


def test_a_slow_upload_holds_up_nothing_and_is_waited_for(cloud, experiment, write):
    write("train", "loss", at_1=3.0)
    cloud.services.faults["WriteTensorboardExperimentData"] = [2.0]
    with upload(cloud, []):
        started = time.monotonic()
    assert time.monotonic() - started > 1.0
    assert cloud.services.points["small-1-train", "loss"] == {1: 3.0}


def test_ctrl_c_waits_for_the_upload_under_way_alone(cloud, experiment, write):
    said = []
    write("train", "loss", at_1=3.0)
    curve = cloud.services.points["small-1-train", "loss"]
    with pytest.raises(KeyboardInterrupt), upload(cloud, said, every=3600.0):
        until(lambda: curve or said)
        write("train", "loss", at_2=2.0)
        raise KeyboardInterrupt
    # Another look would have found the second point.
    assert curve == {1: 3.0} and not said


def test_what_ctrl_c_waits_for_is_said(cloud, experiment, write):
    said = []
    write("train", "loss", at_1=3.0)
    cloud.services.faults["WriteTensorboardExperimentData"] = [3.0]
    with pytest.raises(KeyboardInterrupt), upload(cloud, said):
        until(lambda: "WriteTensorboardExperimentData" in cloud.services.calls)
        raise KeyboardInterrupt
    assert "upload under way" in said[0]
