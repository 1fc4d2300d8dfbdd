"""Loopback servers of S3 and Google Cloud Storage, and a relay that makes them fail."""

import functools
import http.server
import json
import select
import socket
import threading
import types
import urllib.parse
import urllib.request
from http import HTTPStatus


class Relay:
    """A loopback port in front of a server, which cuts every connection after some bytes.

    Attributes:
      limit: bytes of answers that pass before connections are cut; None lets all pass.
    """

    def __init__(self, port: int):
        self.target, self.limit, self.cuts = port, None, 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self):
        """Ends the listening; connections end with their clients."""
        self.listener.close()

    def _accept(self):
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._relay, args=(client,), daemon=True).start()

    def _relay(self, client):
        """Copies both ways until one side ends or the limit is reached."""
        with client, socket.create_connection(("127.0.0.1", self.target)) as server:
            others = {client: server, server: client}
            while True:
                for source in select.select(list(others), [], [])[0]:
                    try:
                        block = source.recv(1 << 12)
                        if source is server and block and self._is_cut(len(block)):
                            return
                        if not block:
                            return
                        others[source].sendall(block)
                    except OSError:  # the other end is gone
                        return

    def _is_cut(self, count):
        """Whether these bytes of an answer are too many."""
        if self.limit is None:
            return False
        self.limit -= count
        self.cuts += self.limit < 0
        return self.limit < 0


class S3:
    """moto's server, and how s3fs finds it."""

    name, address = "S3", "s3://bucket"

    def __init__(self):
        import boto3
        from moto.server import ThreadedMotoServer

        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._server.start()
        _, self.port = self._server.get_host_and_port()
        keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}
        url = f"http://127.0.0.1:{self.port}"
        self._client = boto3.client("s3", endpoint_url=url, region_name="us-east-1", **keys)
        self._client.create_bucket(Bucket="bucket")

    def put(self, key, path):
        self._client.upload_file(str(path), "bucket", key)

    def environment(self, port):
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "1",
        }

    def stop(self):
        self._client.close()
        self._server.stop()


def _with_generations(handle):
    """Adds to a handler of the emulator what it lacks: generations, and preconditions on them."""

    def generation(request, storage):
        name = request.params.get("object_id") or request.query.get("name", [""])[0]
        if request.query.get("uploadType") == ["multipart"]:
            name = name or request.data["meta"]["name"]
        try:
            found = storage.get_file_obj(request.params["bucket_name"], name)
        except Exception:  # there is none
            return "0"
        return str(found.get("generation", "0"))

    def call(request, response, storage):
        now = generation(request, storage)
        if request.query.get("ifGenerationMatch", [now])[0] != now:
            response.status = HTTPStatus.PRECONDITION_FAILED
        elif request.query.get("ifGenerationNotMatch", [""])[0] == now:
            response.status = HTTPStatus.NOT_MODIFIED
        else:
            handle(request, response, storage)
            response["X-Goog-Generation"] = generation(request, storage)

    return call


def _with_exact_parts(read):
    """Reads an upload in two parts as it was sent; the emulator's parser is one for letters."""

    def call(handler, query):
        kind = handler.headers.get("Content-Type") or ""
        if not kind.startswith("multipart/related"):
            return read(handler, query)
        from gcp_storage_emulator import server as emulator

        boundary = b"--" + kind.partition("boundary=")[2].strip("\"'").encode()
        whole = emulator._decode_raw_data(emulator._read_raw_data(handler), handler)
        _, first, second = whole[: whole.rindex(boundary)].split(boundary, 2)
        line = b"\r\n" if first.startswith(b"\r\n") else b"\n"  # the clients differ
        head, content = second.split(line + line, 1)
        return {
            "meta": json.loads(first.split(line + line, 1)[1]),
            "content": content.removesuffix(line),
            "content-type": head.decode().partition(":")[2].strip(),
        }

    return call


def _in_turn(handle):
    """Handles one request at a time, since what the emulator holds is not made for threads."""
    lock = threading.Lock()

    def call(router, method):
        with lock:
            handle(router, method)

    return call


@functools.cache
def _emulator():
    """The emulator's module, with what it lacks."""
    from gcp_storage_emulator import server as emulator
    from gcp_storage_emulator import storage
    from gcp_storage_emulator.handlers import objects

    # It would write down all that it has at each write, and keep what is removed.
    storage.Storage._write_config_to_file = lambda self: None
    storage.DEFAULT_SOFT_DELETE_RETENTION_SECONDS = 0
    emulator._read_data = _with_exact_parts(emulator._read_data)
    # A connection over which nothing comes would keep all others waiting.
    emulator.server = types.SimpleNamespace(HTTPServer=http.server.ThreadingHTTPServer)
    emulator.Router.handle = _in_turn(emulator.Router.handle)
    for _, handlers in emulator.HANDLERS:
        for method, handle in handlers.items():
            if handle in (objects.get, objects.insert, objects.download):
                handlers[method] = _with_generations(handle)
    return emulator


class GoogleStorage:
    """gcp-storage-emulator's server, and how gcsfs and TensorStore find it."""

    name, address = "Google Cloud Storage", "gs://bucket"

    def __init__(self):
        emulator = _emulator()
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self._server = emulator.create_server(
            "127.0.0.1", self.port, in_memory=True, default_bucket="bucket"
        )
        self._server.start()

    def put(self, key, path):
        address = f"http://127.0.0.1:{self.port}/upload/storage/v1/b/bucket/o"
        query = urllib.parse.urlencode({"uploadType": "media", "name": key})
        request = urllib.request.Request(f"{address}?{query}", path.read_bytes(), method="POST")
        request.add_header("Content-Type", "application/octet-stream")
        urllib.request.urlopen(request).close()

    def environment(self, port):
        return {
            "STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}",
        }

    def stop(self):
        self._server.stop()
