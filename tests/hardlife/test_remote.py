"""Checkpoints in an object store that fails: S3 and Google's, from servers on this machine."""

import os
import subprocess
import sys

import numpy as np
import pytest

from t0repro.converters.sources import load_any

from ..helpers.bucket_servers import S3, GoogleStorage, Relay
from . import jobs

pytestmark = pytest.mark.hardlife

FORMATS = ("jax", "mtf", "hf")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A checkpoint, and folders with its conversions to each format."""
    folder = tmp_path_factory.mktemp("source")
    checkpoint = jobs.write_checkpoint(folder / "jax")
    for to in FORMATS[1:]:
        jobs.convert_job(checkpoint, to).finish(folder / to)
        (folder / to / "out").rename(folder / f"{to}_only")
    return folder


@pytest.fixture(scope="module", params=[S3, GoogleStorage], ids=["s3", "gs"])
def store(request, source):
    """A server with the checkpoint in each format, and a relay in front of it."""
    server = request.param()
    for to in FORMATS:
        folder = source / ("jax" if to == "jax" else f"{to}_only")
        for path in folder.rglob("*"):
            if path.is_file():
                server.put(f"{to}/{path.relative_to(folder)}", path)
    relay = Relay(server.port)
    yield server, relay
    relay.close()
    server.stop()


def convert(address, folder, environment):
    """Converts to Mesh TensorFlow's format in a process that knows the store by the relay."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "t0repro.cli", "convert", address, str(folder), "--to", "mtf"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout + done.stderr


def parameters(folder):
    """The bytes of the parameters of a checkpoint."""
    tree = load_any(str(folder))
    return {name: np.asarray(x).tobytes() for name, x in tree.items() if name.startswith("target/")}


@pytest.mark.parametrize("to", FORMATS)
def test_a_store_that_cuts_connections_ends_a_conversion_clearly_and_it_goes_on(
    to, store, source, moments, outcome, tmp_path
):
    server, relay = store
    environment = server.environment(relay.port)
    expected = parameters(source / "jax")
    cut = 0
    for _ in range(2):
        relay.limit, before = int(10 ** moments.uniform(3, 6)), relay.cuts
        code, said = convert(f"{server.address}/{to}", tmp_path / "out", environment)
        if code == 0:
            break
        cut += 1
        assert relay.cuts > before and "Traceback" not in said, said[-3000:]
        assert code == 2 and "fix: Check the connection" in said, said
        assert not (tmp_path / "out").exists()
    relay.limit = None
    code, said = convert(f"{server.address}/{to}", tmp_path / "again", environment)
    assert code == 0, said[-3000:]
    assert parameters(tmp_path / "again") == expected
    outcome(
        f"{server.name} that cuts connections: {to}: {cut} conversions failed clearly, then the"
        " same bytes"
    )
