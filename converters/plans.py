"""Plans a conversion: the target's tensors in order, their writer, and the small files."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from t0repro.converters import (
    hf,
    hf_config,
    hf_files,
    jax_tree,
    mtf,
    scanning,
    storage,
)
from t0repro.converters.arithmetic import arithmetic, gin_text
from t0repro.converters.options import Options
from t0repro.converters.safetensors_files import SafetensorsWriter, index_text
from t0repro.converters.tensors import CheckpointReader, CheckpointRef, Output, TensorInfo, Writer
from t0repro.parameters import layout
from t0repro.parameters.shape import ModelShape


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything that a conversion will write.

    Attributes:
      outputs: The tensors, in the order they are written.
      open_writer: Opens the writer for a directory.
      norm_names: How Mesh TensorFlow spells the model's norms.
      small_files: Name -> content of the destination's other files.
      notes: What is missing or dropped, one sentence each.
    """

    outputs: list[Output]
    open_writer: Callable[[Path], Writer]
    norm_names: layout.NormNames
    small_files: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def identity(self) -> list[Any]:
        """Everything besides the tensors' names and shapes that decides the content, as JSON."""
        return [self.norm_names, sorted(self.small_files), list(self.notes)]


def make_plan(
    reader: CheckpointReader,
    target: CheckpointRef,
    family: ModelShape,
    tensors: Mapping[str, TensorInfo],
    options: Options,
) -> Plan:
    """Plans what to write for one target.

    Args:
      reader: The source.
      target: The checkpoint to write.
      family: The model's shape.
      tensors: Flat key -> shape and type of the tensors to convert.
      options: See `Options`.

    Raises:
      UserError: If the gin file cannot be read or contradicts config.json, or if the target
        cannot express the model's arithmetic.
    """
    # An explicit choice wins, then what the source or its manifest says, then today's names.
    norm_names = options.norm_names or reader.norm_names or "rms_norm"
    step = target.step or 0
    text = gin_text(reader.ref, options.gin_file)
    computed = arithmetic(reader.ref, family, text, options.gin_file)
    from_config = reader.ref.format == "hf"
    where = storage.join(reader.ref.path, hf.CONFIG) if from_config else reader.ref.path
    hf_config.check_target_computes(computed, family, target.format, where)
    if target.format == "hf":
        return _hf_plan(reader, family, tensors, options, text, computed, norm_names, step)
    notes = []
    if from_config and text is None:
        text = hf_config.gin_text(computed, family, reader.ref.path)
        notes.append(f"{mtf.OPERATIVE_CONFIG} is made from config.json; run the model with it.")
    if target.format == "mtf":
        outputs = list(mtf.mtf_outputs(tensors, norm_names))
        return Plan(
            outputs,
            lambda path: mtf.MtfWriter(path, step, text),
            norm_names,
            notes=tuple(notes),
        )
    outputs = list(jax_tree.jax_outputs(tensors, family, options.scan))
    # The `jax` format is this project's own layout, whatever --layout says.
    of_t5x = (options.layout or "legacy") if target.format == "t5x" else None
    small = {mtf.OPERATIVE_CONFIG: text.encode()} if text else {}
    if options.scan and (averaged := scanning.averaged_kernels(tensors)):
        notes.append(
            f"The slots v of {len(averaged)} kernels are averaged into v_row and v_col, as"
            " scalable_t5 keeps them; converting back cannot restore them."
        )
    return Plan(
        outputs,
        lambda path: jax_tree.jax_writer(path, step, outputs, of_t5x),
        norm_names,
        small,
        tuple(notes),
    )


def _hf_plan(
    reader: CheckpointReader,
    family: ModelShape,
    tensors: Mapping[str, TensorInfo],
    options: Options,
    text: str | None,
    computed: hf_config.Arithmetic,
    norm_names: layout.NormNames,
    step: int,
) -> Plan:
    outputs = hf.hf_outputs(tensors, reader.ref.path)
    weights = [output for output in outputs if output.file != hf.SLOTS_FILE]
    slots = len(weights) < len(outputs)
    dtypes = {output.info.dtype.name for output in weights}
    # config.json has one type for all weights, and float32 holds each of them exactly.
    dtype = dtypes.pop() if len(dtypes) == 1 else "float32"
    vocabulary = Path(options.vocabulary) if options.vocabulary else None
    tokenizer = hf_files.tokenizer_files(vocabulary, family)
    provenance = {
        "path": reader.ref.path,
        "format": reader.ref.format,
        "step": step,
        "versions": versions(),
    }
    config = hf_files.model_config(family, dtype, computed)
    small = {
        "README.md": hf_files.model_card(family, provenance, dtype, slots).encode(),
        "generation_config.json": json.dumps(hf_files.generation_config(), indent=2).encode(),
        **tokenizer,
        hf.CONFIG: json.dumps(config, indent=2).encode(),
    }
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
    if family.position_bias_per_layer and not family.tied:
        notes.append(
            "transformers 4 computes this umT5 as T5X does. transformers 5 takes every umT5 for"
            " tied and multiplies its logits by d_model**-0.5; after loading, set"
            " model.config.tie_word_embeddings = False."
        )
    if not tokenizer:
        notes.append(
            "There are no tokenizer files; --vocab FILE (a SentencePiece model) adds them."
        )
    return Plan(
        outputs, lambda path: SafetensorsWriter(path, outputs), norm_names, small, tuple(notes)
    )


def versions() -> dict[str, str | None]:
    """Versions of the packages involved, None for those not installed; kept in the manifest."""
    packages = ("t0repro", "numpy", "jax", "orbax-checkpoint", "mesh-tensorflow", "tensorflow")
    return {name: _version(name) for name in packages}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
