"""What a conversion is asked to do."""

from __future__ import annotations

import dataclasses
import os

from t0repro.converters.jax_tree import Layout
from t0repro.parameters import layout


@dataclasses.dataclass(frozen=True)
class Options:
    """What a conversion does besides changing the format.

    Attributes:
      slots: False leaves the optimizer's slots out. hf keeps them in a file beside the weights.
      norm_names: how Mesh TensorFlow's variables spell the norms: "rms_norm", or "layer_norm" as in
        T5 1.0's released checkpoints. By default as in the checkpoint that the model came from,
        where its manifest says so, and else "rms_norm".
      dtype: "float32" or "bfloat16": the type of the parameters in the target; None keeps them.
      master_dtype: the same, for mtf only, by the name that gin has for it. By default what
        `gin_file` binds, since Mesh TensorFlow restores into variables of that type alone.
      scan: stack the layers as T5X's scalable_t5 does; only for t5x.
      layout: "legacy" (msgpack and Zarr) or "orbax" (T5X's default since 2023); only for t5x, whose
        managers read both. By default legacy, which T5X of any age reads.
      t5x_importer_slots: the T5X side, source or target, has the slots of square matrices as T5X's
        own importer of Mesh TensorFlow's checkpoints leaves them.
      vocab_size: pad the vocabulary with zeros, or cut it, to this size. By default one that comes
        from hf and is no multiple of 128 is padded to the next, as the others want.
      vocabulary: a SentencePiece model for hf's tokenizer files.
      gin_file: the configuration that the model was trained with, put beside the target as
        operative_config.gin; by default the source's own. The sizes that it binds must be the
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
