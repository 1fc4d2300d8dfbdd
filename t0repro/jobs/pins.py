"""Pins, which keep a checkpoint as long as jobs need it, even if the training run deletes it.

On a disk, a pin is a folder of hard links to the checkpoint's files, under the same names. It takes
no space and no time, needs no cooperation from the training program, and outlives the original.
Beside it is a copy of the training run's operative_config.gin, which that run may rewrite.

In a bucket, a pin is a lease, which a training run on JAX checks before it removes a checkpoint.
What it could not remove is removed when the pin is released.
"""

from __future__ import annotations

import glob
import os
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Protocol

from t0repro import storage
from t0repro.converters import finding, sources
from t0repro.converters.mtf import OPERATIVE_CONFIG
from t0repro.converters.tensors import CheckpointRef
from t0repro.errors import UserError
from t0repro.storage import leases
from t0repro.storage.disk import atomic_directory

_FOLDER = "pins"


def complete_checkpoints(model_dir: Path) -> dict[int, CheckpointRef]:
    """Step -> complete checkpoint in a training run's folder, ascending; {} before the first."""
    if not model_dir.is_dir():
        return {}
    return {ref.step: ref for ref in finding.list_checkpoints(model_dir) if ref.step is not None}


class Pins(Protocol):
    """The pins of a training run's checkpoints."""

    def pin(self, ref: CheckpointRef) -> bool:
        """Pins a checkpoint; returns False if the training run deleted it meanwhile.

        Raises:
          UserError: if its files differ from what was written.
        """
        ...

    def path(self, step: int) -> str | None:
        """A pinned checkpoint's path: a folder, or the prefix of Mesh TensorFlow's files."""
        ...

    def unpin_all_but(self, steps: Collection[int]) -> None:
        """Releases all other steps."""
        ...


class Links:
    """Pins on a disk, in `folder`/pins/<step>."""

    def __init__(self, folder: Path):
        self._place = folder / _FOLDER

    def pin(self, ref: CheckpointRef) -> bool:
        """Links a checkpoint's files."""
        place = self._place / str(ref.step)
        if place.exists():
            return True
        try:
            # Renamed when it is whole, so that a pin that exists can be used.
            with atomic_directory(place) as temporary:
                _link(ref, temporary)
                copy = str(temporary / os.path.basename(ref.path))
                sources.open_checkpoint(finding.find_checkpoint(copy))  # checks files and sizes
        except (FileNotFoundError, UserError):
            # Deletion takes a while: only part of the checkpoint may have been linked.
            if ref.step not in complete_checkpoints(Path(ref.path).parent):
                return False
            raise
        return True

    def path(self, step: int) -> str | None:
        """The path among the pins, whose name shows the step in both formats."""
        place = self._place / str(step)
        if not place.is_dir():
            return None
        whole = place / f"checkpoint_{step}"
        return str(whole if whole.is_dir() else place / f"model.ckpt-{step}")

    def unpin_all_but(self, steps: Collection[int]) -> None:
        """Removes the other pins, and a killed controller's unfinished one."""
        kept = {str(step) for step in steps}
        for name in os.listdir(self._place) if self._place.is_dir() else ():
            if name not in kept:
                shutil.rmtree(self._place / name, ignore_errors=True)


class Leases:
    """Pins in a bucket, which last as long as this process."""

    def __init__(self, model_dir: Path):
        self._model_dir = model_dir
        self._held: dict[int, tuple[leases.Lease, str]] = {}

    def pin(self, ref: CheckpointRef) -> bool:
        """Takes the lease on a checkpoint."""
        assert ref.step is not None
        if ref.step in self._held:
            return True
        lease = leases.pin(ref.path)
        if lease is None:
            return False
        # The training run may have removed it between the listing and the lease.
        if ref.step not in complete_checkpoints(self._model_dir):
            lease.release()
            return False
        self._held[ref.step] = lease, ref.path
        return True

    def path(self, step: int) -> str | None:
        """The checkpoint's own address."""
        return self._held[step][1] if step in self._held else None

    def unpin_all_but(self, steps: Collection[int]) -> None:
        """Releases the other leases, and removes what the training run could not remove."""
        for step in self._held.keys() - set(steps):
            lease, checkpoint = self._held.pop(step)
            lease.release()
            # A lease only delays: the training run has marked what it wanted to remove meanwhile.
            if leases.is_unwanted(checkpoint):
                # Imported here, since it brings JAX.
                from t0repro.training.checkpoint_retention import remove_checkpoint

                remove_checkpoint(storage.place(checkpoint))


def _link(ref: CheckpointRef, place: Path) -> None:
    # Only this file beside a checkpoint shows the model's activation and similar settings.
    beside = Path(ref.path).with_name(OPERATIVE_CONFIG)
    if beside.is_file():
        shutil.copy2(beside, place / OPERATIVE_CONFIG)
    if os.path.isdir(ref.path):
        shutil.copytree(ref.path, place / os.path.basename(ref.path), copy_function=_link_or_copy)
        return
    for path in glob.glob(f"{glob.escape(ref.path)}.*"):
        _link_or_copy(path, str(place / os.path.basename(path)))


def _link_or_copy(source: str, target: str) -> str:
    try:
        os.link(source, target)
    # A file that is gone cannot be copied either; `pin` then asks whether the checkpoint is.
    except FileNotFoundError:
        raise
    except OSError:  # a file system without links
        shutil.copy2(source, target)
    return target
