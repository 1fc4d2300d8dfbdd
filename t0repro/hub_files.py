"""Lists, downloads (resuming) and verifies the files of a Hugging Face repository or a GCS bucket.

huggingface_hub is not used because it checks sizes but not checksums, and without a network it
fails only after retries. This uses two requests of the hub's HTTP API (shown for datasets), and two
of Google Cloud Storage's JSON API:

    GET /api/datasets/<repository>/tree/<revision>/<folder>        names, sizes, checksums
    GET /datasets/<repository>/resolve/<revision>/<path>           the bytes, Range allowed

    GET /storage/v1/b/<bucket>/o?prefix=<folder>/                  names, sizes, checksums
    GET /storage/v1/b/<bucket>/o/<name>?alt=media                  the bytes, Range allowed
"""

from __future__ import annotations

import abc
import base64
import dataclasses
import hashlib
import os
import shutil
import time
import urllib.parse
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from t0repro.errors import UserError
from t0repro.progress import say
from t0repro.storage.disk import name_in_errors
from t0repro.storage.names import check_inside
from t0repro.words import sized

HUB = "https://huggingface.co"
TIMEOUT_SECONDS = (5.0, 30.0)
"""Timeout in seconds, to connect and between two packets."""
DELAYS_SECONDS = (0.5, 1.0, 2.0, 4.0)
"""Seconds before each further attempt after a server error or an interrupted transfer."""
_BLOCK = 1 << 20
_MOST_PAGES = 1000  # of a listing, at a thousand files a page; stops endless listings


@dataclasses.dataclass(frozen=True)
class HubFile:
    """A file of a repository or bucket, with the one checksum that the server lists, in hex.

    Attributes:
      path: Path in the repository or bucket.
      size: Bytes.
      sha256: SHA-256, listed for the hub's large files.
      blob: Git's SHA-1, over a header with the length and then the bytes, for its other files.
      md5: MD5, listed for a bucket's objects.
      crc32c: CRC32C, for bucket objects without an MD5 (those composed from parts).
    """

    path: str
    size: int
    sha256: str | None = None
    blob: str | None = None
    md5: str | None = None
    crc32c: str | None = None

    def __post_init__(self) -> None:
        check_inside(self.path, "the server's listing")

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition("/")[2]

    def checksum_of(self, path: Path) -> str:
        """Computes a local file's checksum, of the kind that the server lists for this one."""
        if self.sha256:
            digest = hashlib.sha256()
        elif self.blob:
            # Git hashes a header with the length before the content.
            digest = hashlib.sha1(b"blob %d\0" % self.size)
        elif self.md5:
            digest = hashlib.md5()
        else:
            import google_crc32c

            digest = google_crc32c.Checksum()
        with open(path, "rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
        checksum = digest.hexdigest()
        # google_crc32c gives bytes, hashlib text.
        return checksum if isinstance(checksum, str) else checksum.decode()

    @property
    def checksum(self) -> str:
        """The checksum that the server lists."""
        return self.sha256 or self.blob or self.md5 or self.crc32c or ""


def check_room(to: Path, total: int, held: Iterable[Path], fix: str) -> None:
    """Checks a folder's disk before a download.

    Args:
      to: The folder.
      total: Bytes of all files.
      held: The files of an interrupted download, which need not arrive again.
      fix: What to do if there is too little room.

    Raises:
      UserError: If the rest does not fit.
    """
    needed = total - sum(path.stat().st_size for path in held if path.is_file())
    free = shutil.disk_usage(to).free
    if needed > free:
        raise UserError(
            f"{sized(needed)} would be downloaded, but only {sized(free)} are free.",
            where=str(to),
            fix=fix,
        )


class RemoteFiles(abc.ABC):
    """Files on a server; subclasses implement the server's API.

    Args:
      base_url: Address of the server or a mirror; it may begin with `user:password@`.
      delays: Seconds to wait before each retry.
    """

    unreachable_fix = "This command needs the network; --base_url names a mirror."
    refused_fix = "Ask the server's owner for access."

    def __init__(self, base_url: str, delays: Sequence[float] = DELAYS_SECONDS):
        import requests

        self._session = requests.Session()
        # User and password stay in the session, because addresses are shown, recorded and compared.
        address = urllib.parse.urlsplit(base_url)
        user, _, server = address.netloc.rpartition("@")
        if user:
            name, _, password = user.partition(":")
            self._session.auth = urllib.parse.unquote(name), urllib.parse.unquote(password)
        self.base_url = address._replace(netloc=server).geturl().rstrip("/")
        self._delays = delays
        # No compression in transit: byte counts and ranges must be those of the file itself.
        self._session.headers["Accept-Encoding"] = "identity"
        self._reached = False

    @abc.abstractmethod
    def files(self, folder: str) -> list[HubFile] | None:
        """Lists a folder's files; None if there is no such folder.

        Raises:
          UserError: If the server cannot be reached or answers with an error.
        """

    @abc.abstractmethod
    def _url(self, file: HubFile) -> str:
        """The address that a file is downloaded from."""

    def download(self, file: HubFile, to: Path, advance: Callable[[int], None]) -> None:
        """Downloads a file and verifies its checksum; resumes if part of it is already at `to`.

        Args:
          file: One of those that `files` lists.
          to: The local file.
          advance: Called with each number of bytes gained, negative when bytes are discarded.

        Raises:
          UserError: If the server keeps failing, or the checksum is wrong twice.
        """
        self._resume(file, to, advance)
        if self._is_right(file, to):
            return
        # It probably resumed from a wrong beginning; retry once from the start.
        advance(-file.size)
        to.unlink()
        self._resume(file, to, advance)
        if not self._is_right(file, to):
            to.unlink()
            raise UserError(
                f"The bytes that arrived are not those that the server lists ({file.size} bytes,"
                f" checksum {file.checksum}), twice.",
                where=self._url(file),
                fix="Try again later, or from the server itself if --base_url names a mirror.",
            )

    def _is_right(self, file: HubFile, path: Path) -> bool:
        if path.stat().st_size != file.size:
            return False
        return file.checksum_of(path) == file.checksum

    # Requests --------------------------------------------------------------------------------

    def _ask(self, url: str, **options: Any) -> Any:
        """Sends a request, with retries; returns the response if it is a success, 404 or 416."""
        import requests

        # None marks the last attempt, after which there is no waiting.
        for delay in (*self._delays, None):
            try:
                answer = self._session.get(url, timeout=TIMEOUT_SECONDS, **options)
                self._reached = True
            # Both derive from RequestException, whose retries further down cannot help here.
            except (requests.exceptions.InvalidSchema, requests.TooManyRedirects) as error:
                raise UserError(
                    f"The server redirects to an address that is not followed: {error}.",
                    where=url,
                    fix="Give another --base_url; only http and https addresses are followed.",
                ) from error
            except requests.RequestException as error:
                # This server has never responded: there is probably no network, and retrying would
                # only delay the message.
                if not self._reached or delay is None:
                    raise UserError(
                        f"The server cannot be reached ({type(error).__name__}).",
                        where=self.base_url,
                        fix=self.unreachable_fix,
                    ) from error
                reason = type(error).__name__
            else:
                # Callers handle 404 and 416.
                if answer.status_code < 400 or answer.status_code in (404, 416):
                    return answer
                # With stream=True, requests keeps the connection of an unread answer until it is
                # closed.
                answer.close()
                if delay is None or answer.status_code not in (408, 429, 500, 502, 503, 504):
                    raise UserError(
                        f"The server answers {answer.status_code} {answer.reason}.",
                        where=url,
                        fix=self.refused_fix
                        if answer.status_code in (401, 403)
                        else "Try again later; what has been fetched is kept.",
                    )
                reason = f"{answer.status_code} {answer.reason}"
            self._wait(delay, url, reason)
        raise AssertionError("the last attempt returns or raises")

    def _wait(self, seconds: float, url: str, reason: str) -> None:
        say(f"{url}: {reason}; trying again in {seconds:g} s")
        time.sleep(seconds)

    def _resume(self, file: HubFile, to: Path, advance: Callable[[int], None]) -> None:
        """Appends to `to` until it has the listed size; progress resets the retries."""
        # Later requests open the file with "r+b", which creates none.
        to.touch()
        have = to.stat().st_size
        # Longer than the file: left over from another version of it.
        if have > file.size:
            to.write_bytes(b"")
            have = 0
        advance(have)
        attempts = iter(self._delays)
        while have < file.size:
            came, error = self._append(file, to, have, advance)
            have += came
            if came > 0:
                # Bytes arrived, so the server is reachable: start the delays over.
                attempts = iter(self._delays)
            if have >= file.size:
                break
            delay = next(attempts, None)
            if delay is None:
                raise UserError(
                    f"The transfer breaks off repeatedly at byte {have:,} of"
                    f" {file.size:,}: {error}.",
                    where=self._url(file),
                    fix="Start the command again: it resumes there.",
                )
            self._wait(delay, self._url(file), error)

    def _append(
        self, file: HubFile, to: Path, have: int, advance: Callable[[int], None]
    ) -> tuple[int, str]:
        """Makes one request; returns bytes gained (negative if it starts over) and why it ended."""
        import urllib3

        headers = {"Range": f"bytes={have}-"} if have else {}
        answer = self._ask(self._url(file), headers=headers, stream=True)
        with answer:
            if answer.status_code in (404, 416):
                raise UserError(
                    f"The server lists this file but answers {answer.status_code} for it.",
                    where=self._url(file),
                    fix="Try again later, or from another --base_url.",
                )
            # The server granted the range only if its response says where it begins; otherwise it
            # sends the whole file.
            goes_on = answer.headers.get("Content-Range", "").startswith(f"bytes {have}-")
            start = have if answer.status_code == 206 and goes_on else 0
            if start < have:  # the server ignored the range and sent the whole file
                advance(start - have)
            came, error = start, "it ends early"
            with name_in_errors(to), open(to, "r+b") as target:
                # Truncate beyond the beginning, or the file would stay too long.
                target.truncate(start)
                target.seek(start)
                try:
                    # iter_content would drop the part of a block that arrived before an
                    # interruption.
                    while came < file.size and (block := answer.raw.read1(_BLOCK)):
                        # Never write more than the listed size, whatever the server sends.
                        block = block[: file.size - came]
                        target.write(block)
                        came += len(block)
                        advance(len(block))
                except urllib3.exceptions.HTTPError as cut:
                    error = type(cut).__name__
        return came - have, error


class HubRepository(RemoteFiles):
    """A repository on the Hugging Face hub, at one revision.

    Args:
      base_url: Address of the hub or a mirror.
      name: `owner/name`.
      revision: Commit, branch or ref (`refs/pr/1`).
      delays: Seconds to wait before each retry.
      kind: `datasets` or `models`.
    """

    def __init__(
        self,
        base_url: str,
        name: str,
        revision: str,
        delays: Sequence[float] = DELAYS_SECONDS,
        kind: Literal["datasets", "models"] = "datasets",
    ):
        super().__init__(base_url, delays)
        self.name, self.revision, self._kind = name, revision, kind
        # As Hugging Face's clients do; a mirror of --base_url is given nobody's token, and neither
        # is a server that the hub redirects to (requests drops it there).
        if self.base_url == (os.environ.get("HF_ENDPOINT", "").rstrip("/") or HUB):
            token = os.environ.get("HF_TOKEN", "").strip()  # a secret's file may end a line
            if token:
                self._session.headers["Authorization"] = f"Bearer {token}"
            self.refused_fix = (
                f"Accept its authors' terms at {HUB}/{self._prefix}{name}, and set HF_TOKEN to a"
                f" token of your account{' (the one that is set is refused)' if token else ''}."
            )
        # Not every command that reads the hub has --base_url.
        self.unreachable_fix = "This command needs the network; HF_ENDPOINT names a mirror."
        if kind == "models":
            self.unreachable_fix += " Or copy the checkpoint from a machine that has it."
        else:
            self.unreachable_fix += (
                " Without either, copy the tasks' folders from a machine that has them, or make"
                " them from the datasets: seqio_cache_tasks --module_import=t0repro.tasks.t0."
            )

    def files(self, folder: str) -> list[HubFile] | None:
        """Lists a folder's files; None if there is no such folder.

        Raises:
          UserError: If the hub cannot be reached or answers with an error.
        """
        url: str | None = (
            f"{self.base_url}/api/{self._kind}/{self.name}/tree/{self._revision}/{folder}"
        )
        found, pages = [], set()
        while url:
            pages.add(url)
            answer = self._ask(url)
            if answer.status_code == 404:
                return None
            found += [_hub_file(entry, url) for entry in self._entries(answer, url)]
            url = self._next_page(answer, url, pages)
        return [file for file in found if file is not None]

    def _next_page(self, answer: Any, url: str, pages: Collection[str]) -> str | None:
        """The URL of the listing's next page; it must be new and on the same server."""
        following = answer.links.get("next", {}).get("url")
        if following is None:
            return None
        # A relative link is relative to the page that it is on.
        following = urllib.parse.urljoin(url, following)
        if following in pages:
            reason = "its next page is one that was read already"
        elif len(pages) >= _MOST_PAGES:
            reason = f"it has more than {_MOST_PAGES:,} pages"
        elif not following.startswith(self.base_url + "/"):
            reason = f"its next page is on another server, {following}"
        else:
            return following
        raise UserError(
            f"The listing cannot be followed: {reason}.",
            where=url,
            fix="Give the address of the hub, or of a mirror of it, as --base_url.",
        )

    @property
    def _prefix(self) -> str:
        return "datasets/" if self._kind == "datasets" else ""  # models have none

    @property
    def _revision(self) -> str:
        return urllib.parse.quote(self.revision, safe="")  # refs/pr/1 has slashes

    def _url(self, file: HubFile) -> str:
        place = f"{self.base_url}/{self._prefix}{self.name}"
        return f"{place}/resolve/{self._revision}/{file.path}"

    def _entries(self, answer: Any, url: str) -> list[dict[str, Any]]:
        try:
            entries = answer.json()
        except ValueError:
            entries = None
        if not isinstance(entries, list):
            raise UserError(
                "The answer is not a listing of the hub's.",
                where=url,
                fix="Give the address of the hub, or of a mirror of it, as --base_url.",
            )
        return entries


class Bucket(RemoteFiles):
    """A public Google Cloud Storage bucket.

    Args:
      base_url: https://storage.googleapis.com or a mirror.
      name: The bucket's name.
      delays: Seconds to wait before each retry.
    """

    def __init__(self, base_url: str, name: str, delays: Sequence[float] = DELAYS_SECONDS):
        super().__init__(base_url, delays)
        self.name = name

    def files(self, folder: str) -> list[HubFile] | None:
        """Lists the objects below a folder, at any depth; None if there are none.

        Raises:
          UserError: If the server cannot be reached or answers with an error.
        """
        url = f"{self.base_url}/storage/v1/b/{self.name}/o"
        # Without the slash, a folder whose name begins with this one's would match, too.
        query = {"prefix": f"{folder.rstrip('/')}/"}
        found, pages = [], set()
        while True:
            page = f"{url}?{urllib.parse.urlencode(query)}"
            answer = self._ask(page)
            if answer.status_code == 404:
                return None
            try:
                listing = answer.json()
                found += [_bucket_file(item) for item in listing.get("items", ())]
            except (AttributeError, KeyError, TypeError, ValueError):
                raise UserError(
                    "The answer is not a listing of Google Cloud Storage's.",
                    where=page,
                    fix="Give the address of the server, or of a mirror of it, as --base_url.",
                ) from None
            if "nextPageToken" not in listing:
                # Names that end in a slash stand for folders.
                return [file for file in found if not file.path.endswith("/")] or None
            pages.add(query.get("pageToken"))
            query["pageToken"] = listing["nextPageToken"]
            if query["pageToken"] in pages or len(pages) >= _MOST_PAGES:
                raise UserError(
                    "The listing does not come to an end.",
                    where=page,
                    fix="Give the address of the server, or of a mirror of it, as --base_url.",
                )

    def _url(self, file: HubFile) -> str:
        # In this API's paths, a slash within an object's name has to be encoded.
        name = urllib.parse.quote(file.path, safe="")
        return f"{self.base_url}/storage/v1/b/{self.name}/o/{name}?alt=media"


def _bucket_file(item: dict[str, Any]) -> HubFile:
    md5 = item.get("md5Hash")
    # Objects composed of parts have no MD5.
    crc32c = None if md5 else base64.b64decode(item["crc32c"]).hex()
    # The JSON API writes 64-bit numbers as strings.
    size = int(item["size"])
    return HubFile(item["name"], size, md5=md5 and base64.b64decode(md5).hex(), crc32c=crc32c)


def _hub_file(entry: dict[str, Any], url: str) -> HubFile | None:
    if entry.get("type") != "file":
        return None
    # Large files are kept by LFS, whose id is the SHA-256; others have Git's.
    large = entry.get("lfs") or {}
    try:
        sha256 = str(large["oid"]).removeprefix("sha256:") if large else None
        blob = None if large else str(entry["oid"])
        return HubFile(str(entry["path"]), int(large.get("size", entry["size"])), sha256, blob)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"An entry of the listing lacks {error}.",
            where=url,
            fix="Give the address of the hub, or of a mirror of it, as --base_url.",
        ) from error
