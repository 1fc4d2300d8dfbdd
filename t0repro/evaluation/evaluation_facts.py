"""An evaluation's own record: provenance.json and operative_config.gin."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from t0repro.compat import installed_version
from t0repro.evaluation.opened import Checkpoint
from t0repro.evaluation.records import digest_of_texts, read_records
from t0repro.storage import write_atomically
from t0repro.storage.disk import name_in_errors
from t0repro.words import remove_passwords

# An evaluation may leave this file beside its outputs: a JSON object with any of the fields
# step, checkpoint, checkpoint_hash, device, duration_seconds, versions, templates_hash,
# data_revision, scores_sha256 and data.
EVALUATION_FACTS = "provenance.json"

_PACKAGES = (
    "t0repro",
    "jax",
    "jaxlib",
    "flax",
    "numpy",
    "orbax-checkpoint",
    "tensorflow",
    "mesh-tensorflow",
    "t5",
    "seqio",
    "promptsource",
    "sentencepiece",
)


def write_facts(folder: Path, checkpoint: Checkpoint, names: Sequence[str], device: str) -> None:
    """Writes provenance.json into an evaluation's folder.

    Args:
      folder: the `<split>_eval` folder, with a record of each finished task.
      checkpoint: the checkpoint that was evaluated.
      names: names of the tasks to cover.
      device: the device that computed.
    """
    records = read_records(folder, checkpoint.step)
    used = {name: records[name] for name in names if name in records}
    facts = {
        **_facts(checkpoint, used),
        "scores_sha256": scores_sha256(folder, used),
        "device": device,
    }
    write_atomically(folder / EVALUATION_FACTS, json.dumps(facts, indent=1))


def operative_config(mixture: str, checkpoint: Checkpoint, settings: Any) -> str:
    """The evaluation's settings, the model's shape and, if known, the training run's configuration.

    All are written as gin bindings; the training run's are copied from its operative_config.gin.
    """
    lines = [
        f"rank_eval.mixture = {mixture!r}",
        f"rank_eval.checkpoint = {remove_passwords(checkpoint.path)!r}",
    ]
    values = dataclasses.asdict(settings)
    values["lengths"] = dict(settings.lengths)
    lines += [f"rank_eval.{name} = {value!r}" for name, value in values.items()]
    shape = dataclasses.asdict(checkpoint.model.config)
    lines += ["", *(f"model.{name} = {value!r}" for name, value in shape.items())]
    training = checkpoint.training_config()
    if training is not None:
        lines += ["", "# The training run's operative_config.gin", training.rstrip()]
    return "\n".join(lines) + "\n"


def package_versions() -> dict[str, str]:
    """Versions of Python and of those installed packages that can affect the numbers."""
    installed = {name: installed_version(name) for name in _PACKAGES}
    versions = {name: version for name, version in installed.items() if version is not None}
    return {"python": platform.python_version(), **versions}


def rounds_alike(device: str | None) -> bool:
    """Whether scores computed on a `jax_device` have the bits that they have here."""
    # Not on how many devices: each computes the same programs.
    return (device or "").partition(" x ")[2] == device_kind()


def jax_device(rounded_by: Collection[str] = (), others: Collection[str] = ()) -> str:
    """The devices that JAX computes on, and why the last bits of some scores are not theirs.

    Args:
      rounded_by: what changed them here.
      others: the `device_kind` of those that computed some of the scores before.
    """
    import jax

    device = f"{jax.device_count()} x {device_kind()}"
    if rounded_by:
        device += f", scores rounded by {' and by '.join(rounded_by)}"
    return f"{device}, some scores computed by {' and by '.join(others)}" if others else device


def device_kind() -> str:
    """The kind of device that JAX computes on here, and what else there decides last bits."""
    import jax

    from t0repro.model.attention import VARIABLE

    kind = f"{jax.devices()[0].device_kind}, {os.cpu_count()} CPU cores"
    if kind.startswith("cpu,"):
        kind = f"{kind} of {_name_processor()}"
    else:
        # By default, GPUs round the operands of float32 matmuls to TF32, TPUs to bfloat16.
        kind += f", matmul precision {jax.config.jax_default_matmul_precision or 'default'}"
    if way := os.environ.get(VARIABLE):
        kind += f", --attention {way}"
    flags = os.environ.get("XLA_FLAGS", "").split()
    # These change how many devices there are, or what is written about programs.
    flags = [x for x in flags if "device_count" not in x and "dump" not in x]
    return f"{kind}, XLA_FLAGS {' '.join(flags)}" if flags else kind


def _name_processor() -> str:
    """The processor's name, as far as the system says it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def _facts(checkpoint: Checkpoint, used: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    records = list(used.values())
    return {
        "step": checkpoint.step,
        "checkpoint": remove_passwords(checkpoint.path),
        "checkpoint_hash": checkpoint.digest,
        "duration_seconds": sum(record["seconds"] for record in records),
        "versions": package_versions(),
        "templates_hash": digest_of_texts(record["key"]["prompt"] for record in records),
        "data_revision": digest_of_texts(record["rows"] for record in records),
        "data": _origins(used),
    }


def scores_sha256(folder: Path, records: Mapping[str, Mapping[str, Any]]) -> str:
    """SHA-256 of all scores and decoded texts: of each task's name and file, by name."""
    digest = hashlib.sha256()
    for name in sorted(records):
        digest.update(f"{name}\n".encode())
        path = folder / f"{name}_{records[name]['key']['step']}_predictions"
        with name_in_errors(path), open(path, "rb") as file:
            # In blocks: an evaluation's memory must not grow with its tasks' files.
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def _origins(used: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Dataset -> description of its rows' origin and version; unknown ones are left out."""
    origins = {}
    for record in used.values():
        origin = record["key"]["data"]
        if origin and "dataset" in origin:
            rest = [f"{name} {value}" for name, value in origin.items() if name != "dataset"]
            # Splits of one dataset, as ANLI's rounds are, each have their own
            lines = origins.setdefault(origin["dataset"], [])
            if (text := ", ".join(rest)) not in lines:
                lines.append(text)
    return {name: "; ".join(lines) for name, lines in sorted(origins.items())}
