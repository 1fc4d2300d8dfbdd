"""The one command for a lent GPU, tried on a CPU with a tiny model."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "bench" / "gpu.py"


def run(out, *arguments):
    command = [sys.executable, "-P", str(SCRIPT), str(out), "--tiny", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads((out / "gpu.json").read_text())


def test_each_part_is_written_once_and_what_a_cut_left_is_not_run_again(tmp_path):
    figures = run(tmp_path, "--only", "kernels", "lora")
    assert list(figures) == ["kernels", "lora"]
    assert not [found for found in figures.values() if "error" in found]
    assert figures["kernels"]["float32"] == "" and figures["lora"]["rate"] > 0

    again = run(tmp_path, "--only", "kernels", "large", "--minutes", "0")
    assert again == figures | {"large": {"error": "no time left"}}
    table = (tmp_path / "gpu.md").read_text()
    assert "| large | 0 s | error no time left |" in table and "mfu" in table


def test_the_wheels_that_such_a_machine_lacks_are_locked(tmp_path):
    done = subprocess.run([sys.executable, SCRIPT, "--wheels"], capture_output=True, text=True)
    lines = done.stdout.splitlines()
    names = [line.partition("==")[0] for line in lines if "==" in line]
    assert {"jaxtyping", "pytest-timeout", "setuptools"} < set(names) and "--hash" in lines[1]
