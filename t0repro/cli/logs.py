"""What libraries may log: SeqIO repeats its advice for every task of a mixture."""

from __future__ import annotations

import logging


class SeqioOnce(logging.Filter):
    """Lets each of SeqIO's messages through once per process, and all others always."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to log a record."""
        # By the file: SeqIO logs through absl's logger, as other libraries do.
        if "seqio" not in record.pathname:
            return True
        message = record.getMessage()
        is_new = message not in self._seen
        self._seen.add(message)
        return is_new
