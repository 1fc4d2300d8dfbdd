"""Runs t5_mesh_transformer in subprocesses.

As a program: the server behind CommandServer.
"""

import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))

from helpers.commands import ForkServer, collect_rarely, serve  # noqa: E402

BIN = Path(sys.executable).parent

TRAIN = [
    "--module_import=tiny_tasks",
    "--gin_file=dataset.gin",
    "--gin_param=MIXTURE_NAME = 'tiny_train'",
    "--gin_file=models/t5.1.1.tiny.gin",
    "--gin_param=d_kv = 16",
    "--gin_file=learning_rate_schedules/constant_0_001.gin",
    "--gin_param=run.train_steps = 4",
    "--gin_param=run.save_checkpoints_steps = 2",
    "--gin_param=run.batch_size = ('sequences_per_batch', 8)",
    "--gin_param=run.sequence_length = {'inputs': 32, 'targets': 8}",
    "--gin_param=serialize_num_microbatches.tokens_per_microbatch_per_replica = 128",
    "--gin_param=pack_dataset.use_custom_ops = False",
    "--gin_param=utils.run.mesh_shape = []",
]


def evaluate(model_dir: Path, mode: str, mixture: str, *more: str) -> list[str]:
    """Flags that evaluate a trained model_dir in a mode."""
    return [
        f"--model_dir={model_dir}",
        "--module_import=tiny_tasks",
        f"--gin_file={model_dir / 'operative_config.gin'}",
        f"--gin_file={mode}.gin",
        f"--gin_param=MIXTURE_NAME = '{mixture}'",
        "--gin_param=run.dataset_split = 'validation'",
        "--gin_param=run.batch_size = ('sequences_per_batch', 8)",
        "--gin_param=run.eval_checkpoint_step = 4",
        "--gin_param=Bitransformer.decode.max_decode_length = 8",
        *more,
    ]


def environment(vocabulary: Path) -> dict[str, str]:
    """A subprocess's environment, in which tiny_tasks can be imported."""
    folders = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    more = {"PYTHONPATH": os.pathsep.join(folders), "T0REPRO_TINY_VOCAB": str(vocabulary)}
    return {**os.environ, **more}


def run_python(code: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Runs Python code as a program of its own; -P, as the checkout's gin/ is not gin-config."""
    return subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, env=env, check=False
    )


def run_command(flags: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Runs t5_mesh_transformer."""
    return subprocess.run(
        [str(BIN / "t5_mesh_transformer"), *flags],
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )


class CommandServer:
    """Runs t5_mesh_transformer many times, each in a fork of one process that has imported it.

    The imports are most of what a small run costs; a fork keeps graphs and gin apart all the same.
    """

    def __init__(self, env: dict[str, str]):
        self._server = ForkServer(HERE / "mesh_commands.py", env)
        self.close = self._server.close

    def run(
        self, flags: list[str], unpatched: str = "", presses: int = 0, once: Path | None = None
    ) -> tuple[int, str]:
        """(exit code, stdout and stderr) of the command.

        Args:
          flags: its arguments.
          unpatched: a function of Mesh TensorFlow's utils to run as its authors left it.
          presses: how often to press Ctrl-C.
          once: the file whose first line is waited for before that; None presses as soon as the
            flags are parsed.
        """
        job = {"flags": flags, "unpatched": unpatched, "presses": presses, "once": str(once or "")}
        done = self._server.run(job)
        return done.returncode, done.stderr


def _serve() -> None:
    collect_rarely()
    from t0repro import compat
    from t0repro.cli import t5_mesh_transformer

    # Once for all jobs: it takes seconds.
    compat.install()
    importlib.import_module("t5.models.mesh_transformer_main")
    sys.argv[0] = "t5_mesh_transformer"
    t5_mesh_transformer.define_flags()
    serve(lambda job: _run(**job))


def _run(flags: list[str], unpatched: str, presses: int, once: str) -> None:
    """Runs the command, whose whole output goes to stderr."""
    from mesh_tensorflow.transformer import utils

    from t0repro.cli import t5_mesh_transformer as main

    os.dup2(2, 1)
    if unpatched:
        setattr(utils, unpatched, getattr(utils, unpatched).__wrapped__)
    if presses:
        # A shell starts what runs in the background with Ctrl-C ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if presses and once:
        threading.Thread(target=_press, args=(presses, Path(once)), daemon=True).start()
    elif presses:
        main.run = lambda options: signal.raise_signal(signal.SIGINT)
    sys.argv[1:] = flags
    main.console_entry_point()


def _press(presses: int, once: Path) -> None:
    while not once.exists() or not once.stat().st_size:
        time.sleep(0.2)
    for _ in range(presses):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)


if __name__ == "__main__":
    _serve()
