"""The unit tests that Mesh TensorFlow, t5 and SeqIO ship pass here, from the installed packages."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

# Modules that cannot run in any environment with a current TensorFlow, and why.
LEFT_OUT = {
    "mesh_tensorflow": {
        # The layout optimizer, which this project does not use: OR-Tools' own protobuf library ends
        # the interpreter when TensorFlow's is loaded already.
        "auto_mtf/api_test.py": "ortools",
        "auto_mtf/graph_interface_test.py": "ortools",
        "auto_mtf/layout_optimizer_test.py": "ortools",
        "auto_mtf/memory_estimator_test.py": "ortools",
        "auto_mtf/scheduler_test.py": "ortools",
        "auto_mtf/valid_layouts_test.py": "ortools",
        "experimental/data_aug_lib_test.py": "tensorflow.contrib, which TensorFlow 2 dropped",
        "experimental/input_reader_test.py": "a TPU",
    },
    "t5": {},
    "seqio": {},
}

# Tests that skip themselves, by the reason that they give.
EXPECTED_SKIPS = {
    "Not a test.",  # tf.test.TestCase.test_session, once for each class
    "b/273289576",  # SeqIO's own, of its preprocessors_test
}

# How many tests and subtests pass with the locked versions, so that none can drop out unseen.
PASSING = {"mesh_tensorflow": 162, "t5": 159, "seqio": 423}

# What absltest's main does before the tests run; pytest's arguments are none of absl's flags.
PLUGIN = """
from absl import flags


def pytest_configure():
    flags.FLAGS(["pytest"])
"""


@pytest.mark.slow
@pytest.mark.mtf
@pytest.mark.parametrize("package", PASSING)
def test_a_peers_own_unit_tests_pass_in_this_environment(package, tmp_path):
    settings = tmp_path / "pytest.ini"
    # Bare functions called test_... are helpers in seqio.test_utils: the tests are all TestCases.
    settings.write_text("[pytest]\npython_functions = none\n")
    (tmp_path / "absl_flags.py").write_text(PLUGIN)
    report = tmp_path / "report.xml"
    command = [sys.executable, "-P", "-m", "t0repro.mtf", "pytest", "--pyargs", package]
    command += ["-q", "-c", str(settings), "--rootdir", str(tmp_path), f"--junitxml={report}"]
    command += ["-p", "no:cacheprovider", "-p", "absl_flags", "-W", "ignore"]
    folder = Path(importlib.util.find_spec(package).origin).parent
    command += [f"--ignore={folder / name}" for name in LEFT_OUT[package]]
    environment = {"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"}
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout[-5000:] + ended.stderr[-2000:]
    suite = next(ElementTree.parse(report).iter("testsuite"))
    skips = {skip.get("message") for skip in suite.iter("skipped")}
    assert skips <= EXPECTED_SKIPS
    counted = {name: int(suite.get(name, 0)) for name in ("tests", "skipped", "failures", "errors")}
    assert counted["failures"] == counted["errors"] == 0
    assert counted["tests"] - counted["skipped"] == PASSING[package]
