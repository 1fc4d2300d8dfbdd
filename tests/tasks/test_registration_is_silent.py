"""Registering reads no row, no vocabulary and opens no socket: an audit hook watches it."""

import os
import subprocess
import sys


def test_the_registry_of_prompts_is_light():
    heavy = {"tensorflow", "seqio", "promptsource"}
    code = f"import sys, t0repro.tasks; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


MODULES = ("local", "t0", "demo", "examples.small", "examples.learning")
# Both ways to register: described alone, then in SeqIO. T0's module may read the catalog and
# promptsource's templates; those whose rows are here may look for them.
REGISTERED = f"""
import sys
from t0repro.tasks import registration
from t0repro.tasks.registry import prompted_mixtures
from t0repro.tasks.registry import prompted_tasks

read, sockets, importing = set(), [], None


def watch(event, arguments):
    if importing and event.startswith("socket."):
        sockets.append((importing, event, arguments))
    if importing and event == "open" and isinstance(arguments[0], str):
        read.add((importing, arguments[0]))


def import_all():
    global importing
    for importing in {MODULES}:
        __import__(f"t0repro.tasks.{{importing}}")
    importing = None


sys.addaudithook(watch)
with registration.describing():
    import_all()
assert not sockets, sockets
heavy = {{"tensorflow", "seqio", "t5", "jax", "datasets"}} & set(sys.modules)
assert not heavy, heavy
mixtures = {{name: sorted(of.tasks) for name, of in prompted_mixtures().items()}}
described = sorted(prompted_tasks()), mixtures
from t0repro.tasks.registry import _mixtures
from t0repro.tasks.registry import _tasks
for module in {MODULES}:
    del sys.modules[f"t0repro.tasks.{{module}}"]
_tasks.clear(), _mixtures.clear()
import seqio
import_all()
assert not sockets, sockets
registered = {{
    name: sorted(task.name for task in seqio.MixtureRegistry.get(name).tasks)
    for name in seqio.MixtureRegistry.names()
}}
assert described == (sorted(seqio.TaskRegistry.names()), registered)
assert len(described[0]) > 1000 and len(registered) == 14

rows = [path for _, path in read if path.endswith((".jsonl", ".parquet", ".model"))]
assert not rows, rows
folder = registration.__file__.rsplit("/", 1)[0]
known = {{folder + "/data/datasets.csv", folder + "/data/catalog.csv"}}
assert known <= {{path for _, path in read}}
of_t0 = {{path for module, path in read if module == "t0" and "site-packages" not in path}}
foreign = [path for path in of_t0 - known if not path.endswith((".py", ".pyc", ".zip"))]
assert not foreign, foreign
clients = {{"mesh_tensorflow", "t5.models", "datasets", "torch"}} & set(sys.modules)
assert not clients, clients
"""


def test_described_tasks_and_mixtures_are_those_of_seqio_and_registering_reads_no_data(rows_root):
    """Nor does it open a socket, read a vocabulary, or need SeqIO where tasks are described."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", REGISTERED],
        capture_output=True,
        text=True,
        env={**os.environ, "T0REPRO_DATA_DIR": str(rows_root), "T0REPRO_VOCAB": "absent.model"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
