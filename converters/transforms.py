"""Changes that a conversion can make on the way: dtype, vocabulary size, slots.

Each one is a reader that wraps another reader, so the formats need not know about it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from t0repro.converters.tensors import CheckpointReader, TensorInfo
from t0repro.errors import UserError
from t0repro.parameters import layout
from t0repro.parameters.layout import NormNames

DTYPES = ("float32", "bfloat16")


class _Around:
    """Base class: passes everything through from another reader."""

    def __init__(self, reader: CheckpointReader):
        self._reader = reader
        self.ref = reader.ref
        self.norm_names: NormNames | None = reader.norm_names
        self.tensors: Mapping[str, TensorInfo] = reader.tensors

    def read(self, key: str) -> np.ndarray:
        return self._reader.read(key)

    def native_name(self, key: str) -> str:
        return self._reader.native_name(key)


class WithoutSlots(_Around):
    """Leaves out the optimizer slots; parameters and the step remain."""

    def __init__(self, reader: CheckpointReader):
        super().__init__(reader)
        self.tensors = {
            key: info for key, info in reader.tensors.items() if not key.startswith(layout.SLOTS)
        }


class Cast(_Around):
    """Casts the parameters; slots and the step keep their types.

    Args:
      reader: The reader to wrap.
      dtype: "float32" or "bfloat16"; None casts nothing.

    Raises:
      UserError: If `dtype` is neither, or if it is None and a parameter is of another type
        (float16 or float64, which Hugging Face models may have).
    """

    def __init__(self, reader: CheckpointReader, dtype: str | None):
        super().__init__(reader)
        if dtype not in (None, *DTYPES):
            raise UserError(f"There is no type {dtype!r} to convert to; give float32 or bfloat16.")
        parameters = {
            key: info for key, info in reader.tensors.items() if key.startswith(layout.PARAMETERS)
        }
        if dtype is None:
            for key, info in parameters.items():
                _check_type(reader.native_name(key), info, reader.ref.path)
            return
        self._dtype = np.dtype(dtype)
        cast = {key: TensorInfo(info.shape, self._dtype) for key, info in parameters.items()}
        self.tensors = {**reader.tensors, **cast}

    def read(self, key: str) -> np.ndarray:
        """Reads one tensor in its new type."""
        array = self._reader.read(key)
        # numpy rounds float32 to bfloat16 to nearest even, as both stacks do.
        return array.astype(self.tensors[key].dtype, copy=False)

    @property
    def lossy(self) -> list[str]:
        """Flat keys of the parameters that the new type rounds."""
        return [
            key
            for key, info in self.tensors.items()
            if not np.can_cast(self._reader.tensors[key].dtype, info.dtype, "safe")
        ]


def _check_type(name: str, info: TensorInfo, where: str) -> None:
    if info.dtype.name not in DTYPES:
        raise UserError(
            f"{name} is {info.dtype.name}; parameters are kept in float32 or bfloat16.",
            where=where,
            fix="Add --dtype float32 (exact for float16, rounded for float64) or --dtype bfloat16.",
        )


class Resized(_Around):
    """Pads the vocabulary with zeros, or cuts it, to a given size.

    This changes the embedding's rows, the logits kernel's columns and their slots. A factored slot
    that averages over the vocabulary is left as it is.

    Args:
      reader: The reader to wrap.
      vocab_size: The new size.

    Raises:
      UserError: If the size is below 1, or factored slots would average over another axis.
    """

    def __init__(self, reader: CheckpointReader, vocab_size: int):
        super().__init__(reader)
        if vocab_size < 1:
            raise UserError(
                f"A vocabulary cannot have {vocab_size} entries.", fix="Give at least 1."
            )
        self._size = vocab_size
        _check_order(reader, vocab_size)
        self._axes = {
            key: axis
            for key in reader.tensors
            if (axis := _vocabulary_axis(key, reader.tensors)) is not None
        }
        self.tensors = {
            key: TensorInfo(self._shape(key, info.shape), info.dtype)
            for key, info in reader.tensors.items()
        }

    def _shape(self, key: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        if key not in self._axes:
            return shape
        axis = self._axes[key]
        return (*shape[:axis], self._size, *shape[axis + 1 :])

    def read(self, key: str) -> np.ndarray:
        """Reads one tensor at its new size."""
        array = self._reader.read(key)
        if key not in self._axes:
            return array
        kept = min(self._size, array.shape[self._axes[key]])
        # New rows are zero, in slots too: Adafactor's statistics of a row that was never trained.
        resized = np.zeros(self.tensors[key].shape, array.dtype)
        part = [slice(None)] * array.ndim
        part[self._axes[key]] = slice(kept)
        resized[tuple(part)] = array[tuple(part)]
        return resized


def _check_order(reader: CheckpointReader, vocab_size: int) -> None:
    """Raises UserError if the new size changes which axis a factored slot averages over.

    The names of factored slots depend on which of the parameter's axes is larger.
    """
    for key in reader.tensors:
        path, slot = ("", None) if key == layout.STEP else layout.split_key(key)
        # A slot's parameter has the axis; the slot may have lost it to the mean.
        axis = _vocabulary_axis(layout.PARAMETERS + path, reader.tensors) if path else None
        if slot in ("v_row", "v_col") and axis is not None:
            before = list(reader.tensors[layout.PARAMETERS + path].shape)
            after = [vocab_size if n == axis else size for n, size in enumerate(before)]
            if layout.factored_slots(before) != layout.factored_slots(after) or (
                layout.t5x_dropped_axes(before) != layout.t5x_dropped_axes(after)
            ):
                raise UserError(
                    f"With a vocabulary of {vocab_size} the slots of {reader.native_name(key)}"
                    " would average over another axis.",
                    where=reader.ref.path,
                    fix="Convert without slots (--no_slots), or keep the vocabulary's size.",
                )


def _vocabulary_axis(key: str, tensors: Mapping[str, TensorInfo]) -> int | None:
    """The tensor's vocabulary axis, or None if it has none."""
    if key == layout.STEP:
        return None
    path, slot = layout.split_key(key)
    found = layout.find_row(path, "t5x", layout.is_decoder_only(tensors))
    if not found or "vocab_size" not in found[0].axes:
        return None
    axes = list(found[0].axes)
    # A factored slot lacks the axis that it averages over, which moves those after it.
    if slot in ("v_row", "v_col"):
        del axes[layout.t5x_dropped_axes(tensors[layout.PARAMETERS + path].shape)[slot]]
    return axes.index("vocab_size") if "vocab_size" in axes else None


class ExchangedSlots(_Around):
    """Swaps v_row and v_col where a matrix's two largest axes tie, as T5X's importer does."""

    def __init__(self, reader: CheckpointReader):
        super().__init__(reader)
        shapes = {key: info.shape for key, info in reader.tensors.items()}
        # The exchange is its own inverse, so one table serves both directions.
        self._keys = {layout.exchange_tied_slots(key, shapes): key for key in reader.tensors}
        self.tensors = {key: reader.tensors[source] for key, source in self._keys.items()}

    def read(self, key: str) -> np.ndarray:
        """Reads one tensor by its new key."""
        return self._reader.read(self._keys[key])

    def native_name(self, key: str) -> str:
        """The source's own name."""
        return self._reader.native_name(self._keys.get(key, key))
