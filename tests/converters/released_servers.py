"""Loopback servers with the requests by which released checkpoints are listed and fetched."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlparse

import google_crc32c

PAGE = 2  # objects of a bucket's listing; Google Cloud Storage's page has 1,000


class Server(ThreadingHTTPServer):
    """Serves a folder as Google Cloud Storage's bucket `t5-data` and as the hub's repositories.

    Faults are taken from the front, one a request for bytes: ("cut", n) sends n bytes and hangs
    up; "wrong" sends other bytes; None is no fault.
    """

    daemon_threads = True

    def __init__(self, root: Path):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.root = root
        self.faults: list = []
        self.asked: list[tuple[str, str]] = []  # (path, Range) of requests for bytes
        self.requests = 0
        self.composite = False  # objects put together from parts have no MD5

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        self.server.requests += 1
        url = urlparse(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        if url.path == "/storage/v1/b/t5-data/o":
            self._list_bucket(query)
        elif match := re.fullmatch(r"/storage/v1/b/t5-data/o/([^/]+)", url.path):
            assert query == {"alt": "media"}
            self._bytes(unquote(match[1]))
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)/", url.path):
            self._list_repository(f"{match[1]}/{unquote(match[2])}")
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", url.path):
            self._bytes(f"{match[1]}/{unquote(match[2])}/{match[3]}")
        else:
            self._send(404, b"{}")

    def _list_bucket(self, query: dict[str, str]):
        paths = sorted(path for path in self.server.root.rglob("*") if path.is_file())
        names = [str(path.relative_to(self.server.root)) for path in paths]
        names = [name for name in names if name.startswith(query["prefix"])]
        first = int(query.get("pageToken", 0))
        listing: dict = {"kind": "storage#objects"}
        if names:
            listing["items"] = [self._object(name) for name in names[first : first + PAGE]]
        if first + PAGE < len(names):
            listing["nextPageToken"] = str(first + PAGE)
        self._send(200, json.dumps(listing).encode())

    def _object(self, name: str) -> dict:
        data = (self.server.root / name).read_bytes()
        crc32c = google_crc32c.Checksum(data).digest()
        item = {"name": name, "size": str(len(data)), "crc32c": base64.b64encode(crc32c).decode()}
        if not self.server.composite:
            item["md5Hash"] = base64.b64encode(hashlib.md5(data).digest()).decode()
        return item

    def _list_repository(self, folder: str):
        root = self.server.root / folder
        if not root.is_dir():
            return self._send(404, b"{}")
        entries = []
        for path in sorted(root.iterdir()):
            data = path.read_bytes()
            entry = {"type": "file", "path": path.name, "size": len(data)}
            entry["oid"] = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            if path.suffix == ".safetensors":
                entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data)}
            entries.append(entry)
        self._send(200, json.dumps(entries).encode())

    def _bytes(self, name: str):
        asked = self.headers.get("Range", "")
        self.server.asked.append((name, asked))
        fault = self.server.faults.pop(0) if self.server.faults else None
        data, status, headers = (self.server.root / name).read_bytes(), 200, {}
        if fault == "wrong":
            data = bytes(255 - byte for byte in data)
        if asked:
            start = int(asked.removeprefix("bytes=").removesuffix("-"))
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            data, status = data[start:], 206
        self._send(status, data, headers, fault[1] if isinstance(fault, tuple) else None)

    def _send(self, status: int, data: bytes, headers: dict | None = None, cut: int | None = None):
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data if cut is None else data[:cut])
        if cut is not None:
            self.wfile.flush()
            self.close_connection = True


@contextmanager
def serving(root: Path) -> Iterator[Server]:
    """The server, on a port that is free, until the block ends."""
    server = Server(root)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
