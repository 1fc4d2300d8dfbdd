"""Limits what libraries print to what is worth reading."""

from __future__ import annotations

import contextlib
import glob
import importlib.util
import logging
import os
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def only_records(
    name: str | None, is_worth_logging: Callable[[logging.LogRecord], bool]
) -> Iterator[None]:
    """Leaves out the records of a logger, None for the root, that are not worth logging."""
    log = logging.getLogger(name)
    log.addFilter(is_worth_logging)
    try:
        yield
    finally:
        log.removeFilter(is_worth_logging)


NOT_ON_A_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_ACCELERATOR_TYPE": "v5e-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
"""Without these libtpu asks Google's metadata server which TPU it is on, prints errors when it gets
no answer, and lets in one process at a time."""


def quiet_libtpu() -> None:
    """Keeps libtpu from printing errors if it is installed on a machine without a TPU.

    JAX loads it when it looks for devices.
    """
    chips = (*glob.glob("/dev/accel[0-9]*"), *glob.glob("/dev/vfio/[0-9]*"))
    if not chips and importlib.util.find_spec("libtpu"):
        for variable, value in NOT_ON_A_TPU.items():
            os.environ.setdefault(variable, value)


class SeqioOnce(logging.Filter):
    """Lets each of SeqIO's messages through once per process, and all others always."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to log a record."""
        # Match by file: SeqIO logs through absl's logger, as other libraries do.
        if "seqio" not in record.pathname:
            return True
        message = record.getMessage()
        is_new = message not in self._seen
        self._seen.add(message)
        return is_new
