"""Cloud Storage on loopback: the part of its JSON API that the client uses, over a folder.

Every folder below the root is a bucket. The same folder is what a job's container sees at /gcs.
"""

import base64
import email
import hashlib
import json
import re
import urllib.parse
from pathlib import Path

import google_crc32c

from tests.helpers.loopback import FileHandler, FileServer


class StorageServer(FileServer):
    """Answers a request whose method is in `faults` with that status, once for each entry."""

    def __init__(self, root: Path):
        super().__init__(root, StorageHandler)
        self.statuses: dict[str, list[int]] = {}


class StorageHandler(FileHandler):
    server: StorageServer

    def do_GET(self):
        if self._refused("GET"):
            return
        bucket, name, query = self._asked()
        folder = self.server.root / bucket
        if not folder.is_dir():
            return self._fail(404, f"The specified bucket does not exist: {bucket}")
        if name is None:
            prefix = query.get("prefix", [""])[0]
            names = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
            items = [self._object(bucket, each) for each in names if each.startswith(prefix)]
            return self._json({"kind": "storage#objects", "items": items})
        if not (folder / name).is_file():
            return self._fail(404, f"No such object: {bucket}/{name}")
        if query.get("alt") != ["media"]:
            return self._json(self._object(bucket, name))
        data = (folder / name).read_bytes()
        headers = {"X-Goog-Hash": f"crc32c={_crc32c(data)},md5={_md5(data)}"}
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if match is None:
            return self.send(200, data, headers)
        first, last = int(match[1]), int(match[2] or len(data) - 1)
        headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
        self.send(206, data[first : last + 1], headers)

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path.startswith("/token"):  # what a service account's key is exchanged at
            return self._json({"access_token": "t", "token_type": "Bearer", "expires_in": 3600})
        if self._refused("POST"):
            return
        bucket, _, _ = self._asked()
        if not (self.server.root / bucket).is_dir():
            return self._fail(404, f"The specified bucket does not exist: {bucket}")
        head = f"Content-Type: {self.headers['Content-Type']}\r\n\r\n".encode()
        fields, content = email.message_from_bytes(head + body).get_payload()
        name = json.loads(fields.get_payload())["name"]
        path = self.server.root / bucket / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.get_payload(decode=True))
        self._json(self._object(bucket, name))

    def do_DELETE(self):
        if self._refused("DELETE"):
            return
        bucket, name, _ = self._asked()
        (self.server.root / bucket / name).unlink()
        self.send(204, b"")

    def _asked(self) -> tuple[str, str | None, dict]:
        path, _, query = self.path.partition("?")
        match = re.fullmatch(r".*/storage/v1/b/([^/]+)(?:/o(?:/(.*))?)?", path)
        name = urllib.parse.unquote(match[2]) if match[2] else None
        return match[1], name, urllib.parse.parse_qs(query)

    def _refused(self, method: str) -> bool:
        waiting = self.server.statuses.get(method)
        if not waiting:
            return False
        status = waiting.pop(0)
        denied = {"GET": "storage.objects.get"}.get(method, "storage.objects.create")
        says = {403: f"the account does not have {denied} access", 503: "backend error"}
        self._fail(status, says[status])
        return True

    def _object(self, bucket: str, name: str) -> dict:
        data = (self.server.root / bucket / name).read_bytes()
        return {
            "kind": "storage#object",
            "id": f"{bucket}/{name}/1",
            "bucket": bucket,
            "name": name,
            "size": str(len(data)),
            "generation": "1",
            "crc32c": _crc32c(data),
            "md5Hash": _md5(data),
        }

    def _fail(self, status: int, message: str):
        self._json({"error": {"code": status, "message": message}}, status)

    def _json(self, content: dict, status: int = 200):
        self.send(status, json.dumps(content).encode(), {"Content-Type": "application/json"})


def _crc32c(data: bytes) -> str:
    return base64.b64encode(google_crc32c.Checksum(data).digest()).decode()


def _md5(data: bytes) -> str:
    return base64.b64encode(hashlib.md5(data).digest()).decode()
