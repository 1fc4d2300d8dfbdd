"""Writes TensorBoard event files without TensorFlow, and reads them.

Not in the JAX core, because it needs TensorBoard's package.
"""

from __future__ import annotations

import functools
import io
import itertools
import os
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from t0repro.storage import make_folder
from t0repro.storage.disk import append_or_undo, name_in_errors

MARK = "tfevents"  # in the name of every event file

# What clu's writer writes besides numbers and texts. It encodes them with TensorFlow.
_OF_CLU = ("write_audios", "write_histograms", "write_hparams", "write_images", "write_summaries")

_files = itertools.count()


def event_writer(directory: str | os.PathLike[str]) -> EventWriter:
    """A writer of TensorBoard event files into a directory."""
    return EventWriter(Path(directory))


class EventWriter:
    """Writes an event file with the methods of clu.metric_writers.SummaryWriter, and its bytes.

    Numbers and texts are written without TensorFlow. The rest (`_OF_CLU`) is encoded by clu, which
    imports TensorFlow then. What is written is visible to readers at once.

    Args:
      directory: the directory; created if it does not exist.
    """

    def __init__(self, directory: Path):
        make_folder(directory)
        # TensorFlow's name, by which TensorBoard reads a directory's files in order.
        name = f"events.out.{MARK}.{int(time.time()):010}.{socket.gethostname()}"
        # The number tells apart this process's writers that begin within the same second.
        self._path = directory / f"{name}.{os.getpid()}.{next(_files)}.v2"
        with name_in_errors(self._path):
            # Unbuffered: what a full disk refused must not be written later, when it is closed.
            self._file = open(self._path, "xb", buffering=0)  # noqa: SIM115 (closed by close())
        from tensorboard.compat.proto.event_pb2 import Event, SourceMetadata

        source = SourceMetadata(writer="tensorflow.core.util.events_writer")
        # TensorFlow dates a file by whole seconds.
        now = float(int(time.time()))
        self._append(Event(wall_time=now, file_version="brain.Event:2", source_metadata=source))

    def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Writes numbers, rounded to float32, at a step, by tag.

        Raises:
          ValueError: if a value is not a single number.
        """
        import numpy as np
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
        from tensorboard.compat.proto.types_pb2 import DT_FLOAT
        from tensorboard.plugins.scalar.metadata import create_summary_metadata

        metadata = create_summary_metadata(display_name=None, description=None)
        for tag, value in scalars.items():
            with np.errstate(over="ignore"):  # infinite as a float32
                number = np.asarray(value).astype("<f4")
            if number.ndim:
                raise ValueError(f"{tag} is an array of shape {list(number.shape)}, not a number.")
            tensor = TensorProto(
                dtype=DT_FLOAT, tensor_shape=TensorShapeProto(), tensor_content=number.tobytes()
            )
            value = Summary.Value(tag=tag, tensor=tensor, metadata=metadata)
            self._add(step, Summary(value=[value]))

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Writes texts, which TensorBoard shows as Markdown, at a step, by tag."""
        from tensorboard.plugins.text.summary_v2 import text_pb

        for tag, text in texts.items():
            self._add(step, text_pb(tag, text))

    def _add(self, step: int, summary: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._append(Event(wall_time=time.time(), step=step, summary=summary))

    def _append(self, *events: Any) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        framed = io.BytesIO()
        for event in events:
            RecordWriter(framed).write(event.SerializeToString())
        append_or_undo(self._file, framed.getvalue(), self._path)

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name in _OF_CLU:
            return functools.partial(self._write_by_clu, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _write_by_clu(self, method: str, *arguments: Any, **options: Any) -> None:
        from clu.metric_writers import SummaryWriter
        from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

        # TensorBoard follows one file of a directory at a time, so the events move into this one.
        with tempfile.TemporaryDirectory() as folder:
            writer = SummaryWriter(folder)
            getattr(writer, method)(*arguments, **options)
            writer.close()
            (path,) = Path(folder).iterdir()
            events = LegacyEventFileLoader(str(path)).Load()
            self._append(*[event for event in events if event.HasField("summary")])

    def flush(self) -> None:
        """Syncs what was written to the disk."""
        with name_in_errors(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file; harmless if it is closed already."""
        self._file.close()


def read_scalars(directory: str | os.PathLike[str]) -> dict[str, list[tuple[int, float]]]:
    """Every scalar of the event files in a directory: tag -> (step, value), in the files' order.

    Scalars are summaries of that name, as TensorFlow 1 wrote them, or tensors without a dimension.
    """
    import numpy as np

    from t0repro import compat

    compat.quiet_logs()  # TensorBoard imports TensorFlow
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util import tensor_util

    # 0 means all; by default TensorBoard keeps ten tensors of a tag, drawn at random.
    events = EventAccumulator(os.fspath(directory), {"scalars": 0, "tensors": 0}).Reload()
    found = {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }
    for tag in events.Tags()["tensors"]:
        points = [(e.step, tensor_util.make_ndarray(e.tensor_proto)) for e in events.Tensors(tag)]
        if all(value.ndim == 0 and np.issubdtype(value.dtype, np.floating) for _, value in points):
            found[tag] = [(step, float(value)) for step, value in points]
    return found
