"""T0's sequence in a bucket gives what it gives on a disk, byte for byte and bit for bit."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "bucket_check.py"


@pytest.mark.slow
@pytest.mark.parametrize("store", ["gs", "s3"])
def test_the_scripts_of_t0s_readme_write_the_same_in_a_bucket(store):
    ended = subprocess.run(
        [sys.executable, SCRIPT, "--store", store], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    assert "119 files were compared byte for byte" in ended.stdout
    assert f"{store}://bucket/t0 and a local folder hold the same." in ended.stdout
