"""What the tests of t5_mesh_transformer share: its helpers, a vocabulary and a trained run."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parent))

import mesh_commands as commands  # noqa: E402 (in this folder)


@pytest.fixture(scope="session")
def vocabulary(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("vocabulary") / "tiny.model"
    ended = commands.run_python(
        f"import tiny_tasks; tiny_tasks.train_vocabulary({str(path)!r})", commands.environment(path)
    )
    assert path.exists(), ended.stderr
    return path


@pytest.fixture(scope="session")
def env(vocabulary) -> dict[str, str]:
    return commands.environment(vocabulary)


@pytest.fixture(scope="session")
def trained(tmp_path_factory, env) -> tuple[Path, str]:
    """A model_dir after four steps, and what training printed on stderr."""
    model_dir = tmp_path_factory.mktemp("run") / "model"
    ended = commands.run_command([f"--model_dir={model_dir}", *commands.TRAIN], env)
    assert ended.returncode == 0, ended.stderr
    return model_dir, ended.stderr


@pytest.fixture(scope="session")
def server(env):
    """The command with its imports done, for the runs that are not about the command line."""
    server = commands.CommandServer(env)
    yield server
    server.close()
