"""Every run mode as a job: its container executed here, its results back through tracking."""

import shutil

import pytest

from tests.cloud import tiny_jobs
from tests.cloud.commands import submit
from tests.cloud.services import STORE, start_container
from tests.cloud.test_experiments import lineage
from tests.cloud.tiny_jobs import TASK

pytestmark = pytest.mark.slow
INPUTS = dict.fromkeys(("configuration", "architecture", "dataset"), "INPUT")
CHECKPOINT = "--gin.CHECKPOINT_PATH='/gcs/bucket/model/checkpoint_2'"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A training run's folder with the checkpoints of steps 0 and 2."""
    folder = tmp_path_factory.mktemp("trained")
    tiny_jobs.write(folder / "gin")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder / "gin")
        words = ["--run_mode=train", "--gin_file=train.gin", "--gin.TRAIN_STEPS=2"]
        words += [f"--gin.MODEL_DIR='{folder / 'model'}'"]
        with start_container((), words, folder) as process:
            output = process.communicate()[0]
    assert process.returncode == 0, output
    return folder / "model"


@pytest.fixture
def job(cloud, experiment, gin_file, monkeypatch, capsys):
    """Submits a tracked job and follows it: what it printed, its run's metadata and metrics."""
    cloud.services.run_jobs = True

    def job(mode, *words, tensorboard=("--tensorboard", "7")):
        tracked = ("--experiment", "t5", "--run_name", "a", "--wait", "--poll_seconds", "0.2")
        options = (*tracked, *tensorboard, "--run_mode", mode)
        code, out, err = submit(monkeypatch, capsys, *options, *words)
        assert code == 0, (err, cloud.services.logs)
        state = cloud.services.contexts[f"{STORE}/contexts/t5-a"].metadata
        assert state["_state"] == "COMPLETE" and out.endswith("succeeded\n")
        return out, dict(state["_metrics"]) if "_metrics" in state else {}

    return job


@pytest.mark.parametrize(
    ("mode", "words", "artifacts", "metric", "file"),
    [
        pytest.param(
            "eval",
            ("--gin_file=eval.gin", CHECKPOINT, "--gin.EVAL_OUTPUT_DIR='/gcs/bucket/out'"),
            {**INPUTS, "model": "OUTPUT"},
            f"{TASK}/accuracy",
            f"out/inference_eval/{TASK}-metrics.jsonl",
            id="eval",
        ),
        pytest.param(
            "infer",
            ("--gin_file=infer.gin", CHECKPOINT, "--gin.INFER_OUTPUT_DIR='/gcs/bucket/out'"),
            {**INPUTS, "model": "OUTPUT"},
            None,
            "out/*-predict.jsonl-00000-of-00001",
            id="infer",
        ),
        pytest.param(
            "precompile",
            ("--gin_file=precompile.gin", "--gin.MODEL_DIR='/gcs/bucket/out'"),
            {**INPUTS, "model": "OUTPUT"},
            None,
            "out/*",
            id="precompile",
        ),
        # What these compute is said in flags, so they have no configuration in gin.
        pytest.param(
            "rank-eval",
            (
                *("--", "--checkpoint=/gcs/bucket/model", f"--mixture={TASK}", "--limit=8"),
                *("--module_import=t0repro.tasks.demo", "--out=/gcs/bucket/out"),
            ),
            {"dataset": "INPUT", "model": "OUTPUT"},
            "rank_eval/synthetic_glue/mrpc",
            "out/report.html",
            id="rank-eval",
        ),
        pytest.param(
            "aux",
            (
                *("--", "--model_dir=gs://bucket/model", f"--auxiliary_job_mixtures={TASK}"),
                *("--auxiliary_job_gin_file=aux.gin", "--replace_gin_file", "--once"),
                "--auxiliary_job_build_target_path=//t5x:eval",
            ),
            {"dataset": "INPUT", "model": "OUTPUT"},
            f"{TASK}/accuracy",
            f"model/inference_eval/{TASK}/events*",
            id="aux",
        ),
    ],
)
def test_results_of_a_run_mode_come_back(cloud, trained, job, mode, words, artifacts, metric, file):
    shutil.copytree(trained, cloud.bucket / "model")
    _, metrics = job(mode, *words)
    assert lineage(cloud.services) == {f"a-{name}": how for name, how in artifacts.items()}
    assert [*cloud.bucket.glob(file)], cloud.services.logs
    if metric is None:
        assert not metrics
    else:
        assert 0 <= metrics[metric] <= 100 and metrics[f"{metric}/step"] in (0, 2)
    # The configuration is whole: what was overridden stands in it, too.
    for artifact in cloud.services.artifacts.values():
        if artifact.display_name == "a-configuration":
            text = (cloud.storage.root / artifact.uri.removeprefix("gs://")).read_text()
            assert "/gcs/bucket/out" in text and TASK in text


def test_two_replicas_train_together(cloud, trained, job, gin_file):
    out, metrics = job(
        *("train", "--replica_count", "2", "--gin_file", gin_file, "--gin.TRAIN_STEPS=2"),
        "--gin.MODEL_DIR='/gcs/bucket/two'",
    )
    (log,) = cloud.services.logs.values()
    assert "processes: 2, coordinated by 127.0.0.1:" in log
    assert metrics[f"{TASK}/accuracy/step"] in (0, 2) and "at step" in out
    assert (cloud.bucket / "two/checkpoint_2").is_dir()
