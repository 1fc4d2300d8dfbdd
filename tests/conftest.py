"""Fixtures and environment of all tests: JAX on CPU, quiet TensorFlow, real data if at hand."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # else it says of each server that it stopped

_SHARED = Path(__file__).resolve().parents[2] / "shared"


def _shared(variable: str, inside: str, what: str) -> Path:
    path = Path(os.environ.get(variable) or _SHARED / inside)
    if not path.exists():
        pytest.skip(f"{what} is not here: set {variable}")
    return path


def pytest_configure(config):
    """Lets all processes of this run of the tests share the programs that JAX compiles.

    The same tiny models are compiled in many tests and in the commands that they start. The folder
    is empty at first, so that nothing of an earlier run of the tests is found.
    """
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # set by the first process for the others
        folder = tempfile.mkdtemp(prefix="t0repro_tests_programs_")
        os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


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
