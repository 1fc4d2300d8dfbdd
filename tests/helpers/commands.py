"""Runs this project's commands in processes of their own, with what they import imported before.

Importing TensorFlow, SeqIO and JAX takes most of the time of a tiny run. So commands are forks of
one process per worker that has imported them: each has its own memory, folder, environment, output
and exit code. Tests of imports, of signals and of start-up start real processes instead.

As a program: the process that forks.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib.metadata
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
    "t0repro.runs.evaluate",
    "t0repro.runs.batch_infer",
)


def run(
    program: str,
    *arguments: object,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs a program as a command line would.

    Args:
      program: an installed program, such as t0repro, or the module for `python -P -m`.
      arguments: its arguments.
      env: its environment; this process's own if None.
      cwd: its working folder; this process's own if None.
    """
    env = dict(os.environ if env is None else env)
    words = [str(argument) for argument in arguments]
    return _server(_on_import(env)).run({"program": program, "arguments": words}, env, cwd)


def _on_import(env: dict[str, str]) -> frozenset[tuple[str, str]]:
    return frozenset(
        (name, value)
        for name, value in env.items()
        if name.startswith(_READ_ON_IMPORT) and name != "PYTHONPATH"
    )


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


def collect_rarely() -> None:
    """Lets the garbage collector skip what there is, and come less often.

    It took an eighth of the tests' processor time, and a fifth of that of imports: traces of JAX
    and modules are many small objects.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def serve(call: Callable[[dict[str, Any]], object]) -> None:
    """Calls a function with each job on stdin, in forks; prints their exit codes."""
    collect_rarely()
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


def _run_program(program: str, arguments: list[str]) -> None:
    sys.argv = [program, *arguments]
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    scripts = importlib.metadata.entry_points(group="console_scripts", name=program)
    if scripts:
        sys.exit(next(iter(scripts)).load()())
    runpy.run_module(program, run_name="__main__", alter_sys=True)


def _main() -> None:
    collect_rarely()
    from t0repro import compat

    compat.install()
    for name in _IMPORTED:
        importlib.import_module(name)
    sys.modules["t0repro.cli.app"].command()  # built here once, not by each fork
    serve(lambda job: _run_program(**job))


if __name__ == "__main__":
    _main()
