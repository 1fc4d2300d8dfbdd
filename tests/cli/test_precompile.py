"""`t0repro precompile` reads a run's gin files and compiles it for devices that are not here."""

import subprocess
import sys

import pytest

DEMO = [
    *("--module_import", "t0repro.tasks.demo", "--gin_file", "dataset.gin"),
    *("--gin_file", "demo/t5.1.1.demo.gin", "--gin_param", "MIXTURE_NAME = 'demo_train'"),
    *("--gin_param", "run.train_steps = 100"),
]


def precompile(*options):
    command = [sys.executable, "-P", "-m", "t0repro.cli", "precompile", *options]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.mtf
def test_a_run_is_compiled_for_virtual_devices_in_its_layout(tmp_path):
    mesh = "utils.run.mesh_shape = 'batch:2,model:2'"
    done = precompile(*DEMO, "--topology", "cpu-4", "--gin_param", mesh, "--hlo", str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert lines[0] == "devices: 4 x cpu, data 2, model 2"
    assert any("communication" in line and "all-reduce" in line for line in lines)
    assert "all-reduce" in (tmp_path / "train.hlo.txt").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--topology", "cpu-none"], "no topology 'cpu-none'"),
        (["--topology", "v3-500"], "no topology 'v3-500'"),
        (["--topology", "cpu-2", "--run_mode", "infer"], "takes a training"),
    ],
)
def test_what_cannot_be_compiled_is_one_message(options, message):
    done = precompile(*options)
    assert done.returncode == 2
    assert message in done.stderr and "Traceback" not in done.stderr
