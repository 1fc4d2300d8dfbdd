"""The layout of T0's command is executed, on 64 and on all of its 512 virtual CPU devices."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .test_processes import free_port

SCRIPT = Path(__file__).with_name("many_devices.py")
# Two cores stand for all devices, whose threads meet late.
PATIENT = (
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=600",
    "--xla_cpu_collective_call_terminate_timeout_seconds=3600",
    "--xla_cpu_collective_timeout_seconds=3600",
)


def run(processes, devices, folder):
    """What each process of the script prints; each has this many devices."""
    count = f"--xla_force_host_platform_device_count={devices}"
    flags = " ".join([os.environ["XLA_FLAGS"], count, *PATIENT])
    env = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    coordinator = f"127.0.0.1:{free_port()}"
    started = []
    for index in range(processes):
        told = [coordinator, str(processes), str(index)] if processes > 1 else []
        # Into files: a process whose pipe is full would keep the others waiting.
        with open(folder / f"{index}.out", "w") as out, open(folder / f"{index}.err", "w") as err:
            command = [sys.executable, "-P", SCRIPT, *told]
            started.append(subprocess.Popen(command, env=env, stdout=out, stderr=err))
    codes = [process.wait() for process in started]
    errors = [(folder / f"{index}.err").read_text()[-4000:] for index in range(processes)]
    assert not any(codes), errors
    outputs = [(folder / f"{index}.out").read_text() for index in range(processes)]
    return [json.loads(output.splitlines()[-1]) for output in outputs]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("processes", "devices", "layout"),
    [(1, 64, "data 8, model 8"), (2, 256, "data 64, model 8")],
)
def test_t0s_layout_computes_what_one_device_does_and_sends_what_precompile_says(
    processes, devices, layout, tmp_path
):
    for found in run(processes, devices, tmp_path):
        assert found["devices"] == processes * devices
        assert found["layout"] == layout
        assert found["differences"]["losses"] < 1e-6
        assert max(found["differences"].values()) < 1e-5
        assert found["collectives"] == {"all-reduce": 24, "all-reduce in loop": 14}
        assert found["precompiled"] == {name: found[name] for name in ("collectives", "sent")}
