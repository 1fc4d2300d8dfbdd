"""Keeps a checkpoint for as long as jobs need it, whatever the training run deletes.

A pin is a folder of hard links to the checkpoint's files, under the same names. It takes no space
and no time, needs no help from the program that trains, and outlives the original. Beside it is a
copy of the training run's operative_config.gin, which that run may still rewrite.
"""

from __future__ import annotations

import glob
import os
import shutil
from collections.abc import Collection
from pathlib import Path

from t0repro.converters import sources
from t0repro.converters.mtf import OPERATIVE_CONFIG
from t0repro.converters.tensors import CheckpointRef
from t0repro.errors import UserError
from t0repro.files import atomic_directory

PINS = "pins"


def whole_checkpoints(model_dir: Path) -> dict[int, CheckpointRef]:
    """Step -> complete checkpoint in a training run's folder, ascending; {} before the first."""
    if not model_dir.is_dir():
        return {}
    return {ref.step: ref for ref in sources.list_checkpoints(model_dir) if ref.step is not None}


def pin(ref: CheckpointRef, folder: Path) -> Path | None:
    """Links a checkpoint's files into `folder`/pins/<step> and returns its path there.

    Returns:
      None if the training deleted it meanwhile.

    Raises:
      UserError: if its files are not those that were written.
    """
    place = folder / PINS / str(ref.step)
    if not place.exists():
        try:
            with atomic_directory(place) as temporary:
                _link(ref, temporary)
                copy = str(temporary / os.path.basename(ref.path))
                sources.open_checkpoint(sources.find_checkpoint(copy))  # checks files and sizes
        except (FileNotFoundError, UserError):
            # Deleting takes a while, too: half of it may have been linked.
            if _is_gone(ref):
                return None
            raise
    # The name stays: both formats tell the step by it.
    return place / os.path.basename(ref.path)


def pinned(step: int, folder: Path) -> Path:
    """The path of a pinned checkpoint: a folder, or the prefix of Mesh TensorFlow's files."""
    place = folder / PINS / str(step)
    whole = place / f"checkpoint_{step}"
    return whole if whole.is_dir() else place / f"model.ckpt-{step}"


def unpin_all_but(steps: Collection[int], folder: Path) -> None:
    """Removes the pins of other steps, and what a killed controller left of an unfinished one."""
    kept = {str(step) for step in steps}
    for name in os.listdir(folder / PINS) if (folder / PINS).is_dir() else ():
        if name not in kept:
            shutil.rmtree(folder / PINS / name, ignore_errors=True)


def _link(ref: CheckpointRef, place: Path) -> None:
    # The model's activation and the like are known from this file beside a checkpoint alone.
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
    except FileNotFoundError:
        raise
    except OSError:  # a file system without links
        shutil.copy2(source, target)
    return target


def _is_gone(ref: CheckpointRef) -> bool:
    there = whole_checkpoints(Path(ref.path).parent)
    return ref.step not in there
