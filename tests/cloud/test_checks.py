"""What would fail in the cloud fails here, without a network."""

from importlib.util import find_spec

import pytest

from t0repro.cloud.vertex.accelerators import check_machines, tpu_slice
from t0repro.cloud.vertex.checks import check_job
from t0repro.cloud.vertex.command_line import read_arguments
from t0repro.cloud.vertex.spec import Machines
from t0repro.errors import UserError
from t0repro.storage import buckets, stores
from tests.runs.tiny_gin import MODEL, SIZES

CPU = Machines("n1-standard-4")
V3 = Machines("cloud-tpu", "TPU_V3", 8)
TRAIN = (
    "--run_mode=train", f"--gin_file={MODEL}", "--gin_file=t5x/configs/runs/pretrain.gin",
    *(f"--gin_bindings={binding}" for binding in SIZES),
    "--gin.DROPOUT_RATE=0.0", "--gin.MIXTURE_OR_TASK_NAME='m'", "--gin.TRAIN_STEPS=4",
    "--gin.TASK_FEATURE_LENGTHS={'inputs': 8, 'targets': 8}", "--gin.MODEL_DIR='gs://b/m'",
)  # fmt: skip


def checked(*words, machines=CPU, location="europe-west4"):
    return check_job(read_arguments(words), machines, location)


def test_a_training_is_read_as_the_container_will():
    configured, lines = checked(*TRAIN)
    assert (configured.output, configured.mixture, configured.split) == ("gs://b/m", "m", "train")
    assert "Total number of parameters: " in configured.architecture
    assert "MODEL_DIR = 'gs://b/m'" in configured.text
    assert lines == ("memory: not checked, because no figures are known for this machine",)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("--gin.TRAIN_STEPS=4", "--gin.TRAIN_STEP=4"), "TRAIN_STEPS .*'TRAIN_STEP' may be meant"),
        (("--gin.MODEL_DIR='gs://b/m'", ""), "without a value: MODEL_DIR"),
        (("--gin.MODEL_DIR='gs://b/m'", "--gin.MODEL_DIR='runs/m'"), "lost with the job"),
    ],
)
def test_what_the_run_would_refuse_is_refused(change, message):
    words = [change[1] if word == change[0] else word for word in TRAIN]
    with pytest.raises(UserError, match=message):
        checked(*filter(None, words))


@pytest.mark.parametrize("folder", ["gs://b/m", "/gcs/b/m"])
def test_a_folder_for_results_may_stand_in_a_gin_file(folder, tmp_path):
    (tmp_path / "my.gin").write_text(f"MODEL_DIR = '{folder}'\n")
    words = [word for word in TRAIN if "MODEL_DIR" not in word]
    configured, _ = checked(*words, f"--gin_file={tmp_path / 'my.gin'}")
    assert configured.output == folder


def test_a_gin_file_below_gcs_is_read_here_from_its_bucket(bucket_servers, monkeypatch):
    for name, value in bucket_servers["gs"].items():
        monkeypatch.setenv(name, value)
    stores.file_system.cache_clear()
    buckets.write("gs://bucket/my.gin", b"MODEL_DIR = 'gs://b/m'\n")
    words = [word for word in TRAIN if "MODEL_DIR" not in word]
    configured, _ = checked(*words, "--gin_file=/gcs/bucket/my.gin")
    assert configured.output == "gs://b/m"
    with pytest.raises(UserError, match="There is no gin file gs://bucket/other.gin"):
        checked(*words, "--gin_file=/gcs/bucket/other.gin")
    stores.file_system.cache_clear()


def test_an_evaluation_and_an_inference_have_their_configuration_too():
    for mode, folder in (("eval", "EVAL_OUTPUT_DIR"), ("infer", "INFER_OUTPUT_DIR")):
        dropped = ("--run_mode", "--gin_file=t5x", "--gin.MODEL_DIR", "--gin.TRAIN_STEPS")
        words = [word for word in TRAIN if not word.startswith(dropped)]
        configured, _ = checked(
            f"--run_mode={mode}", f"--gin_file={MODEL}",
            f"--gin_file=t5x/configs/runs/{mode}.gin", *words,
            f"--gin.{folder}='/gcs/b/out'", "--gin.CHECKPOINT_PATH='gs://b/c'",
        )  # fmt: skip
        assert configured.output == "/gcs/b/out" and "CHECKPOINT_PATH" in configured.text


def test_a_rank_evaluation_of_a_local_checkpoint_is_refused():
    with pytest.raises(UserError, match="container has no checkpoint runs/model"):
        checked("--run_mode=rank-eval", "--checkpoint=runs/model", "--out=/gcs/b/o", "--mixture=m")


def test_a_training_from_a_local_checkpoint_is_refused():
    words = [word.replace("pretrain", "finetune") for word in TRAIN]
    with pytest.raises(UserError, match="container has no checkpoint runs/c"):
        checked(*words, "--gin.INITIAL_CHECKPOINT_PATH='runs/c'")


def test_a_job_without_a_folder_for_results_is_refused():
    with pytest.raises(UserError, match="no folder for its results"):
        checked("--run_mode=rank-eval", "--checkpoint=gs://b/c", "--mixture=m")


@pytest.mark.parametrize(
    ("machines", "location", "message"),
    [
        (Machines("cloud-tpu", "NVIDIA_L4", 1), "us-central1", "takes TPUs"),
        (Machines("cloud-tpu"), "us-central1", "takes TPUs"),
        (Machines("cloud-tpu", "TPU_V3", 9), "europe-west4", "does not take 9"),
        (Machines("cloud-tpu", "TPU_V3", 8, 2), "europe-west4", "one replica"),
        (Machines("cloud-tpu", "TPU_V3", 32), "us-central1", "up to 8 cores"),
        (Machines("cloud-tpu", "TPU_V3", 8), "us-west1", "has no TPU_V3"),
        (Machines("n1-standard-8", "NVIDIA_L4", 1), "us-central1", "n1-standard-8 does not take"),
        (Machines("a2-highgpu-4g", "NVIDIA_TESLA_A100", 1), "us-central1", "does not take 1"),
        (Machines("a4-highgpu-8g", "NVIDIA_B200", 4), "us-central1", "does not take 4"),
        (Machines("a4x-highgpu-8g", "NVIDIA_GB200", 8), "us-central1", "as a4x-highgpu-4g"),
        (Machines("g4-standard-48", "NVIDIA_B200", 8), "us-central1", "as a4-highgpu-8g"),
        (Machines("a3-highgpu-8g", "NVIDIA_RTX_PRO_6000", 8), "us-central1", "g4-standard-48"),
        (Machines("g4-standard-96", "NVIDIA_RTX_PRO_6000", 1), "us-central1", "does not take 1"),
        (
            Machines("ct5lp-hightpu-8t", tpu_topology="2x2"),
            "us-central1",
            "do not fill whole machines",
        ),
        (Machines("ct5lp-hightpu-4t"), "us-central1", "2 axes"),
        (Machines("ct5p-hightpu-4t", tpu_topology="2x2"), "us-central1", "3 axes"),
        (Machines("ct6e-standard-4t", "TPU_V3", 8), "us-central1", "already says"),
        (Machines("ct6e-standard-4t", None, 0, 2, "2x4"), "us-central1", "one replica"),
        (Machines("n1-standard-4", tpu_topology="2x2"), "us-central1", "takes no --tpu_topology"),
        (Machines("g2-standard-8", "TPU_V3", 8), "europe-west4", "g2-standard-8 does not take"),
    ],
)
def test_machines_that_do_not_exist_are_refused(machines, location, message):
    with pytest.raises(UserError, match=message):
        check_machines(machines, location)


@pytest.mark.parametrize(
    "words", [("--run_mode=aux", "--model_dir=gs://b/m"), ("t5_mesh_transformer",)]
)
def test_replicas_that_would_each_do_the_whole_work_are_refused(words):
    with pytest.raises(UserError, match="runs on one machine"):
        checked(*words, machines=Machines("n1-standard-4", replica_count=2))


def test_what_the_tables_do_not_know_is_said_and_passes():
    new = Machines("x9-highgpu-8g", "NVIDIA_X9", 8)
    assert check_machines(new, "us-central1") == [
        "NVIDIA_X9: not in the table of accelerators, so not checked"
    ]
    a100 = Machines("a2-highgpu-1g", "NVIDIA_TESLA_A100", 1)
    (warning,) = check_machines(a100, "us-central1")
    assert "which regions have NVIDIA_TESLA_A100 is not known here" in warning
    assert not check_machines(V3, "europe-west4")


@pytest.mark.parametrize(
    ("machine_type", "topology", "found"),
    [
        ("ct5lp-hightpu-4t", "4x4", ("v5e-16", 16)),
        # Named by cores, of which a chip has two; one device for each chip.
        ("ct5p-hightpu-4t", "2x2x2", ("v5p-16", 8)),
        ("ct6e-standard-4t", "2x4", ("v6e-8", 8)),
    ],
)
def test_a_slice_of_tpu_hosts_is_named_by_its_topology(machine_type, topology, found):
    machines = Machines(machine_type, tpu_topology=topology)
    assert tpu_slice(machines) == found
    lines = check_job(
        read_arguments(TRAIN + ("--gin.BATCH_SIZE=16",)), machines, "us-east5", compiles=False
    )[1]
    assert lines[-1].startswith("memory (estimated; ")


def test_mesh_tensorflow_is_refused_on_v6e_alone():
    words = ("t5_mesh_transformer", "--backend=mtf", "--model_dir=gs://b/m")
    with pytest.raises(UserError, match="cannot run on TPU v6e"):
        checked(*words, machines=Machines("ct6e-standard-4t", tpu_topology="2x2"))
    with pytest.raises(UserError) as other:
        checked(*words, machines=Machines("ct5lp-hightpu-4t", tpu_topology="2x2"))
    assert "v6e" not in str(other.value)


@pytest.mark.tpu
def test_a_training_is_compiled_for_its_slice():
    lines = checked(*TRAIN, "--gin.BATCH_SIZE=8", machines=V3)[1]
    assert lines[-1].startswith("memory: the train step fits with")


@pytest.mark.skipif(find_spec("libtpu") is not None, reason="the compiler is here")
def test_without_the_compiler_a_training_is_estimated_for_its_slice():
    lines = checked(*TRAIN, "--gin.BATCH_SIZE=8", machines=V3)[1]
    assert lines[-1].startswith("memory (estimated; the extra tpu")


def test_a_model_that_fits_no_gpu_is_refused_and_a_small_one_fits():
    gpu = Machines("g2-standard-8", "NVIDIA_L4", 1)
    lines = checked(*TRAIN, machines=gpu)[1]
    assert lines[-1].startswith("memory (estimated): ") and lines[-1].endswith("it fits.")
    large = [word.replace(MODEL, "t5x/examples/t5/t5_1_1/xxl.gin") for word in TRAIN]
    with pytest.raises(UserError, match="does not fit into memory"):
        checked(*large, machines=gpu)


def test_the_readmes_training_is_read_with_what_it_trains_on():
    configured, _ = checked(
        "t5_mesh_transformer", "--backend=mtf", "--model_dir=gs://b/t0",
        "--module_import=t0repro.tasks.demo", "--gin_file=dataset.gin",
        "--gin_param=MIXTURE_NAME = 'demo_train'", "--gin_file=demo/t5.1.1.demo.gin",
        "--gin_param=utils.run.mesh_shape = []", "--gin_param=run.train_steps = 100",
    )  # fmt: skip
    assert (configured.output, configured.mixture) == ("gs://b/t0", "demo_train")
    assert "MIXTURE_NAME" in configured.text and configured.architecture
