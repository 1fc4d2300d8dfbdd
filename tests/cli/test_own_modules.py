"""Where commands look for the modules that --module_import names, and T0's own names for its."""

import os
import subprocess
import sys

import pytest

from t0repro.cli import gate
from t0repro.progress import NOT_ON_A_TPU, quiet_libtpu

from ..helpers import commands


def tasks_ls(folder, *arguments):
    """`t0repro tasks ls` in a folder."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return commands.run("t0repro", "tasks", "ls", *arguments, env=env, cwd=folder)


def test_a_module_in_the_working_folder_is_found(tmp_path):
    (tmp_path / "my_tasks.py").write_text("import t0repro.tasks.demo")
    done = tasks_ls(tmp_path, "--module_import=my_tasks", "--mixture=demo_train")
    assert done.returncode == 0 and "14 tasks of 4 datasets." in done.stdout, done.stderr
    both = "--module_import=my_tasks,t0repro.tasks.examples.topics"
    assert "14 tasks of 4" in tasks_ls(tmp_path, both, "--mixture=demo_train").stdout
    assert tasks_ls(tmp_path, both, "--mixture=topics_train").returncode == 0
    missing = tasks_ls(tmp_path, "--module_import=my_taskz")
    assert missing.returncode == 2
    assert "'my_taskz'" in missing.stderr and "the working folder" in missing.stderr


def test_the_working_folder_hides_no_installed_module(tmp_path, monkeypatch):
    (tmp_path / "gin").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with gate.gate("test"):
        assert sys.path[-1] == str(tmp_path) and sys.path.count(str(tmp_path)) == 1


def test_settings_of_jax_change_no_number_of_a_command():
    code = """
from t0repro.cli.gate import gate
with gate("test"):
    import jax
    print(jax.random.uniform(jax.random.key(1)), jax.jit(lambda x: x + 1).lower(1.0).as_text())
"""
    environment = {name: x for name, x in os.environ.items() if name not in gate._FIXED_SETTINGS}

    def run(**settings):
        command = [sys.executable, "-P", "-c", code]
        environment_of_it = environment | settings
        return subprocess.run(command, env=environment_of_it, capture_output=True, text=True)

    plain, named = run(), run(JAX_ENABLE_X64="False", JAX_THREEFRY_PARTITIONABLE="1")
    assert plain.returncode == 0 and plain.stderr == named.stderr == ""
    others = {
        "JAX_ENABLE_X64": "1",
        "JAX_DISABLE_JIT": "true",
        "JAX_DEFAULT_PRNG_IMPL": "rbg",
        "JAX_THREEFRY_PARTITIONABLE": "0",
        "JAX_NUMPY_DTYPE_PROMOTION": "strict",
        "JAX_NUMPY_RANK_PROMOTION": "raise",
    }
    done = run(**others)
    assert done.stdout == plain.stdout == named.stdout
    for name, value in others.items():
        assert f"note: {name}={value} is not used" in done.stderr


def test_t0s_own_module_registers_its_tasks_here():
    code = """
from t0repro.tasks.registration import describing
from t0repro.tasks.registry import prompted_mixtures
with describing():
    import t0.seqio_tasks
print(len(prompted_mixtures()["t0_train"].tasks))
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert int(done.stdout) > 200, done.stderr


@pytest.mark.parametrize("is_installed", [True, False])
def test_libtpu_is_told_that_there_is_no_tpu_only_where_it_is_installed(monkeypatch, is_installed):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name if is_installed else None)
    monkeypatch.setattr("glob.glob", lambda pattern: [])
    for name in NOT_ON_A_TPU:
        monkeypatch.setenv(name, "the user's")
        monkeypatch.delenv(name)
    monkeypatch.setenv("TPU_WORKER_ID", "3")
    quiet_libtpu()
    expected = NOT_ON_A_TPU | {"TPU_WORKER_ID": "3"} if is_installed else {"TPU_WORKER_ID": "3"}
    assert {name: os.environ[name] for name in NOT_ON_A_TPU if name in os.environ} == expected
