"""Registering reads no row, no vocabulary and opens no socket: an audit hook watches it."""

import os
import subprocess
import sys

import pytest

WATCHED = """
import sys
seen = []
def watch(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo"):
        seen.append((event, str(arguments)))
    if event == "open" and str(arguments[0]).endswith((".jsonl", ".parquet", ".model")):
        seen.append((event, str(arguments[0])))
sys.addaudithook(watch)
import t0repro.tasks.{module}
import seqio
assert not seen, seen
heavy = {{"mesh_tensorflow", "t5.models", "datasets", "torch"}} & set(sys.modules)
assert not heavy, heavy
print(len(seqio.TaskRegistry.names()))
"""


@pytest.mark.parametrize(("module", "least"), [("demo", 40), ("small", 40), ("local", 20)])
def test_registration_reads_no_data_and_opens_no_socket(module, least, rows_root):
    done = subprocess.run(
        [sys.executable, "-P", "-c", WATCHED.format(module=module)],
        capture_output=True,
        text=True,
        env={**os.environ, "T0REPRO_DATA_DIR": str(rows_root), "T0REPRO_VOCAB": "absent.model"},
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= least


def test_the_registry_of_prompts_is_light():
    heavy = {"tensorflow", "seqio", "promptsource", "yaml"}
    code = f"import sys, t0repro.tasks; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-P", "-c", code], check=True)
