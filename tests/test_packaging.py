"""What a checkout and its lock promise."""

import ast
import hashlib
import importlib.metadata
import itertools
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from .helpers.locks import TIERS, locked, normal_name

ROOT = Path(__file__).resolve().parents[1]


def test_a_python_in_the_checkouts_root_finds_gin_config_and_not_the_folder_gin():
    code = "import gin; gin.configurable; import t0repro.gin; print(t0repro.gin.__path__[0])"
    for start in (["-c", code], ["-P", "-c", code]):
        done = subprocess.run([sys.executable, *start], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert (Path(done.stdout.strip()) / "demo" / "t5.1.1.demo.gin").is_file()


def test_the_locks_pin_every_package_once_by_hash_and_name_no_address():
    entries = [locked(tier) for tier in TIERS]
    for lock in entries:
        assert lock
        for entry in lock.values():
            assert re.match(r"[\w.-]+==\S+", entry) and "--hash=sha256:" in entry, entry
            assert "://" not in entry
    for one, other in itertools.combinations(entries, 2):
        shared = one.keys() & other.keys()
        # What some systems alone need for one tier, all may need for another.
        assert all(";" in one[name].partition("\n")[0] for name in shared), shared


def test_the_core_is_locked_without_tensorflow_and_what_stands_on_it():
    of_reference = {"tensorflow-cpu", "mesh-tensorflow", "t5", "seqio", "apache-beam", "clu"}
    assert of_reference <= locked("reference").keys()
    assert not [name for name in locked("core") if "tensorflow" in name or "seqio" in name]


def test_ci_compiles_for_tpus_with_the_libtpu_that_the_locked_jax_asks_for():
    lock = (ROOT / ".ci" / "libtpu.lock").read_text()
    (version,) = re.findall(r"^libtpu==(\S+) ", lock, re.MULTILINE)
    asked = [Requirement(line) for line in importlib.metadata.requires("jax") or []]
    (libtpu,) = [requirement for requirement in asked if requirement.name == "libtpu"]
    assert version in libtpu.specifier and "--hash=sha256:" in lock


def test_every_script_is_valid_bash():
    scripts = [*(ROOT / "scripts").rglob("*.sh"), ROOT / ".ci" / "run"]
    assert {path.name for path in scripts} >= {"setup.sh", "quickstart.sh", "test.sh", "run"}
    for path in scripts:
        subprocess.run(["bash", "-n", str(path)], check=True)


def fake_python(path: Path, version: tuple[int, int, int]) -> Path:
    """An interpreter of another version, which can make no environment."""
    code = f"import sys; sys.version_info = {version}; "
    path.write_text(
        f"""#!/bin/sh
case $1 in
  -c) exec {sys.executable} -c "{code}$2" ;;
  --version) echo Python {".".join(map(str, version))} ;;
  *) exit 1 ;;
esac
"""
    )
    path.chmod(0o755)
    return path


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A folder with what scripts/setup.sh reads."""
    (tmp_path / "scripts").mkdir()
    for name in ("scripts/setup.sh", "setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    return tmp_path


def setup(checkout: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("TIER", "EXTRAS")}
    command = ["bash", str(checkout / "scripts" / "setup.sh")]
    return subprocess.run(command, env=kept | environment, capture_output=True, text=True)


def test_a_python_that_tensorflow_has_no_wheels_for_is_passed_over_but_for_the_core(checkout):
    new = fake_python(checkout / "new", (3, 14, 0))
    old = fake_python(checkout / "old", (3, 12, 1))

    def refused(pythons: str, tier: str) -> str:
        done = setup(checkout, PYTHON=pythons, TIER=tier)
        assert done.returncode == 2
        return done.stdout + done.stderr

    assert "making .venv with Python 3.12.1" in refused(f"{new} {old}", "reference")
    told = refused(str(new), "reference")
    assert "no Python from 3.11 to 3.13" in told and f"{new}: Python 3.14.0" in told
    assert "TIER=core does without it" in told
    assert "making .venv with Python 3.14.0" in refused(str(new), "core")
    assert "there is no tier 'jax'; TIER is core, reference or tests" in refused(str(old), "jax")


def test_an_extra_that_does_not_exist_is_refused_and_help_installs_nothing(checkout):
    done = setup(checkout, EXTRAS="s3,browser")
    assert done.returncode == 2 and not (checkout / ".venv").exists()
    assert "there is no extra 'browser'; EXTRAS is one or more of jax gpu tpu" in done.stderr
    for script in (ROOT / "scripts").glob("*.sh"):
        shown = subprocess.run(["bash", script, "--help"], capture_output=True, text=True)
        assert shown.returncode == 0 and script.name in shown.stdout, script


def make_wheel(folder: Path) -> Path:
    """An empty package for Pythons before 3.8, which is what promptsource says of itself."""
    file = folder / "old_thing-1.0-py3-none-any.whl"
    metadata = "Metadata-Version: 2.1\nName: old_thing\nVersion: 1.0\nRequires-Python: <3.8\n"
    kind = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(file, "w") as wheel:
        for name, text in {"METADATA": metadata, "WHEEL": kind, "RECORD": ""}.items():
            wheel.writestr(f"old_thing-1.0.dist-info/{name}", text)
    return file


# A build backend whose package is empty, so that nothing has to be fetched to install it.
BACKEND = """
import zipfile

def build_editable(folder, settings=None, metadata=None):
    file = "t0repro-1.0-py3-none-any.whl"
    kept = {"METADATA": "Metadata-Version: 2.1\\nName: t0repro\\nVersion: 1.0\\n", "RECORD": ""}
    kept["WHEEL"] = "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"
    with zipfile.ZipFile(f"{folder}/{file}", "w") as wheel:
        for name, text in kept.items():
            wheel.writestr(f"t0repro-1.0.dist-info/{name}", text)
    return file
"""


@pytest.fixture
def small_checkout(checkout) -> Path:
    """One whose core names one wheel, in its folder wheels/, and whose own package is empty."""
    (checkout / "wheels").mkdir()
    (checkout / "backend.py").write_text(BACKEND)
    backend = "requires = []\nbuild-backend = 'backend'\nbackend-path = ['.']\n"
    (checkout / "pyproject.toml").write_text(f"[build-system]\n{backend}")
    (checkout / "setup.py").write_text("")
    digest = hashlib.sha256(make_wheel(checkout / "wheels").read_bytes()).hexdigest()
    write_lock(checkout, digest)
    # Stand-ins of a version manager for a uv that is not installed.
    (checkout / "no_uv").mkdir()
    python = f'[ "$2" != uv ] || exit 1; exec {sys._base_executable} "$@"'
    for name, body in {"uv": "exit 127", "python3": python}.items():
        (checkout / "no_uv" / name).write_text(f"#!/bin/sh\n{body}\n")
        (checkout / "no_uv" / name).chmod(0o755)
    return checkout


def write_lock(checkout: Path, digest: str) -> None:
    lock = f"old-thing==1.0 \\\n    --hash=sha256:{digest}\n"
    (checkout / "requirements" / "core.lock").write_text(lock)


@pytest.mark.parametrize("installer", ["uv", "pip"])
def test_uv_and_pip_make_the_same_environment_from_a_lock(small_checkout, installer):
    has_uv = not subprocess.run(["sh", "-c", "uv --version"], capture_output=True).returncode
    if installer == "uv" and not has_uv:
        pytest.skip("uv is not installed")
    path = os.environ["PATH"]
    environment = {
        "TIER": "core",
        "PYTHON": sys._base_executable,
        "PATH": f"{small_checkout / 'no_uv'}:{path}" if installer == "pip" else path,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(small_checkout / "wheels"),
    }
    lock = (small_checkout / "requirements" / "core.lock").read_text()
    write_lock(small_checkout, "0" * 64)
    refused = setup(small_checkout, **environment)
    assert refused.returncode and "hash" in refused.stderr.lower()

    (small_checkout / "requirements" / "core.lock").write_text(lock)
    done = setup(small_checkout, **environment)
    assert done.returncode == 0, done.stderr
    assert ("1 locked packages with uv" in done.stdout) == (installer == "uv")
    assert "installing with pip" not in done.stdout
    code = "import importlib.metadata as m; print(*sorted(d.name for d in m.distributions()))"
    command = [str(small_checkout / ".venv" / "bin" / "python"), "-P", "-c", code]
    found = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/")
    assert set(found.stdout.split()) - {"pip", "setuptools"} == {"old_thing", "t0repro"}
    # The tier stays until another is named.
    again = setup(small_checkout, **{k: v for k, v in environment.items() if k != "TIER"})
    assert ".venv is up to date with the core tier" in again.stdout


def test_every_folder_with_modules_is_a_package_so_that_a_wheel_has_it():
    tracked = subprocess.run(
        ["git", "ls-files", "-z", "t0repro/*.py", "tasks/*.py", "converters/*.py", "gin/*.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\0")
    modules = {Path(name) for name in tracked if name}
    assert modules
    missing = {str(path.parent) for path in modules if path.with_name("__init__.py") not in modules}
    assert not missing


def third_party_imports(*folders: str) -> set[str]:
    """Top-level modules that code in these folders imports, except Python's and ours."""
    found = set()
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add((node.module or "").partition(".")[0])
    return found - sys.stdlib_module_names - {"t0repro"}


def asked_for() -> dict[str, set[str]]:
    """The packages of requirements/*.in, by the comment that they stand under; setup.py's too."""
    asked = importlib.metadata.requires("t0repro") or []
    # numpy>=2, and jax>=0.10.2 ; extra == "jax": what a tier holds
    tiers = ("jax", "gs", "s3", "vertex")
    requirements = [Requirement(line) for line in asked]
    sections: dict[str, set[str]] = {
        "setup.py": {
            normal_name(each.name)
            for each in requirements
            if not each.marker or any(each.marker.evaluate({"extra": extra}) for extra in tiers)
        }
    }
    for tier in TIERS:
        for line in (ROOT / "requirements" / f"{tier}.in").read_text().splitlines():
            if line.startswith("#"):
                packages = sections.setdefault(line, set())
            elif line:
                packages.add(normal_name(re.split(r"[=<>!\[;]", line)[0]))
    return sections


# Installed for what they do, not for what they export to our code.
NEVER_IMPORTED = {
    "tensorflow-text": "imported by seqio, at a version that fits tensorflow's",
    "setuptools": "builds the package",
    "beartype": "pytest's --jaxtyping-packages names it",
    "basedpyright": "a command",
    "coverage": "a command",
    "gcsfs": "fsspec finds it by gs://",
    "ipykernel": "nbclient starts it",
    "import-linter": "a command",
    "ruff": "a command",
    "mkdocs-material": "mkdocs.yml names it",
    "mkdocstrings-python": "mkdocs.yml names it",
    "pytest-timeout": "pyproject.toml sets its timeout",
    "pytest-xdist": "pytest -n",
    "s3fs": "fsspec finds it by s3://",
}


def test_every_package_that_is_asked_for_is_imported_or_has_a_reason():
    folders = ("t0repro", "tasks", "converters", "tests", "scripts")
    providers = importlib.metadata.packages_distributions()
    used = {
        normal_name(package)
        for module in third_party_imports(*folders)
        for package in providers.get(module, ())
    }
    sections = asked_for()
    # The other sections say in their comments for whom they are.
    ours = {
        package
        for comment, packages in sections.items()
        if not any(words in comment for words in ("does not ask for", "What t5", "peers"))
        for package in packages
    }
    assert ours - used == NEVER_IMPORTED.keys()


def test_every_package_that_is_imported_is_asked_for_by_name():
    packages = {normal_name(name) for names in asked_for().values() for name in names}
    # What extras bring.
    extras = {"torch", "transformers", "lm_eval", "mlflow", "wandb", "starlette", "uvicorn"}
    providers = importlib.metadata.packages_distributions()
    for module in third_party_imports("t0repro", "tasks", "converters") - extras:
        assert {normal_name(name) for name in providers[module]} & packages, module
