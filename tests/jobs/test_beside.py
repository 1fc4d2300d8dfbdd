"""A training run takes its auxiliary jobs along; they end after its last checkpoint."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from t0repro.cloud.auxiliary import auxiliary_jobs_during_training
from t0repro.cloud.auxiliary_options import AuxiliaryOptions
from t0repro.config.t5x.gin_files import T5xInputs
from t0repro.errors import UserError
from t0repro.jobs.journal import read_status
from t0repro.storage import input_path, place

from .trainings import curve, save_checkpoints

T5 = str(Path(sys.executable).with_name("t5_mesh_transformer"))


def jobs_during_training(model_dir: Path | str, command: list[str] | str, **changes):
    target = command if isinstance(command, str) else " ".join(command)
    asked = {"auxiliary_job_mixtures": "m", "poll_seconds": 0.1} | changes
    options = AuxiliaryOptions(auxiliary_job_build_target_path=target, **asked)
    return auxiliary_jobs_during_training(model_dir, options, T5xInputs("train"))


def test_when_the_block_ends_every_checkpoint_is_done(tmp_path, evaluator):
    model_dir = tmp_path / "model"
    with jobs_during_training(model_dir, evaluator):
        save_checkpoints(model_dir, 3, 6)
    assert curve(model_dir / "inference_eval" / "m") == [(3, 0.75), (6, 0.8571)]


def test_a_job_that_could_not_work_stops_the_training_before_it_starts(tmp_path):
    with (
        pytest.raises(UserError, match="no mixtures"),
        jobs_during_training(tmp_path / "model", "true", auxiliary_job_mixtures=""),
    ):
        pytest.fail("the training started")


def test_a_bucket_out_of_reach_is_refused_before_the_training_starts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with (
        pytest.raises(UserError, match="not a known scheme"),
        jobs_during_training("foo://bucket/run", "true"),
    ):
        pytest.fail("the training started")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("bucket", ["s3"], indirect=True)
def test_every_checkpoint_of_a_training_in_a_bucket_is_evaluated_from_there(
    bucket, tmp_path, evaluator
):
    with jobs_during_training(bucket, evaluator):
        save_checkpoints(place(bucket), 3, 6)
    copy = input_path(bucket)
    assert curve(copy / "inference_eval" / "m") == [(3, 0.75), (6, 0.8571)]
    assert {path.name for path in (copy / "auxiliary" / "m" / "results").iterdir()} == {
        "m_3_predictions", "m_6_predictions"
    }  # fmt: skip
    assert [each.state for each in read_status(copy).values()] == ["succeeded"] * 2


def test_a_job_given_up_is_said_at_the_end(tmp_path):
    model_dir = tmp_path / "model"
    with (
        pytest.raises(UserError, match="not every auxiliary job"),
        jobs_during_training(model_dir, "false", max_failures=1),
    ):
        save_checkpoints(model_dir, 3)
    (progress,) = read_status(model_dir).values()
    assert progress.state == "given up" and progress.reason == "exit code 1"


def test_a_training_that_fails_ends_its_jobs_and_keeps_its_own_error(tmp_path):
    model_dir = tmp_path / "model"
    with (
        pytest.raises(ZeroDivisionError),
        jobs_during_training(model_dir, "sleep 600"),
    ):
        save_checkpoints(model_dir, 3)
        while not list(model_dir.glob("auxiliary/m/step_3/*.log")):
            pass
        raise ZeroDivisionError
    name = next(model_dir.glob("auxiliary/m/step_3/*.json")).name
    running = subprocess.run(["pgrep", "-f", name], capture_output=True, text=True, check=False)
    assert running.stdout == ""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["jax", "mtf"])
def test_t0s_command_evaluates_its_checkpoints_as_it_trains(tmp_path, backend, evaluator):
    model_dir = tmp_path / "model"
    lengths, target = "{'inputs': 32, 'targets': 8}", " ".join(evaluator)
    done = subprocess.run(
        [
            *(T5, f"--backend={backend}", f"--model_dir={model_dir}"),
            *("--module_import=t0repro.tasks.demo", "--gin_file=dataset.gin"),
            *("--gin_file=demo/t5.1.1.demo.gin", "--gin_param=MIXTURE_NAME = 'demo_train'"),
            *("--gin_param=utils.run.mesh_shape = []", "--gin_param=run.train_steps = 4"),
            *("--gin_param=run.save_checkpoints_steps = 2", "--gin_param=run.batch_size = 2"),
            *("--gin_param=run.keep_checkpoint_max = 1", "--poll_seconds=0.2"),
            f"--gin_param=run.sequence_length = {lengths}",
            *("--auxiliary_job_mixtures=m", f"--auxiliary_job_build_target_path={target}"),
        ],
        env=os.environ | {"T0REPRO_DATA_DIR": ""},
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).resolve().parents[2],
    )
    assert done.returncode == 0, done.stderr[-3000:]
    steps = [step for step, _ in curve(model_dir / "inference_eval" / "m")]
    assert steps[-1] == 4 and steps == sorted(set(steps))
