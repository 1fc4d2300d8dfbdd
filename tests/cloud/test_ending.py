"""However a job ends, and whoever notices, its run ends so too, with the best of its metrics."""

import time

import grpc
import pytest

from t0repro.cloud.vertex.custom_jobs import cancel_job, find_job, logs_of_job, read_job
from t0repro.cloud.vertex.outcome import follow, read_record, record_end
from t0repro.errors import UserError
from t0repro.event_files import event_writer
from t0repro.progress import heard_by
from tests.cloud.services import STORE, JobState, Refused
from tests.cloud.test_experiments import submitted

ACCURACY = "task/accuracy"


def write_accuracy(cloud, *values):
    writer = event_writer(cloud.bucket / "model/inference_eval/task")
    for step, value in enumerate(values):
        writer.write_scalars(step, {"eval/accuracy": value})
    writer.close()


def ended(cloud, name, state="SUCCEEDED", message=""):
    """Ends a job as the service would."""
    job = cloud.services.jobs[name]
    job.error.message = message
    job.state = getattr(JobState, f"JOB_STATE_{state}")


def run(cloud):
    return cloud.services.contexts[f"{STORE}/contexts/t5-small-1"].metadata


def followed(cloud, name, record, said):
    with heard_by(said.append):
        return follow(name, record, cloud.place, poll_seconds=0.02)


def test_a_run_that_ends_between_two_looks_has_its_last_metrics(cloud, experiment):
    name, record = submitted(cloud)
    write_accuracy(cloud, 10.0, 30.0, 20.0)
    ended(cloud, name)
    said = []
    seen, metrics = followed(cloud, name, record, said)
    assert seen.state == "succeeded" and said == ["job 1000: succeeded"]
    assert metrics == {ACCURACY: 30.0, f"{ACCURACY}/step": 1}
    # Numbers, which the console can sort by.
    assert dict(run(cloud)["_metrics"]) == metrics and run(cloud)["_state"] == "COMPLETE"
    (execution,) = cloud.services.executions.values()
    assert execution.state.name == "COMPLETE"


def test_a_preempted_job_ends_its_run_as_failed_with_the_reason_and_its_metrics(cloud, experiment):
    name, record = submitted(cloud)
    write_accuracy(cloud, 10.0)
    ended(cloud, name, "FAILED", "The TPU was preempted.")
    seen, metrics = followed(cloud, name, record, [])
    assert (seen.state, seen.reason) == ("failed", "The TPU was preempted.")
    assert run(cloud)["_state"] == "FAILED" and metrics[ACCURACY] == 10.0
    assert run(cloud)["_params"]["failure"] == "The TPU was preempted."


def test_a_job_that_never_got_its_machines_has_ended_although_the_client_waits_on(
    cloud, experiment
):
    name, record = submitted(cloud)
    ended(cloud, name, "EXPIRED")
    seen, _ = followed(cloud, name, record, [])
    assert seen.state == "failed" and "not become available" in seen.reason


def test_lost_connections_are_waited_out(cloud, experiment):
    name, record = submitted(cloud)
    # Google's client tries the first again by itself, the others not.
    cloud.services.faults["GetCustomJob"] = [
        0.0,
        Refused(grpc.StatusCode.UNAVAILABLE, "the connection was lost"),
        Refused(grpc.StatusCode.UNKNOWN, "the stream was removed"),
        Refused(grpc.StatusCode.UNKNOWN, "the stream is still gone"),
    ]
    said = []

    def say(line):
        said.append(line)
        if "still gone" in line:
            ended(cloud, name)

    with heard_by(say):
        seen, _ = follow(name, record, cloud.place, poll_seconds=0.02)
    assert seen.state == "succeeded"
    assert (said[0], said[-1]) == ("job 1000: waiting", "job 1000: succeeded")
    assert [line for line in said if "trying again" in line and "the stream was removed" in line]


def test_a_look_that_is_forbidden_is_an_error_that_says_the_job_goes_on(cloud, experiment):
    name, record = submitted(cloud)
    denied = Refused(grpc.StatusCode.PERMISSION_DENIED, "aiplatform.customJobs.get denied")
    cloud.services.faults["GetCustomJob"] = [denied]
    with pytest.raises(UserError, match="look at the job, which continues: permission denied"):
        followed(cloud, name, record, [])


def test_results_that_may_not_be_read_are_an_error_and_recorded_once_they_may(cloud, experiment):
    name, record = submitted(cloud)
    write_accuracy(cloud, 10.0)
    ended(cloud, name)
    cloud.storage.statuses["GET"] = [403] * 10  # the client asks for other things, too
    with pytest.raises(UserError, match="permission denied: .*objects.get access") as denied:
        followed(cloud, name, record, [])
    assert "roles/storage.objectAdmin" in str(denied.value)
    cloud.storage.statuses.clear()
    # Not ended without its metrics: whoever may read records both.
    assert run(cloud)["_state"] == "RUNNING" and not dict(run(cloud)["_metrics"])
    followed(cloud, name, record, [])
    assert run(cloud)["_state"] == "COMPLETE" and run(cloud)["_metrics"][ACCURACY] == 10.0


def test_whoever_looks_later_records_the_end_and_only_once(cloud, experiment):
    name, _ = submitted(cloud)
    write_accuracy(cloud, 10.0)
    ended(cloud, name)
    seen = read_job("1000", cloud.place)
    record = read_record(seen, cloud.place)
    assert record is not None
    first = record_end(seen, record, cloud.place)
    updates = cloud.services.calls.count("UpdateContext")
    assert record_end(seen, record, cloud.place) == first == {ACCURACY: 10, f"{ACCURACY}/step": 0}
    assert cloud.services.calls.count("UpdateContext") == updates


def test_a_job_is_found_by_its_name_and_canceled(cloud, experiment):
    name, record = submitted(cloud)
    found = find_job("small", cloud.place)
    assert found is not None and found.name == name and find_job("other", cloud.place) is None
    cancel_job("1000", cloud.place)
    seen, _ = followed(cloud, name, record, [])
    assert seen.state == "canceled" and run(cloud)["_state"] == "CANCELLED"
    with pytest.raises(UserError, match="does not exist"):
        cancel_job("9", cloud.place)


def test_the_log_is_what_the_containers_wrote_in_order(cloud, experiment):
    name, _ = submitted(cloud)
    cloud.services.logs[name] = "first\nsecond\n"
    lines = logs_of_job("1000", cloud.place)
    assert [line.rpartition(" ")[2] for line in lines] == ["first", "second"]
    assert logs_of_job("1000", cloud.place, last=1) == lines[1:]
    assert time.strptime(lines[0][:19], "%Y-%m-%d %H:%M:%S")
