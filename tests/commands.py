"""Runs this project's commands in processes of their own, with what they import imported before.

Importing TensorFlow, SeqIO and JAX takes most of the time of a tiny run. So commands are forks of
one process per worker that has imported them: each has its own memory, folder, environment, output
and exit code. Tests of imports, of signals and of start-up start real processes instead.

As a program: the process that forks.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

# Read when a module is imported, so a fork cannot change them.
_READ_ON_IMPORT = ("JAX_", "TF_", "PYTHON")
_IMPORTED = (
    "jax",
    "orbax.checkpoint",
    "seqio",
    "t5.data",
    "t0repro.cli.app",
    "t0repro.converters.convert",
    "t0repro.runs.train",
    "t0repro.runs.task_eval",
    "t0repro.runs.batch_infer",
)


def run(
    module: str,
    *arguments: object,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs `python -P -m module arguments`.

    Args:
      module: the module to run as the program.
      arguments: its arguments.
      env: its environment; this process's own if None.
      cwd: its working folder; this process's own if None.
    """
    env = dict(os.environ if env is None else env)
    words = [str(argument) for argument in arguments]
    return _server(_on_import(env)).run({"module": module, "arguments": words}, env, cwd)


def _on_import(env: dict[str, str]) -> frozenset[tuple[str, str]]:
    return frozenset(pair for pair in env.items() if pair[0].startswith(_READ_ON_IMPORT))


@functools.cache
def _server(on_import: frozenset[tuple[str, str]]) -> ForkServer:
    """A server for commands with these variables, which ends with this process."""
    others = {name: x for name, x in os.environ.items() if not name.startswith(_READ_ON_IMPORT)}
    server = ForkServer(Path(__file__), others | dict(on_import))
    atexit.register(server.close)
    return server


class ForkServer:
    """The process of a script that ends in `serve`."""

    def __init__(self, script: Path, env: dict[str, str]):
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )

    def run(
        self, job: dict[str, Any], env: dict[str, str] | None = None, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Runs a job in a fork.

        Args:
          job: what the script's function takes, as JSON.
          env: the fork's environment; the server's own if None.
          cwd: the fork's working folder; this process's own if None.
        """
        assert self._process.stdin and self._process.stdout
        with _output() as out, _output() as error:
            request = {"job": job, "folder": str(cwd or Path.cwd()), "env": env}
            request |= {"stdout": out.name, "stderr": error.name}
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
            assert answer, "the server died"
            return subprocess.CompletedProcess(
                list(job.values()), int(answer), out.read(), error.read()
            )

    def close(self) -> None:
        self._process.communicate()


def _output() -> IO[str]:
    return tempfile.NamedTemporaryFile("r", encoding="utf-8", errors="replace")


def serve(call: Callable[[dict[str, Any]], object]) -> None:
    """Calls a function with each job on stdin, in forks; prints their exit codes."""
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _answer(call, **json.loads(line))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _answer(
    call: Callable[[dict[str, Any]], object],
    job: dict[str, Any],
    folder: str,
    env: dict[str, str] | None,
    stdout: str,
    stderr: str,
) -> None:
    """Calls the function and ends this fork as a program ends."""
    code = 1
    try:
        os.chdir(folder)
        os.dup2(os.open(stdout, os.O_WRONLY), 1)
        os.dup2(os.open(stderr, os.O_WRONLY), 2)
        if env is not None:
            os.environ.clear()
            os.environ.update(env)
        call(job)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # waits for the threads that a program waits for
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run_module(job: dict[str, Any]) -> None:
    sys.argv = [job["module"], *job["arguments"]]
    runpy.run_module(job["module"], run_name="__main__", alter_sys=True)


def _main() -> None:
    from t0repro import compat

    compat.install()
    for name in _IMPORTED:
        importlib.import_module(name)
    serve(_run_module)


if __name__ == "__main__":
    _main()
