"""Files and folders by path or address: they are opened, listed, written and locked here.

A path is on a disk of this machine, which `disk` writes and `locks` locks. An address
(`gs://bucket/name`) is in a bucket: `buckets` reads and writes its objects, and `leases` locks. A
program that appends or renames works in a local copy of an address, which `output_path` opens and
`working_copies` uploads. Each function here asks once what it was given.

Functions that take or return `str` serve checkpoints, which are read in place; `file://` is taken
off by `local_path` first.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

from t0repro.errors import UserError
from t0repro.storage import access, buckets, disk, leases, locks, stores, working_copies

AnyPath = str | os.PathLike[str]
Result = TypeVar("Result")

_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/")
_CHUNK_BYTES = 1 << 26
_READ_BYTES = 1 << 22  # what is read of a large object at a time
_REQUESTS = 4  # at a time, for one array
_FILES = 8  # at a time


def scheme_of(path: AnyPath) -> str | None:
    """The scheme of an address, `gs` of `gs://bucket/x`; None for a local path or `file:///x`."""
    # Of the two slashes pathlib leaves one.
    match = _ADDRESS.match(os.fspath(path))
    return None if match is None or match[1].lower() == "file" else match[1].lower()


def is_address(path: AnyPath) -> bool:
    """Whether a path names something in a bucket."""
    return scheme_of(path) is not None


def _address(path: AnyPath) -> str:
    """An address with both of its slashes, its scheme in small letters and no slash at its end."""
    scheme, _, rest = os.fspath(path).partition(":")
    return f"{scheme.lower()}://{rest.strip('/')}"


def _remove_file_scheme(path: AnyPath) -> Path:
    return Path(re.sub("^file:/+", "/", os.fspath(path), flags=re.IGNORECASE))


def output_path(path: AnyPath, where: str | None = None) -> Path:
    """The path of an output. Every path that a command writes to is made here.

    Args:
      path: A local path, `file:///...`, or an address, of which this is the working copy: what is
        written there is uploaded.
      where: The option or gin binding that names it, for the message.

    Raises:
      UserError: For an address that cannot be opened.
    """
    if is_address(path):
        return working_copies.open_copy(check_address(path, where), writes=True)
    return _remove_file_scheme(path)


def input_path(path: AnyPath, where: str | None = None) -> Path:
    """The path of an input that only local files can provide; see `output_path`.

    Raises:
      UserError: For an address that cannot be opened.
    """
    if is_address(path):
        return working_copies.open_copy(check_address(path, where), writes=False)
    return _remove_file_scheme(path)


def place(path: AnyPath) -> Path:
    """A path object: pathlib's for a local path, epath's, with the same methods, for an address.

    Orbax takes either.
    """
    return stores.path_object(_address(path)) if is_address(path) else Path(path)


def absolute_place(path: AnyPath) -> Path:
    """A path object of an absolute path, or of an address, which is one."""
    return place(path) if is_address(path) else Path(path).absolute()


def local_path(path: AnyPath) -> str:
    """Returns a path as a string, without `file://`.

    Raises:
      UserError: For an address with one slash, such as `gs:/bucket`, unless there is such a file.
    """
    path = os.fspath(path)
    if is_address(path) and "://" not in path:
        if os.path.exists(path):
            return os.path.abspath(path)
        raise UserError(
            f"{path} is neither a path nor an address.",
            where=path,
            fix=f"Write an address with two slashes: {path.replace(':/', '://', 1)}.",
        )
    return path.removeprefix("file://")


def absolute(path: str) -> str:
    """The absolute path of a local file or directory; an address is one."""
    return path if is_address(path) else os.path.abspath(path)


def real(path: str) -> str:
    """A local path without its symbolic links; an address has none."""
    return path if is_address(path) else os.path.realpath(path)


def normal(path: str) -> str:
    """A path without `..`, and without a slash at its end."""
    return path.rstrip("/") if is_address(path) else os.path.normpath(path)


def join(path: str, name: str) -> str:
    """Joins a directory and a name; an absolute name is returned as it is."""
    # tf.train.Saver's state file may name a checkpoint by its address.
    if is_address(name):
        return name
    return f"{path.rstrip('/')}/{name}" if is_address(path) else os.path.join(path, name)


def base_name(path: str) -> str:
    """Returns the last part of a path."""
    return path.rstrip("/").rpartition("/")[2]


def address_of(path: Path) -> str | None:
    """The address that a path in a working copy stands for; None for any other path."""
    copy = working_copies.copy_with(path)
    return copy and copy.address_of(path)


def orbax_writes_to(path: AnyPath) -> bool:
    """Whether Orbax writes and reads checkpoints there itself; of addresses, only at Google's."""
    return scheme_of(path) in (None, "gs")


def tensorstore_spec(path: str) -> dict[str, Any] | None:
    """How TensorStore opens a directory itself; None for an address that it cannot open."""
    if is_address(path):
        return stores.tensorstore_spec(path)
    # To TensorStore, the path is a mere prefix of its keys, hence the slash.
    return {"driver": "file", "path": f"{path}/"}


def check_address(path: AnyPath, where: str | None = None) -> str:
    """An address, spelled in full, that this machine can open; a local path as it is.

    It touches no network.

    Args:
      path: A path or an address.
      where: The option or gin binding that names it, for the message.

    Raises:
      UserError: For an unknown scheme, or without the scheme's library or credentials.
    """
    if not is_address(path):
        return os.fspath(path)
    access.check(address := _address(path), where)
    return address


def check_readable(path: AnyPath, where: str | None = None) -> None:
    """Raises UserError for an address, at any store that fsspec opens, that cannot be read.

    It touches no network.
    """
    check_scheme(path, where)
    if scheme_of(path) in access.SCHEMES:
        check_address(path, where)


def check_scheme(path: AnyPath, where: str | None = None) -> None:
    """Raises UserError for an address of a scheme that is none to fsspec either."""
    if scheme_of(path) not in (None, *access.SCHEMES):
        import fsspec

        if scheme_of(path) not in fsspec.available_protocols():
            check_address(path, where)


def check_folder(path: AnyPath, where: str | None = None) -> None:
    """Raises UserError if no folder can be written at a path or an address; writes nothing."""
    if is_address(path):
        check_address(path, where)
        return
    if why := disk.find_obstacle(_remove_file_scheme(path)):
        raise UserError(
            f"No folder can be made or written at {path}: {why}.",
            where=where,
            fix="Choose a folder that can be written to.",
        )


def exists(path: str) -> bool:
    """Whether there is a file or directory of this name."""
    return buckets.exists(path) if is_address(path) else os.path.exists(path)


def is_file(path: str) -> bool:
    """Whether there is a file of this name."""
    return buckets.kind_of(path) == "file" if is_address(path) else os.path.isfile(path)


def is_directory(path: str) -> bool:
    """Whether there is a directory of this name."""
    return buckets.kind_of(path) == "directory" if is_address(path) else os.path.isdir(path)


def list_names(path: str) -> list[str]:
    """Lists the names in a directory; empty if there is no such directory."""
    if is_address(path):
        return buckets.list_names(path)
    return sorted(os.listdir(path)) if os.path.isdir(path) else []


def list_files(path: str) -> Iterator[str]:
    """Yields the files in a directory and below it."""
    if is_address(path):
        # A store lists everything below an address at once; level by level takes many requests.
        yield from (join(path, name) for name in buckets.objects(path))
        return
    for name in list_names(path):
        entry = os.path.join(path, name)
        if os.path.isdir(entry):
            yield from list_files(entry)
        else:
            yield entry


def file_sizes(path: str) -> dict[str, int]:
    """Size in bytes of each file in a directory and below it, by its name relative to it."""
    if is_address(path):
        return buckets.objects(path)
    return {file.removeprefix(path).lstrip("/"): os.path.getsize(file) for file in list_files(path)}


def file_size(path: str) -> int:
    """Returns a file's size in bytes.

    Raises:
      OSError: If there is no such file.
    """
    return buckets.size_of(path) if is_address(path) else os.path.getsize(path)


def stamp(path: str) -> list[Any]:
    """Returns values that change when a file is written: size and mtime, or a store's key."""
    if is_address(path):
        return [buckets.key_of(path)]
    status = os.stat(path)
    return [status.st_size, status.st_mtime_ns]


def refresh(path: str) -> bool:
    """Drops the cached listings of a remote path's file system; False for a local path."""
    if is_address(path):
        # fsspec caches listings, so a file written by another process since would stay unseen.
        stores.store_of(path).invalidate_cache()
    return is_address(path)


def call_at_once(function: Callable[[str], Result], files: Iterable[str]) -> Iterator[Result]:
    """Calls a function for several files at a time; yields the results in the files' order."""
    with concurrent.futures.ThreadPoolExecutor(_FILES) as pool:
        yield from pool.map(function, files)


def read(path: str, start: int = 0, count: int | None = None) -> bytes:
    """Reads a file, or up to `count` bytes of it from `start` on.

    Raises:
      OSError: If it cannot be read.
    """
    if is_address(path):
        return buckets.read(path, start, None if count is None else start + count)
    with open(path, "rb") as file:
        file.seek(start)
        return file.read() if count is None else file.read(count)


def read_blocks(path: str) -> Iterator[bytes]:
    """Yields a file's content in blocks of some megabytes.

    Raises:
      OSError: If it cannot be read.
    """
    if is_address(path):
        # By ranges: a file of the library would hold its parts and one more copy of them.
        for start in range(0, buckets.size_of(path), _READ_BYTES):
            yield buckets.read(path, start, start + _READ_BYTES)
        return
    with open(path, "rb") as file:
        while block := file.read(_READ_BYTES):
            yield block


def read_into(path: str, start: int, room: memoryview) -> bool:
    """Fills memory with a file's bytes from `start` on; returns whether there were enough.

    Args:
      path: The file.
      start: The first byte.
      room: Writable memory, as single bytes.

    Raises:
      OSError: If the file cannot be read.
    """
    if is_address(path):

        def fill(begin: int) -> bool:
            end = min(begin + _READ_BYTES, len(room))
            data = buckets.read(path, start + begin, start + end)
            if len(data) == end - begin:
                room[begin:end] = data
            return len(data) == end - begin

        with concurrent.futures.ThreadPoolExecutor(_REQUESTS) as pool:
            return all(pool.map(fill, range(0, len(room), _READ_BYTES)))
    # Unbuffered: bytes go straight into the memory.
    with open(path, "rb", 0) as file:
        file.seek(start)
        while room and (count := file.readinto(room[:_CHUNK_BYTES])):
            room = room[count:]
    return not room


def is_streamed(path: Path) -> bool:
    """Whether a file of a working copy has its bytes only in the bucket."""
    return working_copies.is_streamed(path)


def open_file(path: Path) -> BinaryIO:
    """A file that is open for reading; a shard in a working copy is read from the bucket."""
    return working_copies.open_file(path)


def copy_here(path: str) -> working_copies.TemporaryCopy | None:
    """A complete copy of an address, removed with the last reference to it; None for a local path.

    Raises:
      UserError: If there is not enough space for the copy.
    """
    return working_copies.TemporaryCopy(path) if is_address(path) else None


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A temporary folder that lasts for the block, or is removed by the next process."""
    scratch = working_copies.Scratch()
    try:
        yield scratch.path
    finally:
        scratch.remove()


@contextlib.contextmanager
def fetch(path: AnyPath) -> Iterator[Path]:
    """What an address holds now, in a copy that lasts for the block; a local path is itself."""
    if not is_address(path):
        yield Path(path)
        return
    copy = working_copies.WorkingCopy(check_address(path), writes=False)
    try:
        yield copy.path
    finally:
        copy.close()


def make_folder(folder: AnyPath) -> None:
    """Makes a folder and its parents, unless they exist; buckets have none.

    Raises:
      UserError: For an address that cannot be opened, or a new folder called `gs:`, `s3:` and so
        on, which only an address can mean.
      OSError: If it cannot be made.
    """
    if is_address(folder):
        check_address(folder)
    else:
        disk.make_folder(_remove_file_scheme(folder))


def write_atomically(path: AnyPath, content: str | bytes, *, private: bool = False) -> None:
    """Writes a whole file, which appears complete, in place of one of that name.

    Creates the parent directory if needed. A private file is readable only by its owner (0600).

    Raises:
      OSError: With the file's name, if it cannot be written.
    """
    data = content.encode() if isinstance(content, str) else content
    if is_address(path):
        buckets.write(check_address(path), data)
    else:
        disk.write_atomically(_remove_file_scheme(path), data, private=private)


def put_file(source: Path, target: AnyPath) -> None:
    """Copies or links a file to a path, or copies it to an address, where it appears complete."""
    if is_address(target):
        buckets.upload(source, _address(target))
    else:
        disk.put_file(source, Path(target))


def put_tree(folder: Path, address: str, last: Iterable[str] = ()) -> None:
    """Copies the files below a folder to an address, those of the names in `last` at the end."""
    buckets.upload_tree(folder, address, last)


def remove(path: str) -> None:
    """Removes a file; nothing if there is none."""
    if is_address(path):
        buckets.remove(path)
    else:
        Path(path).unlink(missing_ok=True)


def remove_all(path: str, first: Iterable[str] = ()) -> None:
    """Removes a directory with all that it holds.

    Args:
      path: The directory or address.
      first: Names that are removed before all others, in this order; of a directory, any order is
        taken.
    """
    if is_address(path):
        buckets.remove_all(path, first)
    else:
        shutil.rmtree(path, ignore_errors=True)


def explain_errors(path: AnyPath) -> contextlib.AbstractContextManager[None]:
    """Turns a full, read-only or vanished disk into a UserError, or a store that does not answer.

    Args:
      path: The path being written, for errors that do not name a file.

    Raises:
      UserError: In place of the error of the file system, the store or a library on top of it.
    """
    if is_address(path):
        return buckets.explain_errors(_address(path))
    return disk.explain_errors(path)


# A checkpoint's files, which may be larger than memory.


def open_new(path: str, *, resume: bool = False) -> BinaryIO:
    """Opens a file that is written in order; `finish` it, since closing it leaves no object.

    Args:
      path: The file.
      resume: Whether to keep the content of a local file.
    """
    if is_address(path):
        return cast(BinaryIO, buckets.NewObject(path))
    return open(path, "r+b" if resume and os.path.exists(path) else "w+b")


def finish(file: BinaryIO) -> None:
    """Completes a file of `open_new`: it is on the disk, or the object appears."""
    if isinstance(file, buckets.NewObject):
        file.finish()
        return
    with disk.name_in_errors(file.name):
        file.flush()
        os.fsync(file.fileno())
        file.close()
        disk.sync(os.path.dirname(file.name))


def write_large(path: str, content: memoryview) -> None:
    """Writes a whole file of any size; an object appears complete, a local file as it grows."""
    if is_address(path):
        buckets.write_large(path, content)
        return
    # Not synced here: `sync_all` syncs the files of a checkpoint together.
    with disk.name_in_errors(path), open(path, "wb") as file:
        file.write(content)


def sync_all(paths: Iterable[str]) -> None:
    """Syncs local files and their directories to disk, eight at a time."""
    local = [Path(path) for path in paths if not is_address(path)]
    with concurrent.futures.ThreadPoolExecutor(_FILES) as pool:
        # Sync directories too: otherwise a power failure may lose the names of synced files.
        list(pool.map(disk.sync, [*local, *{path.parent for path in local}]))


def upload(path: AnyPath) -> None:
    """Uploads what changed in the working copy of an address; nothing for any other path.

    Raises:
      UserError: If the store cannot be written to, or another run has taken over.
    """
    if is_address(path):
        working_copies.upload(_address(path))


def refetch(folder: Path) -> None:
    """Fetches what another machine has written below a folder of a working copy."""
    copy = working_copies.copy_with(folder)
    assert copy is not None
    copy.refetch(folder)


def close_copies() -> None:
    """Uploads and removes all working copies, when a command ends.

    Raises:
      UserError: If something could not be uploaded.
    """
    working_copies.close_all()


def lock_folder(
    folder: AnyPath,
    purpose: str,
    *,
    fix: str = "Wait for it to end, or choose another folder.",
) -> contextlib.AbstractContextManager[object]:
    """Locks a folder or an address for this process, which may change anything in it meanwhile.

    Args:
      folder: A folder, which is created if it does not exist, a working copy's, or an address.
      purpose: What the holder does, such as "training", for the error that a second run gets.
      fix: What a second run can do instead.

    Raises:
      UserError: If another run holds the folder (the message names it), or if the folder cannot be
        created or locked.
    """
    if is_address(folder):
        return leases.hold(_address(folder), purpose, fix=fix)
    if copy := working_copies.copy_with(Path(folder)):
        return copy.lock(Path(folder), purpose, fix=fix)
    return locks.lock_folder(Path(folder), purpose, fix=fix)
