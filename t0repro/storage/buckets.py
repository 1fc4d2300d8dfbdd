"""Objects in buckets: read, listed, created, replaced, removed, copied from and to this machine.

A bucket has no folders and cannot rename or append: a reader sees an object's old content or its
new one, never a part. What has to happen once, such as taking a lock, is a `create`, which the
store refuses if the object is there.

Everything here takes addresses (`gs://bucket/name`). `t0repro.storage` takes local paths too.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import io
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from t0repro.errors import UserError
from t0repro.storage.access import store_error
from t0repro.storage.names import check_inside
from t0repro.storage.stores import store_of

_PART_BYTES = 1 << 24  # what is sent of a large object at a time; stores take 10,000 such parts
_AHEAD_BYTES = 1 << 18  # as much as TensorFlow reads of a file at a time
_READS_AHEAD = 16  # requests at a time

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@contextlib.contextmanager
def explain_errors(
    address: str, passed_on: tuple[type[Exception], ...] = (UserError,)
) -> Iterator[None]:
    """Makes a UserError of what a store's library raises in the block."""
    try:
        yield
    except passed_on:
        raise
    except Exception as error:  # each library has exceptions of its own
        raise store_error(error, address) from error


def _explain_errors_of(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Explains a function's errors except for a missing file; its only string is the address."""

    @functools.wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        address = next(arg for arg in args if isinstance(arg, str))
        with explain_errors(address, (UserError, FileNotFoundError)):
            return function(*args, **kwargs)

    return call


@_explain_errors_of
def kind_of(address: str) -> str | None:
    """What an address names, "file" or "directory"; None if there is nothing."""
    try:
        # Not fsspec's exists, isfile and isdir: they answer False to every error, a lost connection
        # too.
        return store_of(address).info(address)["type"]
    except FileNotFoundError:
        return None


def exists(address: str) -> bool:
    """Whether there is an object, or one whose name continues this one after a slash."""
    return kind_of(address) is not None


@_explain_errors_of
def size_of(address: str) -> int:
    """An object's size in bytes."""
    return store_of(address).size(address)


@_explain_errors_of
def key_of(address: str) -> str:
    """What changes when an object is written."""
    return store_of(address).ukey(address)


@_explain_errors_of
def list_names(address: str) -> list[str]:
    """The names in a directory; empty if there is no such directory."""
    if kind_of(address) != "directory":
        return []
    try:
        entries = store_of(address).ls(address, detail=False)
    except FileNotFoundError:  # removed since
        return []
    # Some file systems end a directory's entry with a slash, or list it with its full address.
    return sorted(entry.rstrip("/").rpartition("/")[2] for entry in entries)


@_explain_errors_of
def objects(address: str) -> dict[str, int]:
    """The objects below an address: name relative to it -> size in bytes; sorted by name."""
    system = store_of(address)
    root = system._strip_protocol(address).rstrip("/")  # how the library spells what it lists
    sizes = {
        name.removeprefix(root).lstrip("/"): int(info["size"])
        for name, info in system.find(address, detail=True).items()
        if info["type"] != "directory" and not name.endswith("/")
    }
    sizes.pop("", None)  # the object of that very name
    for name in sizes:
        check_inside(name, address)
    return dict(sorted(sizes.items()))


@_explain_errors_of
def read(address: str, start: int = 0, end: int | None = None) -> bytes:
    """An object's content, or its bytes from one place to another.

    Raises:
      FileNotFoundError: If there is no such object.
    """
    return store_of(address).cat_file(address, start=start or None, end=end)


@_explain_errors_of
def write(address: str, content: bytes) -> None:
    """Writes an object as a whole, in place of one of that name."""
    store_of(address).pipe_file(address, content)


@_explain_errors_of
def create(address: str, content: bytes) -> bool:
    """Writes an object if there is none of that name; of several that try, one succeeds.

    Returns:
      Whether this call wrote it.
    """
    # Asked first too: emulators overwrite where the store itself would refuse.
    if exists(address):
        return False
    try:
        store_of(address).pipe_file(address, content, mode="create")
    except FileExistsError:
        return False
    except OSError as error:
        # How the libraries report that the precondition failed.
        if "412" in str(error) or "recondition" in str(error):
            return False
        raise
    return True


@_explain_errors_of
def remove(address: str) -> None:
    """Removes an object; nothing if there is none."""
    with contextlib.suppress(FileNotFoundError):
        store_of(address).rm_file(address)


def remove_all(address: str, first: Iterable[str] = ()) -> None:
    """Removes the objects below an address.

    Args:
      address: The address.
      first: Names that are removed before all others, in this order.
    """
    order = {name: place for place, name in enumerate(first)}
    for name in sorted(objects(address), key=lambda name: order.get(name, len(order))):
        remove(f"{address}/{name}")


@_explain_errors_of
def upload(path: Path, address: str) -> None:
    """Copies a file of this machine to an object, which appears once it is complete."""
    store_of(address).put_file(str(path), address)


def upload_tree(folder: Path, address: str, last: Iterable[str] = ()) -> None:
    """Copies the files below a folder to objects below an address.

    Args:
      folder: The folder.
      address: The address.
      last: Names of files that are copied after all others, in this order.
    """
    names = [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]
    order = {name: place for place, name in enumerate(last, 1)}
    for name in sorted(names, key=lambda name: (order.get(name, 0), name)):
        upload(folder / name, f"{address}/{name}")


@_explain_errors_of
def download(address: str, path: Path) -> None:
    """Copies an object to a file in a folder that exists.

    Raises:
      FileNotFoundError: If there is no such object.
    """
    store_of(address).get_file(address, str(path))


class NewObject(io.RawIOBase):
    """An object that is written in order and sent in parts; it appears when it is finished.

    Args:
      address: The object.

    Attributes:
      name: The same.
    """

    def __init__(self, address: str):
        self.name = address
        with explain_errors(address):
            self._file = store_of(address).open(address, "wb", block_size=_PART_BYTES)

    def writable(self) -> bool:
        """True."""
        return True

    def tell(self) -> int:
        """Bytes written so far."""
        return self._file.tell()

    def write(self, data: Any, /) -> int:
        """Writes all of the bytes; sends the parts that they fill."""
        content = memoryview(data)
        with explain_errors(self.name):
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
        with explain_errors(self.name):
            self._file.close()
        super().close()

    def close(self) -> None:
        """Gives up what was sent, unless it is finished."""
        if not self.closed:
            with contextlib.suppress(Exception):  # the store forgets it by itself in some days
                self._file.discard()
            self._file.closed = True  # else the library finishes it once it is forgotten
        super().close()


def write_large(address: str, content: memoryview) -> None:
    """Writes an object of any size as a whole."""
    if len(content) <= _PART_BYTES:
        write(address, bytes(content))
        return
    with NewObject(address) as new:
        new.write(content)
        new.finish()


class Stream(io.RawIOBase):
    """An object that is read in order, with the next part fetched while one is read.

    Args:
      address: The object.
      size: Its size in bytes.
    """

    def __init__(self, address: str, size: int):
        self._address, self._size, self._place = address, size, 0
        self._parts: dict[int, concurrent.futures.Future[bytes]] = {}
        self._part(0)

    def readable(self) -> bool:
        """True, for io's buffers."""
        return True

    def seekable(self) -> bool:
        """True, for io's buffers."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Moves to another byte; what was fetched of the part there is kept."""
        self._place = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._place}[whence]
        return self._place

    def readinto(self, buffer: Any) -> int:
        """Fills a buffer, at most to the end of a part; 0 at the end of the object."""
        if self._place >= self._size:
            return 0
        number, skipped = divmod(self._place, _AHEAD_BYTES)
        ahead = [number + 1] if (number + 1) * _AHEAD_BYTES < self._size else []
        self._parts = {each: self._part(each) for each in (number, *ahead)}
        data = self._parts[number].result()[skipped : skipped + len(buffer)]
        buffer[: len(data)] = data
        self._place += len(data)
        return len(data)

    def _part(self, number: int) -> concurrent.futures.Future[bytes]:
        """A part, which is asked for unless it has been."""
        if number not in self._parts:
            start = number * _AHEAD_BYTES
            end = min(start + _AHEAD_BYTES, self._size)
            reading = _readers().submit(read, self._address, start, end)
            self._parts[number] = reading
        return self._parts[number]


@functools.cache
def _readers() -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(_READS_AHEAD, "reads of buckets")
