"""What the files beside a checkpoint state about its model: its arithmetic, sizes and names.

A checkpoint's tensors do not show the arithmetic. transformers' directories state it in
config.json. For other checkpoints it is in the training run's gin file: `operative_config.gin`
beside them, or T5X's `config.gin`. Sizes and names in these files must be the checkpoint's.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from t0repro import storage
from t0repro.adapters import NAMES
from t0repro.config.gin.statements import Binding
from t0repro.config.model import ModelConfig
from t0repro.converters import adapter_files, hf, hf_config, sources
from t0repro.converters.model_gin import (
    check_gin_text,
    describes_model,
    read_bound_arithmetic,
    read_gin,
)
from t0repro.converters.mtf import OPERATIVE_CONFIG
from t0repro.converters.tensors import CheckpointRef, StoredTensor
from t0repro.converters.witnesses import check_names, damage_error
from t0repro.errors import UserError
from t0repro.parameters import naming
from t0repro.parameters.shape import ModelShape

# A run writes these beside its checkpoints: what Mesh TensorFlow and T5X call their gin files.
T5X_CONFIG = "config.gin"
# T5X's and Mesh TensorFlow's, which comes last and wins: a training run here says more in it.
_GIN_FILES = (T5X_CONFIG, OPERATIVE_CONFIG)
_MODEL_INFO = "model-info.txt"  # T5X's list of variables
_VARIABLE = re.compile(r"Variable\s+(?:params/)?(\S+)\s+size")
_PARAMETERS_END = "Total number of parameters:"
_OTHER_GIN = "Give the gin file of the model that the checkpoint holds."


def arithmetic_source(ref: CheckpointRef) -> CheckpointRef:
    """The checkpoint whose folder states a model's arithmetic; for an adapter's, maybe the base.

    A run that trained the adapter left its gin file beside it; without one, the base's counts.
    """
    if not adapter_files.is_adapter(ref) or any(
        storage.is_file(ref.beside(name)) for name in _GIN_FILES
    ):
        return ref
    return arithmetic_source(sources.base_of(ref))


def version(ref: CheckpointRef) -> dict[str, Any]:
    """A fingerprint of a checkpoint's files, its base's, and the gin files beside them.

    It changes whenever opening the checkpoint again might give another model.
    """
    files = [ref.beside(name) for name in _GIN_FILES]
    beside = {file: storage.stamp(file) for file in files if storage.is_file(file)}
    base = version(sources.base_of(ref)) if adapter_files.is_adapter(ref) else {}
    return sources.fingerprint(ref) | beside | base


def gin_text(ref: CheckpointRef, gin_file: str | os.PathLike[str] | None = None) -> str | None:
    """The gin text that a model was trained with; None if unknown.

    Args:
      ref: The checkpoint.
      gin_file: A file to read instead of the one beside the checkpoint.

    Raises:
      UserError: If the file cannot be read.
    """
    if gin_file is not None:
        return read_gin(gin_file)
    return text_beside(ref, OPERATIVE_CONFIG)


def text_beside(ref: CheckpointRef, name: str) -> str | None:
    """The text of a file that a run wrote beside its checkpoints; None if there is none.

    Raises:
      UserError: If it is not text.
    """
    file = ref.beside(name)
    return _text(file) if storage.is_file(file) else None


def arithmetic(
    ref: CheckpointRef,
    family: ModelShape,
    text: str | None,
    gin_file: str | os.PathLike[str] | None = None,
) -> hf_config.Computation:
    """A checkpoint's model arithmetic: activation, epsilon and so on.

    Args:
      ref: The checkpoint.
      family: The model's sizes.
      text: Its gin text, from `gin_text`; T5X's config.gin beside it supplies what this leaves out.
      gin_file: The text's file, if it is not the one beside the checkpoint.

    Raises:
      UserError: If config.json and the gin text disagree, or name arithmetic that no T5 here has,
        or nothing says whether the inputs of a model without an encoder attend in both directions.
    """
    texts = {
        ref.beside(T5X_CONFIG): text_beside(ref, T5X_CONFIG),
        os.fspath(gin_file or ref.beside(OPERATIVE_CONFIG)): text,
    }
    bound = _read_bound_arithmetic(texts)
    # A run's file that leaves it unbound says the default of its dialect: each to earlier ones.
    if (
        family.decoder_only
        and "input_full_attention" not in bound
        and not any(said and describes_model(said, file) for file, said in texts.items())
    ):
        raise _unknown_direction_error(ref)
    if ref.format != "hf":
        # Only gin shows the activation of such a checkpoint; without it, assume the published ones:
        # T5 1.1's gated GELU and T5 1.0's ReLU.
        default = ("gelu", "linear") if family.gated else ("relu",)
        values = {field: binding.value for field, binding in bound.items()}
        return dataclasses.replace(hf_config.Computation(default), **values)
    config = hf.read_arithmetic(ref.path)
    for field, binding in bound.items():
        if binding.value != getattr(config, field):
            raise UserError(
                f"`{binding.line}` does not fit the model, whose {hf.CONFIG} says"
                f" {getattr(config, field)!r}.",
                where=binding.place,
                fix=_OTHER_GIN,
            )
    # A field that a gin file leaves unbound has gin's default, which may not be the model's.
    for field in ("epsilon", "max_distance"):
        default = getattr(hf_config.Computation, field)
        if text and field not in bound and getattr(config, field) != default:
            raise UserError(
                f"The gin file leaves the {field} at {default}, but {hf.CONFIG} says"
                f" {getattr(config, field)}.",
                where=str(gin_file or ref.beside(OPERATIVE_CONFIG)),
                fix=_OTHER_GIN,
            )
    return config


def _read_bound_arithmetic(texts: Mapping[str, str | None]) -> dict[str, Binding]:
    """What gin texts, by file, bind about a model's arithmetic; later files win."""
    bound: dict[str, Binding] = {}
    for file, text in texts.items():
        bound |= read_bound_arithmetic(text, file) if text else {}
    return bound


def _unknown_direction_error(ref: CheckpointRef) -> UserError:
    file = ref.beside(T5X_CONFIG)
    line = "models.DecoderOnlyModel.inputs_bidirectional_attention"
    return UserError(
        "The model has no encoder, and nothing says whether its inputs attend in both directions"
        " (a prefix language model) or each position to earlier ones alone (a causal one).",
        where=ref.path,
        fix=f"Put the training run's {T5X_CONFIG} or {OPERATIVE_CONFIG} into"
        f" {os.path.dirname(file)}. If it is gone and you know the answer, write it there:"
        f" echo '{line} = False' > {file}    (True for a prefix language model)",
    )


def open_configured(
    ref: CheckpointRef, model: ModelConfig, *, slots: bool = True, keep_shared: bool = False
) -> dict[str, StoredTensor]:
    """Opens a checkpoint in the form that a run's model needs; reads each tensor when it is used.

    If only the model has a position bias per layer, each layer gets the checkpoint's shared one.

    Args:
      ref: The checkpoint.
      model: The run's model.
      slots: False omits the optimizer slots.
      keep_shared: Whether the shared bias stays in the result too, for rules that name it.

    Raises:
      UserError: Like `check_configured` and `sources.open_any`.
    """
    check_configured(ref, model)
    tree = sources.open_tree(ref, slots=slots)
    repeated = map_layer_biases(tree, model)
    shared = {name: tree[name] if keep_shared else tree.pop(name) for name in {*repeated.values()}}
    return tree | {name: shared[source] for name, source in repeated.items()}


def map_layer_biases(names: Iterable[str], model: ModelConfig) -> dict[str, str]:
    """Finds the tensors to fill each layer's own position bias from a shared one.

    Args:
      names: Flat keys of a checkpoint.
      model: The model to fill.

    Returns:
      Key of a layer -> the checkpoint's key; empty unless only the model has a bias per layer.
    """
    if not model.position_bias_per_layer:
        return {}
    counts = {"encoder": model.num_encoder_layers, "decoder": model.num_decoder_layers}
    layer_biases = {}
    # `coder/` ends either tower's name: the shared biases of encoder and decoder, and their slots.
    for key in [key for key in names if f"coder/{naming.RELATIVE_BIAS}" in key]:
        before, tower, after = key.partition("encoder" if "encoder" in key else "decoder")
        for layer in range(counts[tower]):
            layer_biases[f"{before}{tower}/layers_{layer}{after}"] = key
    return layer_biases


def check_configured(ref: CheckpointRef, model: ModelConfig) -> None:
    """Checks that a run's arithmetic matches the files beside the checkpoint that it reads.

    Args:
      ref: The checkpoint; without such files it passes. For an adapter's, see `arithmetic_source`.
      model: The run's model.

    Raises:
      UserError: Naming the field of config.json, or the gin file's line, with another value.
    """
    ref = arithmetic_source(ref)
    _check_query_scale(ref, model)
    # Two names of one function: T5X's gin files say silu, `hf_config` says swish.
    swish = tuple("swish" if name == "silu" else name for name in model.activations)
    fields = {
        "activations": ("feed_forward_proj", swish),
        "max_distance": ("relative_attention_max_distance", model.relative_attention_max_distance),
        "epsilon": ("layer_norm_epsilon", model.rms_norm_epsilon),
    }
    config = hf.read_arithmetic(ref.path) if ref.format == "hf" else None
    texts = {ref.beside(file): text_beside(ref, file) for file in _GIN_FILES}
    bound = {} if config else _read_bound_arithmetic(texts)
    for field, (name, configured) in fields.items():
        if config and configured != getattr(config, field):
            raise UserError(
                f"The run is configured for {configured!r}, but the checkpoint's {hf.CONFIG} says"
                f" {getattr(config, field)!r}.",
                where=f"{storage.join(ref.path, hf.CONFIG)}, {name}",
                fix=f"Run with the {OPERATIVE_CONFIG} that `t0repro convert {ref.path} OUT --to"
                " jax` writes.",
            )
        if field in bound and configured != bound[field].value:
            raise UserError(
                f"The run is configured for {configured!r}, but the checkpoint was trained with"
                f" `{bound[field].line}`.",
                where=bound[field].place,
                fix="Configure the run alike, or choose another checkpoint.",
            )


def _check_query_scale(ref: CheckpointRef, model: ModelConfig) -> None:
    """Checks that a run scales queries as the checkpoint's training did, since kernels differ."""
    said = _query_scale(ref)
    if said is None or said[0] == model.scale_queries:
        return
    scaled, place = said
    does = "divides" if model.scale_queries else "does not divide"
    binding = f"network.T5Config.scale_attn_logits = {scaled}"
    raise UserError(
        f"The run {does} queries by the root of head_dim; the checkpoint was trained"
        f" {'with' if scaled else 'without'} that division, so its query kernels do not fit.",
        where=f"{ref.path}; {place}",
        fix=f"Bind {binding}{', in a gin file of t5x.contrib.gpu.t5' if scaled else ''};"
        " or choose another checkpoint.",
    )


def _query_scale(ref: CheckpointRef) -> tuple[bool, str] | None:
    """Whether a training run scaled queries, and the place that shows it; None if unknown."""
    if ref.format in ("hf", "mtf"):  # neither library can
        return False, f"its format is {ref.format}"
    texts = {ref.beside(name): text_beside(ref, name) for name in _GIN_FILES}
    if bound := _read_bound_arithmetic(texts).get("scale_queries"):
        return bool(bound.value), f"{bound.place}: {bound.line}"
    for file, text in texts.items():
        # A file that describes the model and leaves this unbound says T5X's default.
        if text and describes_model(text, file):
            return False, f"{file}, which leaves scale_attn_logits at False"
    return None


def check_run_files(ref: CheckpointRef, family: ModelShape) -> None:
    """Checks that a checkpoint's model matches the files of a run beside it.

    Args:
      ref: The checkpoint.
      family: Its model.

    Raises:
      UserError: Naming the line that the model contradicts, or a file that cannot be read.
    """
    for name in _GIN_FILES:
        if (text := text_beside(ref, name)) is not None:
            check_gin_text(text, ref.beside(name), family)
    file = ref.beside(_MODEL_INFO)
    if storage.is_file(file):
        _check_model_info(file, family)


def _text(file: str) -> str:
    try:
        return storage.read(file).decode()
    except UnicodeDecodeError as error:
        raise damage_error(file, f"it is not UTF-8 ({error.reason})") from None


def _check_model_info(file: str, family: ModelShape) -> None:
    """Compares the parameters' names in T5X's list, which have no `target/` prefix."""
    parameters, end, _ = _text(file).partition(_PARAMETERS_END)
    matches = (match[1] for match in map(_VARIABLE.match, parameters.splitlines()) if match)
    # An adapter's parameters stand among the base's; here they are merged.
    named = {name for name in matches if name.rpartition("/")[2] not in NAMES}
    # A scanned tree has other names, and another kind of list shows nothing about this one.
    if end and named and not any(re.match(r"(encoder|decoder)/\1/", name) for name in named):
        check_names(family.parameters(), named, file, lambda name: f"target/{name}")
