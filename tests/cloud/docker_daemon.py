"""Docker on loopback: as much of its HTTP API as one container takes, run as a process here."""

from __future__ import annotations

import json
import re
import struct
import subprocess
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.cloud.services import start_container

IMAGE = "registry.example/t0repro:1"


class DockerDaemon(ThreadingHTTPServer):
    """Has one image, and runs one container.

    Attributes:
      created: what the container was asked to be.
      container: the process, once it is started.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.created: dict[str, Any] = {}
        self.container: subprocess.Popen[str] | None = None

    def start_container(self) -> None:
        """Starts the container, with /gcs where it is mounted from."""
        (mounted,) = [b for b in self.created["HostConfig"]["Binds"] if b.endswith(":/gcs:rw")]
        mount = Path(mounted.partition(":")[0])
        self.container = start_container((), self.created["Cmd"], mount)


class _Handler(BaseHTTPRequestHandler):
    server: DockerDaemon

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        path = re.sub(r"^/v[\d.]+|\?.*", "", self.path)
        if path == "/containers/c1/logs":
            return self._follow()
        answers = {
            f"/distribution/{IMAGE}/json": {"Descriptor": {}, "Platforms": []},
            "/version": {"ApiVersion": "1.44"},
            f"/images/{IMAGE}/json": {"Id": "sha256:1"},
            "/networks": [],
            "/networks/n1": {"Id": "n1"},
            "/containers/c1/json": {"Id": "c1", "Config": {"Tty": False}},
        }
        if path not in answers:
            return self._send(404, {"message": f"No such thing: {path}"})
        return self._send(200, answers[path])

    def _follow(self):
        """Sends what the container writes, as it writes it."""
        self.send_response(200)
        self.end_headers()
        for line in self.server.container.stdout:
            data = line.encode()
            # A frame of standard output: its number, three bytes of nothing, and the length.
            self.wfile.write(struct.pack(">BxxxL", 1, len(data)) + data)

    def do_POST(self):
        path = re.sub(r"^/v[\d.]+|\?.*", "", self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if path == "/containers/create":
            self.server.created = json.loads(body)
        if path == "/containers/c1/start":
            self.server.start_container()
        if path == "/containers/c1/wait":
            self.server.container.wait()
        answers = {
            "/images/create": "",
            "/networks/create": {"Id": "n1"},
            "/containers/create": {"Id": "c1", "Warnings": []},
            "/containers/c1/start": "",
            "/containers/c1/wait": {"StatusCode": 0},
        }
        self._send(200, answers[path])

    def _send(self, status: int, answer: Any) -> None:
        data = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
