"""A local Hugging Face hub: the parts of its HTTP interface by which datasets and models are read.

    python hub_server.py FOLDER        prints its address; serves FOLDER/<owner>/<name>/<path>

Every repository has one commit. Datasets are asked for by the branch that the hub keeps in Parquet.
A repository that holds a file `gated` lists its files, and gives them only to those who have
accepted its terms: to nobody here.
"""

import hashlib
import http.server
import json
import re
import sys
from pathlib import Path

BRANCH = "refs%2Fconvert%2Fparquet"
COMMIT = "c0ffee" * 6 + "c0de"
FOLDER = Path(sys.argv[1])


class Hub(http.server.BaseHTTPRequestHandler):
    """Answers what `HfApi.dataset_info` and `hf_hub_download` ask."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        """Answers with a body."""
        self._answer(body=True)

    def do_HEAD(self):
        """Answers with the headers alone."""
        self._answer(body=False)

    def _answer(self, body):
        path = self.path.split("?")[0]
        about = re.fullmatch(rf"/api/datasets/([^/]+/[^/]+)/revision/{BRANCH}", path)
        tree = re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/[^/]+/(.*)", path)
        file = re.fullmatch(r"(?:/datasets)?/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        if about and (FOLDER / about[1]).is_dir():
            root = FOLDER / about[1]
            siblings = [
                {"rfilename": str(path.relative_to(root)), "size": path.stat().st_size}
                for path in sorted(root.rglob("*.parquet"))
            ]
            content = {"id": about[1], "sha": COMMIT, "siblings": siblings}
            self._send(200, json.dumps(content).encode(), body)
        elif tree and (FOLDER / tree[1] / tree[2]).is_dir():
            self._send(200, json.dumps(_entries(FOLDER / tree[1], tree[2])).encode(), body)
        elif file and (FOLDER / file[1] / "gated").is_file():
            self._send(403, b"{}", body, {"X-Error-Code": "GatedRepo"})
        elif file and (FOLDER / file[1] / file[3]).is_file():
            self._send(200, (FOLDER / file[1] / file[3]).read_bytes(), body)
        else:
            self._send(404, b'{"error": "not found"}', body)

    def _send(self, status, content, body, headers=()):
        self.send_response(status)
        for name, value in dict(headers).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, format, *arguments):
        """Keeps the log off the terminal."""


def _entries(root, folder):
    """The files of a folder as the hub lists them, with git's checksums."""
    files = [path for path in sorted((root / folder).iterdir()) if path.is_file()]
    return [
        {
            "type": "file",
            "path": str(path.relative_to(root)),
            "size": path.stat().st_size,
            "oid": hashlib.sha1(b"blob %d\0" % path.stat().st_size + path.read_bytes()).hexdigest(),
        }
        for path in files
    ]


if __name__ == "__main__":
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
    server.serve_forever()
