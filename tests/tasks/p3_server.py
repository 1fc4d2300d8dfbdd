"""A local HTTP server with the two requests of the hub that are used, over a P3-shaped tree."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlparse

PAGE = 4  # entries of a listing; the hub's is 1,000


class P3Server(ThreadingHTTPServer):
    """Serves `root`/<path>; `faults` are taken from the front, one a request for bytes.

    Faults: an int is answered as that status; ("cut", n) sends n bytes and hangs up; "wrong" sends
    other bytes; "whole" ignores Range; None is no fault.
    """

    daemon_threads = True

    def __init__(self, root: Path):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.root = root
        self.faults: list = []
        self.asked: list[tuple[str, str]] = []  # (file name, Range)
        self.listings = 0
        self.listing_faults: list = []
        self.next_page = ""  # named by every listing, in place of the right one
        self.large: bool = True  # tell SHA-256 of TFRecords, as of files in large file storage

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: P3Server
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        url = urlparse(self.path)
        if match := re.fullmatch(r"/api/datasets/bigscience/P3/tree/(\w+)/(.*)", url.path):
            self._list(match[1], match[2], int(parse_qs(url.query).get("cursor", ["0"])[0]))
        elif match := re.fullmatch(r"/datasets/bigscience/P3/resolve/\w+/(.*)", url.path):
            # The hub sends one on to where large files are stored.
            self._send(302, b"", {"Location": f"/stored/{match[1]}"})
        elif match := re.fullmatch(r"/stored/(.*)", url.path):
            self._file(self.server.root / match[1])
        else:
            self._send(404, b"{}")

    def _list(self, revision: str, folder: str, first: int):
        self.server.listings += 1
        fault = self.server.listing_faults.pop(0) if self.server.listing_faults else None
        if isinstance(fault, int):
            return self._send(fault, b"{}")
        if fault is not None:
            return self._send(200, fault)
        path = self.server.root / folder
        if not path.is_dir():
            return self._send(404, b'{"error": "not found"}')
        entries = [self._entry(file) for file in sorted(path.iterdir())]
        headers, following = {}, ""
        if first + PAGE < len(entries):
            following = f"{self.server.url}{urlparse(self.path).path}?cursor={first + PAGE}"
        following = self.server.next_page or following
        if following:
            headers["Link"] = f'<{following}>; rel="next"'
        self._send(200, json.dumps(entries[first : first + PAGE]).encode(), headers)

    def _entry(self, file: Path) -> dict:
        data = file.read_bytes()
        entry = {
            "type": "file",
            "path": str(file.relative_to(self.server.root)),
            "size": len(data),
            "oid": hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest(),
        }
        if ".tfrecord-" in file.name and self.server.large:
            entry["oid"] = "of the pointer"
            entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data)}
        return entry

    def _file(self, path: Path):
        asked = self.headers.get("Range", "")
        self.server.asked.append((path.name, asked))
        fault = self.server.faults.pop(0) if self.server.faults else None
        if isinstance(fault, int):
            return self._send(fault, b"no")
        data, status, headers = path.read_bytes(), 200, {}
        if fault == "wrong":
            data = bytes(255 - byte for byte in data)
        if asked and fault != "whole":
            start = int(re.fullmatch(r"bytes=(\d+)-", asked)[1])
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            data, status = data[start:], 206
        cut = fault[1] if isinstance(fault, tuple) else None
        self._send(status, data, headers, cut)

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
def serving(root: Path) -> Iterator[P3Server]:
    """The server, on a port of its own, until the block ends."""
    server = P3Server(root)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
