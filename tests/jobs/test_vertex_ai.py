"""Jobs as Vertex AI custom jobs: the real client against the service on loopback."""

import grpc
import pytest

from t0repro import storage
from t0repro.cloud.launchers.vertex import VertexLauncher, VertexMachine
from t0repro.errors import UserError
from t0repro.jobs.commands import JobSettings
from t0repro.jobs.controller import Controller, Policy
from t0repro.jobs.job import Job, Limits
from t0repro.storage import input_path, place

from ..cloud import conftest as vertex
from ..cloud.services import LOCATION, PROJECT, JobState, Refused
from .trainings import curve, save_checkpoints

certificate, cloud = vertex.certificate, vertex.cloud

NAME = "t0repro-12ab-3-1"


@pytest.fixture
def launcher(cloud):
    machine = VertexMachine(
        *(PROJECT, LOCATION, "image", "a2-highgpu-1g", f"gs://{vertex.BUCKET}"),
        *("NVIDIA_TESLA_A100", 1),
        labels={"a": "b"},
    )
    return VertexLauncher(machine, mount=str(cloud.services.mount))


@pytest.fixture
def job(cloud):
    return Job(NAME, cloud.bucket / "run" / "job", ("true",), {}, Limits())


def test_a_job_is_named_runs_the_worker_and_is_found_again(cloud, launcher, job):
    assert launcher.state(job) == "unknown"
    launcher.submit(job)
    (submitted,) = cloud.services.jobs.values()
    assert submitted.display_name == NAME and dict(submitted.labels) == {"a": "b"}
    pool = submitted.job_spec.worker_pool_specs[0]
    assert list(pool.container_spec.command) == ["python"]
    assert list(pool.container_spec.args) == [
        *("-m", "t0repro.jobs.worker"),
        f"/gcs/{vertex.BUCKET}/run/job/{NAME}.json",
    ]
    assert pool.machine_spec.accelerator_count == 1
    # A controller that is started again knows nothing but the name.
    again = VertexLauncher(launcher.machine, launcher.mount)
    for state, meaning in (
        (JobState.JOB_STATE_PENDING, "waiting"),
        (JobState.JOB_STATE_RUNNING, "running"),
        (JobState.JOB_STATE_FAILED, "ended"),
    ):
        submitted.state = state
        assert again.state(job) == meaning
    again.cancel(job)
    assert submitted.state == JobState.JOB_STATE_FAILED  # it had ended
    submitted.state = JobState.JOB_STATE_RUNNING
    again.cancel(job)
    assert submitted.state == JobState.JOB_STATE_CANCELLED


def test_refusals_are_passed_on(cloud, launcher, job, tmp_path):
    cloud.services.faults["CreateCustomJob"] = [
        Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "custom_model_training_gpus is exceeded")
    ]
    with pytest.raises(UserError, match="quota is used up: .*gpus is exceeded"):
        launcher.submit(job)
    with pytest.raises(UserError, match="sees only folders below /gcs"):
        VertexLauncher(launcher.machine).submit(job)
    assert not cloud.services.jobs


@pytest.mark.slow
def test_checkpoints_are_evaluated_by_jobs_on_the_service(cloud, launcher, evaluator):
    cloud.services.run_jobs = True
    model_dir = cloud.bucket / "model"
    save_checkpoints(model_dir, 3, 6)
    settings = JobSettings(mixtures=("m",), build_target=" ".join(evaluator))
    jobs = Controller(model_dir, settings, launcher, Policy(poll_seconds=0.2))
    assert jobs.run(lambda: False)
    assert curve(model_dir / "inference_eval" / "m") == [(3, 0.75), (6, 0.8571)]
    names = {job.display_name for job in cloud.services.jobs.values()}
    assert len(names) == 2 and all(name.startswith("t0repro-") for name in names)


@pytest.mark.slow
@pytest.mark.parametrize("bucket", ["gs"], indirect=True)
def test_checkpoints_in_a_bucket_are_evaluated_by_jobs_on_the_service(
    cloud, launcher, bucket, evaluator
):
    cloud.services.run_jobs = True
    save_checkpoints(place(bucket), 3, 6)
    settings = JobSettings(mixtures=("m",), build_target=" ".join(evaluator))
    # Nothing is mounted here.
    unmounted = VertexLauncher(launcher.machine)
    assert Controller(bucket, settings, unmounted, Policy(poll_seconds=0.2)).run(lambda: False)
    storage.close_copies()
    assert curve(input_path(bucket) / "inference_eval" / "m") == [(3, 0.75), (6, 0.8571)]
    pools = [job.job_spec.worker_pool_specs[0] for job in cloud.services.jobs.values()]
    files = [pool.container_spec.args[-1] for pool in pools]
    assert len(files) == 2
    assert all(file.startswith(f"{bucket}/auxiliary/m/step_") for file in files)
