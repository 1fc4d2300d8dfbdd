"""Google Cloud on loopback for the real clients: one server for each test, and how to reach it."""

from __future__ import annotations

import datetime
import ipaddress
import json
import os
from pathlib import Path
from typing import NamedTuple

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from t0repro.cloud.vertex.google import Place, connect
from tests.cloud import tiny_jobs
from tests.cloud.services import LOCATION, PROJECT, Services, serving
from tests.cloud.storage import StorageServer
from tests.helpers.loopback import running

BUCKET = "bucket"


class Cloud(NamedTuple):
    services: Services
    storage: StorageServer
    place: Place

    @property
    def bucket(self) -> Path:
        """The folder that the bucket is."""
        return self.storage.root / BUCKET

    def staged(self) -> list[str]:
        """The objects that jobs have in staging."""
        return sorted(
            str(p.relative_to(self.bucket)) for p in self.bucket.glob("t0repro/**/*") if p.is_file()
        )


@pytest.fixture(scope="session")
def certificate(tmp_path_factory) -> tuple[bytes, bytes]:
    """A certificate for localhost and its key; gRPC reads once whom it trusts, so once for all."""
    trusted = Path(os.environ.get("GRPC_DEFAULT_SSL_ROOTS_FILE_PATH", "/"))
    if trusted.with_name("key.pem").exists():  # made for the tests of another folder
        return trusted.read_bytes(), trusted.with_name("key.pem").read_bytes()
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = made.public_bytes(serialization.Encoding.PEM)
    path = tmp_path_factory.mktemp("tls") / "root.pem"
    path.write_bytes(pem)
    os.environ["GRPC_DEFAULT_SSL_ROOTS_FILE_PATH"] = str(path)
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    path.with_name("key.pem").write_bytes(private)
    return pem, private


@pytest.fixture
def cloud(tmp_path, certificate, monkeypatch):
    """Vertex AI, Cloud Storage and Cloud Logging; the clients find them by the environment."""
    root = tmp_path / "gcs"
    (root / BUCKET).mkdir(parents=True)
    (root / "blobs").mkdir()
    services = Services(root)
    server, port = serving(services, *certificate)
    with running(StorageServer(root)) as storage:
        account = {
            "type": "service_account",
            "client_email": "someone@p.iam.gserviceaccount.com",
            "private_key": certificate[1].decode(),
            "private_key_id": "1",
            "token_uri": f"{storage.url}/token",
            "project_id": PROJECT,
        }
        key_file = tmp_path / "account.json"
        key_file.write_text(json.dumps(account))
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(key_file))
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", storage.url)
        for service in ("AIPLATFORM", "LOGGING"):
            name = f"CLOUDSDK_API_ENDPOINT_OVERRIDES_{service}"
            monkeypatch.setenv(name, f"https://localhost:{port}/")
        yield Cloud(services, storage, Place(PROJECT, LOCATION, f"gs://{BUCKET}"))
    for worker in services.workers:
        worker.join()
    server.stop(None).wait()
    _forget()


@pytest.fixture
def experiment(cloud):
    """The experiment t5, made as its users make it."""
    from google.cloud.aiplatform import Experiment

    connect(cloud.place)
    Experiment.create("t5")
    return "t5"


@pytest.fixture
def gin_file(tmp_path, monkeypatch):
    """A training run's gin file and one that it includes, in the current folder."""
    work = tmp_path / "work"
    tiny_jobs.write(work)
    monkeypatch.chdir(work)
    return "train.gin"


def _forget():
    """Has Google's client forget its connections and credentials, which it keeps in globals."""
    from google.cloud.aiplatform import initializer
    from google.cloud.aiplatform.metadata import metadata

    initializer.global_config.__init__()
    metadata._experiment_tracker.reset()
