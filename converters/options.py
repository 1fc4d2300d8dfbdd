"""Options of a conversion."""

from __future__ import annotations

import dataclasses
import os

from t0repro.converters.jax_tree import Layout
from t0repro.parameters import layout


@dataclasses.dataclass(frozen=True)
class Options:
    """What a conversion does besides changing the format.

    Attributes:
      slots: False leaves the optimizer slots out. hf keeps them in a file beside the weights.
      norm_names: How Mesh TensorFlow's variables spell the norms: "rms_norm", or "layer_norm" as in
        T5 1.0's released checkpoints. Defaults to what the source or its manifest says, else to
        "rms_norm".
      dtype: Type of the target's parameters, "float32" or "bfloat16"; None keeps the source's.
      master_dtype: The same under gin's name for it; only for mtf. Defaults to what `gin_file`
        binds, because Mesh TensorFlow restores only into variables of that type.
      scan: Stack the layers as T5X's scalable_t5 does; only for t5x.
      layout: "legacy" (msgpack and Zarr) or "orbax" (T5X's default since 2023); only for t5x.
        Defaults to legacy, which T5X of any age reads.
      t5x_importer_slots: The T5X side, source or target, has the slots of square matrices as T5X's
        own importer of Mesh TensorFlow's checkpoints leaves them.
      vocab_size: Pad the vocabulary with zeros, or cut it, to this size. By default a vocabulary
        from hf is padded to a multiple of 128, which the other formats expect.
      vocabulary: SentencePiece model for hf's tokenizer files.
      gin_file: Configuration that the model was trained with, written beside the target as
        operative_config.gin; defaults to the source's own. The sizes that it binds must match the
        checkpoint's.
    """

    slots: bool = True
    norm_names: layout.NormNames | None = None
    dtype: str | None = None
    master_dtype: str | None = None
    scan: bool = False
    layout: Layout | None = None
    t5x_importer_slots: bool = False
    vocab_size: int | None = None
    vocabulary: str | os.PathLike[str] | None = None
    gin_file: str | os.PathLike[str] | None = None
