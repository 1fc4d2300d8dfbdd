"""Checkpoints in an object store that fails: S3 and Google's, from servers on this machine.

Needs EXTRAS=s3,gs,hardlife (s3fs and gcsfs, and the two servers).
"""

import os
import select
import socket
import subprocess
import sys
import threading
import urllib.parse
import urllib.request

import numpy as np
import pytest

from t0repro.converters.sources import load_any

from . import jobs

pytestmark = pytest.mark.hardlife

FORMATS = ("jax", "mtf", "hf")


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


class S3:
    """moto's server, and how s3fs finds it."""

    name, address = "S3", "s3://bucket"

    def __init__(self):
        pytest.importorskip("s3fs", reason="EXTRAS=s3 bash scripts/setup.sh brings s3fs")
        moto = pytest.importorskip("moto.server", reason="EXTRAS=hardlife brings moto")
        import boto3

        self._server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._server.start()
        _, self.port = self._server.get_host_and_port()
        keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}
        url = f"http://127.0.0.1:{self.port}"
        self._client = boto3.client("s3", endpoint_url=url, region_name="us-east-1", **keys)
        self._client.create_bucket(Bucket="bucket")

    def put(self, key, path):
        self._client.upload_file(str(path), "bucket", key)

    def environment(self, port):
        return {
            "FSSPEC_S3_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "FSSPEC_S3_KEY": "test",
            "FSSPEC_S3_SECRET": "test",
            "AWS_MAX_ATTEMPTS": "1",
        }

    def stop(self):
        self._client.close()
        self._server.stop()


class GoogleStorage:
    """gcp-storage-emulator's server, and how gcsfs finds it."""

    name, address = "Google Cloud Storage", "gs://bucket"

    def __init__(self):
        pytest.importorskip("gcsfs", reason="EXTRAS=gs bash scripts/setup.sh brings gcsfs")
        emulator = pytest.importorskip(
            "gcp_storage_emulator.server", reason="EXTRAS=hardlife brings gcp-storage-emulator"
        )
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self._server = emulator.create_server(
            "127.0.0.1", self.port, in_memory=True, default_bucket="bucket"
        )
        self._server.start()

    def put(self, key, path):
        address = f"http://127.0.0.1:{self.port}/upload/storage/v1/b/bucket/o"
        query = urllib.parse.urlencode({"uploadType": "media", "name": key})
        request = urllib.request.Request(f"{address}?{query}", path.read_bytes(), method="POST")
        request.add_header("Content-Type", "application/octet-stream")
        urllib.request.urlopen(request).close()

    def environment(self, port):
        return {
            "STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}",
            "FSSPEC_GS_TOKEN": "anon",
            "FSSPEC_GCS_TOKEN": "anon",
            # By default gcsfs asks by gRPC what kind of bucket it is, which no stand-in answers.
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        }

    def stop(self):
        self._server.stop()


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
        assert code == 2 and "to do: Check the connection" in said, said
        assert not (tmp_path / "out").exists()
    relay.limit = None
    code, said = convert(f"{server.address}/{to}", tmp_path / "again", environment)
    assert code == 0, said[-3000:]
    assert parameters(tmp_path / "again") == expected
    outcome(
        f"{server.name} that cuts connections: {to}: {cut} conversions failed clearly, then the"
        " same bytes"
    )
