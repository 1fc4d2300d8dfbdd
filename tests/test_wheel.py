"""The wheel and the source distribution: what they hold; they work without TensorFlow."""

import glob
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import t0repro.tasks.demo.datasets as demo_data

from .tasks.prompt_caches import make

ROOT = Path(__file__).resolve().parents[1]
LOCKS = [ROOT / "requirements" / f"{tier}.lock" for tier in ("core", "reference")]


def sources(*folders: str) -> set[str]:
    """The files that git tracks or would track, below some folders or everywhere."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *folders]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return {name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()}


@pytest.fixture(scope="module")
def distributions(tmp_path_factory) -> tuple[Path, Path]:
    """The source distribution of what git tracks or would, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    # A copy, so that what earlier builds left in the checkout stays out.
    for name in sources():
        (folder / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / "tree" / name)
    setup = [sys.executable, "-P", "setup.py", "--quiet", "sdist", "--dist-dir", str(folder)]
    subprocess.run(setup, cwd=folder / "tree", check=True, capture_output=True)
    (source,) = folder.glob("*.tar.gz")
    pip = [sys.executable, "-P", "-m", "pip", "wheel", "--quiet", "--no-deps"]
    wheel = [*pip, "--no-build-isolation", "--wheel-dir", str(folder), str(source)]
    subprocess.run(wheel, cwd=folder, check=True)
    return source, next(folder.glob("*.whl"))


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(distributions):
    source, wheel = distributions
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
    # The alias of T0's package is installed under T0's name, and not under ours.
    expected = sources("t0repro") | {
        name.replace("tasks/t0_alias/", "t0/", 1)
        if name.startswith("tasks/t0_alias/")
        else f"t0repro/{name}"
        for name in sources("tasks", "converters", "gin")
    }
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert {"t0repro/gin/demo/t5.1.1.demo.gin", "t0repro/reports/templates/page.css"} <= expected
    with tarfile.open(source) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {"setup.py", "README.md", "LICENSE", "tasks/demo/sentencepiece.model"} <= inside
    assert not [name for name in inside if name.startswith(("tests", "docs", "runs"))]


def interpreter(version: str) -> str | None:
    """A Python of this version on this machine; None if there is none."""
    root = os.environ.get("PYENV_ROOT", str(Path.home() / ".pyenv"))
    installed = glob.glob(f"{root}/versions/{version}.*/bin/python")
    for path in filter(None, [shutil.which(f"python{version}"), *installed]):
        # pyenv's stand-ins are there for versions that are not.
        if not subprocess.run([path, "-c", "0"], capture_output=True, check=False).returncode:
            return path
    return None


def clean_environment(path: str, folder: Path) -> str:
    """The Python of a new environment."""
    subprocess.run([path, "-m", "venv", str(folder / "venv")], check=True)
    return str(folder / "venv" / "bin" / "python")


def install(python: str, *arguments: str) -> None:
    # Not compiled: that takes longer than all else, and few of the modules are imported.
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-compile"]
    subprocess.run([*pip, *arguments], check=True)


@pytest.fixture(scope="module")
def locked_versions(tmp_path_factory) -> Path:
    """The locks as pip's constraints, so that what was released today changes no test."""
    lines = [line for path in LOCKS for line in path.read_text().splitlines()]
    versions = [line.removesuffix("\\").strip() for line in lines if re.match(r"\w.*==", line)]
    path = tmp_path_factory.mktemp("lock") / "constraints.txt"
    path.write_text("\n".join(versions))
    return path


@pytest.fixture(scope="module")
def package_index(locked_versions, tmp_path_factory) -> None:
    """Skips where pip reaches no package index."""
    folder = str(tmp_path_factory.mktemp("download"))
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"]
    command = [*pip, "--constraint", str(locked_versions), "--dest", folder, "click"]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("pip reaches no package index")


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
@pytest.mark.usefixtures("package_index")
def test_a_jax_only_installation_trains_scores_and_converts(
    distributions, locked_versions, tmp_path, version
):
    path = interpreter(version)
    if path is None:
        pytest.skip(f"no Python {version} on this machine")
    name = "demo_synthetic_glue_mrpc_paraphrase"
    import t0repro.tasks.demo  # noqa: F401

    make(tmp_path / "cache", name, min_shards=1)
    python = clean_environment(path, tmp_path)
    install(python, "--constraint", str(locked_versions), f"{distributions[1]}[jax]")
    subprocess.run([python, "-m", "pip", "check"], check=True)
    command = [str(tmp_path / "venv" / "bin" / "t0repro"), "--help"]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert not shown.stderr and "convert" in shown.stdout
    arguments = [str(tmp_path / "cache" / name), str(demo_data.VOCABULARY), str(tmp_path)]
    script = [python, str(ROOT / "tests" / "helpers" / "jax_only.py"), *arguments]
    done = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "trains, scores and converts" in done.stdout


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.parametrize("version", ["3.12", "3.13"])  # CI has the lock on 3.11
@pytest.mark.usefixtures("package_index")
def test_both_stacks_run_from_the_lock_on_later_pythons(distributions, tmp_path, version):
    path = interpreter(version)
    if path is None:
        pytest.skip(f"no Python {version} on this machine")
    python = clean_environment(path, tmp_path)
    # As scripts/setup.sh installs it.
    lock = ["--no-deps", "--ignore-requires-python", "--require-hashes"]
    install(python, *lock, *(f"--requirement={path}" for path in LOCKS))
    install(python, "--no-deps", str(distributions[1]))
    command = [str(tmp_path / "venv" / "bin" / "t0repro"), "doctor", "--json"]
    environment = {name: value for name, value in os.environ.items() if "T0REPRO" not in name}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [part["state"] for part in json.loads(done.stdout)["core"]] == ["ok"] * 3
