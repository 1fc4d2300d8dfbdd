"""The prompt bench as people start it: `t0repro browse` in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

COMMAND = (sys.executable, "-P", "-m", "t0repro", "browse")
DEMO = "--module_import=t0repro.tasks.demo"
PROMPT = "demo_synthetic_glue_mrpc_want_to_know"
DATASET = "synthetic_glue/mrpc"


class Bench:
    """A running `t0repro browse`, and requests to it as its page makes them."""

    def __init__(self, process: subprocess.Popen[str]):
        self.process = process
        assert process.stdout is not None
        line = next(each for each in process.stdout if each.startswith("Open "))
        self.url = line.split()[1]
        self.base, self.token = self.url.split("/?token=")
        self.cookie = f"t0repro-{self.base.rsplit(':', 1)[1]}={self.token}"

    def ask(
        self, path: str, body: Any = None, headers: Mapping[str, str | None] = {}
    ) -> tuple[int, str, Mapping[str, str]]:
        """Status, text and headers of an answer; a header of None is left out."""
        given = {"Cookie": self.cookie, "Origin": self.base if body is not None else None}
        given |= headers
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        request = urllib.request.Request(
            self.base + path, data, {name: value for name, value in given.items() if value}
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.status, answer.read().decode(), answer.headers
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode(), error.headers

    def processor_seconds(self) -> float:
        """Processor time of the process and its children so far."""
        own = psutil.Process(self.process.pid)
        times = [each.cpu_times() for each in (own, *own.children())]
        return sum(each.user + each.system for each in times)


def run_bench(*arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs `t0repro browse` where it ends by itself."""
    environment = {**os.environ, **variables}
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )


@contextlib.contextmanager
def start_bench(*arguments: str | Path, **variables: str) -> Iterator[Bench]:
    """Starts `t0repro browse` on a free port, and ends it as Ctrl-C does."""
    command = [*COMMAND, *map(str, arguments)]
    environment = {**os.environ, **variables}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            bench = Bench(process)
            bench.ask("/static/browse.css")  # from its first answer on, Ctrl-C ends it
            yield bench
        finally:
            process.send_signal(2)
            process.wait(20)
    assert process.returncode == 0


def fields(**changes: Any) -> dict[str, Any]:
    """What the page sends for the demo's prompt, with changes in the template."""
    draft = {
        "name": "mine",
        "jinja": "{{sentence1}} and {{sentence2}}: same? ||| {{answer_choices[label]}}",
        "answer_choices": "no ||| yes",
        "original_task": True,
        "choices_in_prompt": False,
        "metrics": ["Accuracy"],
        "identifier": "",
        "base": "",
    }
    return {
        "dataset": DATASET,
        "like": PROMPT,
        "draft": {**draft, **changes},
        "split": "validation",
        "start": 0,
    }
