"""T0's commands on a machine without a TPU: its flags, its mesh, its module, and Ctrl-C."""

from pathlib import Path

import mesh_commands as commands
import pytest

pytestmark = pytest.mark.mtf

TPU = [
    "--tpu=my-tpu",
    "--gcp_project=my-project",
    "--tpu_zone=europe-west4-a",
    "--gin_param=utils.tpu_mesh_shape.tpu_topology = 'v3-512'",
    "--gin_param=utils.tpu_mesh_shape.model_parallelism = 8",
]
BACKENDS = ("mtf", "jax")


def train(model_dir: Path, backend: str, *more: str) -> list[str]:
    """Flags of a training run that takes the mesh of a TPU, as T0's do."""
    flags = [flag for flag in commands.TRAIN if "mesh_shape" not in flag]
    return [f"--model_dir={model_dir}", *flags, f"--backend={backend}", *more]


@pytest.mark.parametrize("backend", BACKENDS)
def test_t0s_tpu_flags_run_here_and_say_what_becomes_of_them(server, tmp_path, backend):
    flags = train(tmp_path / "model", backend, *TPU, "--gin_param=run.train_steps = 1")
    code, text = server.run(flags)
    assert code == 0, text
    assert "--tpu=my-tpu, --gcp_project=my-project, --tpu_zone=europe-west4-a: no effect" in text
    assert "mesh_shape batch:64,model:8, of tpu_mesh_shape: one device here" in text
    assert "8 sequences of 32 + 8 tokens" in text and "GB" in text
    assert text.index("mesh_shape") < text.index("step 1") if "step 1" in text else True
    assert "Traceback" not in text


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_mesh_of_t5s_readme_for_one_device_trains(server, tmp_path, backend):
    """Its gradients are sums over the mesh, though over one device each."""
    more = ["--gin_param=utils.run.mesh_shape = 'model:1,batch:1'"]
    code, text = server.run(train(tmp_path / "model", backend, *more))
    assert code == 0, text


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("flag", "part"),
    [
        ("--gin_param=run.batch_size = 0", "batch_size is 0"),
        ("--gin_param=run.batch_size = ('tokens_per_batch', 100)", "sequences of 32 tokens"),
        ("--gin_param=run.sequence_length = 0", "at least 1"),
        ("--gin_param=dropout_rate = 1.5", "dropout_rate is 1.5"),
        ("--gin_param=run.save_checkpoints_steps = 0", "save_checkpoints_steps is 0"),
        ("--gin_param=run.keep_checkpoint_max = -1", "keep_checkpoint_max is -1"),
        ("--gin_param=d_modle = 10", "'d_model'"),
        ("--gin_param=tokens_per_batch=1048576", "run.batch_size = ('tokens_per_batch', N)"),
        ("--gin_param=num_layers = 100000000", "num_layers"),
    ],
)
def test_a_wrong_number_or_name_is_refused_alike_on_both(server, tmp_path, backend, flag, part):
    model_dir = tmp_path / "model"
    code, text = server.run(
        [f"--model_dir={model_dir}", *commands.TRAIN, f"--backend={backend}", flag]
    )
    assert code == 2, text
    assert part in text and "where: " in text and "fix: " in text
    assert "Traceback" not in text
    assert not model_dir.exists()


API = [
    "--module_import=tiny_tasks",
    "--use_model_api",
    "--mode=train",
    "--mixture_or_task=tiny_train",
    "--train_steps=1",
    "--input_sequence_length=32",
    "--target_sequence_length=8",
    *(flag for flag in commands.TRAIN if "models/" in flag or "d_kv" in flag or "pack_" in flag),
    "--gin_file=dataset.gin",
    "--gin_param=MIXTURE_NAME = 'tiny_train'",
    "--gin_param=MtfModel.learning_rate_schedule = 0.001",
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--batch_size=0"], "batch_size is 0"),
        (["--batch_size=8", "--gin_param=dropout_rate = 1.5"], "dropout_rate is 1.5"),
        (["--batch_size=8", "--gin_param=d_ff = 100000000000"], "does not fit into memory"),
        (["--batch_size=8", "--gin_param=d_modle = 10"], "'d_model'"),
    ],
)
def test_the_model_api_refuses_wrong_numbers_alike_on_both(server, tmp_path, backend, flags, part):
    model_dir = tmp_path / "model"
    code, text = server.run([f"--model_dir={model_dir}", *API, f"--backend={backend}", *flags])
    assert code == 2, text
    assert part in text and "Traceback" not in text
    assert not model_dir.exists()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_model_api_says_what_becomes_of_the_tpu_flags(server, tmp_path, backend):
    line = [f"--model_dir={tmp_path / 'm'}", *API, f"--backend={backend}", "--batch_size=8"]
    code, text = server.run([*line, "--tpu=my-tpu", "--tpu_topology=v3-8"])
    assert code == 0, text
    assert "--tpu=my-tpu: no effect without a TPU" in text
    assert "8 sequences of 32 + 8 tokens" in text and "it fits" in text


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_model_that_mesh_tensorflow_alone_has_is_refused_on_jax_only(server, tmp_path, backend):
    flag = "--gin_param=DenseReluDense.use_bias = True"
    steps = "--gin_param=run.train_steps = 1"
    line = [f"--model_dir={tmp_path / 'm'}", *commands.TRAIN, f"--backend={backend}", flag, steps]
    code, text = server.run(line)
    assert code == (0 if backend == "mtf" else 2), text


def test_without_arguments_the_command_says_what_to_give(server):
    code, text = server.run([])
    assert code == 2
    assert "nothing to run" in text and "--gin_file=dataset.gin" in text


def test_options_of_t5_are_taken_with_dashes_too(server, tmp_path):
    line = [flag.replace("--gin_param", "--gin-param") for flag in commands.TRAIN]
    code, text = server.run([f"--model-dir={tmp_path / 'm'}", *line, "--gin-param=d_modle = 1"])
    assert code == 2 and "d_modle" in text, text


# ---- Ctrl-C -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["score_eval", "infer", "eval"])
def test_ctrl_c_while_evaluating_says_that_it_starts_over(server, tmp_path, mode):
    line = [f"--model_dir={tmp_path}", f"--gin_file={mode}.gin", "--backend=jax"]
    code, text = server.run(line, presses=1)
    assert code == 130 and "Traceback" not in text
    assert "interrupted" in text and "an evaluation starts over" in text


@pytest.mark.parametrize(("backend", "presses"), [("mtf", 1), ("jax", 1), ("jax", 2)])
def test_ctrl_c_while_training_says_how_to_go_on(server, tmp_path, backend, presses):
    model_dir = tmp_path / "model"
    flags = [
        f"--model_dir={model_dir}", *commands.TRAIN, f"--backend={backend}",
        "--gin_param=run.train_steps = 100000",
    ]  # fmt: skip
    code, text = server.run(flags, presses=presses, once=model_dir / "metrics.jsonl")
    assert code == 130, text
    assert "Traceback" not in text
    assert "continues from" in text
