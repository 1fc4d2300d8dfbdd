"""A job's results: copied from its bucket, summarized, uploaded to Vertex AI's TensorBoard."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from t0repro import compat, event_files
from t0repro.cloud.google import Place, cloud_errors, connect, storage_client
from t0repro.cloud.staging import split_address
from t0repro.files import make_folder, naming, write_atomically
from t0repro.progress import say

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
        with naming(target), target.open("ab") as file:
            file.write(data)


def best_metrics(folder: Path) -> dict[str, float]:
    """The summary metrics of a job: each metric's maximum and its step, as numbers.

    Metrics are those of SeqIO's tasks and of Mesh TensorFlow's evaluations in event files, as
    `<task>/<metric>`, and the mean accuracies of a rank evaluation's report, in percent, as
    `rank_eval/<dataset>`. Beside `NAME` stands `NAME/step`.
    """
    found: dict[str, tuple[float, int]] = {}
    for directory in sorted({path.parent for path in folder.rglob(f"*{event_files.MARK}*")}):
        run = directory.relative_to(folder)
        if not _evaluates(run):
            continue
        for tag, points in event_files.read_scalars(directory).items():
            finite = [(value, step) for step, value in points if math.isfinite(value)]
            if finite:
                # Of equal values the first counts, since one would stop there.
                best = max(finite, key=lambda point: (point[0], -point[1]))
                name = _name(run, tag)
                # Several folders may hold one metric; the largest value counts.
                found[name] = max(found.get(name, best), best, key=lambda point: point[0])
    for path in sorted(folder.rglob(_REPORT)):
        found |= _of_report(path)
    return _flat(found)


def _evaluates(run: Path) -> bool:
    """Whether a TensorBoard run holds tasks' metrics: inference_eval/<task>, or <split>_eval."""
    return any(part.endswith("_eval") and part != "training_eval" for part in run.parts)


def _name(run: Path, tag: str) -> str:
    """`<task>/<metric>`: SeqIO writes eval/<metric> in the task's run, t5 eval/<task>/<metric>."""
    metric = tag.removeprefix("eval/").removeprefix("inference/")
    parts = run.parts
    if "inference_eval" in parts:
        return "/".join((*parts[parts.index("inference_eval") + 1 :], metric))
    return metric


def _of_report(path: Path) -> dict[str, tuple[float, int]]:
    from t0repro.reports.report import load_report

    report = load_report(path)
    step = report.provenance.step
    means = {one.dataset: one.accuracy.mean for one in report.datasets}
    means |= {f"mean of {one.group}": one.mean for one in report.groups}
    return {f"rank_eval/{name}": (mean, step) for name, mean in means.items()}


def _flat(found: Mapping[str, tuple[float, int]]) -> dict[str, float]:
    flat: dict[str, float] = {}
    for name, (value, step) in found.items():
        flat |= {name: value, f"{name}/step": step}
    return flat


# ---- Copies a job's TensorBoard files to Vertex AI TensorBoard while the job runs ----------------

# Vertex AI's own integration does not cover Cloud TPU, and its uploader reads a folder. So event
# files are copied from the bucket to a folder here as they grow, and the uploader reads that.
# Every folder of event files becomes a run named after the job's: `RUN-train`,
# `RUN-inference-eval-TASK`.


_LAST_TRIES = 5  # to upload after the job has ended, before giving up
_PATIENCE = 1.0  # seconds after Ctrl-C until a message says what it waits for


@contextlib.contextmanager
def uploading(
    results: str,
    experiment: str,
    run_name: str,
    tensorboard: str,
    place: Place,
    *,
    every: float,
) -> Iterator[None]:
    """Uploads from a thread during the block, and whatever is left after it.

    A slow or failing upload delays nothing else; whatever failed is sent again. After Ctrl-C in the
    block, only the current upload is finished: the job continues, and the next command that follows
    it uploads everything.

    Args:
      results: address of the folder that the job writes into.
      experiment: the experiment under which the TensorBoard shows the runs.
      run_name: of the job; its TensorBoard runs' names begin with it.
      tensorboard: resource name.
      place: project and location.
      every: seconds between polls of the bucket.
    """
    ended, interrupted = threading.Event(), threading.Event()

    def work() -> None:
        with tempfile.TemporaryDirectory(prefix="t0repro-vertex-") as folder:
            upload = _Upload(results, experiment, run_name, tensorboard, place, Path(folder))
            upload.repeat(every, ended, interrupted)

    thread = threading.Thread(target=work, name="uploader", daemon=True)
    thread.start()
    try:
        yield
    except KeyboardInterrupt:
        interrupted.set()
        ended.set()  # ends the thread's pause
        thread.join(_PATIENCE)
        if thread.is_alive():
            say("TensorBoard: ending the upload under way; another Ctrl-C does not wait for it")
        raise
    finally:
        ended.set()
        thread.join()


@dataclasses.dataclass
class _Upload:
    """What is uploaded and where to, and the uploader between two polls of the bucket."""

    results: str
    experiment: str
    run_name: str
    tensorboard: str
    place: Place
    folder: Path
    uploader: Any = None

    def repeat(self, every: float, ended: threading.Event, interrupted: threading.Event) -> None:
        """Uploads every so many seconds, and once more after `ended`, or until `interrupted`."""
        tries_left = _LAST_TRIES
        while not interrupted.is_set():
            was_last = ended.is_set()  # before the copy, so that the last one is whole
            try:
                self.once()
                if was_last:
                    return
            except Exception as error:  # whatever it is, the job is followed to its end
                say(f"TensorBoard: {' '.join(str(error).split())}")
                # Only tries after the job's end are counted.
                tries_left -= was_last
                if not tries_left:
                    say("TensorBoard: not all is uploaded.")
                    return
            # `ended` is set by now, so waiting for it would not wait.
            if was_last:
                time.sleep(every)
            else:
                ended.wait(every)

    def once(self) -> None:
        """Copies new data and sends it.

        Raises:
          UserError: If either fails; the next call sends everything again, since the uploader does
            not know what of a failed request arrived. A point that arrives twice is one point.
        """
        copy_results(storage_client(self.place.project), self.results, self.folder)
        try:
            with cloud_errors("upload to TensorBoard", where=self.tensorboard):
                if self.uploader is None:
                    self.uploader = self._made()
                # Google's public method runs until its thread gets a stop signal, and then leaves
                # out what came since its last poll.
                self.uploader._upload_once()
        except BaseException:
            self.uploader = None
            raise

    def _made(self) -> Any:
        connect(self.place)
        compat.quiet_logs()  # the uploader imports TensorFlow
        from google.cloud.aiplatform import initializer
        from google.cloud.aiplatform.tensorboard import uploader, uploader_constants, uploader_utils
        from google.cloud.aiplatform.utils import TensorboardClientWithOverride

        client = initializer.global_config.create_client(TensorboardClientWithOverride)
        blobs: Any = uploader_utils.get_blob_storage_bucket_and_folder(
            client, self.tensorboard, self.place.project
        )
        made = uploader.TensorBoardUploader(
            experiment_name=self.experiment,
            tensorboard_resource_name=self.tensorboard,
            blob_storage_bucket=blobs[0],
            blob_storage_folder=blobs[1],
            writer_client=client,
            logdir=str(self.folder),
            # Profiles are read from a bucket, not from a folder.
            allowed_plugins=uploader_constants.ALLOWED_PLUGINS - {"profile"},
            run_name_prefix=f"{self.run_name}-",
            verbosity=0,
        )
        made.create_experiment()
        return made
