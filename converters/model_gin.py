"""What a gin file of either dialect binds about a model, compared with a checkpoint.

The file need not be one that this machine can run: its statements are read, and nothing is called.
"""

from __future__ import annotations

import dataclasses
import os
import re
import tokenize
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from t0repro.config.gin.folders import default_bindings, mesh_folders, open_file
from t0repro.config.gin.statements import (
    Binding,
    Bindings,
    BindingStatement,
    Macro,
    last_bindings,
    parse_statements,
    read_statements,
    resolve_macros,
)
from t0repro.errors import UserError
from t0repro.parameters.shape import ModelShape

# Configurable and argument -> the family's field, in Mesh TensorFlow's names and in T5X's.
_FIELDS = {
    ("Unitransformer", "d_model"): "d_model",
    ("DenseReluDense", "hidden_size"): "d_ff",
    ("SelfAttention", "num_heads"): "num_heads",
    ("SelfAttention", "key_value_size"): "d_kv",
    ("SelfAttention", "relative_attention_num_buckets"): "relative_attention_num_buckets",
    ("SelfAttention", "relative_attention_type"): "position_bias_per_layer",
    ("EncDecAttention", "num_heads"): "num_heads",
    ("EncDecAttention", "key_value_size"): "d_kv",
    ("Unitransformer", "shared_embedding_and_softmax_weights"): "tied",
    ("make_layer_stack", "num_layers"): "layers",
    ("T5Config", "emb_dim"): "d_model",
    ("T5Config", "mlp_dim"): "d_ff",
    ("T5Config", "num_heads"): "num_heads",
    ("T5Config", "head_dim"): "d_kv",
    ("T5Config", "vocab_size"): "vocab_size",
    ("T5Config", "num_encoder_layers"): "num_encoder_layers",
    ("T5Config", "num_decoder_layers"): "num_decoder_layers",
    ("T5Config", "logits_via_embedding"): "tied",
    ("TransformerConfig", "emb_dim"): "d_model",
    ("TransformerConfig", "mlp_dim"): "d_ff",
    ("TransformerConfig", "num_heads"): "num_heads",
    ("TransformerConfig", "head_dim"): "d_kv",
    ("TransformerConfig", "vocab_size"): "vocab_size",
    ("TransformerConfig", "num_layers"): "num_decoder_layers",
    ("TransformerConfig", "logits_via_embedding"): "tied",
}
# Bindings in mesh_tensorflow's defaults.gin, which every run reads first, from a model's macros.
_DEFAULTS = {
    ("Unitransformer", "d_model"): "d_model",
    ("DenseReluDense", "hidden_size"): "d_ff",
    ("SelfAttention", "num_heads"): "num_heads",
    ("SelfAttention", "key_value_size"): "d_kv",
    ("make_layer_stack", "num_layers"): "num_layers",
}
# Arithmetic that the weights do not show.
_ARITHMETIC = {
    ("DenseReluDense", "activation"): "activations",
    ("sublayer_rms_norm", "epsilon"): "epsilon",
    ("T5Config", "mlp_activations"): "activations",
    ("T5Config", "scale_attn_logits"): "scale_queries",
    ("TransformerConfig", "mlp_activations"): "activations",
    ("Unitransformer", "input_full_attention"): "input_full_attention",
    ("DecoderOnlyModel", "inputs_bidirectional_attention"): "one_way_full_attention",
    ("jax_model", "relative_attention_max_distance"): "max_distance",
    ("jax_model", "exact_gelu"): "exact_gelu",
    ("jax_model", "scale_tied_logits"): "scale_tied_logits",
}
# Further such arithmetic, of which only this value is supported.
_FIXED = {
    ("SelfAttention", "fold_scaling_into_initializer"): True,
    ("EncDecAttention", "fold_scaling_into_initializer"): True,
    ("Unitransformer", "sinusoid_positional_embedding"): False,
    ("VocabEmbedding", "scale_variable_like_classifier_weights"): False,
    ("unit_scaling_convention", "value"): False,
}
_TOWERS = ("encoder", "decoder")


def check_gin_file(path: str | os.PathLike[str], family: ModelShape) -> list[str]:
    """Checks that every size bound in a gin file equals the checkpoint's.

    Args:
      path: a gin file of either dialect, with the files that it includes.
      family: the checkpoint's model.

    Returns:
      The names of missing included files, whose bindings were therefore not checked.

    Raises:
      UserError: if the file cannot be read or is not gin, or a size differs; the message names the
        binding and its line.
    """
    return check_gin_text(read_gin(path), path, family)


def check_gin_text(text: str, path: str | os.PathLike[str], family: ModelShape) -> list[str]:
    """Checks that every size bound in gin text equals the checkpoint's; see `check_gin_file`.

    Args:
      text: Text of either dialect; included files count if they are available.
      path: The text's file, for messages and for its includes.
      family: The checkpoint's model.
    """
    bound, missing = _read_bindings(text, path)
    # The file's own bindings win: model files set macros and leave these bindings to defaults.gin.
    defaults = {
        ("", *argument): Binding(
            "", *argument, Macro(name), f"{'.'.join(argument)} = %{name}", "defaults.gin"
        )
        for argument, name in _DEFAULTS.items()
    }
    bindings = {**defaults, **bound}
    for (scope, configurable, argument), binding in bindings.items():
        field = _FIELDS.get((configurable, argument))
        resolved = resolve_macros(binding, bindings)
        if field is None or isinstance(resolved.value, Macro) or resolved.value is None:
            # A macro from a missing file cannot be compared.
            continue
        towers = [tower for tower in _TOWERS if tower in scope.split("/")]
        if not scope:
            # A binding for one tower holds there only.
            towers = [t for t in _TOWERS if (t, configurable, argument) not in bindings]
        value = resolved.value
        if field == "position_bias_per_layer":
            # The bias of a single layer equals a shared one.
            layers = max(family.num_encoder_layers, family.num_decoder_layers)
            value = value == "bias" and layers > 1
        names = [field]
        if field == "layers":  # a stack's depth belongs to its tower
            towers = ["decoder"] if family.decoder_only else towers
            names = [f"num_{tower}_layers" for tower in towers]
        for name in names:
            if value != getattr(family, name):
                raise UserError(
                    f"`{resolved.line}` does not fit the checkpoint, whose {name} is"
                    f" {getattr(family, name)} ({binding.line}).",
                    where=resolved.place,
                    fix="Give the gin file of the model that the checkpoint holds, or copy the"
                    " whole checkpoint again.",
                )
    return missing


def master_dtype(path: str | os.PathLike[str]) -> str | None:
    """The dtype that a gin file binds for Mesh TensorFlow's checkpoints; None if it binds none.

    Raises:
      UserError: if the file cannot be read or is not gin.
    """
    bindings, _ = _read_bindings(read_gin(path), path)
    binding = bindings.get(("", "get_variable_dtype", "master_dtype"))
    value = resolve_macros(binding, bindings).value if binding else None
    return value if isinstance(value, str) else None


def read_bound_sentinels(text: str, path: str | os.PathLike[str]) -> int | None:
    """The number of sentinels that gin text adds to a vocabulary's file; None if it adds none.

    0 says only that the file of the run's own vocabulary holds them, as T5's second file does.
    """
    bindings, _ = _read_bindings(text, path)
    for (_, configurable, argument), binding in bindings.items():
        if (configurable, argument) == ("SentencePieceVocabulary", "extra_ids"):
            value = resolve_macros(binding, bindings).value
            return value if isinstance(value, int) and value > 0 else None
    return None


def read_bound_arithmetic(text: str, path: str | os.PathLike[str]) -> dict[str, Binding]:
    """The model arithmetic bound in gin text that the weights do not show.

    Args:
      text: Text of either dialect; included files count if they are available.
      path: The text's file, for messages and for its includes.

    Returns:
      Fields of `Arithmetic` that are bound, with their values.

    Raises:
      UserError: If the towers' activations differ, or a binding is of arithmetic that no T5 here
        has.
    """
    bindings, _ = _read_bindings(text, path)
    for key, supported in _FIXED.items():
        for binding in _find_bound(_TOWERS, key, bindings):
            if binding.value != supported:
                raise UserError(
                    f"The model was trained with `{binding.line}`, which is not supported.",
                    where=binding.place,
                    fix="Give a model that was trained without it.",
                )
    bound: dict[str, Binding] = {}
    for key, field in _ARITHMETIC.items():
        # Mesh TensorFlow makes layers in their tower's scope, but calls norms in none.
        for binding in _find_bound(_TOWERS if field == "activations" else ("",), key, bindings):
            value = binding.value
            if field == "activations":
                names = value if isinstance(value, list | tuple) else (value,)
                # `silu` is the usual name for Mesh TensorFlow's `swish`.
                value = tuple("swish" if name == "silu" else name for name in names)
            other = bound.setdefault(field, dataclasses.replace(binding, value=value))
            if other.value != value:
                raise UserError(
                    f"`{binding.line}` differs from `{other.line}` ({other.place}), but all layers"
                    " here have one activation.",
                    where=binding.place,
                    fix="Give a model whose towers have the same activation.",
                )
    exact_gelu, activations = bound.pop("exact_gelu", None), bound.get("activations")
    if activations and exact_gelu and exact_gelu.value:
        value = tuple("gelu_exact" if name == "gelu" else name for name in activations.value)
        bound["activations"] = dataclasses.replace(activations, value=value)
    if one_way := bound.pop("one_way_full_attention", None):
        bound |= dict.fromkeys(("input_full_attention", "one_way_position_buckets"), one_way)
    return bound


def _find_bound(
    scopes: Sequence[str], argument: tuple[str, str], bindings: Bindings
) -> list[Binding]:
    """The bindings of an argument that count in some scopes, with the values of their macros."""
    bound = (bindings.get((scope, *argument)) or bindings.get(("", *argument)) for scope in scopes)
    resolved = [resolve_macros(each, bindings) for each in bound if each]
    return [each for each in resolved if not isinstance(each.value, Macro)]


def describes_model(text: str, path: str | os.PathLike[str]) -> bool:
    """Whether gin text binds a size of a model; see `read_bound_arithmetic`."""
    bindings, _ = _read_bindings(text, path)
    return any((configurable, argument) in _FIELDS for _, configurable, argument in bindings)


def drop_adapter(text: str) -> str:
    """Gin text without its bindings of an adapter, for a whole model: comments and macros stay."""
    statements = parse_statements(text)
    lines = text.splitlines(keepends=True)
    starts = [each.location.line_num - 1 for each in statements] + [len(lines)]
    removed = set[int]()
    for statement, start, end in zip(statements, starts, starts[1:], strict=False):
        if isinstance(statement, BindingStatement) and _is_of_adapter(statement):
            removed.update(
                at
                for at in range(start, end)
                if lines[at].strip() and not lines[at].lstrip().startswith("#")
            )
    return "".join(line for at, line in enumerate(lines) if at not in removed)


def bind_vocabulary_size(text: str, size: int) -> str:
    """Gin text whose bindings of the vocabulary's size, where it has any, bind another size."""
    lines = text.splitlines(keepends=True)
    for statement in parse_statements(text):
        if not isinstance(statement, BindingStatement):
            continue
        argument = statement.selector.rpartition(".")[2], statement.arg_name
        if _FIELDS.get(argument) == "vocab_size":
            at = statement.location.line_num - 1
            lines[at] = re.sub(r"(vocab_size\s*=\s*)[^\s#]+", rf"\g<1>{size}", lines[at])
    return "".join(lines)


def _is_of_adapter(statement: Any) -> bool:
    """Whether a binding names an adapter, or is one of its arguments; in either dialect."""
    module, _, configurable = statement.selector.rpartition(".")
    names_one = configurable in ("jax_training", "train") and statement.arg_name == "adapter"
    return names_one or (configurable in ("lora", "ia3") and module.endswith("adapters"))


def read_gin(path: str | os.PathLike[str]) -> str:
    """A gin file's text.

    Raises:
      UserError: If the file cannot be read.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from None


def _unreadable(path: str | os.PathLike[str], error: OSError | UnicodeDecodeError) -> UserError:
    reason = error.strerror if isinstance(error, OSError) else error
    return UserError(
        f"The gin file cannot be read: {reason}.",
        where=os.fspath(path),
        fix="Name the operative_config.gin, or another gin file, that the model was trained with.",
    )


def _read_bindings(text: str, path: str | os.PathLike[str]) -> tuple[Bindings, list[str]]:
    """The bindings of gin text and of the files that it includes, and the missing files' names.

    Raises:
      UserError: If a file cannot be read, or is not gin.
    """
    missing: list[str] = []

    def open_include(name: str, within: Sequence[str]) -> tuple[str, str] | None:
        # Next to the including file, in the working folder, and where Mesh TensorFlow looks.
        gin_folders = [*mesh_folders(()), os.path.dirname(default_bindings())]
        try:
            file = open_file(name, [os.path.dirname(within[-1]), "", *gin_folders])
        except (OSError, UnicodeDecodeError) as error:
            raise _unreadable(name, error) from None
        if file is None or file[0] in within:
            missing.append(name)
            return None
        return file

    try:
        return last_bindings(read_statements(text, path, open_include)), missing
    except (SyntaxError, ValueError, tokenize.TokenError) as error:
        raise UserError(
            f"The file is not a gin file: {error}",
            where=getattr(error, "filename", None) or str(path),
            fix="Save it as UTF-8 without a byte order mark (BOM)."
            if text.startswith("\ufeff")
            else "Correct it there.",
        ) from None
