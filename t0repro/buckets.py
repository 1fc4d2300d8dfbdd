"""Objects in buckets: read, listed, created, replaced, removed, copied from and to this machine.

fsspec does the work, with gcsfs for gs:// and s3fs for s3://. A bucket has no folders and cannot
rename or append: a reader sees an object's old content or its new one, never a part. What has to
happen once, such as taking a lock, is a `create`, which the store refuses if the object is there.

Everything here takes addresses (`gs://bucket/name`). What takes local paths too is
`t0repro.working_copies`.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import importlib.util
import io
import logging
import os
import re
import socket
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

from t0repro.errors import UserError

_CONNECT_SECONDS = 2.0  # a lost first packet is sent again after one
_SILENT_SECONDS = 60  # without a byte, after which a request is sent again

# Has epath, which Orbax uses, go through fsspec too, rather than through TensorFlow's own clients;
# epath asks once.
os.environ.setdefault("EPATH_USE_TF", "false")
# TensorStore would wait for an answer for ever. It sends a request up to 32 more times.
os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES", "1")
os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS", str(_SILENT_SECONDS))

# memory:// lives as long as its process; tests use it.
SCHEMES = ("gs", "s3", "memory")

_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/")
_LIBRARIES = {"gs": "gcsfs", "s3": "s3fs"}
_STORES = {"gs": "Google Cloud Storage", "s3": "S3"}
_MACHINE = Path("/sys/class/dmi/id/product_name")  # the machine's name in its firmware
_VENDOR = Path("/sys/class/dmi/id/sys_vendor")
_LISTED_AS_FOLDERS = "directory"
_PART_BYTES = 1 << 18  # as much as TensorFlow reads of a file at a time
_PARTS_AT_A_TIME = 16  # requests

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


# ---- Addresses ----------------------------------------------------------------------------------


def scheme_of(path: str | os.PathLike[str]) -> str | None:
    """The scheme of an address, `gs` of `gs://bucket/x`; None for a local path or `file:///x`."""
    # Of the two slashes pathlib leaves one.
    found = _ADDRESS.match(os.fspath(path))
    return None if found is None or found[1].lower() == "file" else found[1].lower()


def is_address(path: str | os.PathLike[str]) -> bool:
    """Whether a path names something in a bucket."""
    return scheme_of(path) is not None


def spelled(path: str | os.PathLike[str]) -> str:
    """An address with both of its slashes, its scheme in small letters and no slash at its end."""
    scheme, _, rest = os.fspath(path).partition(":")
    return f"{scheme.lower()}://{rest.strip('/')}"


_another_machines = False


@contextlib.contextmanager
def addresses_of_another_machine() -> Iterator[None]:
    """Within the block, `checked` looks only at an address's spelling: this machine opens none."""
    global _another_machines
    _another_machines = True
    try:
        yield
    finally:
        _another_machines = False


def checked(path: str | os.PathLike[str], where: str | None = None) -> str:
    """An address that this machine can open, spelled in full; touches no network.

    Args:
      path: An address.
      where: The option or gin binding that names it, for the message.

    Raises:
      UserError: For an unknown scheme, or without the scheme's library or credentials.
    """
    scheme, address = scheme_of(path), spelled(path)
    if scheme not in SCHEMES:
        raise UserError(
            f"{address} cannot be opened: {scheme}:// is not a known scheme.",
            where=where,
            fix=f"Give a local path or an address: {', '.join(f'{s}://' for s in SCHEMES[:2])}.",
        )
    if not address.partition("://")[2]:
        raise UserError(f"{address} names no bucket.", where=where, fix="Write scheme://bucket/x.")
    if _another_machines:
        return address
    check_credentials(address, where)
    library = _LIBRARIES.get(scheme)
    if library is not None and importlib.util.find_spec(library) is None:
        raise UserError(
            f"{address} cannot be opened: {library} is not installed.",
            where=where,
            fix=f"EXTRAS={scheme} bash scripts/setup.sh, or: pip install {library}.",
        )
    return address


def check_readable(path: str | os.PathLike[str], where: str | None = None) -> None:
    """Raises UserError for an address from which nothing can be read; touches no network.

    Args:
      path: An address, which may be at any store that fsspec opens, or a local path.
      where: See `checked`.
    """
    check_scheme(path, where)
    if scheme_of(path) in SCHEMES:
        checked(path, where)


def check_scheme(path: str | os.PathLike[str], where: str | None = None) -> None:
    """Raises UserError for an address that is none to fsspec either; see `check_readable`."""
    if scheme_of(path) not in (None, *SCHEMES):
        import fsspec

        if scheme_of(path) not in fsspec.available_protocols():
            checked(path, where)


def place(path: str | os.PathLike[str]) -> Path:
    """A path object: pathlib's for a local path, epath's, with the same methods, for an address.

    Orbax takes either.
    """
    if not is_address(path):
        return Path(path)
    if scheme_of(path) == "memory":
        raise UserError(
            f"{spelled(path)} cannot hold checkpoints.",
            fix="Give a local path or an address: gs://, s3://.",
        )
    use_emulator()
    from etils import epath

    _configure(spelled(path).partition(":")[0])
    return cast(Path, epath.Path(spelled(path)))


def google_storage() -> str:
    """Where public files of Google's storage are; its own clients' variable names an emulator."""
    return os.environ.get("STORAGE_EMULATOR_HOST") or "https://storage.googleapis.com"


def use_emulator() -> None:
    """Has TensorStore find the emulator that the other libraries find by STORAGE_EMULATOR_HOST."""
    if emulator := os.environ.get("STORAGE_EMULATOR_HOST"):
        os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        os.environ.setdefault("TENSORSTORE_GCS_HTTP_URL", emulator)
        os.environ.setdefault("GOOGLE_AUTH_TOKEN_FOR_TESTING", "none")
        os.environ.setdefault("FSSPEC_GCS_TOKEN", "anon")


def _configure(scheme: str) -> None:
    """Sets how fsspec makes a scheme's file systems, ours and those that epath asks it for.

    They keep no listings, which would hide what TensorStore or another process has written or
    removed since. gcsfs too would wait for an answer for ever; it sends a request up to 5 more
    times.
    """
    import fsspec.config

    ours: dict[str, Any] = {"use_listings_cache": False}
    # Without gcsfs, fsspec's own message names what is missing.
    if scheme == "gs" and importlib.util.find_spec("gcsfs"):
        import aiohttp

        ours["requests_timeout"] = aiohttp.ClientTimeout(sock_read=_SILENT_SECONDS)
    fsspec.config.conf[scheme] = {**ours, **fsspec.config.conf.get(scheme, {})}


def absolute(path: str | os.PathLike[str]) -> Path:
    """A path object of an absolute path, or of an address, which is one."""
    return place(path) if is_address(path) else Path(path).absolute()


def orbax_writes_to(path: str | os.PathLike[str]) -> bool:
    """Whether Orbax writes and reads checkpoints there itself; of addresses, only at Google's."""
    return scheme_of(path) in (None, "gs")


# ---- Credentials --------------------------------------------------------------------------------


def check_credentials(address: str, where: str | None) -> None:
    """Raises UserError for an address on a machine without its store's credentials.

    The stores' libraries would look for them over the network and retry for minutes. Credentials
    are a file or a variable, or belong to a machine of the store's owner.
    """
    if address.startswith("gs://") and not has_google_credentials():
        variable = "GOOGLE_APPLICATION_CREDENTIALS"
        store, login = "Google Cloud", "gcloud auth application-default login"
    elif address.startswith("s3://") and not _has_amazon_credentials():
        variable, store, login = "AWS_SHARED_CREDENTIALS_FILE", "AWS", "aws configure"
    else:
        return
    named = os.environ.get(variable)
    reason = f" {variable} is {named}, which is not a file." if named else ""
    raise UserError(
        f"{address} cannot be opened: this machine has no {store} credentials.{reason}",
        where=where,
        fix=f"Run `{login}`, or give a local path.",
    )


def has_google_credentials() -> bool:
    """Whether there is a credentials file or an emulator, or this is one of Google's machines."""
    # The first names a metadata server, which is where Google's machines get their credentials; the
    # last may say that a public bucket needs none.
    variables = ("GCE_METADATA_HOST", "STORAGE_EMULATOR_HOST", "FSSPEC_GCS_TOKEN")
    if any(os.environ.get(name) for name in variables):
        return True
    folder = os.environ.get("CLOUDSDK_CONFIG") or Path.home() / ".config" / "gcloud"
    files = [
        os.environ.get("GOOGLE_APPLICATION_CREDENTIALS"),
        Path(folder) / "application_default_credentials.json",
    ]
    return any(file and Path(file).is_file() for file in files) or "Google" in _text(_MACHINE)


def _has_amazon_credentials() -> bool:
    variables = ("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_WEB_IDENTITY_TOKEN_FILE", "FSSPEC_S3_KEY")
    containers = (
        "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
        "AWS_CONTAINER_CREDENTIALS_FULL_URI",
        "FSSPEC_S3_ANON",
    )
    if any(os.environ.get(name) for name in variables + containers):
        return True
    home = Path.home() / ".aws"
    files = [
        Path(os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or home / "credentials"),
        Path(os.environ.get("AWS_CONFIG_FILE") or home / "config"),
    ]
    return any(file.is_file() for file in files) or "Amazon" in _text(_VENDOR)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


# ---- Stores -------------------------------------------------------------------------------------


@functools.cache
def file_system(scheme: str) -> Any:
    """Fsspec's file system for a scheme; it keeps connections, and no listings.

    Raises:
      UserError: If fsspec does not know the scheme or lacks its library.
    """
    import fsspec

    # They log the traceback of each attempt that failed; the error of the last one says it all.
    for library in ("fsspec", "gcsfs"):
        logging.getLogger(library).setLevel(logging.CRITICAL)
    emulator = os.environ.get("STORAGE_EMULATOR_HOST") if scheme == "gs" else None
    # By default gcsfs asks by gRPC what kind of bucket it is, which emulators do not answer.
    options: dict[str, Any] = {"token": "anon"} if emulator else {}
    if emulator:
        os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    try:
        _configure(scheme)
        # The cache of file systems would outlive the variables that say where the store is.
        system = fsspec.filesystem(scheme, skip_instance_cache=True, **options)
    except (ImportError, ValueError) as error:
        raise UserError(
            f"Addresses that begin with {scheme}:// cannot be opened: {error}.",
            fix="Install the package that the message names, or copy the files here.",
        ) from None
    if scheme in _STORES:
        server = system.base if scheme == "gs" else system.s3.meta.endpoint_url
        _check_reachable(_STORES[scheme], server)
    return system


def _check_reachable(store: str, server: str) -> None:
    """Raises UserError if no connection can be made; gcsfs tries for 40 s, s3fs for 10 s."""
    url = urllib.parse.urlsplit(server)
    if urllib.request.getproxies():  # they reach what this machine does not
        return
    port = url.port or {"http": 80}.get(url.scheme, 443)
    try:
        socket.create_connection((url.hostname, port), _CONNECT_SECONDS).close()
    except OSError as error:
        raise UserError(
            f"{store} cannot be reached: {error}.",
            where=f"{url.scheme}://{url.netloc}",
            fix="Check the connection, or give a local path.",
        ) from None


def located(address: str) -> tuple[Any, str]:
    """The file system of an address, and the address as it takes it.

    Raises:
      UserError: Without the store's library or credentials.
    """
    check_credentials(address, None)
    return file_system(address.partition("://")[0].lower()), address


def explained(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Makes a UserError of what a store's library raises, unless it says that there is no file.

    What a call for local paths raises is passed on.
    """

    @functools.wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        try:
            return function(*args, **kwargs)
        except (UserError, FileNotFoundError):
            raise
        except Exception as error:  # each library has exceptions of its own
            places = [os.fspath(arg) for arg in args if isinstance(arg, str | os.PathLike)]
            address = next((each for each in places if is_address(each) and "://" in each), None)
            if address is None:
                raise
            raise store_error(error, address) from error

    return call


def store_error(error: Exception, address: str | os.PathLike[str]) -> UserError:
    """A UserError in place of what a store's library, or one on top of it, raised."""
    return UserError(
        f"The store did not answer as it should: {error}",
        where=spelled(address),
        fix="Check the connection and the permissions, then start the same command again.",
    )


@explained
def exists(address: str) -> bool:
    """Whether there is an object, or one whose name continues this one after a slash."""
    system, path = located(address)
    try:
        # Not fsspec's exists: it answers False to every error, a lost connection too.
        system.info(path)
    except FileNotFoundError:
        return False
    return True


@explained
def is_object(address: str) -> bool:
    """Whether there is an object of this very name."""
    system, path = located(address)
    try:
        return system.info(path)["type"] == "file"
    except FileNotFoundError:
        return False


@explained
def read(address: str) -> bytes:
    """An object's content.

    Raises:
      FileNotFoundError: If there is no such object.
    """
    system, path = located(address)
    return system.cat_file(path)


@explained
def write(address: str, content: bytes) -> None:
    """Writes an object as a whole, in place of one of that name."""
    system, path = located(address)
    system.pipe_file(path, content)


@explained
def create(address: str, content: bytes) -> bool:
    """Writes an object if there is none of that name; of several that try, one succeeds.

    Returns:
      Whether this call wrote it.
    """
    system, path = located(address)
    # Asked first too: emulators overwrite where the store itself would refuse.
    if exists(address):
        return False
    try:
        system.pipe_file(path, content, mode="create")
    except FileExistsError:
        return False
    except OSError as error:
        # How the libraries report that the precondition failed.
        if "412" in str(error) or "recondition" in str(error):
            return False
        raise
    return True


@explained
def objects(address: str) -> dict[str, int]:
    """The objects below an address: name relative to it -> size in bytes; sorted by name."""
    system, path = located(address)
    root = system._strip_protocol(path).rstrip("/")  # how the library spells what it lists
    found = system.find(path, detail=True)
    sizes = {
        name.removeprefix(root).lstrip("/"): int(info["size"])
        for name, info in found.items()
        if info["type"] != _LISTED_AS_FOLDERS and not name.endswith("/")
    }
    sizes.pop("", None)  # the object of that very name
    for name in sizes:
        check_inside(name, address)
    return dict(sorted(sizes.items()))


def is_inside(name: str) -> bool:
    """Returns whether a name from a file or listing, once joined, stays inside its folder."""
    # Joining gives an absolute name as it is, and `..` leads out of the folder.
    parts = name.split("/")
    return bool(name) and "://" not in name and not os.path.isabs(name) and ".." not in parts


def check_inside(name: str, where: str) -> None:
    """Refuses a name in a listing of somebody else's that would be a file outside of its folder.

    Raises:
      UserError: naming it.
    """
    if not is_inside(name):
        raise UserError(
            f"The listing names {name!r}, which is not below its folder.",
            where=where,
            fix="Do not trust what is there; get it from where it came from.",
        )


@explained
def remove(address: str) -> None:
    """Removes an object; nothing if there is none."""
    system, path = located(address)
    try:
        system.rm_file(path)
    except FileNotFoundError:
        return


def remove_all(address: str, first: Sequence[str] = ()) -> None:
    """Removes the objects below an address.

    Args:
      address: The address.
      first: Names that are removed before all others, in this order.
    """
    order = {name: place for place, name in enumerate(first)}
    for name in sorted(objects(address), key=lambda name: order.get(name, len(order))):
        remove(f"{address}/{name}")


@explained
def upload(path: Path, address: str) -> None:
    """Copies a file of this machine to an object, which appears once it is complete."""
    system, target = located(address)
    system.put_file(str(path), target)


def upload_tree(folder: Path, address: str, last: Sequence[str] = ()) -> None:
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


@explained
def download(address: str, path: Path) -> None:
    """Copies an object to a file in a folder that exists.

    Raises:
      FileNotFoundError: If there is no such object.
    """
    system, source = located(address)
    system.get_file(source, str(path))


@explained
def read_part(address: str, start: int, end: int) -> bytes:
    """An object's bytes from one place to another, or to its end.

    Raises:
      FileNotFoundError: If there is no such object.
    """
    system, path = located(address)
    return system.cat_file(path, start=start, end=end)


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
        number, skipped = divmod(self._place, _PART_BYTES)
        ahead = [number + 1] if (number + 1) * _PART_BYTES < self._size else []
        self._parts = {each: self._part(each) for each in (number, *ahead)}
        data = self._parts[number].result()[skipped : skipped + len(buffer)]
        buffer[: len(data)] = data
        self._place += len(data)
        return len(data)

    def _part(self, number: int) -> concurrent.futures.Future[bytes]:
        """A part, which is asked for unless it has been."""
        if number not in self._parts:
            start = number * _PART_BYTES
            end = min(start + _PART_BYTES, self._size)
            reading = _readers().submit(read_part, self._address, start, end)
            self._parts[number] = reading
        return self._parts[number]


@functools.cache
def _readers() -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(_PARTS_AT_A_TIME, "reads of buckets")
