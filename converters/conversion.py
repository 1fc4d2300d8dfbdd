"""A conversion: its options, its changes, the target's tensors in order, and their writer."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import numpy as np

from t0repro import storage
from t0repro.compat import installed_version
from t0repro.converters import adapter_files, hf, hf_config, hf_files, jax_tree, model_gin, mtf
from t0repro.converters.adapter_files import AdapterCheckpoint, AdapterNote
from t0repro.converters.jax_tree import Layout
from t0repro.converters.model_files import (
    T5X_CONFIG,
    arithmetic,
    arithmetic_source,
    gin_text,
    text_beside,
)
from t0repro.converters.own_tokenizer import tokenizer_of
from t0repro.converters.safetensors_files import SafetensorsWriter, index_text
from t0repro.converters.tensors import (
    CheckpointReader,
    CheckpointRef,
    Format,
    Output,
    TensorInfo,
    Writer,
)
from t0repro.converters.witnesses import ADAPTER
from t0repro.errors import UserError
from t0repro.parameters import naming
from t0repro.parameters.naming import NormNames
from t0repro.parameters.shape import ModelShape

Target = Format | Literal["adapter"]
"""What a conversion writes: a format, or an adapter's checkpoint as a run here saves it."""


@dataclasses.dataclass(frozen=True)
class Options:
    """A conversion's changes besides the format.

    Attributes:
      slots: False omits the optimizer slots. hf stores them in a file beside the weights.
      norm_names: Mesh TensorFlow's spelling of the norms: "rms_norm", or "layer_norm" as in T5
        1.0's released checkpoints. Defaults to that of the source or its manifest, else to
        "rms_norm".
      dtype: Type of the target's parameters, "float32" or "bfloat16"; None keeps the source's.
      master_dtype: The same under gin's name for it; only for mtf. Defaults to what `gin_file`
        binds, because Mesh TensorFlow restores only into variables of that type.
      scan: Stack the layers as T5X's scalable_t5 does; only for t5x.
      layout: "legacy" (msgpack and Zarr) or "orbax" (T5X's default since 2023); only for t5x.
        Defaults to legacy, which T5X of any age can read.
      t5x_importer_slots: Whether the T5X side, source or target, has the slots of square matrices
        in the places where T5X's importer of Mesh TensorFlow's checkpoints puts them.
      vocab_size: Pad the vocabulary with zeros, or truncate it, to this size. By default a
        vocabulary from hf is padded to a multiple of 128, which the other formats expect.
      vocabulary: SentencePiece model for hf's tokenizer files.
      gin_file: The model's training configuration, written beside the target as
        operative_config.gin; defaults to the source's own. The sizes that it binds must match the
        checkpoint's.
    """

    slots: bool = True
    norm_names: naming.NormNames | None = None
    dtype: str | None = None
    master_dtype: str | None = None
    scan: bool = False
    layout: Layout | None = None
    t5x_importer_slots: bool = False
    vocab_size: int | None = None
    vocabulary: str | os.PathLike[str] | None = None
    gin_file: str | os.PathLike[str] | None = None


# Each change is a reader that wraps another, so the formats need not support it.


DTYPES = ("float32", "bfloat16")


class _Wrapper:
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


class WithoutSlots(_Wrapper):
    """Omits the optimizer slots; parameters and the step remain."""

    def __init__(self, reader: CheckpointReader):
        super().__init__(reader)
        self.tensors = {
            key: info for key, info in reader.tensors.items() if not key.startswith(naming.SLOTS)
        }


class Cast(_Wrapper):
    """Casts the parameters; slots and the step keep their dtypes.

    Args:
      reader: The reader to wrap.
      dtype: "float32" or "bfloat16"; None casts nothing.

    Raises:
      UserError: If `dtype` is neither, or if it is None and a parameter has another dtype (float16
        or float64, which Hugging Face models may have).
    """

    def __init__(self, reader: CheckpointReader, dtype: str | None):
        super().__init__(reader)
        if dtype not in (None, *DTYPES):
            raise UserError(
                f"There is no type {dtype!r} to convert to.",
                where="--dtype (in Python dtype)",
                fix="Give float32 or bfloat16.",
            )
        parameters = {
            key: info for key, info in reader.tensors.items() if key.startswith(naming.PARAMETERS)
        }
        if dtype is None:
            for key, info in parameters.items():
                if info.dtype.name not in DTYPES:
                    raise UserError(
                        f"{reader.native_name(key)} is {info.dtype.name}; parameters are kept in"
                        " float32 or bfloat16.",
                        where=reader.ref.path,
                        fix="Give --dtype float32 (exact for float16, rounded for float64) or"
                        " --dtype bfloat16, in Python dtype.",
                    )
            return
        self._dtype = np.dtype(dtype)
        cast = {key: TensorInfo(info.shape, self._dtype) for key, info in parameters.items()}
        self.tensors = {**reader.tensors, **cast}

    def read(self, key: str) -> np.ndarray:
        """Reads one tensor in its new dtype."""
        array = self._reader.read(key)
        # numpy rounds float32 to bfloat16 to nearest even, as both stacks do.
        return array.astype(self.tensors[key].dtype, copy=False)

    @property
    def lossy(self) -> list[str]:
        """Flat keys of the parameters that lose precision."""
        return [
            key
            for key, info in self.tensors.items()
            if not np.can_cast(self._reader.tensors[key].dtype, info.dtype, "safe")
        ]


class Resized(_Wrapper):
    """Pads the vocabulary with zeros, or truncates it, to a given size.

    This changes the embedding's rows, the logits kernel's columns and their slots. A factored slot
    that averages over the vocabulary stays as it is.

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
                f"A vocabulary cannot have {vocab_size} entries.",
                where="--vocab_size (in Python vocab_size)",
                fix="Give at least 1.",
            )
        _check_order(reader, vocab_size)
        self._axes: dict[str, int] = {}
        resized = {}
        for key, info in reader.tensors.items():
            if (axis := _vocabulary_axis(key, reader.tensors)) is not None:
                shape = (*info.shape[:axis], vocab_size, *info.shape[axis + 1 :])
                self._axes[key], resized[key] = axis, TensorInfo(shape, info.dtype)
        self.tensors = {**reader.tensors, **resized}

    def read(self, key: str) -> np.ndarray:
        """Reads one tensor at its new size."""
        array = self._reader.read(key)
        if key not in self._axes:
            return array
        # New rows are zero, in slots too, like Adafactor's statistics of a row that was never
        # trained.
        resized = np.zeros(self.tensors[key].shape, array.dtype)
        common = tuple(map(slice, map(min, resized.shape, array.shape)))
        resized[common] = array[common]
        return resized


def _check_order(reader: CheckpointReader, vocab_size: int) -> None:
    """Raises UserError if the new size changes which axis a factored slot averages over.

    The names of factored slots depend on which of the parameter's axes is larger.
    """
    for key in reader.tensors:
        path, slot = ("", None) if key == naming.STEP else naming.split_key(key)
        # Look up the slot's parameter: the slot itself may lack the axis.
        axis = _vocabulary_axis(naming.PARAMETERS + path, reader.tensors) if path else None
        if slot in ("v_row", "v_col") and axis is not None:
            before = list(reader.tensors[naming.PARAMETERS + path].shape)
            after = [vocab_size if n == axis else size for n, size in enumerate(before)]
            if naming.factored_slots(before) != naming.factored_slots(after) or (
                naming.t5x_dropped_axes(before) != naming.t5x_dropped_axes(after)
            ):
                raise UserError(
                    f"With a vocabulary of {vocab_size} the slots of {reader.native_name(key)}"
                    " would average over another axis.",
                    where=reader.ref.path,
                    fix="Keep the size, or leave the slots out: --no_slots, in Python slots=False.",
                )


def _vocabulary_axis(key: str, tensors: Mapping[str, TensorInfo]) -> int | None:
    """The tensor's vocabulary axis, or None if it has none."""
    if key == naming.STEP:
        return None
    path, slot = naming.split_key(key)
    row, _ = naming.find_row(path, "t5x", naming.is_decoder_only(tensors)) or (None, None)
    if row is None or "vocab_size" not in row.axes:
        return None
    axes = list(row.axes)
    # A factored slot lacks the axis that it averages over, which shifts later axes.
    if slot in ("v_row", "v_col"):
        del axes[naming.t5x_dropped_axes(tensors[naming.PARAMETERS + path].shape)[slot]]
    return axes.index("vocab_size") if "vocab_size" in axes else None


class ExchangedSlots(_Wrapper):
    """Swaps v_row and v_col if a matrix's two largest axes are equal, as T5X's importer does."""

    def __init__(self, reader: CheckpointReader):
        super().__init__(reader)
        shapes = {key: info.shape for key, info in reader.tensors.items()}
        # The exchange is its own inverse, so one table serves both directions.
        self._keys = {naming.exchange_tied_slots(key, shapes): key for key in reader.tensors}
        self.tensors = {key: reader.tensors[source] for key, source in self._keys.items()}

    def read(self, key: str) -> np.ndarray:
        """Reads one tensor by its new key."""
        return self._reader.read(self._keys[key])

    def native_name(self, key: str) -> str:
        """The source's own name."""
        return self._reader.native_name(self._keys.get(key, key))


@dataclasses.dataclass(frozen=True)
class Conversion:
    """All outputs of a conversion.

    Attributes:
      outputs: The tensors, in writing order.
      open_writer: Opens the writer for a directory or an address.
      norm_names: Mesh TensorFlow's spelling of the model's norms.
      small_files: Name -> content of the destination's other files.
      notes: What is missing or dropped, one sentence each.
    """

    outputs: list[Output]
    open_writer: Callable[[str], Writer]
    norm_names: naming.NormNames
    small_files: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()


def make_conversion(
    reader: CheckpointReader, target: CheckpointRef, family: ModelShape, options: Options
) -> Conversion:
    """Plans the conversion to one target.

    Args:
      reader: The source, which has only the tensors to convert.
      target: The checkpoint to write.
      family: The model's shape.
      options: See `Options`.

    Raises:
      UserError: If the gin file cannot be read or contradicts config.json, or if the target
        cannot express the model's arithmetic.
    """
    # An explicit choice wins, then the source's or its manifest's spelling, then today's names.
    norm_names = options.norm_names or reader.norm_names or "rms_norm"
    step, source = target.step or 0, arithmetic_source(reader.ref)
    # The output is a whole model; with an adapter's bindings, a run would train one on it.
    text, t5x_text = (
        said and model_gin.bind_vocabulary_size(model_gin.drop_adapter(said), family.vocab_size)
        for said in (gin_text(source, options.gin_file), text_beside(source, T5X_CONFIG))
    )
    computed = arithmetic(source, family, text, options.gin_file)
    from_config = source.format == "hf"
    where = storage.join(source.path, hf.CONFIG) if from_config else source.path
    hf_config.check_target_computes(computed, family, target.format, where)
    tokenizer = tokenizer_of(source, options.vocabulary)
    beside = dict(tokenizer)
    # It says what operative_config.gin may leave out, such as where inputs attend.
    if t5x_text:
        beside[T5X_CONFIG] = t5x_text.encode()
    if target.format == "hf":
        conversion = _plan_hf(reader, family, options, text, computed, norm_names, step)
        return dataclasses.replace(conversion, small_files={**beside, **conversion.small_files})
    notes = []
    if from_config and text is None:
        text = hf_config.gin_text(computed, family, source.path)
        notes.append(f"{mtf.OPERATIVE_CONFIG} is made from config.json; run the model with it.")
    if (ids := hf.read_token_ids(source)) != hf_config.TokenIds():
        notes.append(
            f"config.json pads with id {ids.pad} and ends with id {ids.eos}. Here, as in T5X, id 0"
            " pads, and the vocabulary says which id ends: give --vocab if you convert back to hf."
        )
    if target.format == "mtf":
        # Its writer writes the gin file too.
        outputs = list(mtf.mtf_outputs(reader.tensors, norm_names))
        conversion = Conversion(outputs, lambda path: mtf.MtfWriter(path, step, text), norm_names)
    else:
        # The `jax` format always has this project's own layout, whatever --layout is.
        layout = (options.layout or "legacy") if target.format == "t5x" else None
        outputs = list(jax_tree.jax_outputs(reader.tensors, family, options.scan))
        conversion = Conversion(
            outputs,
            lambda path: jax_tree.jax_writer(path, step, outputs, layout),
            norm_names,
            {mtf.OPERATIVE_CONFIG: text.encode()} if text else {},
        )
    if options.scan and (averaged := jax_tree.kernels_to_average(reader.tensors)):
        notes.append(
            f"The slots v of {len(averaged)} kernels are averaged into v_row and v_col, as"
            " scalable_t5 keeps them; converting back cannot restore them."
        )
    if family.decoder_only:
        notes += _note_buckets(computed, target.format)
    small_files = {**beside, **conversion.small_files}
    return dataclasses.replace(conversion, small_files=small_files, notes=tuple(notes))


def _note_buckets(computed: hf_config.Computation, to: str) -> list[str]:
    """What Mesh TensorFlow and T5X compute differently of a prefix LM's weights."""
    one_way = computed.one_way_position_buckets
    if not computed.input_full_attention or to != ("mtf" if one_way else "t5x"):
        return []
    peer, other = ("Mesh TensorFlow", "T5X") if one_way else ("T5X", "Mesh TensorFlow")
    return [
        f"This is a prefix LM of {other}'s, and {peer} computes another function of its weights:"
        " T5X counts all later positions as distance 0; Mesh TensorFlow divides the buckets of its"
        " position bias between the two directions. t0repro goes by the gin file beside the"
        " checkpoint."
    ]


def _plan_hf(
    reader: CheckpointReader,
    family: ModelShape,
    options: Options,
    text: str | None,
    computed: hf_config.Computation,
    norm_names: naming.NormNames,
    step: int,
) -> Conversion:
    outputs = hf.hf_outputs(reader.tensors)
    weights = [output for output in outputs if output.file != hf.SLOTS_FILE]
    slots = len(weights) < len(outputs)
    dtypes = {output.info.dtype.name for output in weights}
    # config.json has a single type for all weights, and float32 represents each exactly.
    dtype = dtypes.pop() if len(dtypes) == 1 else "float32"
    vocabulary = Path(options.vocabulary) if options.vocabulary else None
    bound = model_gin.read_bound_sentinels(text, reader.ref.folder) if text else None
    pieces = hf_files.read_pieces(vocabulary, family, bound) if vocabulary else None
    # Released models are padded by at most 512 rows, others' by more, but not to twice as many.
    if pieces and 2 * len(pieces.scored) < family.vocab_size:
        raise UserError(
            f"The vocabulary has {len(pieces.scored):,} pieces, and the model's embedding"
            f" {family.vocab_size:,} rows.",
            where=str(vocabulary),
            fix="Give the vocabulary that the model was trained with.",
        )
    tokenizer = hf_files.tokenizer_files(pieces, family)
    ids = pieces.ids if pieces else hf.read_token_ids(arithmetic_source(reader.ref))
    provenance = {
        "path": reader.ref.path,
        "format": reader.ref.format,
        "step": step,
        "versions": versions(),
    }
    config = hf_files.model_config(family, dtype, computed, ids)
    small = {
        "README.md": hf_files.model_card(family, provenance, dtype, slots).encode(),
        **tokenizer,
        hf.CONFIG: json.dumps(config, indent=2).encode(),
    }
    if not family.encoder_only:
        generation = hf_files.generation_config(ids)
        small["generation_config.json"] = json.dumps(generation, indent=2).encode()
    # transformers looks for the index only where the weights are in several files.
    if any(output.file != hf.WEIGHTS for output in weights):
        small[hf.INDEX] = index_text(weights).encode()
    if text:
        small[mtf.OPERATIVE_CONFIG] = text.encode()
    notes = []
    if slots:
        notes.append(
            f"transformers has no place for the optimizer's {len(outputs) - len(weights)} slots;"
            f" they are in {hf.SLOTS_FILE}, which a conversion back reads."
        )
    if family.position_bias_per_layer and not (family.tied or family.encoder_only):
        notes.append(
            "transformers 4 and 5.24 compute this umT5 as T5X does. 5.0 to 5.23 take every umT5"
            " for tied and multiply its logits by d_model**-0.5; after loading, set"
            " model.config.tie_word_embeddings = False."
        )
    if pieces and pieces.note:
        notes.append(pieces.note)
    if not tokenizer and not tokenizer_of(arithmetic_source(reader.ref), None):
        notes.append(
            "There are no tokenizer files; convert's --vocab FILE (a SentencePiece model) adds"
            " them."
        )
    return Conversion(
        outputs, lambda path: SafetensorsWriter(path, outputs), norm_names, small, tuple(notes)
    )


def adapter_conversion(
    adapter: AdapterCheckpoint, note: AdapterNote, shape: ModelShape, to: Target
) -> Conversion:
    """Plans the writing of an adapter alone.

    Args:
      adapter: The adapter's checkpoint.
      note: The note to write, with the base's hash.
      shape: The base's shape.
      to: "peft" or "adapter".
    """
    step = int(adapter.read(naming.STEP))
    if to == "adapter":
        outputs = list(jax_tree.jax_outputs(adapter.tensors, shape))
        # Inside the checkpoint's folder, as a run writes it.
        small = {f"checkpoint_{step}/{ADAPTER}": note.to_json().encode()}
        return Conversion(
            outputs, lambda path: jax_tree.jax_writer(path, step, outputs, None), "rms_norm", small
        )
    outputs = adapter_files.peft_outputs(adapter.tensors)
    metadata = adapter_files.peft_metadata(step, note.digest)
    config = adapter_files.peft_config_text(note.adapter, shape, note.base)
    notes = []
    if note.adapter.base_dtype != "float32":
        notes.append(
            f"The adapter was trained on its base in {note.adapter.base_dtype}; in PEFT, load the"
            " base in that type."
        )
    # A relative one may be the name of a repository on the hub.
    is_local = "://" in note.base or os.path.isabs(note.base)
    if is_local and not storage.is_file(storage.join(note.base, "config.json")):
        notes.append(
            f"PEFT loads the base from a folder of Hugging Face's, which {note.base} is not: write"
            " one with `t0repro convert BASE DIR --to hf`, and name DIR as its base (--base)."
        )
    return Conversion(
        outputs,
        lambda path: SafetensorsWriter(path, outputs, metadata),
        "rms_norm",
        {adapter_files.PEFT_CONFIG: config.encode()},
        tuple(notes),
    )


def versions() -> dict[str, str | None]:
    """Versions of the packages involved, None for those not installed; kept in the manifest."""
    packages = ("t0repro", "numpy", "jax", "orbax-checkpoint", "mesh-tensorflow", "tensorflow")
    return {name: installed_version(name) for name in packages}
