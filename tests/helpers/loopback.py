"""A local HTTP server that serves files in ranges, and fails as it is told to."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TypeVar


class FileServer(ThreadingHTTPServer):
    """Serves the files below `root`.

    Faults are taken from the front, one for each request for bytes: an int is answered as that
    status; ("cut", n) sends n bytes and hangs up; "wrong" sends other bytes; "whole" ignores
    Range; "endless" never stops sending; "huge" says that the file is larger than any disk;
    ("moved", address) redirects to there; None is not a fault.
    """

    daemon_threads = True

    def __init__(self, root: Path, handler: type[FileHandler]):
        super().__init__(("127.0.0.1", 0), handler)
        self.root = root
        self.faults: list = []
        self.asked: list[tuple[str, str]] = []  # (name, Range) of requests for bytes
        self.sent_too_much = 0  # bytes that were taken of endless answers

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class FileHandler(BaseHTTPRequestHandler):
    """Answers requests; a subclass's do_GET says which path asks for which file."""

    server: FileServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    def send_file(self, path: Path, name: str):
        """Sends the bytes that the request asks for, with the next fault; notes it as `name`."""
        asked = self.headers.get("Range", "")
        self.server.asked.append((name, asked))
        fault = self.server.faults.pop(0) if self.server.faults else None
        if isinstance(fault, int):
            return self.send(fault, b"no")
        data, status, headers = path.read_bytes(), 200, {}
        if fault == "wrong":
            data = bytes(255 - byte for byte in data)
        if asked and fault != "whole":
            start = int(re.fullmatch(r"bytes=(\d+)-", asked)[1])
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            data, status = data[start:], 206
        if fault in ("endless", "huge"):
            return self._send_endlessly(data, 10**18 if fault == "huge" else None)
        kind, value = fault if isinstance(fault, tuple) else (None, None)
        if kind == "moved":
            return self.send(302, b"", {"Location": value})
        self.send(status, data, headers, cut=value)

    def _send_endlessly(self, data: bytes, stated: int | None):
        """Sends the data and then zeros, until the other side has had enough."""
        self.send_response(200)
        if stated is not None:
            self.send_header("Content-Length", str(stated))
        self.end_headers()
        self.close_connection = True
        with suppress(OSError):
            self.wfile.write(data)
            while True:
                self.wfile.write(bytes(1 << 16))
                self.server.sent_too_much += 1 << 16

    def send(self, status: int, data: bytes, headers: dict | None = None, cut: int | None = None):
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data if cut is None else data[:cut])
        if cut is not None:
            self.wfile.flush()
            self.close_connection = True


_Server = TypeVar("_Server", bound=FileServer)


@contextmanager
def running(server: _Server) -> Iterator[_Server]:
    """The server, on a free port, until the block ends."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
