"""Fixtures and environment of all tests: JAX on CPU, quiet TensorFlow, real data if available."""

import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest

from .helpers import kept, schedule
from .helpers.commands import collect_rarely

# A busy machine is no failure: what Hypothesis would take for too slow depends on what runs beside.
hypothesis.settings.register_profile(
    "any_machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any_machine")

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Most of the time that JAX compiles on CPU, LLVM makes tiny programs fast. XLA's own passes, which
# decide what is computed, sent and held, are the same. With these flags a tiny training step takes
# 3.9 s of processor time instead of 16.5: no optimization by LLVM, the older emitters of fusions,
# and one LLVM module for a program instead of up to 32.
_XLA_FLAGS = [
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",
]
if importlib.metadata.version("jaxlib").startswith("0.10."):  # 0.11 has the newer emitters alone
    _XLA_FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ.setdefault("XLA_FLAGS", " ".join(_XLA_FLAGS))
# All processes share the programs that JAX compiles, with those of earlier runs: the same tiny
# models are compiled in many tests and in the commands that they start. JAX finds a program by a
# hash of all that it was compiled from. It reads these when a folder's conftest.py imports it.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(kept.FOLDER / "programs"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("GLIBC_TUNABLES", "")  # else each command measures huge pages and restarts
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # else it says of each server that it stopped

_OF_AN_EMULATOR = (
    "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "TENSORSTORE_GCS_HTTP_URL",
    "GOOGLE_AUTH_TOKEN_FOR_TESTING", "FSSPEC_GCS_TOKEN",
)  # fmt: skip
_TESTS = Path(__file__).resolve().parent
_SHARED = _TESTS.parents[1] / "shared"


def _shared(variable: str, inside: str, what: str) -> Path:
    path = Path(os.environ.get(variable) or _SHARED / inside)
    if not path.exists():
        pytest.skip(f"{what} is not here: set {variable}")
    return path


def pytest_addoption(parser):
    schedule.add_options(parser)


def pytest_configure(config):
    config.pluginmanager.register(schedule.Schedule(config))
    if not hasattr(config, "workerinput"):
        kept.remove_old()


def _set_by_commands() -> dict[str, str]:
    """The variables that commands set in their own process, which may be a test's."""
    return {
        name: value
        for name, value in os.environ.items()
        if name in _OF_AN_EMULATOR or name.startswith("T0REPRO_")
    }


def pytest_collection_finish(session):
    """The tests' modules are imported."""
    del session
    collect_rarely()


def pytest_runtest_setup(item):
    if item.get_closest_marker("tpu") and importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu, of the extra tpu, is not installed")


@pytest.fixture(scope="module", autouse=True)
def _process_forgets():
    """Lets no file's tests find what another's in the same worker bound in gin or set, or caches.

    A SeqIO task keeps the folder in which its cache was once found, also when the folder is no
    longer among those that are searched. What a command sets when it finds a store's emulator
    would give later commands credentials, and a checkpoint's vocabulary would be theirs.
    """
    before = _set_by_commands()
    yield
    for name in _set_by_commands():
        del os.environ[name]
    os.environ.update(before)
    if (gin := sys.modules.get("gin")) is not None and hasattr(gin, "clear_config"):
        gin.clear_config()
    if (seqio := sys.modules.get("seqio")) is None:
        return
    seqio.set_global_cache_dirs([])
    for name in seqio.TaskRegistry.names():
        task = seqio.TaskRegistry.get(name)
        task._cache_dir, task._stats = None, {}


@pytest.fixture(scope="session")
def once(tmp_path_factory) -> Callable[..., Path]:
    """A folder of a name, filled by a function in the first worker that asks for it.

    Where its sources are named (helpers/kept.py), later runs find it until these change.
    """
    base = tmp_path_factory.getbasetemp()
    # pytest-xdist's workers have their folders beside each other.
    root = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def folder(name: str, fill: Callable[[Path], object], *sources: Path | str) -> Path:
        if sources:
            return kept.fill_once(kept.FOLDER / f"{name}-{kept.digest(*sources)}", fill)
        return kept.fill_once(root / name, fill)

    return folder


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real datasets, <dataset>/<subset or default>/<split>.jsonl."""
    return _shared("T0REPRO_DATA_DIR", "data", "real data")


@pytest.fixture(scope="session")
def shared_vocab() -> Path:
    """T5's SentencePiece model."""
    return _shared("T0REPRO_VOCAB", "vocab/t5.cc_all.32000.model", "T5's vocabulary")


def pytest_terminal_summary(terminalreporter):
    """Prints the outcomes that tests/hardlife reports, at the end."""
    reports = terminalreporter.stats.get("passed", [])
    for name, line in (pair for report in reports for pair in report.user_properties):
        if name == "outcome":
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def bucket_servers():
    """Starts each store's server once; scheme -> the environment in which its store is found."""
    from .helpers.bucket_servers import S3, GoogleStorage

    started = {"gs": GoogleStorage(), "s3": S3()}
    yield {scheme: server.environment(server.port) for scheme, server in started.items()}
    for server in started.values():
        server.stop()


@pytest.fixture(params=["memory", "gs", "s3"])
def bucket(request, bucket_servers, monkeypatch):
    """The address of a folder in a bucket, which is empty; of a bucket of each scheme in turn."""
    from t0repro import storage
    from t0repro.storage import stores

    for name, value in bucket_servers.get(request.param, {}).items():
        monkeypatch.setenv(name, value)
    stores.file_system.cache_clear()
    yield f"{request.param}://bucket/{request.node.name.partition('[')[0]}"
    storage.close_copies()
    stores.file_system.cache_clear()
