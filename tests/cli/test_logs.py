from __future__ import annotations

import logging

from t0repro.cli.t5_mesh_transformer import SeqioOnce


def record(path: str, message: str) -> logging.LogRecord:
    return logging.LogRecord("absl", logging.WARNING, path, 1, message, ("a",), None)


def test_seqios_messages_are_logged_once_and_other_libraries_each_time():
    once = SeqioOnce()
    records = [
        record("/lib/seqio/dataset_providers.py", "Using an uncached %s."),
        record("/lib/seqio/dataset_providers.py", "Using an uncached %s."),
        record("/lib/seqio/dataset_providers.py", "Task %s does not support caching."),
        record("/lib/t5/models/mesh_transformer.py", "Retrying %s."),
        record("/lib/t5/models/mesh_transformer.py", "Retrying %s."),
    ]
    assert [bool(once.filter(each)) for each in records] == [True, False, True, True, True]
