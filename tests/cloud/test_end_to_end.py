"""From `t0repro vertex submit` to summary metrics, with the job's container executed here."""

import importlib.util
import re

import pytest
import yaml

from t0repro.errors import UserError
from t0repro.partitioning import topologies
from tests.cloud.commands import SUBMIT, no_credentials, submit, vertex
from tests.cloud.services import STORE
from tests.cloud.tiny_jobs import TASK


@pytest.mark.slow
def test_a_training_from_submit_to_summary_metrics(
    cloud,
    experiment,
    gin_file,
    monkeypatch,
    capsys,
):
    cloud.services.run_jobs = True
    code, out, err = submit(
        monkeypatch,
        capsys,
        *("--run_mode", "train", "--gin_file", gin_file, "--gin.TRAIN_STEPS=4"),
        *("--gin.MODEL_DIR='/gcs/bucket/model'", "--experiment", "t5", "--run_name", "small-1"),
        *("--tensorboard", "7", "--wait", "--poll_seconds", "0.2"),
    )
    services = cloud.services
    assert code == 0, (out, err, services.logs)
    state = services.contexts[f"{STORE}/contexts/t5-small-1"].metadata
    metrics = state["_metrics"]
    best = metrics[f"{TASK}/accuracy"]
    assert state["_state"] == "COMPLETE" and 0 <= best <= 100
    assert metrics[f"{TASK}/accuracy/step"] in (2, 4)
    assert f"{TASK}/accuracy: {best:.6g} at step" in out
    # Every point of every scalar that the training logged is in the TensorBoard.
    curve = services.points[f"small-1-inference-eval-{TASK.replace('_', '-')}", "eval/accuracy"]
    assert sorted(curve) == [2, 4] and max(curve.values()) == pytest.approx(best)
    assert sorted(services.points["small-1-train", "loss"])[-1] == 4
    (execution,) = services.executions.values()
    assert execution.state.name == "COMPLETE"


@pytest.mark.slow
@pytest.mark.mtf
def test_the_readmes_commands_run_as_jobs_on_mesh_tensorflow_and_are_scored_on_jax(
    cloud, experiment, monkeypatch, capsys
):
    """t5_mesh_transformer trains, and a rank evaluation takes the checkpoint that it leaves."""
    cloud.services.run_jobs = True
    tracked = ("--experiment", "t5", "--wait", "--poll_seconds", "0.5", "--run_name")
    code, _, err = submit(
        monkeypatch,
        capsys,
        *(*tracked, "mesh-1", "--", "t5_mesh_transformer", "--backend=mtf"),
        *("--model_dir=/gcs/bucket/t0", "--module_import=t0repro.tasks.demo"),
        *("--gin_file=dataset.gin", "--gin_param=MIXTURE_NAME = 'demo_train'"),
        *("--gin_file=demo/t5.1.1.demo.gin", "--gin_param=utils.run.mesh_shape = []"),
        *("--gin_param=run.train_steps = 2", "--gin_param=run.save_checkpoints_steps = 2"),
        "--gin_param=run.batch_size = ('sequences_per_batch', 4)",
    )
    assert code == 0, (err, cloud.services.logs)
    code, out, err = submit(
        monkeypatch,
        capsys,
        *(*tracked, "ranks-1", "--run_mode", "rank-eval", "--"),
        *("--checkpoint=/gcs/bucket/t0", f"--mixture={TASK}", "--limit=8"),
        *("--module_import=t0repro.tasks.demo", "--out=/gcs/bucket/ranks"),
    )
    assert code == 0, (err, cloud.services.logs)
    metrics = cloud.services.contexts[f"{STORE}/contexts/t5-ranks-1"].metadata["_metrics"]
    accuracy = metrics["rank_eval/synthetic_glue/mrpc"]
    assert 0 <= accuracy <= 100 and metrics["rank_eval/synthetic_glue/mrpc/step"] == 2
    assert f"rank_eval/synthetic_glue/mrpc: {accuracy:.6g} at step 2" in out


def test_a_dry_run_prints_what_would_be_sent_and_sends_nothing(
    cloud, gin_file, monkeypatch, capsys
):
    code, out, err = submit(
        monkeypatch,
        capsys,
        *("--run_mode", "train", "--gin_file", gin_file, "--gin.TRAIN_STEPS=4"),
        *("--gin.MODEL_DIR='gs://bucket/model'", "--dry_run"),
    )
    assert code == 0, err
    (pool,) = yaml.safe_load(out)["worker_pool_specs"]
    mode, file, steps, model_dir, search = pool["container_spec"]["args"]
    assert (mode, steps) == ("--run_mode=train", "--gin.TRAIN_STEPS=4")
    assert model_dir == "--gin.MODEL_DIR='gs://bucket/model'"
    assert re.fullmatch("--gin_file=/gcs/bucket/t0repro/small-.*/gin/0-train.gin", file)
    assert search.endswith("/include")
    assert not (cloud.services.calls or cloud.staged())


SLICE = ("--machine_type", "ct5lp-hightpu-4t", "--tpu_topology", "2x2")


def test_a_dry_run_compiles_when_it_is_asked_to_alone(cloud, gin_file, monkeypatch, capsys):
    find_spec = importlib.util.find_spec
    found = importlib.util.find_spec("json")  # libtpu, as if it were installed
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: found if name == "libtpu" else find_spec(name)
    )

    def compiles(topology):
        raise UserError(f"compiling for {topology}")

    monkeypatch.setattr(topologies, "devices_of", compiles)
    run = (*SUBMIT, *SLICE, "--run_mode", "train", "--gin_file", gin_file)
    run = (*run, "--gin.TRAIN_STEPS=4", "--gin.MODEL_DIR='gs://bucket/model'", "--dry_run")
    code, out, err = vertex(monkeypatch, capsys, "submit", *run)
    assert code == 0 and "memory (estimated; --fit compiles it)" in err, err
    (pool,) = yaml.safe_load(out)["worker_pool_specs"]
    assert pool["machine_spec"] == {"machine_type": "ct5lp-hightpu-4t", "tpu_topology": "2x2"}
    code, _, err = vertex(monkeypatch, capsys, "submit", *run, "--fit")
    assert code == 2 and "compiling for v5e-4" in err, err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (SLICE, "compiled without --fit"),
        (("--machine_type", "n1-standard-4", "--dry_run"), "only for TPU slices"),
    ],
)
def test_fit_is_refused_where_it_would_change_nothing(options, said, cloud, monkeypatch, capsys):
    run = (*SUBMIT, *options, "--run_mode", "train", "--fit", "--gin.MODEL_DIR='gs://bucket/m'")
    code, out, err = vertex(monkeypatch, capsys, "submit", *run)
    assert code == 2 and said in err and not out, err
    assert not cloud.services.calls


def test_fit_without_the_compiler_is_refused(cloud, monkeypatch, capsys):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "libtpu" else find_spec(name)
    )
    run = (*SUBMIT, *SLICE, "--run_mode", "train", "--fit", "--dry_run")
    code, _, err = vertex(monkeypatch, capsys, "submit", *run)
    assert code == 2 and "libtpu, which is not installed" in err and "EXTRAS=tpu" in err, err


@pytest.mark.parametrize("named", [None, "/nowhere/key.json"])
def test_credentials_are_asked_for_before_any_file_is_read(
    named, cloud, monkeypatch, capsys, tmp_path
):
    no_credentials(monkeypatch, tmp_path)
    if named:
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", named)
    # Neither the option's nor the file's fault is met.
    run = ("--run_mode", "train", "--gin_file", "missing.gin", "--gin.MODEL_DIR='gs://bucket/m'")
    code, out, err = submit(monkeypatch, capsys, *run)
    assert code == 2 and "credentials" in err and "gcloud auth" in err and not out, err
    assert "missing.gin" not in err and (named or "") in err
    assert not cloud.services.calls
    # A dry run sends nothing and needs none.
    code, _, err = submit(monkeypatch, capsys, *run, "--dry_run")
    assert code == 2 and "missing.gin" in err, err
