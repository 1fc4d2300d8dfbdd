"""Jobs are submitted whole or not at all."""

import grpc
import pytest

from t0repro.cloud.vertex import submission
from t0repro.cloud.vertex.job_config import JobConfig
from t0repro.cloud.vertex.spec import JobSpec, Machines
from t0repro.errors import UserError
from tests.cloud.services import Refused

CPU = Machines("n1-standard-4")


@pytest.fixture
def asked(tmp_path):
    gin_file = tmp_path / "my.gin"
    gin_file.write_text("A = 1\n")
    return JobSpec(
        display_name="small run",
        image_uri="image",
        machines=CPU,
        arguments=("--run_mode=train", f"--gin_file={gin_file}", "--gin.A=2"),
    )


def test_a_job_is_submitted_with_its_gin_files_staged(cloud, asked):
    name = submission.submit(asked, JobConfig(), cloud.place)
    (job,) = cloud.services.jobs.values()
    assert name == job.name
    (file,) = cloud.staged()
    assert file.endswith("/gin/0-my.gin") and (cloud.bucket / file).read_text() == "A = 1\n"
    assert list(job.job_spec.worker_pool_specs[0].container_spec.args) == [
        "--run_mode=train", f"--gin_file=/gcs/bucket/{file}", "--gin.A=2",
    ]  # fmt: skip


def test_a_quota_that_is_used_up_leaves_nothing(cloud, asked):
    cloud.services.faults["CreateCustomJob"] = [
        Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "custom_model_training_tpu_v3 is exceeded")
    ]
    with pytest.raises(UserError, match="quota is used up: .*tpu_v3 is exceeded"):
        submission.submit(asked, JobConfig(), cloud.place)
    assert not cloud.staged() and not cloud.services.jobs
