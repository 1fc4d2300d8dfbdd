"""What the tests of t5_mesh_transformer share: its helpers, a vocabulary and a trained run."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE))

import mesh_commands as commands  # noqa: E402 (in this folder)


@pytest.fixture(scope="session")
def vocabulary(once) -> Path:
    def fill(folder):
        path = folder / "tiny.model"
        code = f"import tiny_tasks; tiny_tasks.train_vocabulary({str(path)!r})"
        ended = commands.run_python(code, commands.environment(path))
        assert path.exists(), ended.stderr

    return once("mesh_vocabulary", fill, HERE / "tiny_tasks.py") / "tiny.model"


@pytest.fixture(scope="session")
def env(vocabulary) -> dict[str, str]:
    return commands.environment(vocabulary)


@pytest.fixture(scope="session")
def trained(once, env) -> tuple[Path, str]:
    """A model_dir after four steps, to copy, and what training printed on stderr."""

    def fill(folder):
        # From some initial parameters and orders of the data a model of four steps generates
        # nothing, so both have a seed.
        seeds = ["--module_import=seeded", "--gin_param=mesh_train_dataset_fn.seed = 1"]
        line = [f"--model_dir={folder / 'model'}", *seeds, *commands.TRAIN]
        ended = commands.run_command(line, env)
        assert ended.returncode == 0, ended.stderr
        (folder / "stderr").write_text(ended.stderr)

    folder = once("mesh_trained", fill)
    return folder / "model", (folder / "stderr").read_text()


@pytest.fixture(scope="session")
def server(env):
    """The command with its imports done, for the runs that are not about the command line."""
    server = commands.CommandServer(env)
    yield server
    server.close()
