"""Where a conversion writes before its files get their names, so that it can be resumed.

The hidden directory `.<name>.conversion` stands beside a destination that is not there yet, or in
one that is. It holds the target's files, `request.json` (what is converted from what) and
`digests.jsonl`, a line for each tensor that is written. A conversion that finds its own request
there goes on: what the lines describe is checked against them and kept. Nothing that looks for
checkpoints looks into it.
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
from t0repro.converters.manifest import MANIFEST, describe
from t0repro.converters.tensors import CheckpointRef, Output
from t0repro.files import sync_directory, sync_tree, write_atomically
from t0repro.locks import LOCK_FILES, folder_lock

REQUEST, DIGESTS = "request.json", "digests.jsonl"
_PURPOSE = "converting a checkpoint"


@dataclasses.dataclass
class Staged:
    """A directory to write to.

    Attributes:
      root: the hidden directory.
      path: where the target's files go, inside it.
      digests: what is written: name -> shape, dtype, sha256; T5X's dummies too until the end.
    """

    root: Path
    path: Path
    digests: dict[str, dict[str, Any]]

    @contextlib.contextmanager
    def log(self) -> Iterator[Callable[[Output, np.ndarray, Callable[[], None]], None]]:
        """Yields a function that writes a tensor while it takes its digest, and notes that."""
        with open(self.root / DIGESTS, "a") as file, ThreadPoolExecutor(1) as pool:

            def enter(output: Output, array: np.ndarray, write: Callable[[], None]) -> None:
                description = pool.submit(describe, array)
                write()
                self.digests[output.name] = description.result()
                file.write(json.dumps([output.name, self.digests[output.name]]) + "\n")
                file.flush()

            yield enter


def staging_directory(directory: Path) -> Path:
    """The hidden directory of a destination."""
    name = f".{directory.name}.conversion"
    return directory / name if directory.exists() else directory.parent / name


@contextlib.contextmanager
def staged(directory: Path, request: dict[str, Any]) -> Iterator[Staged]:
    """Yields a directory to write to, with what an interrupted conversion of the same left there.

    After an exception what was written stays, so that the conversion can be resumed.

    Args:
      directory: the destination, which no other run may hold meanwhile.
      request: all that decides what is written.

    Raises:
      UserError: if the destination is held by another run, a conversion or a training.
    """
    directory = directory.absolute()
    root = staging_directory(directory)
    with contextlib.ExitStack() as held:
        if directory.exists():
            held.enter_context(folder_lock(directory, _PURPOSE))
        held.enter_context(folder_lock(root, _PURPOSE))
        text, files = json.dumps(request, sort_keys=True), root / "files"
        # A cleaning that was interrupted may have left the request without the files, or parts.
        if _read(root / REQUEST) != text or not files.is_dir():
            _empty(root)
            files.mkdir()
            write_atomically(root / REQUEST, text)
        yield Staged(root, files, dict(_lines(root / DIGESTS)))
        _empty(root)
    with contextlib.suppress(OSError):  # where another run has taken the directory since
        for name in LOCK_FILES:
            (root / name).unlink(missing_ok=True)
        root.rmdir()


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def _empty(root: Path) -> None:
    """Removes all but the lock; the request first, so that what is left is never resumed from."""
    (root / REQUEST).unlink(missing_ok=True)
    for path in root.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in LOCK_FILES:
            path.unlink()


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and digest of each whole line; the last may be cut."""
    for line in (_read(path) or "").splitlines():
        with contextlib.suppress(ValueError):
            name, digest = json.loads(line)
            yield name, digest


def publish(staged: Staged, directory: Path, target: CheckpointRef, manifest: str) -> None:
    """Puts the files into their place.

    A destination that is not there yet appears as a whole, by one rename. In one that is, the files
    move one by one, the checkpoint's decisive one late and the manifest last.
    """
    if not directory.exists():
        write_atomically(staged.path / MANIFEST, manifest)
        directory.parent.mkdir(parents=True, exist_ok=True)
        sync_tree(staged.path)
        os.rename(staged.path, directory)
        sync_directory(directory.parent)
        return
    if target.format == "hf":
        _publish_hf(staged.path, directory, manifest)
        return
    (directory / MANIFEST).unlink(missing_ok=True)
    if target.format == "mtf":
        mtf.publish_mtf(staged.path, directory, target.step or 0)
    else:
        for extra in staged.path.iterdir():
            if extra.is_file():
                os.replace(extra, directory / extra.name)
        final = Path(target.path)
        if final.exists():
            shutil.rmtree(staged.root / "replaced", ignore_errors=True)
            os.rename(final, staged.root / "replaced")
        os.rename(staged.path / final.name, final)
    write_atomically(directory / MANIFEST, manifest)


def _publish_hf(staged: Path, directory: Path, manifest: str) -> None:
    """Moves a model's files; config.json, without which it is none, goes first and comes last.

    The manifest comes before it, since it has the model's step.
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
