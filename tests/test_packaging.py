"""What a checkout and its lock promise."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_a_python_in_the_checkouts_root_finds_gin_config_and_not_the_folder_gin():
    code = "import gin; gin.configurable; import t0repro.gin; print(t0repro.gin.__path__[0])"
    for start in (["-c", code], ["-P", "-c", code]):
        done = subprocess.run([sys.executable, *start], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert (Path(done.stdout.strip()) / "demo" / "t5.1.1.demo.gin").is_file()


def test_the_lock_pins_every_package_by_hash_and_names_no_address():
    text = (ROOT / "requirements.lock").read_text()
    entries = re.split(r"\n(?=\S)", text.strip())
    assert len(entries) > 100
    assert all(re.match(r"[\w.-]+==\S+", entry) and "--hash=sha256:" in entry for entry in entries)
    assert "://" not in text


def test_every_script_is_valid_bash():
    scripts = [*(ROOT / "scripts").glob("*.sh"), ROOT / ".ci" / "run"]
    assert {path.name for path in scripts} >= {"setup.sh", "quickstart.sh", "test.sh", "run"}
    for path in scripts:
        subprocess.run(["bash", "-n", str(path)], check=True)


def test_every_folder_with_modules_is_a_package_so_that_a_wheel_has_it():
    tracked = subprocess.run(
        ["git", "ls-files", "-z", "t0repro/*.py", "tasks/*.py", "converters/*.py", "gin/*.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\0")
    modules = {Path(name) for name in tracked if name}
    assert len(modules) > 100
    missing = {str(path.parent) for path in modules if path.with_name("__init__.py") not in modules}
    assert not missing
