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


def run(code, rows_root):
    """Runs code in a process of its own, with a few rows and no vocabulary; its output."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "T0REPRO_DATA_DIR": str(rows_root), "T0REPRO_VOCAB": "absent.model"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("module", "least"), [("demo", 40), ("examples.small", 40), ("local", 20)])
def test_registration_reads_no_data_and_opens_no_socket(module, least, rows_root):
    assert int(run(WATCHED.format(module=module), rows_root)) >= least


def test_the_registry_of_prompts_is_light():
    heavy = {"tensorflow", "seqio", "promptsource"}
    code = f"import sys, t0repro.tasks; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


DESCRIBED = """
import sys
from t0repro.tasks.registration import describing
from t0repro.tasks.registry import prompted_mixtures
from t0repro.tasks.registry import prompted_tasks
with describing():
    for module in {modules}:
        __import__(f"t0repro.tasks.{{module}}")
heavy = {{"tensorflow", "seqio", "t5", "jax", "datasets"}} & set(sys.modules)
assert not heavy, heavy
mixtures = {{name: sorted(of.tasks) for name, of in prompted_mixtures().items()}}
described = sorted(prompted_tasks()), mixtures
from t0repro.tasks.registry import _mixtures
from t0repro.tasks.registry import _tasks
for module in {modules}:
    del sys.modules[f"t0repro.tasks.{{module}}"]
_tasks.clear(), _mixtures.clear()
import seqio
for module in {modules}:
    __import__(f"t0repro.tasks.{{module}}")
registered = {{
    name: sorted(task.name for task in seqio.MixtureRegistry.get(name).tasks)
    for name in seqio.MixtureRegistry.names()
}}
assert described == (sorted(seqio.TaskRegistry.names()), registered)
assert len(described[0]) > 1000 and len(registered) == 14
"""


def test_described_tasks_and_mixtures_are_those_of_seqio_and_need_no_seqio(rows_root):
    modules = ["t0", "local", "demo", "examples.small", "examples.learning"]
    run(DESCRIBED.format(modules=modules), rows_root)
