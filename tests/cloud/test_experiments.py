"""A tracked job has a run with its whole lineage, or there is neither job nor run."""

import grpc
import pytest

from t0repro.cloud.vertex import submission
from t0repro.cloud.vertex.experiments import Tracking, check_tracking
from t0repro.cloud.vertex.job_config import JobConfig
from t0repro.cloud.vertex.spec import JobSpec, Machines
from t0repro.errors import UserError
from tests.cloud.services import STORE, TENSORBOARD, Refused

EXPERIMENT = f"{STORE}/contexts/t5"
WORDS = ("--run_mode=rank-eval", "--checkpoint=/gcs/bucket/c", "--out=/gcs/bucket/out")
TRAINING = JobConfig(
    text="A = 1\n",
    architecture="Total number of parameters: 1\n",
    output="/gcs/bucket/model",
    mixture="mixture",
    split="train",
)


def submitted(cloud, configured=TRAINING, tensorboard=None, run_name="small-1"):
    asked = JobSpec("small", "image", Machines("n1-standard-4"), WORDS)
    tracking = Tracking("t5", run_name, tensorboard)
    return submission.submit_and_track(asked, configured, tracking, cloud.place)


def lineage(services) -> dict[str, str]:
    """Display name of an artifact -> whether the job reads or writes it."""
    kinds = {event.artifact: event.type_.name for event in services.events}
    return {services.artifacts[name].display_name: kind for name, kind in kinds.items()}


def test_the_run_of_a_job_has_its_artifacts_execution_and_parameters(cloud, experiment):
    name, record = submitted(cloud)
    services = cloud.services
    assert lineage(services) == {
        "small-1-configuration": "INPUT",
        "small-1-architecture": "INPUT",
        "small-1-dataset": "INPUT",
        "small-1-model": "OUTPUT",
    }
    (execution,) = services.executions.values()
    assert execution.schema_title == "system.CustomJobExecution"
    assert execution.metadata["resource_name"] == name
    assert execution.state.name == "RUNNING"
    run = f"{EXPERIMENT}-small-1"
    assert services.members[run] == {*services.artifacts, execution.name}
    parameters = services.contexts[run].metadata["_params"]
    assert parameters["job"] == name and parameters["machine_type"] == "n1-standard-4"
    # The configuration is the gin text that was staged, which is there whatever becomes of the job.
    (configuration,) = [a for a in services.artifacts.values() if "config" in a.display_name]
    assert (cloud.storage.root / configuration.uri.removeprefix("gs://")).read_text() == "A = 1\n"
    (dataset,) = [a for a in services.artifacts.values() if a.schema_title == "system.Dataset"]
    assert dict(dataset.metadata) == {"mixture": "mixture", "split": "train"}
    assert record.output == "gs://bucket/model"


def test_an_artifact_that_is_missing_leaves_the_others_their_lineage(cloud, experiment):
    submitted(cloud, JobConfig(output="/gcs/bucket/out"))
    assert lineage(cloud.services) == {"small-1-model": "OUTPUT"}
    assert len(cloud.services.executions) == 1


def test_a_tensorboard_stands_behind_the_run(cloud, experiment):
    _, record = submitted(cloud, tensorboard="7")
    assert record.tensorboard == TENSORBOARD
    assert f"{TENSORBOARD}/experiments/t5/runs/small-1" in cloud.services.tensorboard


@pytest.mark.parametrize(
    ("tracking", "message"),
    [
        (Tracking("t6", "a"), "no experiment t6"),
        (Tracking("t5", "taken"), "has a run taken already"),
        (Tracking("t5", "a", "8"), "does not exist: .*tensorboards/8"),
    ],
)
def test_what_is_missing_or_taken_is_said_before_anything_is_made(
    cloud, experiment, tracking, message
):
    submitted(cloud, run_name="taken")
    before = len(cloud.services.calls)
    with pytest.raises(UserError, match=message):
        check_tracking(tracking, cloud.place)
    assert not [call for call in cloud.services.calls[before:] if call.startswith("Create")]


PERMISSION = Refused(grpc.StatusCode.PERMISSION_DENIED, "aiplatform.customJobs.create denied")
QUOTA = Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "custom_model_training_tpu_v3 is exceeded")


@pytest.mark.parametrize(
    ("method", "faults", "message"),
    [
        ("CreateCustomJob", [QUOTA], "the quota is used up"),
        ("CreateCustomJob", [PERMISSION], "permission denied"),
        ("CreateExecution", [PERMISSION], "permission denied"),
        # The first belongs to the TensorBoard, the third comes after one of the job's.
        ("CreateArtifact", [PERMISSION], "permission denied"),
        ("CreateArtifact", [0.0, 0.0, PERMISSION], "permission denied"),
        ("AddExecutionEvents", [PERMISSION], "permission denied"),
    ],
)
def test_a_refusal_at_any_point_leaves_no_job_no_run_and_no_file(
    cloud, experiment, method, faults, message
):
    cloud.services.faults[method] = faults[:]
    with pytest.raises(UserError, match=message):
        submitted(cloud, tensorboard="7")
    services = cloud.services
    assert not (services.jobs or services.artifacts or services.executions or cloud.staged())
    assert list(services.contexts) == [EXPERIMENT]
    assert not [name for name in services.tensorboard if "/runs/" in name]
    submitted(cloud, tensorboard="7")  # the name is free again


def test_a_job_whose_confirmation_is_lost_is_found_and_stays_tracked(cloud, experiment):
    create = cloud.services.CreateCustomJob

    def create_and_hang_up(request):
        create(request)
        raise Refused(grpc.StatusCode.UNKNOWN, "the stream was removed")

    cloud.services.CreateCustomJob = create_and_hang_up
    name, _ = submitted(cloud)
    assert [name] == list(cloud.services.jobs)
    run = cloud.services.contexts[f"{EXPERIMENT}-small-1"]
    assert run.metadata["_params"]["job"] == name and cloud.staged()


def test_a_bucket_that_is_missing_is_said_and_nothing_made(cloud, experiment):
    place = cloud.place.__class__("p", "us-central1", "gs://nowhere")
    asked = JobSpec("small", "image", Machines("n1-standard-4"), WORDS)
    with pytest.raises(UserError, match="does not exist: .*nowhere"):
        submission.submit_and_track(asked, TRAINING, Tracking("t5", "a"), place)
    assert list(cloud.services.contexts) == [EXPERIMENT] and not cloud.services.jobs


@pytest.mark.parametrize("name", ["Small", "a_b", "", "x" * 119])
def test_a_name_that_vertex_refuses_is_refused_here(name):
    with pytest.raises(UserError, match="cannot name a run"):
        Tracking("t5", name)
