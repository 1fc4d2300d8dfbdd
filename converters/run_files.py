"""What a run writes into its model_dir about its model, compared with a checkpoint there.

Apart from `witnesses`, which the JAX core reads checkpoints with: that core does not import gin.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from t0repro.converters import gin_shapes, storage
from t0repro.converters.integrity import damaged
from t0repro.converters.mtf import OPERATIVE_CONFIG
from t0repro.converters.tensors import CheckpointRef
from t0repro.converters.witnesses import check_names
from t0repro.parameters.shape import ModelShape

T5X_CONFIG = "config.gin"
_GIN_FILES = (OPERATIVE_CONFIG, T5X_CONFIG)  # Mesh TensorFlow's and T5X's
_MODEL_INFO = "model-info.txt"  # T5X's list of variables
_VARIABLE = re.compile(r"Variable\s+(?:params/)?(\S+)\s+size")
_PARAMETERS_END = "Total number of parameters:"


def check_run_files(ref: CheckpointRef, family: ModelShape) -> None:
    """Checks that a checkpoint's model is the one that the files of a run beside it describe.

    Args:
      ref: The checkpoint.
      family: Its model.

    Raises:
      UserError: Naming the line that the model contradicts, or a file that cannot be read.
    """
    directory = ref.path if ref.format == "hf" else os.path.dirname(ref.path)
    for name in _GIN_FILES:
        file = storage.join(directory, name)
        if storage.is_file(file):
            gin_shapes.check_gin_text(_text(file), Path(file), family)
    file = storage.join(directory, _MODEL_INFO)
    if storage.is_file(file):
        _check_model_info(file, family)


def _text(file: str) -> str:
    try:
        return storage.read(file).decode()
    except UnicodeDecodeError as error:
        raise damaged(file, f"it is not UTF-8 ({error.reason})") from None


def _check_model_info(file: str, family: ModelShape) -> None:
    """Compares the parameters' names in T5X's list; its names have no `target/` before them."""
    parameters, end, _ = _text(file).partition(_PARAMETERS_END)
    named = {match[1] for match in map(_VARIABLE.match, parameters.splitlines()) if match}
    # A scanned tree has other names, and a list of another kind says nothing about this one.
    if end and named and not any(re.match(r"(encoder|decoder)/\1/", name) for name in named):
        check_names(family.parameters(), named, file, lambda name: f"target/{name}")
