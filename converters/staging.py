"""Where a conversion writes to: a hidden directory that is renamed, or the address itself.

The hidden directory is called `.<name>.conversion` and is beside a destination that does not exist
yet, or inside one that does. It contains the target's files, `request.json` (what is converted to
what) and `digests.jsonl`, one line per tensor written. A conversion that finds an identical request
there resumes: it keeps tensors that match their digest. Code that searches for checkpoints does not
look inside.

In a bucket, the target's objects are written under their own names, those that make them a
checkpoint last. `.t0repro.conversion` beside them has the request until then. A conversion that
finds an identical request starts over.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from t0repro import storage
from t0repro.converters import mtf
from t0repro.converters.tensors import CheckpointRef, Format, Output
from t0repro.converters.witnesses import MANIFEST, describe
from t0repro.errors import UserError
from t0repro.storage import (
    check_address,
    check_folder,
    is_address,
    lock_folder,
    make_folder,
    output_path,
    write_atomically,
)
from t0repro.storage.disk import name_in_errors, sync, sync_tree
from t0repro.storage.locks import LOCK_FILES
from t0repro.words import sized

REQUEST, DIGESTS = "request.json", "digests.jsonl"
_PURPOSE = "converting a checkpoint"


@dataclasses.dataclass
class Staged:
    """A place that is locked and ready for writing.

    Attributes:
      path: Directory or address for the target's files.
      digests: Tensors written so far: name -> shape, dtype and SHA-256.
      log_file: Where the digests are logged; None if nobody resumes from them.
    """

    path: str
    digests: dict[str, dict[str, Any]]
    log_file: Path | None

    @contextlib.contextmanager
    def log(self) -> Iterator[Callable[[Output, np.ndarray, Callable[[], None]], None]]:
        """Yields a function that writes a tensor, hashes it meanwhile, and logs the digest."""
        # A separate thread, so that hashing overlaps with writing.
        path = self.log_file or Path(os.devnull)
        with name_in_errors(path), open(path, "a") as file, ThreadPoolExecutor(1) as pool:

            def enter(output: Output, array: np.ndarray, write: Callable[[], None]) -> None:
                description = pool.submit(describe, array)
                write()
                # The line comes after the data: a logged tensor has been written in full.
                self.digests[output.name] = description.result()
                file.write(json.dumps([output.name, self.digests[output.name]]) + "\n")
                file.flush()

            yield enter


_IN_BUCKET = ".t0repro.conversion"
_HIDDEN = ".t0repro."


class InBucket:
    """An address; nothing of the checkpoint is on this machine's disk."""

    def __init__(self, address: str):
        self.path = address

    def check_is_free(self, force: bool) -> None:
        """Raises UserError if objects are there, except an interrupted conversion's."""
        # An earlier checkpoint's extra objects would remain among the new one's.
        del force
        if self._objects() and not storage.exists(f"{self.path}/{_IN_BUCKET}"):
            raise self._taken_error()

    def check_space(self, needed: int) -> None:
        """Does nothing: a bucket has no limit."""

    @contextlib.contextmanager
    def stage(self, request: dict[str, Any]) -> Iterator[Staged]:
        """The address itself, without what an interrupted conversion of the same request left.

        Args:
          request: Everything that decides the output, as JSON values.

        Raises:
          UserError: If another conversion or a training run holds the destination.
        """
        mark, text = f"{self.path}/{_IN_BUCKET}", json.dumps(request, sort_keys=True).encode()
        with lock_folder(self.path, _PURPOSE, fix="Wait for it, or give another address."):
            if left := self._objects():
                if not (storage.exists(mark) and storage.read(mark) == text):
                    raise self._taken_error()
                for name in left:
                    storage.remove(f"{self.path}/{name}")
            storage.write_atomically(mark, text)
            yield Staged(self.path, {}, None)
            # Removed last: while it is there, what is at the address counts as unfinished.
            storage.remove(mark)

    def publish(
        self, staged: Staged, target: CheckpointRef, manifest: str, last: Mapping[str, bytes]
    ) -> None:
        """Writes the manifest, then the rest."""
        del staged, target
        for name, content in {MANIFEST: manifest.encode(), **last}.items():
            storage.write_atomically(f"{self.path}/{name}", content)

    def _objects(self) -> list[str]:
        return [name for name in storage.file_sizes(self.path) if not name.startswith(_HIDDEN)]

    def _taken_error(self) -> UserError:
        return UserError(
            "There are objects at this address already.",
            where=self.path,
            fix="Give another address, or remove them.",
        )


# Orbax's metadata and the index file add little to the tensors' bytes.
_SPACE_MARGIN = 1.02


class OnDisk:
    """A directory, which appears complete if it does not exist yet."""

    def __init__(self, directory: Path):
        self.path = str(directory)
        self._given, self._directory = directory, directory.absolute()
        parent = self._directory if self._directory.exists() else self._directory.parent
        self._root = parent / f".{directory.name}.conversion"

    def check_is_free(self, force: bool) -> None:
        """Raises UserError if the directory exists and holds more than an interrupted conversion.

        Then the same call resumes there.
        """
        directory = self._given
        if directory.is_dir():
            hidden = {self._root.name, *LOCK_FILES}
            if force or all(path.name in hidden for path in directory.iterdir()):
                return
        elif not directory.is_symlink() and not directory.exists():
            check_folder(directory)
            return
        raise UserError(
            "The destination already exists."
            if directory.exists()
            else f"The destination is a link to {directory.readlink()}, which is not there.",
            where=str(directory),
            fix="Name a directory that does not exist, or write into this one: --force, in"
            " Python force=True."
            if directory.is_dir()
            else "Name a directory.",
        )

    def check_space(self, needed: int) -> None:
        """Raises UserError if the disk has too little space for a checkpoint of this many bytes."""
        # The directory may not exist yet; its nearest existing parent is on the same disk.
        existing = next(p for p in [self._given, *self._directory.parents] if p.exists())
        free = shutil.disk_usage(existing).free
        if free < needed * _SPACE_MARGIN:
            raise UserError(
                f"The checkpoint needs {sized(int(needed * _SPACE_MARGIN))}, but only {sized(free)}"
                " are free.",
                where=str(existing),
                fix="Free some space or choose another destination.",
            )

    @contextlib.contextmanager
    def stage(self, request: dict[str, Any]) -> Iterator[Staged]:
        """The staging directory, with any files of an interrupted run of the same request.

        On success it is removed. After an exception its files remain, so that the conversion can be
        resumed.
        """
        root = self._root
        with contextlib.ExitStack() as locks:
            if self._directory.exists():
                locks.enter_context(lock_folder(self._directory, _PURPOSE))
            # Lock both: the destination, if others may write into it, and the hidden directory
            # itself.
            locks.enter_context(lock_folder(root, _PURPOSE))
            text, files = json.dumps(request, sort_keys=True), root / "files"
            # An interrupted cleanup may have left the request without the files, or only some of
            # them.
            if _read(root / REQUEST) != text or not files.is_dir():
                _empty(root)
                files.mkdir()
                write_atomically(root / REQUEST, text)
            digests = dict(_read_digests(root / DIGESTS))
            yield Staged(str(files), digests, root / DIGESTS)
            # Only after success: an exception leaves the context before this line.
            _empty(root)
        with contextlib.suppress(OSError):  # another run may have taken the directory since
            for name in LOCK_FILES:
                (root / name).unlink(missing_ok=True)
            root.rmdir()

    def publish(
        self, staged: Staged, target: CheckpointRef, manifest: str, last: Mapping[str, bytes]
    ) -> None:
        """Moves the finished files to the destination.

        A destination that does not exist yet appears in one rename. Into an existing one, files
        move one by one: the file that makes them a checkpoint late, and the manifest last.
        """
        files, directory = Path(staged.path), self._directory
        for name, content in last.items():
            write_atomically(files / name, content)
        if not directory.exists():
            write_atomically(files / MANIFEST, manifest)
            make_folder(directory.parent)
            # A power failure must not leave the final name without its contents.
            sync_tree(files)
            os.rename(files, directory)
            sync(directory.parent)
            return
        if target.format in ("hf", "peft"):
            _publish_files(files, directory, manifest, target.format)
            return
        # Remove the old manifest first: it must never describe the tensors that replace its own.
        (directory / MANIFEST).unlink(missing_ok=True)
        if target.format == "mtf":
            mtf.publish_mtf(files, directory, target.step or 0)
        else:
            _publish_tree(files, directory, Path(target.path).name, self._root / "replaced")
        write_atomically(directory / MANIFEST, manifest)


# Where a checkpoint is written; `path` is the directory or address.
Destination = InBucket | OnDisk


def destination(dst: str | os.PathLike[str]) -> Destination:
    """Where a checkpoint is written.

    Raises:
      UserError: For an address that cannot be opened.
    """
    return InBucket(check_address(dst)) if is_address(dst) else OnDisk(output_path(dst))


def _publish_tree(staged: Path, directory: Path, name: str, replaced: Path) -> None:
    """Replaces a checkpoint's directory, after the small files beside it."""
    for extra in staged.iterdir():
        if extra.is_file():
            os.replace(extra, directory / extra.name)
    final = directory / name
    if final.exists():
        # Rename it away instead of deleting in place, so that the name never has only part of it.
        shutil.rmtree(replaced, ignore_errors=True)
        os.rename(final, replaced)
    os.rename(staged / name, final)


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def _empty(root: Path) -> None:
    """Empties the directory except for the lock.

    The request goes first, so that an interrupted cleanup is never resumed.
    """
    (root / REQUEST).unlink(missing_ok=True)
    for path in root.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in LOCK_FILES:
            path.unlink()


def _read_digests(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields name and digest of each complete line; a crash may have truncated the last one."""
    for line in (_read(path) or "").splitlines():
        with contextlib.suppress(ValueError):
            name, digest = json.loads(line)
            yield name, digest


def _publish_files(staged: Path, directory: Path, manifest: str, target: Format) -> None:
    """Replaces the files of a Hugging Face model, or of an adapter of PEFT's.

    The old config is removed first and the new one moved last, because transformers and PEFT load
    nothing without it. The manifest, which has the global step, is in place before it.
    """
    config = "config.json" if target == "hf" else "adapter_config.json"
    weights = ("model*.safetensors*", "optimizer_slots.*") if target == "hf" else ()
    (directory / config).unlink(missing_ok=True)
    (directory / MANIFEST).unlink(missing_ok=True)
    for stale in [file for pattern in weights for file in directory.glob(pattern)]:
        stale.unlink()
    for name in sorted(os.listdir(staged)):
        if name != config:
            os.replace(staged / name, directory / name)
    write_atomically(directory / MANIFEST, manifest)
    os.replace(staged / config, directory / config)
    sync(directory)
