"""Which lines on standard error are this project's own."""

from __future__ import annotations

import re

# How the lines of healthy commands begin; a library's line begins otherwise.
_OWN = (
    "building Mesh TensorFlow's graph", "cached ", "caching ", "checkpoint: ", "compiling ", "data: ", "devices: ",
    "evaluated ", "importing ", "infer_eval", "JAX: ", "looking for ", "Mesh TensorFlow",
    "model: ", "note: ", "reading ", "read ", "removed ", "restore: ", "scored ", "scoring ", "start: ", "step ",
    "train: ", "t5_mesh_transformer: ",
)  # fmt: skip
_COUNTS = re.compile(r"[\d,]+ (pairs|of [\d,]+ tasks?)\b")


def foreign_lines(stderr: str) -> list[str]:
    """The lines that this project did not write, blank ones left out."""
    return [
        line
        for line in stderr.splitlines()
        if line.strip() and not line.startswith(_OWN) and not _COUNTS.match(line)
    ]
