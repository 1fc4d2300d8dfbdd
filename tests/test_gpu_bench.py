"""The one command for a GPU machine without network: three parts on a CPU, with a tiny model."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "bench" / "gpu.py"


def run(out, *arguments):
    work = out.parent / "work"
    command = [sys.executable, "-P", str(SCRIPT), str(out), "--tiny", f"--work={work}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in out.iterdir()) == ["gpu.json", "gpu.md"]
    assert (out / "gpu.md").read_text().startswith("| part | took |")
    return json.loads((out / "gpu.json").read_text()), done.stdout


def test_each_part_is_written_once_and_what_a_cut_left_is_not_run_again(tmp_path):
    figures, printed = run(tmp_path / "out", "--only", "kernels", "lora", "bits", "--minutes", "60")
    assert list(figures) == ["kernels", "lora", "bits"]
    assert not [found for found in figures.values() if "error" in found]
    assert printed == (tmp_path / "out/gpu.md").read_text()
    assert figures["kernels"]["float32"] == "" and figures["lora"]["rate"] > 0
    assert figures["bits"]["hashes"] == 1

    again, _ = run(tmp_path / "empty", "--only", "kernels", "large", "--minutes", "0")
    assert again == figures | {"large": {"error": "no time left"}}
    table = (tmp_path / "empty/gpu.md").read_text()
    assert "| large | 0 s | error no time left |" in table and "mfu" in table


@pytest.mark.parametrize("sent, fork", [(signal.SIGTERM, "os.fork()"), (signal.SIGKILL, "pass")])
def test_a_part_ends_with_the_command(tmp_path, sent, fork):
    pipe = tmp_path / "pipe"  # is at its end once no part has it open
    os.mkfifo(pipe)
    part = f"import os, time; x = open({str(pipe)!r}, 'w', 1); {fork}; print('a', file=x)"
    part += "; time.sleep(60); print('alive', file=x)"
    code = f"import os, gpu; gpu.outcome(['-c', {part!r}], 100, dict(os.environ))"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=SCRIPT.parent)
    with pipe.open() as lines:
        for _ in range(2 if "fork" in fork else 1):
            assert lines.readline() == "a\n"
        process.send_signal(sent)
        assert lines.read() == ""
    assert process.wait() == (-sent if sent == signal.SIGKILL else 128 + sent)


def test_the_wheels_that_such_a_machine_lacks_are_locked(tmp_path):
    done = subprocess.run([sys.executable, SCRIPT, "--wheels"], capture_output=True, text=True)
    lines = done.stdout.splitlines()
    names = [line.partition("==")[0] for line in lines if "==" in line]
    assert {"google-crc32c", "jaxtyping", "pytest-timeout", "setuptools"} < set(
        names
    ) and "--hash" in lines[1]
