"""A local HTTP server with the two requests of the hub that are used, over a P3-shaped tree."""

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import parse_qs, urlparse

from ..helpers.loopback import FileHandler, FileServer, running

PAGE = 4  # entries of a listing; the hub's is 1,000


class P3Server(FileServer):
    """Serves `root`/<path> as the repository of P3."""

    def __init__(self, root: Path):
        super().__init__(root, _Handler)
        self.listings = 0
        self.tokens: list[str | None] = []  # what listings were asked for with
        self.listing_faults: list = []
        self.next_page = ""  # named by every listing, in place of the right one
        self.large: bool = True  # tell SHA-256 of TFRecords, as of files in large file storage


class _Handler(FileHandler):
    server: P3Server

    def do_GET(self):
        url = urlparse(self.path)
        if match := re.fullmatch(r"/api/datasets/bigscience/P3/tree/(\w+)/(.*)", url.path):
            self._list(match[1], match[2], int(parse_qs(url.query).get("cursor", ["0"])[0]))
        elif match := re.fullmatch(r"/datasets/bigscience/P3/resolve/\w+/(.*)", url.path):
            # The hub sends one on to where large files are stored.
            self.send(302, b"", {"Location": f"/stored/{match[1]}"})
        elif match := re.fullmatch(r"/stored/(.*)", url.path):
            path = self.server.root / match[1]
            self.send_file(path, path.name)
        else:
            self.send(404, b"{}")

    def _list(self, revision: str, folder: str, first: int):
        self.server.listings += 1
        self.server.tokens.append(self.headers["Authorization"])
        fault = self.server.listing_faults.pop(0) if self.server.listing_faults else None
        if isinstance(fault, int):
            return self.send(fault, b"{}")
        if fault is not None:
            return self.send(200, fault)
        path = self.server.root / folder
        if not path.is_dir():
            return self.send(404, b'{"error": "not found"}')
        entries = [self._entry(file) for file in sorted(path.iterdir())]
        headers, following = {}, ""
        if first + PAGE < len(entries):
            following = f"{self.server.url}{urlparse(self.path).path}?cursor={first + PAGE}"
        following = self.server.next_page or following
        if following:
            headers["Link"] = f'<{following}>; rel="next"'
        self.send(200, json.dumps(entries[first : first + PAGE]).encode(), headers)

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


@contextmanager
def serving(root: Path) -> Iterator[P3Server]:
    """The server, on a free port, until the block ends."""
    with running(P3Server(root)) as server:
        yield server
