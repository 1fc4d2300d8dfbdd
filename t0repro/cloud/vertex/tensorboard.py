"""Copies a job's TensorBoard files to Vertex AI TensorBoard while the job runs.

Vertex AI's own integration does not cover Cloud TPU, and its uploader reads a folder. So event
files are copied from the bucket to a folder here as they grow, and the uploader reads that. Every
folder of event files becomes a run named after the job's: `RUN-train`, `RUN-inference-eval-TASK`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from t0repro import compat
from t0repro.cloud.vertex.google import Place, cloud_errors, connect, storage_client
from t0repro.cloud.vertex.results import copy_results
from t0repro.progress import say

_LAST_TRIES = 5  # to upload after the job has ended, before giving up
_PATIENCE = 1.0  # seconds after Ctrl-C until a message says what it waits for


@contextlib.contextmanager
def upload_in_background(
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
                self.upload_once()
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

    def upload_once(self) -> None:
        """Copies new data and sends it.

        Raises:
          UserError: If either fails; the next call sends everything again, since the uploader does
            not know what of a failed request arrived. A point that arrives twice is one point.
        """
        copy_results(storage_client(self.place.project), self.results, self.folder)
        try:
            with cloud_errors("upload to TensorBoard", where=self.tensorboard):
                if self.uploader is None:
                    self.uploader = self._make_uploader()
                # Google's public method runs until its thread gets a stop signal, and then leaves
                # out what came since its last poll.
                self.uploader._upload_once()
        except BaseException:
            self.uploader = None
            raise

    def _make_uploader(self) -> Any:
        connect(self.place)
        compat.quiet_logs()  # the uploader imports TensorFlow
        from google.cloud.aiplatform import initializer
        from google.cloud.aiplatform.tensorboard import uploader, uploader_constants, uploader_utils
        from google.cloud.aiplatform.utils import TensorboardClientWithOverride

        client = initializer.global_config.create_client(TensorboardClientWithOverride)
        blobs: Any = uploader_utils.get_blob_storage_bucket_and_folder(
            client, self.tensorboard, self.place.project
        )
        board = uploader.TensorBoardUploader(
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
        board.create_experiment()
        return board
