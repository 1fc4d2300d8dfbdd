"""T0's sequence in a bucket gives what it gives on a disk, byte for byte and bit for bit."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "dev" / "bucket_check.py"


@pytest.mark.slow
def test_the_scripts_of_t0s_readme_write_the_same_in_each_bucket():
    ended = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    assert ended.stdout.count("119 files were compared byte for byte") == 2
    for store in ("gs", "s3"):
        assert f"{store}://bucket/t0 and a local folder hold the same." in ended.stdout
