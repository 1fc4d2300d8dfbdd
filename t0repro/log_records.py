"""Keeps records of a library's log from being printed while a block runs."""

from __future__ import annotations

import contextlib
import logging
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
