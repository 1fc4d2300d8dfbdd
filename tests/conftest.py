"""Fixtures and environment of all tests: JAX on CPU, quiet TensorFlow, real data if at hand."""

import os
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
