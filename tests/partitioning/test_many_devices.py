"""The layout of T0's command is executed, on 64 virtual CPU devices in their own process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("many_devices.py")
# Two cores stand for all devices, whose threads meet late.
PATIENT = (
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=600",
    "--xla_cpu_collective_call_terminate_timeout_seconds=3600",
    "--xla_cpu_collective_timeout_seconds=3600",
)


@pytest.mark.slow
def test_data_8_model_8_computes_what_one_device_does_and_sends_what_precompile_says():
    count = "--xla_force_host_platform_device_count=64"
    flags = " ".join([os.environ["XLA_FLAGS"], count, *PATIENT])
    env = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-P", SCRIPT], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["layout"] == "data 8, model 8"
    assert found["differences"]["losses"] < 1e-6
    assert max(found["differences"].values()) < 1e-5
    assert found["collectives"] == {"all-reduce": 24, "all-reduce in loop": 14}
    assert found["precompiled"] == {name: found[name] for name in ("collectives", "sent")}
