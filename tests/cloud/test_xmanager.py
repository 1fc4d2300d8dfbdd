"""The same job as an experiment of XManager's own package, on Vertex AI and in a container here."""

import contextlib
import gc
import os
import ssl
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from t0repro.cloud.spec import JobSpec, Machines
from t0repro.cloud.xmanager import Executor, check
from t0repro.errors import UserError
from tests.cloud.commands import submit, vertex
from tests.cloud.docker_daemon import IMAGE, DockerDaemon
from tests.cloud.services import JobState
from tests.loopback import running

pytest.importorskip("xmanager", reason="needs the extra xmanager")
pytestmark = [
    pytest.mark.slow,
    # XManager's packages.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
A100 = Machines("a2-highgpu-4g", "NVIDIA_TESLA_A100", 4)
RANK_EVAL = ("--run_mode", "rank-eval", "--", "--checkpoint=gs://bucket/m", "--mixture=m")
RANK_EVAL += ("--out=gs://bucket/it's out",)


def spec(machines=A100, **changes):
    fields = dict(display_name="a", image_uri=IMAGE, machines=machines, arguments=())
    return JobSpec(**fields | changes)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """XManager's database of experiments is in the user's folder."""
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    for name in ("GOOGLE_CLOUD_PROJECT", "GOOGLE_CLOUD_BUCKET_NAME"):  # which it is given
        monkeypatch.setenv(name, "")
    yield folder
    xmanager_forgets()
    gc.collect()  # while the warnings of what XManager leaves open are ignored


def xmanager_forgets():
    """Has XManager forget its connections to its database and to Docker."""
    from xmanager.docker import docker_adapter
    from xmanager.xm_local.storage import database

    database.database.cache_clear()
    docker_adapter.instance.cache_clear()


@pytest.fixture
def iam(certificate, monkeypatch):
    """A proxy to Google's IAM, which XManager asks for a service account; it grants nothing."""
    pytest.importorskip("socks", reason="needs the extra xmanager")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    root = Path(os.environ["GRPC_DEFAULT_SSL_ROOTS_FILE_PATH"])
    root.with_name("both.pem").write_bytes(b"".join(certificate))
    context.load_cert_chain(root.with_name("both.pem"))

    class Proxy(BaseHTTPRequestHandler):
        def log_message(self, *arguments):
            pass

        def do_CONNECT(self):
            self.send_response(200)
            self.end_headers()
            with (
                contextlib.suppress(OSError),
                context.wrap_socket(self.connection, server_side=True) as connection,
            ):
                connection.recv(1 << 16)
                connection.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 2\r\n\r\n{}")

    with running(ThreadingHTTPServer(("127.0.0.1", 0), Proxy)) as proxy:
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{proxy.server_address[1]}")
        monkeypatch.setenv("no_proxy", "localhost,127.0.0.1")
        # HTTPLIB2_CA_CERTS, which may have been read before this certificate was made.
        monkeypatch.setattr("httplib2.CA_CERTS", str(root))
        yield


@pytest.mark.parametrize("replicas", [1, 3])
def test_vertex_ai_gets_the_same_job(cloud, iam, monkeypatch, capsys, replicas):
    machine = ("--machine_type", "a2-highgpu-4g", "--accelerator_type", "NVIDIA_TESLA_A100")
    machine += ("--accelerator_count", "4", "--replica_count", str(replicas))
    for how in ((), ("--xmanager", "vertex")):
        code, out, err = submit(monkeypatch, capsys, *machine, *how, *RANK_EVAL)
        assert code == 0, err
    ours, theirs = cloud.services.jobs.values()
    assert theirs.job_spec.worker_pool_specs == ours.job_spec.worker_pool_specs
    assert "--out=/gcs/bucket/it's out" in ours.job_spec.worker_pool_specs[0].container_spec.args
    # XManager numbers experiments and jobs.
    assert theirs.display_name.startswith("small_") and out.split()[-1] == theirs.name
    theirs.state = JobState.JOB_STATE_SUCCEEDED
    assert vertex(monkeypatch, capsys, "status", theirs.name)[0] == 0


def test_a_refusal_of_the_service_leaves_nothing_staged(cloud, iam, monkeypatch, capsys, tmp_path):
    import grpc

    from tests.cloud.services import Refused

    cloud.services.faults["CreateCustomJob"] = [
        Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "custom_model_training_cpus is exceeded")
    ]
    (tmp_path / "eval.gin").write_text("")
    aux = ("--run_mode", "aux", "--", "--model_dir=gs://bucket/m", "--auxiliary_job_mixtures=m")
    aux += (f"--auxiliary_job_gin_file={tmp_path / 'eval.gin'}",)
    code, _, err = submit(monkeypatch, capsys, "--xmanager", "vertex", *aux)
    assert code == 2 and "the quota is used up" in err
    assert not cloud.services.jobs and not cloud.staged()


def test_a_container_on_this_machine_runs_the_job(cloud, home, gin_file, monkeypatch, capsys):
    (home / "gcs").symlink_to(cloud.storage.root)
    with running(DockerDaemon()) as docker:
        monkeypatch.setenv("DOCKER_HOST", f"tcp://127.0.0.1:{docker.server_address[1]}")
        code, out, err = submit(
            monkeypatch,
            capsys,
            *("--image_uri", IMAGE, "--xmanager", "local"),
            *("--run_mode", "train", "--gin_file", gin_file, "--gin.TRAIN_STEPS=1"),
            "--gin.MODEL_DIR='/gcs/bucket/its model'",
        )
        assert code == 0, err
        assert docker.created["Image"] == "sha256:1"
    assert (cloud.bucket / "its model/checkpoint_1").is_dir(), out
    assert "[pool0] step 1" in out, out.splitlines()  # as XManager prints the log
    assert "ended XManager's experiment" in out


def test_an_image_that_is_nowhere_is_said(cloud, home, monkeypatch, capsys):
    (home / "gcs").mkdir()
    with running(DockerDaemon()) as docker:
        monkeypatch.setenv("DOCKER_HOST", f"tcp://127.0.0.1:{docker.server_address[1]}")
        code, _, err = submit(monkeypatch, capsys, "--xmanager", "local", *RANK_EVAL)
    assert code == 2 and "XManager refuses: image is found neither locally" in " ".join(err.split())
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:9")
    xmanager_forgets()
    code, _, err = submit(monkeypatch, capsys, "--xmanager", "local", *RANK_EVAL)
    assert code == 2 and "Docker refuses" in err


@pytest.mark.parametrize(
    ("executor", "changes", "message"),
    [
        # XManager takes H100 for an accelerator of the smallest N1 machine.
        ("vertex", {"machines": Machines("a3-highgpu-8g", "NVIDIA_H100_80GB", 8)}, "n1-standard-4"),
        ("vertex", {"machines": Machines("n1-ultramem-40")}, "would choose n1-standard-4"),
        ("vertex", {"machines": Machines("a9-x", "NVIDIA_X", 1)}, "has no NVIDIA_X"),
        ("vertex", {"command": ("t5_mesh_transformer",)}, "cannot run t5_mesh_transformer"),
        ("vertex", {"labels": {"a": "b"}}, "take no labels"),
        ("vertex", {"network": "n"}, "take no network"),
        ("vertex", {"service_account": "s"}, "take no service account"),
        ("local", {}, "no folder ~/gcs"),
        ("local", {"machines": Machines("n1-standard-4", replica_count=2)}, "one replica"),
    ],
)
def test_what_xmanager_would_drop_or_change_is_refused(executor, changes, message):
    with pytest.raises(UserError, match=message):
        check(spec(**changes), Executor(executor))


@pytest.mark.parametrize(
    "machines",
    [
        A100,
        Machines("cloud-tpu", "TPU_V3", 32),
        Machines("n1-standard-4"),
        Machines("n1-highmem-96"),
        Machines("n1-highcpu-16"),
        Machines("n1-standard-8", "NVIDIA_TESLA_T4", 2),
        Machines("g2-standard-12", "NVIDIA_L4", 1),
        Machines("a2-megagpu-16g", "NVIDIA_TESLA_A100", 16),
    ],
    ids=str,
)
def test_machines_are_the_same_by_what_a_job_requires(machines):
    check(spec(machines), Executor.VERTEX)
