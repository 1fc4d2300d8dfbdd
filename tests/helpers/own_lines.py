"""Which lines on standard error are this project's own."""

from __future__ import annotations

import re

# How the lines of healthy commands begin; a library's line begins otherwise.
_OWN = re.compile(
    r"(building Mesh TensorFlow's graph|JAX: |Mesh TensorFlow)"
    r"|(asking|caching|checking|compiling|decoding|evaluating|importing|looking|reading|scoring) "
    r"|(cached|checked|decoded|evaluated|infer_eval|read|removed|scored|step|wrote) "
    r"|(checkpoint|data|devices|infer_eval|model|note|recompute|restore|start): "
    r"|(t5_mesh_transformer|train|train_eval|warning): "
    r"|[\d,]+ (pairs|of [\d,]+ tasks?)\b"
    r"|\w+: [\d,]+ examples? so far$"
    r"|(for a report|to follow it): "
    r"|\w+(  [\w -]+ -?[\d.]+(e-\d+)?)+$"  # a task's metrics
)


def foreign_lines(stderr: str) -> list[str]:
    """The lines that this project did not write, blank ones left out."""
    return [line for line in stderr.splitlines() if line.strip() and not _OWN.match(line.strip())]
