"""Folders of buckets as folders of this machine: what a command writes is uploaded as it goes.

A bucket can neither append to a file nor rename one, so a command writes into a working copy: a
temporary folder that begins with what the bucket holds. Every few seconds, before a checkpoint is
committed and when the command ends, what changed is uploaded.

Files are uploaded in the order in which they were last written, and removals come last. So a file
that vouches for others, such as a cache's COMPLETED, reaches the bucket after them, and a process
that is killed at any moment leaves in the bucket what a kill leaves on a disk: what was finished,
and perhaps the beginning of what was not.

Checkpoints are not fetched, only uploaded: training reads and writes them in the bucket itself.
The shards of a cache are not fetched either: in the copy they are files of the same size that take
no space, and `open_file` reads their bytes from the bucket, in order, the next ones ahead.
What begins with a dot stays on this machine (locks, and files that are not finished), except Zarr's
descriptions of arrays.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import io
import os
import re
import shutil
import tempfile
import threading
import time
import weakref
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import filelock

from t0repro.errors import UserError
from t0repro.progress import byte_progress
from t0repro.storage import buckets, leases
from t0repro.words import show_as, sized

_SECONDS_BETWEEN_UPLOADS = 10.0
_REQUESTS = 8  # at a time
_BUFFER_BYTES = 1 << 18

_HIDDEN = re.compile(r"(^|/)\.(?!z(array|attrs|group|metadata)$)")
_CHECKPOINT = re.compile(r"(^|/)(checkpoint_\d+(/|$)|model\.ckpt-\d+)")
# Files by which others take a checkpoint or a cache for complete, though a converter or a renaming
# may have written them early.
_VOUCHING = re.compile(
    r"(^|/)(_METADATA|_CHECKPOINT_METADATA|integrity\.json|COMPLETED|config\.json)$|\.index$"
)
# Shards of a cache, which may be larger than this machine's disk.
_LARGE = re.compile(r"\.tfrecord-\d+-of-\d+$")

# Files to which several commands append, each in a copy of its own.
_APPENDED = re.compile(r"(^|/)metrics\.jsonl$")
_PREFIX, _IN_USE = "t0repro-", ".in_use"
_SECONDS_TO_BEGIN = 60.0  # by then a folder is in use

_Stamp = tuple[int, int, int]  # size, time of the last change, inode


class WorkingCopy:
    """A folder or file of a bucket, and its copy on this machine.

    Args:
      address: The address, as `storage.check_address` returns it.
      writes: Whether changes are uploaded.

    Attributes:
      address, writes: The same.
      path: The copy. Only its parent exists where the bucket has nothing.
    """

    def __init__(self, address: str, *, writes: bool):
        self.address, self.writes = address, writes
        self._scratch = Scratch()
        self._root = self._scratch.path
        scheme, _, rest = address.partition("://")
        bucket, _, name = rest.partition("/")
        above, _, last = name.rpartition("/")
        # The copy's parent stands for the address's, since commands write beside a file, too.
        self._above = f"{scheme}://{bucket}" + (f"/{above}" if above else "")
        self.path = self._root / last if last else self._root
        self._sent: dict[str, _Stamp] = {}
        self._appended: dict[str, tuple[int, int]] = {}  # length and CRC-32 of what was sent
        self._leases: list[leases.Lease] = []
        self._lock = threading.Lock()
        self._ended = threading.Event()
        show_as(str(self.path), address)
        self.fetch()
        if writes:
            threading.Thread(target=self._upload_periodically, daemon=True).start()

    def address_of(self, path: Path) -> str:
        """The address that a path in the copy stands for."""
        name = path.relative_to(self._root).as_posix()
        return self._above if name == "." else f"{self._above}/{name}"

    @contextlib.contextmanager
    def lock(self, path: Path, purpose: str, *, fix: str) -> Iterator[None]:
        """Holds the lease on what a path stands for, and begins with what the bucket then holds.

        See `t0repro.storage.lock_folder` for the arguments and errors.
        """
        with leases.hold(self.address_of(path), purpose, fix=fix) as lease:
            if not self._leases:
                # Before, another run may have been writing.
                self.fetch()
            path.mkdir(parents=True, exist_ok=True)
            self._leases.append(lease)
            try:
                yield
            finally:
                # While the lease is held, since its next owner begins with what the bucket holds.
                self.upload()
                self._leases.remove(lease)

    def fetch(self) -> None:
        """Makes the copy what the bucket holds now."""
        with self._lock:
            for entry in self._root.iterdir():
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
            prefix = f"{self.path.name}/" if self.path != self._root else ""
            found = buckets.objects(self.address)
            names = {
                prefix + name: size
                for name, size in found.items()
                if not (_HIDDEN.search(name) or _CHECKPOINT.search(name))
            }
            if not found and prefix and buckets.kind_of(self.address) == "file":
                names = {self.path.name: -1}  # one file
            with concurrent.futures.ThreadPoolExecutor(_REQUESTS) as pool:
                # An error of a download is raised only where its result is asked for.
                list(pool.map(lambda name: self._fetch(name, names[name]), names))
            self._sent = {name: stamp for name, stamp in self._files()}
            for name in filter(_APPENDED.search, self._sent):
                content = (self._root / name).read_bytes()
                self._appended[name] = len(content), zlib.crc32(content)

    def refetch(self, folder: Path) -> None:
        """Makes a folder of the copy what the bucket holds, which another machine has written."""
        with self._lock:
            prefix = folder.relative_to(self._root).as_posix()
            for name in buckets.objects(self.address_of(folder)):
                if not _HIDDEN.search(name):
                    self._fetch(f"{prefix}/{name}", -1)
                    self._sent[f"{prefix}/{name}"] = _stamp(folder / name)

    def _fetch(self, name: str, size: int) -> None:
        path = self._root / name
        path.parent.mkdir(parents=True, exist_ok=True)  # in a folder that was just made for it
        if size >= 0 and _LARGE.search(name):
            _make_sparse(path, size, f"{self._above}/{name}")
            return
        with contextlib.suppress(FileNotFoundError):  # removed since it was listed
            buckets.download(f"{self._above}/{name}", path)

    def upload(self) -> None:
        """Brings the bucket up to date with the copy.

        Raises:
          UserError: If the store cannot be written to, or another run has taken over.
        """
        with self._lock:
            for lease in self._leases:
                lease.check()
            files = dict(self._files())
            changed = [name for name in files if self._sent.get(name) != files[name]]

            def place(name: str) -> tuple[bool, int]:
                return _VOUCHING.search(name) is not None, files[name][1]

            for name in sorted(changed, key=place):
                path = self._root / name
                try:
                    if _APPENDED.search(name):
                        self._append(name)
                    else:
                        buckets.upload(path, f"{self._above}/{name}")
                except FileNotFoundError:  # removed or renamed since
                    continue
                self._sent[name] = files[name]
                if _LARGE.search(name):
                    _make_sparse(path, files[name][0], f"{self._above}/{name}")
                    self._sent[name] = _stamp(path)
            for name in [name for name in self._sent if name not in files]:
                buckets.remove(f"{self._above}/{name}")
                del self._sent[name]

    def _append(self, name: str) -> None:
        """Adds a file's new lines to the object, which another command may have added to."""
        address, content = f"{self._above}/{name}", (self._root / name).read_bytes()
        content = content[: content.rfind(b"\n") + 1]  # a line may be half written
        length, crc = self._appended.get(name, (0, 0))
        whole = content
        # A file that does not begin with what was sent was rewritten, and replaces the object.
        if zlib.crc32(content[:length]) == crc and buckets.kind_of(address) == "file":
            there, new = buckets.read(address), content[length:]
            # An upload whose answer was lost may have added them.
            whole = there if new in there else there + new
        buckets.write(address, whole)
        self._appended[name] = len(content), zlib.crc32(content)

    def close(self) -> None:
        """Uploads for the last time and removes the copy."""
        self._ended.set()
        try:
            if self.writes:
                self.upload()
        finally:
            self._scratch.remove()

    def _files(self) -> Iterator[tuple[str, _Stamp]]:
        for parent, folders, names in os.walk(self._root):
            # os.walk goes only into the folders that are left in its list.
            folders[:] = [name for name in folders if not name.startswith(".")]
            for each in names:
                path = Path(parent, each)
                name = path.relative_to(self._root).as_posix()
                if not _HIDDEN.search(name):
                    try:
                        yield name, _stamp(path)
                    except FileNotFoundError:  # removed or renamed since
                        continue

    def _upload_periodically(self) -> None:
        while not self._ended.wait(_SECONDS_BETWEEN_UPLOADS):
            try:
                self.upload()
            except UserError:
                continue  # the next one may succeed; the last one raises


class Scratch:
    """A temporary folder of this process; the next process removes it if this one is killed.

    Attributes:
      path: The folder, which is empty.
    """

    def __init__(self) -> None:
        _remove_abandoned()
        self._root = Path(tempfile.mkdtemp(prefix=_PREFIX))
        # The system releases it however this process ends.
        self._in_use = filelock.FileLock(
            self._root / _IN_USE, is_singleton=False, thread_local=False
        )
        self._in_use.acquire()
        self.path = self._root / "files"
        self.path.mkdir()
        atexit.register(self.remove)

    def remove(self) -> None:
        """Removes the folder."""
        shutil.rmtree(self._root, ignore_errors=True)
        self._in_use.release(force=True)
        atexit.unregister(self.remove)


def _remove_abandoned() -> None:
    """Removes the folders of processes that were killed."""
    for root in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError, filelock.Timeout):  # another user's, or in use
            is_ours = (root / _IN_USE).is_file()
            if is_ours and time.time() - root.stat().st_mtime > _SECONDS_TO_BEGIN:
                with filelock.FileLock(root / _IN_USE, timeout=0, is_singleton=False):
                    shutil.rmtree(root, ignore_errors=True)


def _stamp(path: Path) -> _Stamp:
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ino


_hollow_files: dict[str, tuple[_Stamp, str]] = {}  # path -> its stamp, the object it stands for


def _make_sparse(path: Path, size: int, address: str) -> None:
    """Replaces a file by one of that size that takes up no space, and stands for an object."""
    with open(path, "wb") as file:
        file.truncate(size)
    _hollow_files[str(path)] = _stamp(path), address


def is_streamed(path: Path) -> bool:
    """Whether a file of a working copy has its bytes only in the bucket."""
    found = _hollow_files.get(str(path))
    # It may have been replaced since.
    return found is not None and path.is_file() and _stamp(path) == found[0]


def open_file(path: Path) -> BinaryIO:
    """A file that is open for reading; a shard in a working copy is read from the bucket."""
    if not is_streamed(path):
        return open(path, "rb", buffering=_BUFFER_BYTES)
    stamp, address = _hollow_files[str(path)]
    return io.BufferedReader(buckets.Stream(address, stamp[0]), _BUFFER_BYTES)


class TemporaryCopy:
    """A complete copy of a directory in a bucket, its checkpoints too, which is only read.

    The copy is removed when this object is deleted, or at the latest when the process ends.

    Args:
      address: The directory.

    Attributes:
      path: The copy.

    Raises:
      UserError: If there is not enough space for the copy.
    """

    def __init__(self, address: str):
        scratch = Scratch()
        self.path = str(scratch.path)
        # Not `__del__`, which Python need not call for objects that are alive when it exits.
        weakref.finalize(self, scratch.remove)
        files = buckets.objects(address)
        needed = sum(files.values())
        if (free := shutil.disk_usage(self.path).free) < needed:
            raise UserError(
                f"{address} must be copied here to be read, which takes {sized(needed)}; only"
                f" {sized(free)} are free.",
                where=tempfile.gettempdir(),
                fix="Free some space, or name another place for such files in TMPDIR.",
            )
        with byte_progress("Copying", needed) as done:

            def copy(name: str) -> int:
                target = Path(self.path, name)
                target.parent.mkdir(parents=True, exist_ok=True)
                buckets.download(f"{address}/{name}", target)
                return files[name]

            with concurrent.futures.ThreadPoolExecutor(_REQUESTS) as pool:
                for count in pool.map(copy, files):
                    done(count)


_copies: dict[tuple[str, bool], WorkingCopy] = {}


def open_copy(address: str, *, writes: bool) -> Path:
    """Where to read, or write, what is at an address: in a working copy, made if need be.

    Args:
      address: The address, as `storage.check_address` returns it.
      writes: Whether changes are uploaded.
    """
    for copy in _copies.values():
        if writes and not copy.writes:
            continue
        rest = address.removeprefix(copy.address)
        # A checkpoint in the folder of a copy is not in the copy.
        if rest == "" or (rest != address and rest[0] == "/" and not _CHECKPOINT.search(rest)):
            return copy.path / rest.lstrip("/")
    copy = _copies[address, writes] = WorkingCopy(address, writes=writes)
    return copy.path


def copy_with(path: Path) -> WorkingCopy | None:
    """The working copy that a local path is in."""
    return next((copy for copy in _copies.values() if path.is_relative_to(copy.path)), None)


def upload(address: str) -> None:
    """Uploads what changed in the working copies that an address is in."""
    for copy in list(_copies.values()):
        if address.startswith(copy.address):
            copy.upload()


def close_all() -> None:
    """Uploads and removes all copies, when a command ends.

    Raises:
      UserError: If something could not be uploaded.
    """
    while _copies:
        _copies.popitem()[1].close()
