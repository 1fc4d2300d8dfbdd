"""Renders templates that are not promptsource's own in a separate, restricted process.

A template file may come from a stranger, and Jinja is a programming language. There are three
layers of protection:

  Jinja's sandbox blocks attributes that lead to Python's internals;
  a process that cannot write to files, is killed after SECONDS of processor time on a row, and has
    BYTES of memory beyond what it starts with (`"a" * (4 * 10**9)` needs no attribute at all);
  answers in JSON: even if the process is taken over, nothing that it sends is ever executed.

Such templates are also checked more strictly than promptsource's. A variable that a row lacks is an
error (write `{{ text | default("") }}` if it may be missing), and so are values that T0's schemas
exclude: labels below 0, non-finite numbers (NaN or Inf), binary columns. Rows without a label or
with an empty target are dropped, while T0 would train on a wrong answer or on "<NO LABEL>".

Rows travel as JSON, by `encode_row` and `decode_row`, with which caching spools them too.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

import jinja2
import jinja2.exceptions
import jinja2.meta
import jinja2.nodes
import jinja2.runtime
import jinja2.sandbox

from t0repro.tasks.prompt_environment import TemplateFailure, UndefinedVariable
from t0repro.tasks.row_codec import encode_row
from t0repro.tasks.templates import Drop, Rendering

SECONDS = 2.0
"""Processor seconds for one row; ordinary templates take a thousandth of a second."""
BYTES = 1 << 29
"""Maximum memory for rendering."""
CHARACTERS = 1 << 24
"""Maximum characters of a rendering; sequence lengths keep a few thousand."""


class SandboxedTemplate:
    """A template that the sandbox process compiles and renders; see `CompiledTemplate`.

    Args:
      template: Any object with `name`, `jinja` and `answer_choices`.
      cut: Whether to truncate variables to 2,048 characters, as promptsource does.
    """

    def __init__(self, template: Any, cut: bool = True):
        self.name: str = template.name
        self._request = {
            "name": template.name,
            "jinja": template.jinja,
            "answer_choices": template.answer_choices,
            "cut": cut,
        }

    def render(self, row: Mapping[str, Any], draw_key: str | None = None) -> Rendering | Drop:
        """Renders one row, or returns why it gives no example.

        Raises:
          TemplateFailure: If the template cannot render the row, or exceeds a limit.
        """
        answer = _process.ask("render", **self._request, row=dict(row), draw_key=draw_key)
        return Drop[answer] if isinstance(answer, str) else Rendering(*answer)


def check_jinja(text: str) -> None:
    """Compiles a stranger's Jinja, in the sandbox because compiling evaluates constants.

    Raises:
      jinja2.TemplateSyntaxError: If it is not valid, with the line.
      TemplateFailure: If compiling exceeds a limit.
    """
    _process.ask("check", text=text)


def variables(text: str) -> frozenset[str]:
    """The variables that a stranger's Jinja reads; empty if it is not valid."""
    return frozenset(_process.ask("variables", text=text))


def fixed_choices(text: str) -> tuple[str, ...] | None:
    """The answer choices if they are the same for every row, else None."""
    found = _process.ask("fixed_choices", text=text)
    return None if found is None else tuple(found)


class _Process:
    """The sandbox process, started on first use and restarted after it has died."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._lock = threading.Lock()

    def ask(self, operation: str, **arguments: Any) -> Any:
        """Sends one request and waits for its answer.

        Raises:
          TemplateFailure: If the template fails or exceeds a limit.
          jinja2.TemplateSyntaxError: If it is not valid Jinja.
        """
        with self._lock:
            process = self._start_process()
            assert process.stdin is not None and process.stdout is not None
            try:
                process.stdin.write(encode_row([operation, arguments]) + b"\n")
                process.stdin.flush()
                line = process.stdout.readline()
            except BrokenPipeError:
                line = b""
            # A line without a line break is incomplete: the process died while it answered.
            if not line.endswith(b"\n"):
                raise self._ended_error(process)
        answer = json.loads(line)
        if "answer" in answer:
            return answer["answer"]
        raise _failure(answer["failure"], answer["message"], answer.get("line"))

    def _start_process(self) -> subprocess.Popen[bytes]:
        # After a fork, the pipes belong to the parent: both processes' requests would mix.
        if self._process is None or self._owner != os.getpid():
            self._owner = os.getpid()
            # -P: modules are not looked for in the working directory.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-W", "ignore", "-m", "t0repro.tasks.sandbox_worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # no Ctrl-C reaches it; it ends when its input does
            )
        return self._process

    def _ended_error(self, process: subprocess.Popen[bytes]) -> TemplateFailure:
        """The error for a process that has died; the next request starts another."""
        self.close()
        # SIGPROF comes from the timer that `sandbox_worker` sets before each row.
        if process.returncode == -signal.SIGPROF:
            return TemplateFailure(f"it ran for more than {SECONDS:g} s of processor time")
        return TemplateFailure(
            f"its process was ended (status {process.returncode}), perhaps because memory ran out"
        )

    def close(self) -> None:
        """Ends the process."""
        process, self._process = self._process, None
        if process is None or self._owner != os.getpid():
            return
        # Closing its input is what ends it.
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        try:
            process.wait(timeout=SECONDS)  # it ends by itself when its input does
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


_process = _Process()
atexit.register(_process.close)


def _failure(kind: str, message: str, line: int | None) -> Exception:
    if kind == "syntax":
        return jinja2.TemplateSyntaxError(message, line or 1)
    if kind == "undefined":
        return UndefinedVariable(message, line)
    return TemplateFailure(message, line)
