"""T0's two commands compile and fit, at one layer a tower, for the slices that the paper used."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench" / "precompile_t0.py"

pytestmark = [pytest.mark.slow, pytest.mark.tpu, pytest.mark.mtf]


@pytest.mark.parametrize("size", ["3B", "11B"])
@pytest.mark.parametrize(
    ("command", "devices"),
    [
        ("train", "devices: 512 x TPU v3, data 64, model 8"),
        ("evaluate", "devices: 128 x TPU v3, data 32, model 4"),
    ],
)
def test_t0s_commands_compile_and_fit(size, command, devices):
    arguments = ["--sizes", size, "--commands", command, "--layers", "1"]
    done = subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert devices in lines
    programs = [line for line in lines if "compiled in" in line]
    assert len(programs) == (1 if command == "train" else 3)
    assert sum(line.startswith("fits with") for line in lines) == len(programs)
