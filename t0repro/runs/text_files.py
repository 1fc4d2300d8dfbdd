"""Text files of inputs and targets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from t0repro.config.decoding import InferConfig, ScoreStringsConfig
from t0repro.errors import UserError
from t0repro.model.shapes import Int
from t0repro.storage import write_atomically
from t0repro.words import counted


def read_lines(path: str, binding: str) -> list[str]:
    """Reads a file's lines, without trailing whitespace and without an empty last line.

    Args:
      path: the file; any address that etils.epath opens.
      binding: the gin binding that names it, for messages.

    Raises:
      UserError: if there is no such file, it is not UTF-8, or it has no lines.
    """
    from etils import epath

    try:
        text = epath.Path(path).read_text(encoding="utf-8")
    except (FileNotFoundError, IsADirectoryError) as error:
        raise UserError(
            f"There is no file {path}.", where=binding, fix="Bind it to a text file."
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8: {error.reason} at byte {error.start}.",
            where=binding,
            fix="Save it as UTF-8; unpack it if it is packed.",
        ) from error
    # As Mesh TensorFlow splits: an empty last line is dropped, empty ones before it count.
    lines = [line.rstrip() for line in text.removesuffix("\n").split("\n")] if text else []
    if lines and not lines[-1]:
        lines.pop()
    if not lines:
        raise UserError(f"{path} has no lines.", where=binding, fix="Give a line for each input.")
    return lines


def encode_lines(
    lines: Iterable[str], vocabulary: Any, eos_id: int, length: int
) -> list[Int[np.ndarray, " length"]]:
    """Token ids of each line followed by EOS, cut to `length` (which may cut off the EOS)."""
    # Mesh TensorFlow's order (encode_inputs): EOS first, then the cut.
    return [
        np.array([*vocabulary.encode(line.strip()), eos_id][:length], np.int32) for line in lines
    ]


def infer_inputs(config: InferConfig) -> list[str]:
    """The lines that infer decodes, each repeated as often as configured."""
    lines = read_lines(config.input_filename, "decode_from_file.input_filename")
    return [line for line in lines for _ in range(config.repeats)]


def strings_to_score(config: ScoreStringsConfig) -> tuple[list[str], list[str]]:
    """Inputs and targets to score, in equal number.

    The configuration may give several consecutive targets for each input, or one for all inputs.

    Raises:
      UserError: if the numbers of inputs and targets do not match, or there are no inputs.
    """
    if config.inputs is None:
        raise UserError(
            "score_from_strings.inputs is None.",
            fix="An encoder-decoder model needs inputs: bind it to a file or a list.",
        )
    inputs, targets = (
        read_lines(value, f"score_from_strings.{name}") if isinstance(value, str) else list(value)
        for name, value in (("inputs", config.inputs), ("targets", config.targets))
    )
    if len(inputs) < len(targets):
        if not inputs or len(targets) % len(inputs):
            raise UserError(
                f"{counted(len(targets), 'target')} cannot be split across"
                f" {counted(len(inputs), 'input')}.",
                where="score_from_strings.targets",
                fix="Give as many targets as inputs, or equally many for each input.",
            )
        repeats = len(targets) // len(inputs)
        inputs = [line for line in inputs for _ in range(repeats)]
    elif len(targets) < len(inputs):
        if len(targets) != 1:
            raise UserError(
                f"{len(inputs)} inputs need more than {counted(len(targets), 'target')}.",
                where="score_from_strings.targets",
                fix="Give one target for all inputs, or one or several for each.",
            )
        targets = targets * len(inputs)
    return inputs, targets


def write_lines(path: str | Path, lines: Sequence[Any]) -> None:
    """Writes one line per value, with newlines replaced by spaces."""
    text = "".join(str(line).replace("\n", " ") + "\n" for line in lines)
    write_atomically(path, text)
