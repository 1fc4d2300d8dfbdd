"""Loopback servers with the requests by which released checkpoints are listed and fetched."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlparse

import google_crc32c

from ..helpers.loopback import FileHandler, FileServer, running

PAGE = 2  # objects of a bucket's listing; Google Cloud Storage's page has 1,000


class Server(FileServer):
    """Serves a folder as Google Cloud Storage's bucket `t5-data` and as the hub's repositories."""

    def __init__(self, root: Path, handler: type[FileHandler] | None = None):
        super().__init__(root, handler or Handler)
        self.requests = 0
        self.composite = False  # objects put together from parts have no MD5


class Handler(FileHandler):
    """Answers requests of both."""

    server: Server

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
            self.send(404, b"{}")

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
        self.send(200, json.dumps(listing).encode())

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
            return self.send(404, b"{}")
        entries = []
        for path in sorted(root.iterdir()):
            data = path.read_bytes()
            entry = {"type": "file", "path": path.name, "size": len(data)}
            entry["oid"] = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            if path.suffix == ".safetensors":
                entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data)}
            entries.append(entry)
        self.send(200, json.dumps(entries).encode())

    def _bytes(self, name: str):
        self.send_file(self.server.root / name, name)


@contextmanager
def serving(root: Path) -> Iterator[Server]:
    """The server, on a free port, until the block ends."""
    with running(Server(root)) as server:
        yield server
