"""The hidden directory that a conversion writes to before publishing, so that it can be resumed.

It is called `.<name>.conversion` and is beside a destination that does not exist yet, or inside one
that does. It contains the target's files, `request.json` (what is converted to what) and
`digests.jsonl`, one line per tensor written. A conversion that finds an identical request there
resumes: it keeps tensors that match their digest. Code that searches for checkpoints does not look
inside.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from t0repro.converters import mtf
from t0repro.converters.tensors import CheckpointRef, Output
from t0repro.converters.witnesses import MANIFEST, describe
from t0repro.files import make_folder, naming, sync_directory, sync_tree, write_atomically
from t0repro.locks import LOCK_FILES, folder_lock

REQUEST, DIGESTS = "request.json", "digests.jsonl"
_PURPOSE = "converting a checkpoint"


@dataclasses.dataclass
class Staged:
    """A staging directory that is locked and ready for writing.

    Attributes:
      root: The hidden directory.
      path: Directory inside `root` for the target's files.
      digests: Tensors written so far: name -> shape, dtype and SHA-256.
    """

    root: Path
    path: Path
    digests: dict[str, dict[str, Any]]

    @contextlib.contextmanager
    def log(self) -> Iterator[Callable[[Output, np.ndarray, Callable[[], None]], None]]:
        """Yields a function that writes a tensor, hashes it meanwhile, and logs the digest."""
        # A separate thread, so that hashing overlaps with writing.
        path = self.root / DIGESTS
        with naming(path), open(path, "a") as file, ThreadPoolExecutor(1) as pool:

            def enter(output: Output, array: np.ndarray, write: Callable[[], None]) -> None:
                description = pool.submit(describe, array)
                write()
                # The line comes after the data: a logged tensor has been written in full.
                self.digests[output.name] = description.result()
                file.write(json.dumps([output.name, self.digests[output.name]]) + "\n")
                file.flush()

            yield enter


def staging_directory(directory: Path) -> Path:
    """Returns the path of a destination's hidden directory."""
    name = f".{directory.name}.conversion"
    return directory / name if directory.exists() else directory.parent / name


@contextlib.contextmanager
def staged(directory: Path, request: dict[str, Any]) -> Iterator[Staged]:
    """Yields the staging directory, with any files of an interrupted run of the same request.

    On success the hidden directory is removed. After an exception its files remain, so that the
    conversion can be resumed.

    Args:
      directory: The destination, which is locked meanwhile if it exists.
      request: Everything that decides the output, as JSON values.

    Raises:
      UserError: If another conversion or a training run holds the destination.
    """
    directory = directory.absolute()
    root = staging_directory(directory)
    with contextlib.ExitStack() as held:
        if directory.exists():
            held.enter_context(folder_lock(directory, _PURPOSE))
        # Lock both: the destination, if others may write into it, and the hidden directory itself.
        held.enter_context(folder_lock(root, _PURPOSE))
        text, files = json.dumps(request, sort_keys=True), root / "files"
        # An interrupted cleanup may have left the request without the files, or only some of them.
        if _read(root / REQUEST) != text or not files.is_dir():
            _empty(root)
            files.mkdir()
            write_atomically(root / REQUEST, text)
        yield Staged(root, files, dict(_lines(root / DIGESTS)))
        # Only after success: an exception leaves the context before this line.
        _empty(root)
    with contextlib.suppress(OSError):  # another run may have taken the directory since
        for name in LOCK_FILES:
            (root / name).unlink(missing_ok=True)
        root.rmdir()


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


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields name and digest of each complete line; a crash may have truncated the last one."""
    for line in (_read(path) or "").splitlines():
        with contextlib.suppress(ValueError):
            name, digest = json.loads(line)
            yield name, digest


def publish(staged: Staged, directory: Path, target: CheckpointRef, manifest: str) -> None:
    """Moves the finished files to the destination.

    A destination that does not exist yet appears in one rename. Into an existing one, files move
    one by one: the file that makes them a checkpoint late, and the manifest last.
    """
    if not directory.exists():
        write_atomically(staged.path / MANIFEST, manifest)
        make_folder(directory.parent)
        sync_tree(staged.path)
        os.rename(staged.path, directory)
        sync_directory(directory.parent)
        return
    if target.format == "hf":
        _publish_hf(staged.path, directory, manifest)
        return
    # Remove the old manifest first: it must never describe the tensors that replace its own.
    (directory / MANIFEST).unlink(missing_ok=True)
    if target.format == "mtf":
        mtf.publish_mtf(staged.path, directory, target.step or 0)
    else:
        # Small files first, the checkpoint's directory after them.
        for extra in staged.path.iterdir():
            if extra.is_file():
                os.replace(extra, directory / extra.name)
        final = Path(target.path)
        if final.exists():
            # Rename it away instead of deleting in place, so that the name never has only part of
            # it.
            shutil.rmtree(staged.root / "replaced", ignore_errors=True)
            os.rename(final, staged.root / "replaced")
        os.rename(staged.path / final.name, final)
    write_atomically(directory / MANIFEST, manifest)


def _publish_hf(staged: Path, directory: Path, manifest: str) -> None:
    """Replaces the files of a Hugging Face model.

    The old config.json is removed first and the new one moved last, because transformers loads
    nothing without it. The manifest, which has the global step, is in place before it.
    """
    (directory / "config.json").unlink(missing_ok=True)
    (directory / MANIFEST).unlink(missing_ok=True)
    for stale in [*directory.glob("model*.safetensors*"), *directory.glob("optimizer_slots.*")]:
        stale.unlink()
    for name in sorted(os.listdir(staged)):
        if name != "config.json":
            os.replace(staged / name, directory / name)
    write_atomically(directory / MANIFEST, manifest)
    os.replace(staged / "config.json", directory / "config.json")
    sync_directory(directory)
