"""A job's results, copied from the bucket and summarized."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from t0repro import event_files
from t0repro.cloud.vertex.google import cloud_errors
from t0repro.cloud.vertex.staging import split_address
from t0repro.storage import make_folder, write_atomically
from t0repro.storage.disk import name_in_errors
from t0repro.storage.names import check_inside

_REPORT = "report.json"


def copy_results(client: Any, address: str, folder: Path) -> None:
    """Updates a local copy of a job's event files and report.

    Event files only grow, so if part of one is already here, only the rest is read.

    Raises:
      UserError: If the bucket cannot be read.
    """
    bucket, prefix = split_address(address)
    with cloud_errors("read the job's results", where=address):
        for blob in client.list_blobs(bucket, prefix=f"{prefix}/"):
            name = blob.name.removeprefix(f"{prefix}/")
            check_inside(name or ".", address)  # the object of a folder has no name in it
            if event_files.MARK in name or name.endswith(_REPORT):
                _copy(blob, folder / name)


def _copy(blob: Any, target: Path) -> None:
    make_folder(target.parent)
    # A report is replaced completely.
    if event_files.MARK not in target.name:
        write_atomically(target, blob.download_as_bytes())
        return
    here = target.stat().st_size if target.exists() else 0
    if blob.size > here:
        # Read up to the listed size: the file may grow meanwhile, and is then listed again.
        data = blob.download_as_bytes(start=here, end=blob.size - 1)
        with name_in_errors(target), target.open("ab") as file:
            file.write(data)


def best_metrics(folder: Path) -> dict[str, float]:
    """The summary metrics of a job: each metric's maximum and its step, as numbers.

    Metrics are those of SeqIO's tasks and of Mesh TensorFlow's evaluations in event files, as
    `<task>/<metric>`, and the mean accuracies of a rank evaluation's report, in percent, as
    `rank_eval/<dataset>`. Beside `NAME` stands `NAME/step`.
    """
    bests: dict[str, tuple[float, int]] = {}
    for directory in sorted({path.parent for path in folder.rglob(f"*{event_files.MARK}*")}):
        run = directory.relative_to(folder)
        # Tasks' metrics are in inference_eval/<task>, or in <split>_eval.
        if not any(part.endswith("_eval") and part != "training_eval" for part in run.parts):
            continue
        for tag, points in event_files.read_scalars(directory).items():
            finite = [(value, step) for step, value in points if math.isfinite(value)]
            if finite:
                # Of equal values the first counts, since one would stop there.
                best = max(finite, key=lambda point: (point[0], -point[1]))
                name = _name(run, tag)
                # Several folders may hold one metric; the largest value counts.
                bests[name] = max(bests.get(name, best), best, key=lambda point: point[0])
    for path in sorted(folder.rglob(_REPORT)):
        bests |= _report_metrics(path)
    flat: dict[str, float] = {}
    for name, (value, step) in bests.items():
        flat |= {name: value, f"{name}/step": step}
    return flat


def _name(run: Path, tag: str) -> str:
    """`<task>/<metric>`: SeqIO writes eval/<metric> in the task's run, t5 eval/<task>/<metric>."""
    metric = tag.removeprefix("eval/").removeprefix("inference/")
    parts = run.parts
    if "inference_eval" in parts:
        return "/".join((*parts[parts.index("inference_eval") + 1 :], metric))
    return metric


def _report_metrics(path: Path) -> dict[str, tuple[float, int]]:
    from t0repro.reports.report import load_report

    report = load_report(path)
    step = report.provenance.step
    means = {one.dataset: one.accuracy.mean for one in report.datasets}
    means |= {f"mean of {one.group}": one.mean for one in report.groups}
    return {f"rank_eval/{name}": (mean, step) for name, mean in means.items()}
