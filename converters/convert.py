"""Converting a checkpoint from one format to another, tensor by tensor, with a manifest at the
end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import numpy as np
from t0repro.converters import jax_tree, layout, mtf
from t0repro.converters.family import Family
from t0repro.converters.progress import byte_progress
from t0repro.converters.sources import (
    MANIFEST,
    check_checkpoint,
    find_checkpoint,
    has_slots,
    open_checkpoint,
)
from t0repro.converters.tensors import (
    CheckpointReader,
    CheckpointRef,
    Format,
    TensorInfo,
    total_bytes,
)

from t0repro.errors import UserError
from t0repro.files import atomic_directory, write_atomically

# Orbax and the index file add little to the tensors' bytes.
_SPACE_MARGIN = 1.02


@dataclasses.dataclass(frozen=True)
class ConversionReport:
    """What a conversion did, or with `dry_run` would do.

    Attributes:
      source: the checkpoint that was read.
      target: the checkpoint that was written.
      family: the model that it holds.
      tensors: number of tensors written, the step included and T5X's dummies not.
      bytes: of those tensors.
      slots: "kept", "dropped" (by request) or "none" (the source has none).
      dry_run: whether nothing was written.
    """

    source: CheckpointRef
    target: CheckpointRef
    family: Family
    tensors: int
    bytes: int
    slots: str
    dry_run: bool


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    to: Format,
    *,
    step: int | None = None,
    slots: bool = True,
    norm_names: layout.NormNames | None = None,
    force: bool = False,
    dry_run: bool = False,
) -> ConversionReport:
    """Converts a checkpoint, bit for bit: values, types, optimizer slots and the step.

    The files appear in `dst` under their names only when they are whole, the manifest last.

    Args:
      src: see `sources.find_checkpoint`.
      dst: a directory, made if it is not there: it then is what a model_dir is, and gets
        `model.ckpt-<step>.*` and `checkpoint`, or `checkpoint_<step>/`.
      to: the format to write.
      step: see `sources.find_checkpoint`.
      slots: False leaves the optimizer's slots out.
      norm_names: how Mesh TensorFlow shall spell the norms: "rms_norm", or "layer_norm" as in T5
        1.0's released checkpoints. By default as in the checkpoint that the model came from, where
        its manifest says so, and else "rms_norm".
      force: write into `dst` though it is there, replacing a checkpoint of the same step and
        format; its other files stay.
      dry_run: check everything, write nothing.

    Raises:
      UserError: if the source is missing, damaged, incomplete or no T5, if `dst` is there, if space
        lacks, or if a value does not fit the target's type.
    """
    if to not in get_args(Format):
        raise UserError(f"There is no format {to!r}; there are {', '.join(get_args(Format))}.")
    ref = find_checkpoint(src, step)
    _check_target_absent(Path(dst), force)
    reader = open_checkpoint(ref)
    family = check_checkpoint(reader)
    step = int(reader.read(layout.STEP))
    _check_step(step, ref)
    tensors = {
        key: info
        for key, info in reader.tensors.items()
        if slots or not key.startswith(layout.SLOTS)
    }
    _check_free_space(Path(dst), total_bytes(tensors))
    report = ConversionReport(
        source=dataclasses.replace(ref, step=step),
        target=_target(Path(dst), to, step),
        family=family,
        tensors=len(tensors),
        bytes=total_bytes(tensors),
        slots="none" if not has_slots(reader) else "kept" if slots else "dropped",
        dry_run=dry_run,
    )
    if not dry_run:
        norm_names = norm_names or reader.norm_names or "rms_norm"
        _write(reader, report, tensors, Path(dst), norm_names)
    return report


def _target(directory: Path, to: Format, step: int) -> CheckpointRef:
    name = f"model.ckpt-{step}" if to == "mtf" else f"checkpoint_{step}"
    return CheckpointRef(to, str(directory / name), step)


# --- Checks before the first byte ----------------------------------------------------------------


def _check_target_absent(directory: Path, force: bool) -> None:
    if directory.is_dir():
        if force or not any(directory.iterdir()):
            return
    elif not directory.exists():
        return
    raise UserError(
        "The destination is there already.",
        where=str(directory),
        fix="Name a directory that is not, or add --force to write into it."
        if directory.is_dir()
        else "Name a directory.",
    )


def _check_step(step: int, ref: CheckpointRef) -> None:
    if not 0 <= step <= np.iinfo(np.int32).max:
        raise UserError(f"The global step {step} does not fit T5X's int32.", where=ref.path)
    if ref.step not in (None, step):
        raise UserError(
            f"The name says step {ref.step}, but the checkpoint's own step is {step}.",
            where=ref.path,
            fix="Rename the checkpoint to the step that it holds.",
        )


def _check_free_space(directory: Path, needed: int) -> None:
    existing = next(p for p in [directory, *directory.absolute().parents] if p.exists())
    free = shutil.disk_usage(existing).free
    if free < needed * _SPACE_MARGIN:
        raise UserError(
            f"The checkpoint needs {needed * _SPACE_MARGIN / 1e9:.2f} GB, but only"
            f" {free / 1e9:.2f} GB are free.",
            where=str(existing),
            fix="Free some space or choose another destination.",
        )


# --- Writing -------------------------------------------------------------------------------------


def _write(
    reader: CheckpointReader,
    report: ConversionReport,
    tensors: Mapping[str, TensorInfo],
    directory: Path,
    norm_names: layout.NormNames,
) -> None:
    """Writes to a hidden directory, puts the checkpoint in its place and then the manifest."""
    digests: dict[str, Any] = {}
    step = report.target.step or 0
    with _staging(directory) as (staged, publish):
        with byte_progress(
            f"Converting step {step} to {report.target.format}", report.bytes
        ) as done:
            arrays = _stream(reader, report.target.format, tensors, norm_names, digests, done)
            if report.target.format == "mtf":
                mtf.write_mtf(staged, step, tensors, arrays, norm_names)
            else:
                jax_tree.write_jax(staged, step, tensors, arrays)
        publish(report, _manifest(report, norm_names, digests))


def _stream(
    reader: CheckpointReader,
    to: Format,
    tensors: Mapping[str, TensorInfo],
    norm_names: layout.NormNames,
    digests: dict[str, Any],
    done: Callable[[int], None],
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields key and value of each tensor, entering its digest under its name in the target."""
    for key in sorted(tensors):
        array = reader.read(key)
        if key == layout.STEP:
            array = array.astype(np.int64 if to == "mtf" else np.int32)
        name = mtf.mtf_name(key, tensors, norm_names) if to == "mtf" else key
        content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        digests[name] = {
            "shape": list(array.shape),
            "dtype": array.dtype.name,
            "sha256": hashlib.sha256(content.data).hexdigest(),
        }
        yield key, array
        done(array.nbytes)


@contextlib.contextmanager
def _staging(directory: Path) -> Iterator[tuple[Path, Callable[[ConversionReport, str], None]]]:
    """Yields a hidden directory to write to and a function that puts what it holds into place.

    A destination that is not there yet appears as a whole, by one rename. In one that is, the files
    move one by one, the checkpoint's decisive one late and the manifest last.
    """
    if not directory.exists():
        with atomic_directory(directory) as staged:
            yield staged, lambda report, manifest: write_atomically(staged / MANIFEST, manifest)
        return
    staged = directory / f".conversion-{uuid.uuid4().hex[:8]}.tmp"
    staged.mkdir()

    def publish(report: ConversionReport, manifest: str) -> None:
        (directory / MANIFEST).unlink(missing_ok=True)
        if report.target.format == "mtf":
            mtf.publish_mtf(staged, directory, report.target.step or 0)
        else:
            target = Path(report.target.path)
            if target.exists():
                os.rename(target, staged / "replaced")
            os.rename(staged / target.name, target)
        write_atomically(directory / MANIFEST, manifest)

    try:
        yield staged, publish
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def _manifest(
    report: ConversionReport, norm_names: layout.NormNames, digests: Mapping[str, Any]
) -> str:
    """The manifest's text: where the checkpoint came from and what each tensor must be."""
    packages = ("t0repro", "numpy", "jax", "orbax-checkpoint", "mesh-tensorflow", "tensorflow")
    return json.dumps(
        {
            "source": {
                "path": os.path.abspath(report.source.path),
                "format": report.source.format,
                "step": report.source.step,
            },
            "target": {"format": report.target.format, "step": report.target.step},
            "model": dataclasses.asdict(report.family),
            "slots": report.slots,
            "mtf_norm_names": norm_names,
            "versions": {name: _version(name) for name in packages},
            "tensors": digests,
        },
        indent=1,
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
