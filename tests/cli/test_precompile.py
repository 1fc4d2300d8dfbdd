"""`t0repro precompile` reads a run's gin files and compiles it for devices that are not here."""

import json
import socket
import subprocess
import sys

import numpy as np
import pytest
from jaxlib._hlo import HloModule

from ..helpers import commands

DEMO = [
    *("--module_import", "t0repro.tasks.demo", "--gin_file", "dataset.gin"),
    *("--gin_file", "demo/t5.1.1.demo.gin", "--gin_param", "MIXTURE_NAME = 'demo_train'"),
    *("--gin_param", "run.train_steps = 100"),
]


COMMAND = [sys.executable, "-P", "-m", "t0repro.cli", "precompile"]


def t5x_options(model_dir):
    files = ("t5x/examples/t5/t5_1_1/tiny.gin", "t5x/configs/runs/precompile.gin")
    return [
        *(f"--gin_file={name}" for name in files),
        "--gin.MIXTURE_OR_TASK_NAME='a_task'",
        "--gin.TASK_FEATURE_LENGTHS={'inputs': 16, 'targets': 8}",
        "--gin.BATCH_SIZE=8",
        "--gin.DROPOUT_RATE=0.1",
        f"--gin.MODEL_DIR='{model_dir}'",
    ]


def precompile(*options):
    return commands.run("t0repro", "precompile", *options)


@pytest.mark.mtf
def test_an_adapters_run_is_compiled_for_virtual_devices_in_its_layout(tmp_path):
    mesh = "utils.run.mesh_shape = 'batch:2,model:2'"
    adapter = "t0repro.jax_training.adapter = @t0repro.adapters.ia3()"
    given = ("--gin_param", mesh, "--gin_param", adapter, "--hlo", str(tmp_path))
    done = precompile(*DEMO, "--topology", "cpu-4", *given)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert lines[0] == "devices: 4 x cpu, data 2, model 2"
    assert any("communication" in line and "all-reduce" in line for line in lines)
    assert "all-reduce" in (tmp_path / "train.hlo.txt").read_text()


def test_precompile_gin_leaves_t5xs_files_in_its_model_dir(tmp_path):
    macros = t5x_options(tmp_path)
    options = ["--run_mode=precompile", *macros, "--topology=cpu-2", "--json"]
    done = commands.run("t0repro", "run", *options)
    assert done.returncode == 0, done.stderr[-3000:]
    shown = json.loads(done.stdout)
    assert shown["lines"][0] == "devices: 2 x cpu, data 2, model 1"
    (step,) = shown["steps"]
    assert step["name"] == "train" and step["memory"]["total"] > 0 and step["flops"] > 0
    assert np.load(tmp_path / "assignment").tolist() == [[0], [1]]
    for name in ("lowered_hlo_pre_optimization", "lowered_hlo_post_optimization"):
        module = HloModule.from_serialized_hlo_module_proto((tmp_path / name).read_bytes())
        assert module.name.startswith("jit_")
    # Without a run mode the files themselves say whose they are.
    missing = precompile(*macros[:-1])
    assert missing.returncode == 2 and "MODEL_DIR" in missing.stderr


@pytest.mark.slow
def test_two_processes_compile_for_the_devices_of_both_and_one_of_them_writes(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    flags = [f"--coordinator_address={address}", "--process_count=2"]
    started = [
        subprocess.Popen(
            [*COMMAND, *t5x_options(tmp_path), *flags, f"--process_index={index}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    (shown, said), (other, _) = (process.communicate() for process in started)
    assert [process.returncode for process in started] == [0, 0], said[-3000:]
    assert shown.startswith("devices: 2 x cpu, data 2, model 1\ntrain: compiled in ")
    assert other == "" and np.load(tmp_path / "assignment").shape == (2, 1)
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--topology", "cpu-2", "--multiprocess_gpu"], "single process can compile"),
        (["--demo", "--topology", "cpu-1", "--suggest"], "Name a TPU slice"),
        (["--topology", "cpu-none"], "no topology 'cpu-none'"),
        (["--topology", "v3-500"], "no topology 'v3-500'"),
        (["--topology", "cpu-2", "--run_mode", "infer"], "compiles T5X's training runs"),
    ],
)
def test_what_cannot_be_compiled_is_one_message(options, message):
    done = precompile(*options)
    assert done.returncode == 2
    assert message in done.stderr and "Traceback" not in done.stderr


def test_the_allowlist_holds_for_mesh_tensorflows_gin_files_too(tmp_path):
    (tmp_path / "mine.gin").write_text("import no_such_module\n")
    flags = ["--gin_import_allowlist=my_tasks", "--topology=cpu-1", "--dry_run"]
    done = precompile(*DEMO, f"--gin_file={tmp_path}/mine.gin", *flags)
    assert done.returncode == 2 and "--gin_import_allowlist" in done.stderr, done.stderr


@pytest.mark.parametrize("command", [["precompile"], ["parity", "--out", "x"]])
def test_without_gin_files_there_is_no_run(tmp_path, command):
    done = commands.run("t0repro", *command, cwd=tmp_path)
    assert done.returncode == 2 and "No gin file is given" in done.stderr, done.stderr
    assert "--demo" in done.stderr and not any(tmp_path.iterdir())
