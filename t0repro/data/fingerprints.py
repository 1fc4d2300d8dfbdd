"""What training data were made from: caches, rows, templates and rates, as a position records it.

A fingerprint maps each task to named parts. It is read from what caches and readers record of
themselves and from the sizes of files; no cache is read for it, and each file of rows once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from t0repro.storage import is_streamed
from t0repro.tasks.prompt_cache.folders import PROVENANCE, shard_names
from t0repro.tasks.prompt_cache.provenance import template_digest
from t0repro.tasks.registry import (
    DescribedTask,
    find_tasks,
    prompted_mixtures,
    registered_mixtures,
    task_descriptions,
)
from t0repro.tasks.task import TaskDescription

Fingerprint = Mapping[str, Mapping[str, Any]]

_CHECKSUM = 4  # bytes at the end of a TFRecord file: of its last record
_SHOWN = frozenset(["seed", "shards", "examples", "rate"])  # parts that a message can show


def fingerprint_mixture(name: str, split: str, *, use_cached: bool) -> dict[str, dict[str, Any]]:
    """The fingerprint of a mixture's or task's examples of a split, as SeqIO or we read them."""
    parts_by_task = {}
    for task in find_tasks(name):
        if split not in task.splits:
            continue
        description = task_descriptions().get(task.name)
        if use_cached and task.supports_caching and task.cache_dir:
            if "://" in task.cache_dir:
                # SeqIO has no public function for the cached files.
                parts = _fingerprint_source(task._get_cached_source(split), split)
            else:
                parts = fingerprint_cache(Path(task.cache_dir), split)
        elif description is not None:
            parts = fingerprint_rows(description, split)
        else:
            parts = _fingerprint_source(task.source, split)
        rate = compute_rate(name, task)
        parts_by_task[task.name] = {**parts, **({} if rate is None else {"rate": rate})}
    return parts_by_task


def fingerprint_cache(folder: Path, split: str) -> dict[str, Any]:
    """The parts of a cached split."""
    info = json.loads((folder / f"info.{split}.json").read_text())
    files = [folder / name for name in shard_names(split, info["num_shards"])]
    parts = {
        "shards": len(files),
        "files": _digest([(path.name, path.stat().st_size) for path in files]),
    }
    if (folder / PROVENANCE).is_file():
        provenance = json.loads((folder / PROVENANCE).read_text())
        origin = provenance["splits"].get(split, {}).get("origin", {})
        return parts | {
            "seed": provenance["seed"],
            "template": provenance["template"]["sha256"],
            "rows": _digest_of_origin(origin),
        }
    # Sizes do not show another order of the examples, which checksums of the last ones do.
    if not any(map(is_streamed, files)):
        parts["ends"] = _digest([_end(path) for path in files])
    return parts


def fingerprint_rows(task: TaskDescription, split: str) -> dict[str, Any]:
    """The parts of a prompted task that is rendered from its rows."""
    return {
        "rows": _digest_of_origin(task.rows.origin(split)),
        "template": template_digest(task),
    }


def differences(then: Fingerprint, now: Fingerprint) -> list[str]:
    """What differs, by task: `my_task (files; seed 5 then, 42 now)`.

    Parts that only one side has are not compared: a cache in a bucket has fewer.
    """
    changed = []
    for name in sorted({*then, *now}):
        if name not in then or name not in now:
            changed.append(f"{name} ({'not there then' if name in now else 'gone'})")
            continue
        old, new = then[name], now[name]
        parts = [
            f"{part} {old[part]} then, {new[part]} now" if part in _SHOWN else part
            for part in old
            if part in new and old[part] != new[part]
        ]
        if parts:
            changed.append(f"{name} ({'; '.join(parts)})")
    return changed


def compute_rate(mixture: str, task: Any) -> float | None:
    """The rate of a task in a mixture; None if the name is a task's."""
    if mixture not in registered_mixtures():
        return None
    if isinstance(task, DescribedTask):
        return prompted_mixtures()[mixture].rate(task.name)
    import seqio

    return seqio.MixtureRegistry.get(mixture).get_rate(task)


def _digest_of_origin(origin: Mapping[str, Any]) -> str:
    # The same file elsewhere, or copied, has the same rows.
    return _digest({key: origin[key] for key in origin if key not in ("path", "modified_ns")})


def _fingerprint_source(source: Any, split: str) -> dict[str, Any]:
    """The parts of a SeqIO task's own source, as far as it tells."""
    parts: dict[str, Any] = {}
    # Sources are anyone's code, and none has to know its files or its number of examples.
    with contextlib.suppress(Exception):
        parts["files"] = _digest(_sizes(source.list_shards(split)))
    with contextlib.suppress(Exception):
        parts["examples"] = source.num_input_examples(split)
    return parts


def _sizes(files: Sequence[str]) -> list[tuple[str, int]]:
    import tensorflow as tf

    return [
        (Path(file).name, tf.io.gfile.stat(file).length) if tf.io.gfile.exists(file) else (file, 0)
        for file in files
    ]


def _end(path: Path) -> str:
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - _CHECKSUM))
        return file.read().hex()


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
