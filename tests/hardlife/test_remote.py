"""Checkpoints in an object store that fails: S3 from a server on this machine, and fsspec's memory.

Needs EXTRAS=s3,hardlife (s3fs, and moto's server).
"""

import os
import select
import socket
import subprocess
import sys
import threading

import numpy as np
import pytest

from t0repro.converters.sources import load_any

from . import jobs

pytestmark = pytest.mark.hardlife

FORMATS = ("mtf", "hf")


class Relay:
    """A loopback port in front of a server, which cuts every connection after some bytes.

    Attributes:
      limit: bytes of answers that pass before connections are cut; None lets all pass.
    """

    def __init__(self, port: int):
        self.target, self.limit, self.cuts = port, None, 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self):
        """Ends the listening; connections end with their clients."""
        self.listener.close()

    def _accept(self):
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._relay, args=(client,), daemon=True).start()

    def _relay(self, client):
        """Copies both ways until one side ends or the limit is reached."""
        with client, socket.create_connection(("127.0.0.1", self.target)) as server:
            others = {client: server, server: client}
            while True:
                for source in select.select(list(others), [], [])[0]:
                    try:
                        block = source.recv(1 << 12)
                        if source is server and block and self._is_cut(len(block)):
                            return
                        if not block:
                            return
                        others[source].sendall(block)
                    except OSError:  # the other end is gone
                        return

    def _is_cut(self, count):
        """Whether these bytes of an answer are too many."""
        if self.limit is None:
            return False
        self.limit -= count
        self.cuts += self.limit < 0
        return self.limit < 0


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """An S3 server with one checkpoint in each format, and a relay in front of it."""
    pytest.importorskip("s3fs", reason="EXTRAS=s3,hardlife bash scripts/setup.sh brings s3fs")
    pytest.importorskip("moto", reason="EXTRAS=s3,hardlife bash scripts/setup.sh brings moto")
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    folder = tmp_path_factory.mktemp("store")
    source = jobs.write_checkpoint(folder / "source")
    keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}
    client = boto3.client(
        "s3", endpoint_url=f"http://127.0.0.1:{port}", region_name="us-east-1", **keys
    )
    client.create_bucket(Bucket="bucket")
    for to in FORMATS:
        jobs.convert_job(source, to).finish(folder / to)
        for path in (folder / to / "out").rglob("*"):
            if path.is_file():
                key = f"{to}/{path.relative_to(folder / to / 'out')}"
                client.upload_file(str(path), "bucket", key)
    client.close()
    relay = Relay(port)
    yield source, relay
    relay.close()
    server.stop()


def convert(address, folder, relay):
    """Converts to Mesh TensorFlow's format in a process that knows the store by the relay."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "t0repro.cli", "convert", address, str(folder), "--to", "mtf"],
        env={
            **os.environ,
            "FSSPEC_S3_ENDPOINT_URL": f"http://127.0.0.1:{relay.port}",
            "FSSPEC_S3_KEY": "test",
            "FSSPEC_S3_SECRET": "test",
            "AWS_MAX_ATTEMPTS": "1",
        },
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
    to, store, moments, outcome, tmp_path
):
    source, relay = store
    expected = parameters(source)
    cut = 0
    for _ in range(2):
        relay.limit, before = int(10 ** moments.uniform(3, 6.5)), relay.cuts
        code, said = convert(f"s3://bucket/{to}", tmp_path / "out", relay)
        if code == 0:
            break
        cut += 1
        assert relay.cuts > before and "Traceback" not in said, said[-3000:]
        assert not (tmp_path / "out").exists()
    relay.limit = None
    code, said = convert(f"s3://bucket/{to}", tmp_path / "again", relay)
    assert code == 0, said[-3000:]
    assert parameters(tmp_path / "again") == expected
    outcome(
        f"S3 that cuts connections: {to}: {cut} conversions failed clearly, then the same bytes"
    )
