"""A loopback proxy in front of a store's server: it fails, cuts, delays, hides and reports."""

import dataclasses
import http.client
import http.server
import json
import random
import re
import socketserver
import threading
import time
import urllib.parse
from collections.abc import Callable

_HOP_BY_HOP = {"connection", "transfer-encoding", "keep-alive", "content-length"}
_S3_ENTRY = re.compile(rb"(<Contents>.*?<Key>(.*?)</Key>.*?</Contents>)", re.DOTALL)
# The part of the path or query by which requests about one large upload belong together.
_UPLOAD = re.compile(r"(?:upload_id|uploadId)=[^&]+")
_UPLOAD_NAME = re.compile(rb'"name"\s*:\s*"((?:[^"\\]|\\.)*)"')


@dataclasses.dataclass(frozen=True)
class Request:
    """A request to the store.

    Attributes:
      method: of HTTP.
      name: the object that it is about; "" for a listing.
      moment: "before" the server has it, or "after" the server has answered.
    """

    method: str
    name: str
    moment: str

    @property
    def writes(self) -> bool:
        """Whether it changes an object."""
        return self.method in ("POST", "PUT", "DELETE")


class FaultyStore:
    """A proxy that makes a share of the requests fail.

    Attributes:
      refused, cut_before, cut_after, slow: shares of requests that get a 503, whose connection ends
        before the server has them or before its answer, and that wait.
      seconds: how long the slow ones wait.
      lag: seconds for which listings do not show a new object.
      seen: called with each request before and after the server has it; a status that it returns
        before is the answer.
      counts: kind of fault -> how often it happened.
    """

    def __init__(self, port: int, seed: str = "0"):
        self.refused = self.cut_before = self.cut_after = self.slow = 0.0
        self.seconds, self.lag = 0.3, 0.0
        self.seen: Callable[[Request], int | None] = lambda request: None
        self.counts = {"503": 0, "cut before": 0, "cut after": 0, "slow": 0, "hidden": 0}
        self.target = port
        self._random, self._lock = random.Random(seed), threading.Lock()
        self._born: dict[str, float] = {}
        self.finished: dict[str, tuple] = {}
        self._server = _Server(("127.0.0.1", 0), _handler_of(self))
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self):
        """Ends the listening."""
        self._server.shutdown()
        self._server.server_close()

    def is_hit(self, share: float) -> bool:
        """Draws whether a request is one of a share."""
        with self._lock:
            return self._random.random() < share

    def count(self, fault: str) -> None:
        """Counts a fault."""
        with self._lock:
            self.counts[fault] += 1

    def written(self, name: str) -> None:
        """Notes when an object was first written."""
        self._born.setdefault(name, time.monotonic())

    def without_new(self, listing: bytes) -> bytes:
        """A listing, of either store, without what is too new to be in it."""
        if listing.startswith(b"<"):
            found = _S3_ENTRY.findall(listing)
            for entry, key in found:
                if self._is_new(urllib.parse.unquote_plus(key.decode())):
                    self.count("hidden")
                    listing = listing.replace(entry, b"")
            return listing
        try:
            answer = json.loads(listing)
        except ValueError:
            return listing
        items = answer.get("items", [])
        shown = [item for item in items if not self._is_new(item["name"])]
        if len(shown) < len(items):
            self.count("hidden")
        return json.dumps({**answer, "items": shown}).encode()

    def _is_new(self, name: str) -> bool:
        return time.monotonic() - self._born.get(name, -1e9) < self.lag


class _Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request, client_address):
        """Clients that are killed are not news."""


def _handler_of(store: FaultyStore):
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            """Says nothing."""

        def do_GET(self):  # noqa: N802
            body = self._body()
            name, is_listing = _name_of(self.path, self.command, body)
            self.close_connection = False
            if store.is_hit(store.refused):
                store.count("503")
                return self._answer(503, [], b"{}")
            if store.is_hit(store.cut_before):
                store.count("cut before")
                return self._cut()
            if store.is_hit(store.slow):
                store.count("slow")
                time.sleep(store.seconds)
            if refusal := store.seen(Request(self.command, name, "before")):
                return self._answer(refusal, [], b"{}")
            status, headers, content = self._forward(body)
            request = Request(self.command, name, "after")
            if request.writes and status < 300:
                store.written(name)
            store.seen(request)
            if store.is_hit(store.cut_after):
                store.count("cut after")
                if content and not request.writes:
                    self._head(status, headers, len(content))
                    self.wfile.write(content[: len(content) // 2])
                return self._cut()
            if is_listing and store.lag:
                content = store.without_new(content)
            return self._answer(status, headers, content)

        do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = do_GET  # noqa: N815

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        def _forward(self, body: bytes):
            # The stores answer the last request of an upload as often as it is sent; the emulators
            # forget uploads that are complete.
            upload = _UPLOAD.search(self.path)
            if upload and upload[0] in store.finished:
                return store.finished[upload[0]]
            server = http.client.HTTPConnection("127.0.0.1", store.target, timeout=60)
            headers = {k: v for k, v in self.headers.items() if k.lower() not in _HOP_BY_HOP}
            try:
                server.request(self.command, self.path, body, {**headers, "Connection": "close"})
                got = server.getresponse()
                answer = got.status, got.getheaders(), got.read()
                is_last = "upload_id" in self.path or self.command == "POST"
                if upload and is_last and got.status == 200:
                    store.finished[upload[0]] = answer
                return answer
            finally:
                server.close()

        def _head(self, status, headers, length):
            self.send_response_only(status)
            for key, value in headers:
                if key.lower() not in _HOP_BY_HOP:
                    # The server's own address, in answers to the start of an upload.
                    self.send_header(
                        key, value.replace(f"127.0.0.1:{store.target}", f"127.0.0.1:{store.port}")
                    )
            self.send_header("Content-Length", str(length))
            self.end_headers()

        def _answer(self, status, headers, content):
            length = dict((k.lower(), v) for k, v in headers).get("content-length", len(content))
            self._head(status, headers, length if self.command == "HEAD" else len(content))
            if self.command != "HEAD":
                self.wfile.write(content)

        def _cut(self):
            self.wfile.flush()
            self.close_connection = True

    return Handler


def _name_of(path: str, method: str, body: bytes) -> tuple[str, bool]:
    """The object that a request is about; whether it is a listing."""
    url = urllib.parse.urlsplit(path)
    query = urllib.parse.parse_qs(url.query)
    if "/storage/v1/" not in url.path and "/o/" not in url.path:  # S3's: /bucket/name
        name = urllib.parse.unquote(url.path.strip("/").partition("/")[2])
        return name, not name and method == "GET"
    if found := re.search(r"/o/(.+)$", url.path):
        return urllib.parse.unquote(found[1]), False
    if "name" in query:
        return query["name"][0], False
    if method in ("POST", "PUT"):
        meta = _UPLOAD_NAME.search(body[:4096])
        return (json.loads(b'"' + meta[1] + b'"') if meta else "", False)
    return "", url.path.endswith("/o")
