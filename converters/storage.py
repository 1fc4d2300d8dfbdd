"""Reads and writes files that are local or wherever fsspec reaches (gs://, s3://)."""

from __future__ import annotations

import concurrent.futures
import contextlib
import io
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

import numpy as np

from t0repro import buckets
from t0repro.buckets import explained, located, scheme_of
from t0repro.errors import UserError
from t0repro.files import make_folder, naming, sync, sync_directory, write_atomically, writing
from t0repro.progress import byte_progress
from t0repro.words import sized
from t0repro.working_copies import Scratch

Result = TypeVar("Result")

_CHUNK_BYTES = 1 << 26
_PART_BYTES = 1 << 24  # what is sent of a large object at a time; stores take 10,000 such parts
_READ_BYTES = 1 << 22  # what is read of a large object at a time
_REQUESTS = 4  # at a time, for one array
_FILES = 8  # at a time


def is_remote(path: str) -> bool:
    """Returns whether a path is a remote address (`gs://...`); `file://` is local."""
    return scheme_of(path) is not None and "://" in path


def local_path(path: str | os.PathLike[str]) -> str:
    """Returns a path as a string, without `file://`.

    Raises:
      UserError: For an address with one slash, such as `gs:/bucket`, unless there is such a file.
    """
    path = os.fspath(path)
    if scheme_of(path) is not None and not is_remote(path) and not os.path.exists(path):
        raise UserError(
            f"{path} is neither a path nor an address.",
            where=path,
            fix=f"Write an address with two slashes: {path.replace(':/', '://', 1)}.",
        )
    return path.removeprefix("file://")


def absolute(path: str) -> str:
    """The absolute path of a local file or directory; an address is one."""
    return path if is_remote(path) else os.path.abspath(path)


def real(path: str) -> str:
    """A local path without its symbolic links; an address has none."""
    return path if is_remote(path) else os.path.realpath(path)


def normal(path: str) -> str:
    """A path without `..`, and without a slash at its end."""
    return path.rstrip("/") if is_remote(path) else os.path.normpath(path)


@explained
def is_file(path: str) -> bool:
    """Whether there is a file of this name."""
    if not is_remote(path):
        return os.path.isfile(path)
    return _type(path) == "file"


@explained
def is_directory(path: str) -> bool:
    """Whether there is a directory of this name."""
    if not is_remote(path):
        return os.path.isdir(path)
    return _type(path) == "directory"


def _type(path: str) -> str | None:
    """The kind of a remote address, "file" or "directory"; None if it does not exist."""
    system, path = located(path)
    try:
        # Not isfile and isdir: fsspec's return False on every error, even a lost connection.
        return system.info(path)["type"]
    except FileNotFoundError:
        return None


@explained
def names(path: str) -> list[str]:
    """Lists the names in a directory; empty if there is no such directory."""
    if not is_directory(path):
        return []
    if not is_remote(path):
        return sorted(os.listdir(path))
    system, path = located(path)
    try:
        found = system.ls(path, detail=False)
    except FileNotFoundError:  # removed since
        return []
    # Some file systems end a directory's entry with a slash, or list it with its full address.
    return sorted(entry.rstrip("/").rpartition("/")[2] for entry in found)


def join(path: str, name: str) -> str:
    """Joins a directory and a name; an absolute name is returned as it is."""
    # tf.train.Saver's state file may name a checkpoint by its address.
    if is_remote(name):
        return name
    return f"{path.rstrip('/')}/{name}" if is_remote(path) else os.path.join(path, name)


def name(path: str) -> str:
    """Returns the last part of a path."""
    return path.rstrip("/").rpartition("/")[2]


@explained
def size(path: str) -> int:
    """Returns a file's size in bytes.

    Raises:
      OSError: If there is no such file.
    """
    if not is_remote(path):
        return os.path.getsize(path)
    system, path = located(path)
    return system.size(path)


def walk(path: str) -> Iterator[str]:
    """Yields the files in a directory and below it."""
    if is_remote(path):
        # A store lists everything below an address at once; level by level takes many requests.
        yield from (join(path, name) for name in buckets.objects(path))
        return
    for name in names(path):
        entry = join(path, name)
        if is_directory(entry):
            yield from walk(entry)
        else:
            yield entry


def sizes(path: str) -> dict[str, int]:
    """Size in bytes of each file in a directory and below it, by its name relative to it."""
    if is_remote(path):
        return buckets.objects(path)
    return {file.removeprefix(path).lstrip("/"): os.path.getsize(file) for file in walk(path)}


def at_once(function: Callable[[str], Result], files: Iterable[str]) -> Iterator[Result]:
    """Calls a function for several files at a time; yields the results in the files' order."""
    with concurrent.futures.ThreadPoolExecutor(_FILES) as pool:
        yield from pool.map(function, files)


def tensorstore_name(path: str) -> dict[str, Any] | None:
    """How TensorStore opens a directory itself; None for an address that it cannot open."""
    if not is_remote(path):
        # To TensorStore, the path is a mere prefix of its keys, hence the slash.
        return {"driver": "file", "path": f"{path}/"}
    bucket, _, name = path.partition("://")[2].partition("/")
    place = {"bucket": bucket, "path": f"{name}/"}
    retries = {"max_retries": 6}  # about as many as gcsfs; its default of 32 takes a quarter hour
    system = located(path)[0]
    if scheme_of(path) == "gs":
        buckets.use_emulator()
        return {"driver": "gcs", **place, "gcs_request_retries": retries}
    if scheme_of(path) != "s3" or system.key is not None:  # a key of fsspec's own settings
        return None
    server = system.s3.meta
    spec = {"driver": "s3", **place, "s3_request_retries": retries}
    # Given an endpoint, TensorStore does not look up the region, which it needs to sign requests.
    if ".amazonaws.com" not in server.endpoint_url:
        spec |= {"endpoint": server.endpoint_url, "aws_region": server.region_name or "us-east-1"}
    if system.anon:
        spec["aws_credentials"] = {"type": "anonymous"}
    return spec


def refresh(path: str) -> bool:
    """Drops the cached listings of a remote path's file system; False for a local path."""
    if is_remote(path):
        # fsspec caches listings, so a file written by another process since would stay unseen.
        located(path)[0].invalidate_cache()
    return is_remote(path)


@explained
def stamp(path: str) -> list[Any]:
    """Returns values that change when a file is written: size and mtime, or a store's key."""
    if is_remote(path):
        system, place = located(path)
        return [system.ukey(place)]
    status = os.stat(path)
    return [status.st_size, status.st_mtime_ns]


def write(path: str, content: str | bytes) -> None:
    """Writes a whole file, which appears complete."""
    if is_remote(path):
        buckets.write(path, content.encode() if isinstance(content, str) else content)
    else:
        write_atomically(path, content)


# ---- Writing large files -----------------------------------------------------------------------


def make_directory(path: str) -> None:
    """Makes a directory whose parent exists, unless it exists; buckets have none."""
    if not is_remote(path):
        make_folder(path)


def open_new(path: str, *, resume: bool = False) -> BinaryIO:
    """Opens a file that is written in order; `finish` it, since closing it leaves no object.

    Args:
      path: The file.
      resume: Whether to keep the content of a local file.
    """
    if is_remote(path):
        return cast(BinaryIO, NewObject(path))
    return open(path, "r+b" if resume and os.path.exists(path) else "w+b")


def finish(file: BinaryIO) -> None:
    """Completes a file of `open_new`: it is on the disk, or the object appears."""
    if isinstance(file, NewObject):
        file.finish()
        return
    with naming(file.name):
        file.flush()
        os.fsync(file.fileno())
        file.close()
        sync_directory(os.path.dirname(file.name))


def write_large(path: str, content: memoryview) -> None:
    """Writes a whole file of any size; an object appears complete, a local file as it grows."""
    if not is_remote(path):
        # Not synced here: `sync_all` syncs the files of a checkpoint together.
        with naming(path), open(path, "wb") as file:
            file.write(content)
    elif len(content) <= _PART_BYTES:
        buckets.write(path, bytes(content))
    else:
        with NewObject(path) as new:
            new.write(content)
            new.finish()


def sync_all(paths: Iterable[str]) -> None:
    """Syncs local files and their directories to disk, eight at a time."""
    local = [Path(path) for path in paths if not is_remote(path)]

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        # Sync directories too: otherwise a power failure may lose the names of synced files.
        list(pool.map(sync, [*local, *{path.parent for path in local}]))


class NewObject(io.RawIOBase):
    """An object that is written in order and sent in parts; it appears when it is finished.

    Args:
      address: The object.

    Attributes:
      name: The same.
    """

    def __init__(self, address: str):
        system, path = located(address)
        self.name = address
        with writing(address):
            self._file = system.open(path, "wb", block_size=_PART_BYTES)

    def writable(self) -> bool:
        """True."""
        return True

    def tell(self) -> int:
        """Bytes written so far."""
        return self._file.tell()

    def write(self, data: Any, /) -> int:
        """Writes all of the bytes; sends the parts that they fill."""
        content = memoryview(data)
        with writing(self.name):
            # Each part is filled exactly: the library sends, and holds, all that it was given.
            while content:
                room = _PART_BYTES - self._file.tell() % _PART_BYTES
                self._file.write(content[:room])
                content = content[room:]
        return memoryview(data).nbytes

    def truncate(self, size: int | None = None, /) -> int:
        """Does nothing: an object ends where it was written to."""
        assert size is None
        return self.tell()

    def finish(self) -> None:
        """Sends the rest; from now on there is the object."""
        with writing(self.name):
            self._file.close()
        super().close()

    def close(self) -> None:
        """Gives up what was sent, unless it is finished."""
        if not self.closed:
            with contextlib.suppress(Exception):  # the store forgets it by itself in some days
                self._file.discard()
            self._file.closed = True  # else the library finishes it once it is forgotten
        super().close()


def read(path: str) -> bytes:
    """Reads a whole file.

    Raises:
      OSError: If it cannot be read.
    """
    return read_range(path, 0, None)


def blocks(path: str) -> Iterator[bytes]:
    """Yields a file's content in blocks of some megabytes.

    Raises:
      OSError: If it cannot be read.
    """
    if is_remote(path):
        # By ranges: a file of the library would hold its parts and one more copy of them.
        for start in range(0, size(path), _READ_BYTES):
            yield buckets.read_part(path, start, start + _READ_BYTES)
        return
    with open(path, "rb") as file:
        while block := file.read(_READ_BYTES):
            yield block


@explained
def read_into(path: str, start: int, array: np.ndarray) -> bool:
    """Fills an array with a file's bytes from `start` on; returns whether there were enough.

    Raises:
      OSError: If the file cannot be read.
    """
    # As bytes: NumPy gives no buffer of an array of bfloat16, which is ml_dtypes' type.
    room = array.reshape(-1).view(np.uint8).data
    if is_remote(path):

        def fill(begin: int) -> bool:
            end = min(begin + _READ_BYTES, len(room))
            data = buckets.read_part(path, start + begin, start + end)
            if len(data) == end - begin:
                room[begin:end] = data
            return len(data) == end - begin

        with concurrent.futures.ThreadPoolExecutor(_REQUESTS) as pool:
            return all(pool.map(fill, range(0, len(room), _READ_BYTES)))
    # Unbuffered: bytes go straight into the array's memory.
    with open(path, "rb", 0) as file:
        file.seek(start)
        while room and (count := file.readinto(room[:_CHUNK_BYTES])):
            room = room[count:]
    return not room


class LocalCopy:
    """Copies a remote directory to a temporary local one; a local directory is used in place.

    The copy is removed when this object is deleted, or at the latest when the process ends.

    Args:
      path: A directory.

    Raises:
      UserError: If there is not enough space for the copy.
    """

    def __init__(self, path: str):
        self.path = path
        if not is_remote(path):
            return
        scratch = Scratch()
        self.path = str(scratch.path)
        # Not `__del__`, which Python need not call for objects that are alive when it exits.
        weakref.finalize(self, scratch.remove)
        files = sizes(path)
        needed = sum(files.values())
        if (free := shutil.disk_usage(self.path).free) < needed:
            raise UserError(
                f"{path} must be copied here to be read, which takes {sized(needed)}; only"
                f" {sized(free)} are free.",
                where=tempfile.gettempdir(),
                fix="Free some space, or name another place for such files in TMPDIR.",
            )
        with byte_progress("Copying", needed) as done:

            def copy(name: str) -> int:
                target = Path(self.path, name)
                make_folder(target.parent)
                buckets.download(join(path, name), target)
                return files[name]

            for count in at_once(copy, files):
                done(count)


@explained
def read_range(path: str, start: int, count: int | None) -> bytes:
    """Reads up to `count` bytes of a file from `start` on; all of them if `count` is None."""
    if not is_remote(path):
        with open(path, "rb") as file:
            file.seek(start)
            return file.read() if count is None else file.read(count)
    system, path = located(path)
    with system.open(path, "rb", block_size=1 << 24) as file:
        file.seek(start)
        return file.read() if count is None else file.read(count)
