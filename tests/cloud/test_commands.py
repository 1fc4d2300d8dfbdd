"""`t0repro vertex`: exit codes, and what each command prints."""

import functools
import json
import re

import pytest

from t0repro.event_files import event_writer
from tests.cloud import commands
from tests.cloud.commands import no_credentials
from tests.cloud.services import STORE, JobState
from tests.helpers.own_lines import foreign_lines

RANK_EVAL = ("--run_mode", "rank-eval", "--", "--checkpoint=gs://bucket/model", "--mixture=m")


@pytest.fixture
def vertex(monkeypatch, capsys):
    return functools.partial(commands.vertex, monkeypatch, capsys)


@pytest.fixture
def submit(monkeypatch, capsys):
    def submit(run_name, *command, more=()):
        tracking = ("--experiment", "t5", "--run_name", run_name)
        return commands.submit(monkeypatch, capsys, *tracking, *more, *command)

    return submit


def rank_eval(out):
    return (*RANK_EVAL, f"--out=/gcs/bucket/{out}")


def end(cloud, job, accuracy, state=JobState.JOB_STATE_SUCCEEDED):
    """Ends a job that found an accuracy at step 5."""
    out = cloud.services.jobs[job].job_spec.worker_pool_specs[0].container_spec.args[-1]
    writer = event_writer(out.replace("--out=/gcs", str(cloud.storage.root)) + "/inference_eval/m")
    writer.write_scalars(5, {"eval/accuracy": accuracy})
    writer.close()
    cloud.services.jobs[job].state = state


def test_two_jobs_are_submitted_looked_at_and_compared(cloud, experiment, submit, vertex):
    for name, accuracy in (("one", 40.0), ("two", 60.0)):
        code, out, err = submit(name, *rank_eval(name), more=("--labels", "team=x"))
        assert code == 0, err
        job = out.split()[-1]
        assert out == f"submitted {job}\n"
        number = job.rpartition("/")[2]
        assert f"t0repro vertex status {number} --project p --location us-central1 --wait" in err
        code, out, _ = vertex("status", job)
        assert code == 0 and out.splitlines()[-1] == "waiting"
        end(cloud, job, accuracy)
        code, out, _ = vertex("status", job.rpartition("/")[2])
        assert code == 0
        assert out.splitlines()[1:] == [f"m/accuracy: {accuracy:g} at step 5", "succeeded"]
    code, out, err = vertex("compare", "t5")
    assert code == 0, err
    rows = [line.split() for line in out.splitlines() if line.strip()]
    assert ["state", "COMPLETE", "COMPLETE"] in rows
    assert ["m/accuracy", "40", "at", "5", "60", "at", "5"] in rows
    done = commands.vertex_process("compare", "t5", "--json")
    assert done.returncode == 0 and foreign_lines(done.stderr) == [], done.stderr
    one, two = json.loads(done.stdout)
    assert two["metrics"] == {"m/accuracy": [60.0, 5]} and one["facts"] == two["facts"]
    assert one["name"] == "one" and one["facts"]["machine_type"] == "n1-standard-4"
    code, out, _ = vertex("compare", "t5", "--run", "two")
    assert "40 at 5" not in out and "60 at 5" in out
    code, _, err = vertex("compare", "t5", "--run", "tow")
    assert code == 2 and "Nearest: 'two'" in err


def test_a_failed_job_is_an_exit_code_and_says_how_to_go_on(cloud, experiment, submit, vertex):
    job = submit("one", *rank_eval("o"))[1].split()[-1]
    cloud.services.jobs[job].error.message = "The replica exited with status 1."
    end(cloud, job, 40.0, JobState.JOB_STATE_FAILED)
    code, out, err = vertex("status", job)
    assert code == 2 and "m/accuracy: 40 at step 5" in out
    assert "The job failed: The replica exited with status 1." in err and "vertex logs" in err
    assert cloud.services.contexts[f"{STORE}/contexts/t5-one"].metadata["_state"] == "FAILED"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a", *rank_eval("o"), "--limt=3"), "No such option: --limt"),
        pytest.param(
            ("a", "--", "t5_mesh_transformer", "--backnd=mtf"),
            "Unknown command line flag 'backnd'",
            marks=[pytest.mark.slow, pytest.mark.mtf],
        ),
        (("a", *RANK_EVAL), "Missing option '--out'"),
        (("a", "--run_mode", "evaluate"), "no run mode 'evaluate'"),
        (("a",), "nothing to do"),
        (("a", "--gin_file", "x.gin"), "are for run modes"),
        (("a", "--run_mode", "aux", "--labels", "x"), "x is not a label"),
    ],
)
def test_a_mistake_ends_with_2_before_anything_is_asked_of_the_services(
    cloud, submit, arguments, message
):
    code, out, err = submit(*arguments)
    assert code == 2 and not out, err
    assert message in " ".join(err.replace("│", " ").split())
    assert not (cloud.services.calls or cloud.staged())


def test_a_record_that_may_not_be_read_ends_with_2_and_changes_nothing(
    cloud, experiment, submit, vertex
):
    job = submit("one", *rank_eval("o"))[1].split()[-1]
    end(cloud, job, 40.0)
    cloud.storage.statuses["GET"] = [403] * 10  # the client asks for other things, too
    code, _, err = vertex("status", job)
    assert code == 2 and "read what tracks the job: permission denied" in err
    cloud.storage.statuses.clear()
    code, out, _ = vertex("status", job)
    assert code == 0 and "m/accuracy: 40 at step 5" in out


def test_a_name_that_is_taken_ends_with_2_and_no_second_job(cloud, experiment, submit):
    assert submit("taken", *rank_eval("o"))[0] == 0
    code, out, err = submit("taken", *rank_eval("o"))
    assert code == 2 and not out and "has a run taken already" in err
    assert len(cloud.services.jobs) == 1


def test_a_run_name_without_an_experiment_is_refused(cloud, monkeypatch, capsys):
    code, _, err = commands.submit(monkeypatch, capsys, "--run_name", "a", *rank_eval("o"))
    assert code == 2 and "both an experiment and a name" in err


def test_the_log_is_printed_and_a_job_is_canceled(cloud, experiment, submit, vertex):
    job = submit("one", *rank_eval("o"))[1].split()[-1]
    cloud.services.logs[job] = "begins\nends\n"
    code, out, _ = vertex("logs", job, "--last", "1")
    assert code == 0 and out.endswith(" ends\n") and out.count("\n") == 1
    code, out, _ = vertex("cancel", job)
    assert code == 0 and "Asked to end" in out
    code, _, err = vertex("status", job)
    assert code == 2 and "The job was canceled." in err


def test_a_name_that_no_resource_can_have_is_a_users_mistake(cloud, experiment, submit, vertex):
    for command in ("status", "logs", "cancel", "compare"):
        code, out, err = vertex(command, "my job")
        assert code == 2 and not out and "nothing there can have this name" in err, err
    # Of two options of one name the last counts.
    code, _, err = submit("one", *rank_eval("o"), more=("--experiment", "My experiment"))
    assert code == 2 and "where: --experiment My experiment" in err, err
    assert not cloud.services.jobs and not cloud.staged()


def test_t5xs_own_flags_and_those_of_its_script_reach_the_container(
    cloud, experiment, monkeypatch, tmp_path, vertex
):
    monkeypatch.chdir(tmp_path)
    no_credentials(monkeypatch, tmp_path)
    (tmp_path / "mine.gin").write_text("include 't5x/examples/t5/t5_1_1/tiny.gin'\n")
    code, out, err = vertex(
        *("submit", "--project_id=p", "--region=us-central1", "--staging_bucket=gs://bucket"),
        *("--image_uri=image", "--job_name_prefix=d", "--run_mode=infer", "--dry_run"),
        *("--training_sa=a@b.c", "--sync=False"),
        *("--accelerator_type=TPU_V2", "--accelerator_count=8"),
        *("--gin_files=mine.gin,t5x/configs/runs/infer.gin", "--gin_search_paths=.,/flaxformer"),
        # The container has credentials for its addresses, and a dry run needs none.
        "--tfds_data_dir=gs://bucket/tfds",
        "--gin_overwrites=DROPOUT_RATE=0.0,CHECKPOINT_PATH='gs://bucket/a',MIXTURE_OR_TASK_NAME='t'"
        ",INFER_OUTPUT_DIR='/gcs/bucket/o',TASK_FEATURE_LENGTHS={'inputs': 8, 'targets': 8}",
    )
    assert code == 0, err
    assert "--tfds_data_dir=gs://bucket/tfds" in out
    assert "service_account: a@b.c" in out and re.search(r"display_name: d_\d{14}\n", out), out
    assert "--gin.TASK_FEATURE_LENGTHS={'inputs': 8, 'targets': 8}" in out.replace("''", "'")
    assert ".,/flaxformer" in out and "--gin_file=t5x/configs/runs/infer.gin" in out


def test_an_export_is_refused_with_the_reason(cloud, vertex):
    places = ("--staging_bucket=gs://b", "--image_uri=i", "--display_name=d")
    code, _, err = vertex("submit", *places, "--run_mode=export")
    assert code == 2 and "a SavedModel" in err
    # Not first a complaint of options that would not help.
    code, _, err = vertex("submit", "--run_mode=export")
    assert code == 2 and "a SavedModel" in err
