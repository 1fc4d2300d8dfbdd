"""A job's files in Cloud Storage: gin files, staged under names that cannot collide, and results.

Each job has its own folder, named by the display name, the time and a random part. In it, the files
of the command line are numbered, so that equal names do not collide; files that they include keep
their path, under which gin looks for them:

    gs://BUCKET/t0repro/NAME-20261122-074500-3f9a/
      gin/0-model.gin  gin/1-run.gin      what --gin_file names
      include/shared/data.gin             what these files include
      config.gin                          the whole configuration, as gin writes it
      job.json                            what tracks the job
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import posixpath
import re
import secrets
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from t0repro import compat, event_files
from t0repro.buckets import check_inside
from t0repro.cloud.google import Place, cloud_errors, connect, storage_client
from t0repro.cloud.spec import MOUNT, Arguments, gin_files_replaced
from t0repro.config.gin_imports import Unresolved
from t0repro.errors import UserError
from t0repro.files import make_folder, naming, write_atomically
from t0repro.progress import say


@dataclasses.dataclass(frozen=True)
class Staged:
    """The files to copy for a job.

    Attributes:
      folder: `gs://...`, of this job alone.
      files: path below the folder -> contents.
      arguments: the job's arguments with the files' paths in the container.
    """

    folder: str
    files: dict[str, bytes]
    arguments: tuple[str, ...]


def new_folder(staging_bucket: str, display_name: str) -> str:
    """An address below the staging bucket that no other job uses."""
    if not re.fullmatch(r"gs://[^/]+(/.*)?", staging_bucket):
        raise UserError(
            f"{staging_bucket} is not a bucket.", where="--staging_bucket", fix="Give gs://BUCKET."
        )
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", display_name).strip("-") or "job"
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    return f"{staging_bucket.rstrip('/')}/t0repro/{name}-{stamp}-{secrets.token_hex(4)}"


def mounted(address: str) -> str:
    """The path in a container of an address: `/gcs/BUCKET/x` for `gs://BUCKET/x`."""
    return re.sub("^gs://", f"{MOUNT}/", address)


def stage(arguments: Arguments, folder: str) -> Staged:
    """Plans the copies of a command's gin files.

    Files that come with this package, with t5 or with Mesh TensorFlow, and those that are in Cloud
    Storage already, are not copied.

    Args:
      arguments: the command line.
      folder: the job's own, `gs://...`.

    Raises:
      UserError: If a gin file includes another by a path that the container cannot have.
    """
    files: dict[str, bytes] = {}
    places: dict[str, str] = {}
    for name in (*arguments.gin_files, *arguments.auxiliary_gin_files):
        local = _local(name, arguments.search_paths)
        if name.startswith("gs://"):
            places[name] = mounted(name)
        elif local is not None:
            staged = f"gin/{len(files)}-{local.name}"
            files[staged], places[name] = local.read_bytes(), f"{mounted(folder)}/{staged}"
    included: dict[str, bytes] = {}
    for name in places:
        local = _local(name, arguments.search_paths)
        if local is not None:
            _add_included(local, arguments.search_paths, included)
    # Numbers are given to the command line's files alone, so `include` may hold any names.
    files |= {f"include/{name}": data for name, data in included.items()}
    search = f"{mounted(folder)}/include" if included else None
    words = gin_files_replaced(arguments, places, search)
    return Staged(folder, files, words)


def _local(name: str, search_paths: Sequence[str]) -> Path | None:
    """The local file that gin opens for a name; None if it is not in a folder of the user's."""
    # Search as gin does: for the name itself first, then in each folder.
    candidates = [Path(folder, name) for folder in ("", *search_paths)]
    return next((path for path in candidates if path.is_file()), None)


def _add_included(path: Path, search_paths: Sequence[str], found: dict[str, bytes]) -> None:
    """Adds the local files that a gin file includes, recursively, by their names."""
    for name in _includes(path):
        local = _local(name, search_paths)
        if local is None or name in found:
            continue
        if os.path.isabs(name) or ".." in PurePosixPath(name).parts:
            raise UserError(
                f"The job's container has no {name}, which the gin file includes.",
                where=str(path),
                fix="Include it by a path below a folder of --gin_search_paths"
                " (--gin_location_prefix with t5_mesh_transformer).",
            )
        found[name] = local.read_bytes()
        _add_included(local, search_paths, found)


def _includes(path: Path) -> Iterator[str]:
    """The files in a gin file's `include` lines."""
    from gin import config_parser

    try:
        statements = list(config_parser.ConfigParser(path.read_text(), Unresolved()))
    except SyntaxError:
        return  # the configuration's check reports it, with its place
    for statement in statements:
        if isinstance(statement, config_parser.IncludeStatement):
            # `a/../x.gin` is x.gin: only a path that leads out of the folder is refused.
            yield posixpath.normpath(statement.filename) if statement.filename else ""


# ---- Copies --------------------------------------------------------------------------------------


def upload(staged: Staged, client: Any) -> None:
    """Writes the files; if one fails, removes those that were written.

    Raises:
      UserError: If the bucket is missing, or refuses.
    """
    bucket, prefix = split_address(staged.folder)
    try:
        for name, data in staged.files.items():
            write(client, f"{staged.folder}/{name}", data)
    # Ctrl-C must not leave anything behind either.
    except BaseException:
        with contextlib.suppress(UserError):  # the first error says more
            remove(client, bucket, prefix)
        raise


def write(client: Any, address: str, data: bytes) -> None:
    """Writes one object.

    Raises:
      UserError: If the bucket is missing, or refuses.
    """
    from google.cloud.storage.retry import DEFAULT_RETRY

    bucket, name = split_address(address)
    with cloud_errors("copy a file to Cloud Storage", where=address):
        # Writing the same bytes twice is harmless, so retry after a lost connection.
        client.bucket(bucket).blob(name).upload_from_string(data, retry=DEFAULT_RETRY)


def remove(client: Any, bucket: str, prefix: str) -> None:
    """Deletes what is below a job's own folder."""
    from google.api_core import exceptions

    with cloud_errors("remove staged files", where=f"gs://{bucket}/{prefix}"):
        for blob in client.list_blobs(bucket, prefix=f"{prefix}/"):
            with contextlib.suppress(exceptions.NotFound):
                blob.delete()


def split_address(address: str) -> tuple[str, str]:
    """`gs://bucket/a/b` -> ("bucket", "a/b")."""
    bucket, _, name = address.removeprefix("gs://").partition("/")
    return bucket, name.rstrip("/")


# ---- Results: copied from the bucket, summarized, uploaded to Vertex AI's TensorBoard ------------

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
