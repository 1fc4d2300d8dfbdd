"""The arithmetic in a T5's config.json that its weights do not show.

transformers' T5, mT5 and umT5 compute different logits from the same weights with another
activation, norm epsilon, range of the position bias, or scale before the logits. `arithmetic_of`
reads all of these as transformers 4 and 5 write them, and refuses by name what is not supported
here; docs/checkpoints.md has the table.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any, Literal

from t0repro.config.model import Activation
from t0repro.errors import UserError
from t0repro.parameters.shape import ModelShape

# transformers' names of activations (transformers/activations.py, ACT2FN). Its "gelu" is the exact
# one with the error function; Mesh TensorFlow's is the tanh form, "gelu_new" in transformers.
_ACTIVATIONS: dict[str, Activation] = {
    "relu": "relu",
    "gelu": "gelu_exact",
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "silu": "swish",
    "swish": "swish",
    "sigmoid": "sigmoid",
    "tanh": "tanh",
    "linear": "linear",
}
_MAX_DISTANCE, _EPSILON = 128, 1e-6  # of Mesh TensorFlow and T5X

# Relatives of T5 by their model_type, each with what is not supported here.
_RELATIVES = {
    "longt5": "LongT5, whose encoder attends within windows of the input",
    "switch_transformers": "a Switch Transformer, whose feed-forward layers are experts",
    "t5gemma": "T5Gemma, whose layers are Gemma's",
    "t5gemma2": "T5Gemma 2, whose layers are Gemma's",
}
# transformers' classes of an encoder alone (T5EncoderModel and its kin) end in this.
_ENCODER_CLASS = "EncoderModel"
# transformers' classes with other outputs, by the ends of their names.
_OTHER_CLASSES = {
    "ForSequenceClassification": "a T5 with a head for classes instead of logits",
    "ForTokenClassification": "an encoder with a head for classes instead of logits",
    "ForQuestionAnswering": "a T5 with a head for spans instead of logits",
}

# Fields of which only one value is supported, with what another would mean. pad_token_id is not one
# of them: padding is masked. Here and in T5X it is id 0, which is why the decoder begins with 0.
_FIXED: dict[str, tuple[tuple[Any, ...], str]] = {
    "decoder_start_token_id": ((0, None), "the decoder's first input is id 0"),
    "quantization_config": ((None,), "weights are not quantized"),
    "pruned_heads": (({}, None), "all layers have all heads"),
}

# Fields that are read as what they are, without conversion: "false" is true for Python.
_TYPES: dict[str, tuple[type, str]] = {
    "tie_word_embeddings": (bool, "true or false"),
    "is_gated_act": (bool, "true or false"),
    "scale_decoder_outputs": (bool, "true or false"),
    "feed_forward_proj": (str, "a string"),
    "dense_act_fn": (str, "a string"),
    "architectures": (list, "a list"),
    "pad_token_id": (int, "a whole number"),
}

Logits = Literal["scaled embedding", "embedding", "kernel"]


@dataclasses.dataclass(frozen=True)
class Computation:
    """A T5's arithmetic, beyond the shapes of its weights.

    Attributes:
      activations: of the feed-forward layer, in the names of `ModelConfig`.
      max_distance: distances from this one on share a bucket of the position bias.
      epsilon: added to the mean square in every layer norm.
      scale_tied_logits: whether logits from the embedding are scaled by d_model**-0.5.
      scale_queries: whether queries are divided by d_kv**0.5, an option of T5X's contrib/gpu.
      input_full_attention: whether inputs attend in both directions in a model without an encoder.
      one_way_position_buckets: whether such inputs count later positions as distance 0, as in T5X.
    """

    activations: tuple[Activation, ...]
    max_distance: int = _MAX_DISTANCE
    epsilon: float = _EPSILON
    scale_tied_logits: bool = True
    scale_queries: bool = False
    input_full_attention: bool = False
    one_way_position_buckets: bool = False


def arithmetic_of(config: Mapping[str, Any], where: str) -> Computation:
    """Reads the arithmetic from the content of config.json.

    Args:
      config: the content, as transformers 4 or 5 wrote it.
      where: the file, for messages.

    Raises:
      UserError: naming the field with an unsupported value.
    """
    _check_family(config, where)
    for field, (values, meaning) in _FIXED.items():
        if config.get(field) not in values:
            raise UserError(
                f"{field} is {config[field]!r}, but here {meaning}.",
                where=f"{where}, {field}",
                fix="Convert a model that was trained and saved without it.",
            )
    return Computation(
        _activations(config, where),
        int(_number(config, "relative_attention_max_distance", _MAX_DISTANCE, int, where)),
        # Unscaled tied logits are read as a separate kernel (`HfReader`), so scale_tied_logits
        # stays True.
        float(_number(config, "layer_norm_epsilon", _EPSILON, (int, float), where)),
    )


def check_field_types(config: Mapping[str, Any], where: str) -> None:
    """Checks that the fields that are read here have values of their types.

    Raises:
      UserError: naming the field.
    """
    for field, (kind, meaning) in _TYPES.items():
        # Not isinstance: in Python, a bool is an int.
        if config.get(field) is not None and type(config[field]) is not kind:
            raise UserError(
                f"{field} is {config[field]!r}, not {meaning}.",
                where=f"{where}, {field}",
                fix="Copy the file again, or write the value that the model was saved with.",
            )


def _check_family(config: Mapping[str, Any], where: str) -> None:
    """Checks that config.json is of a T5 with logits, or of its encoder."""
    kind = config.get("model_type")
    if kind is None:
        raise UserError(
            "config.json does not say which model it is of: it has no model_type.",
            where=f"{where}, model_type",
            fix='If it is a T5, an mT5 or a umT5, add "model_type": "t5", "mt5" or "umt5".',
        )
    if kind not in ("t5", "mt5", "umt5"):
        relative = _RELATIVES.get(str(kind))
        raise UserError(
            f"The model is {relative}, whose layers are not supported."
            if relative
            else f"The model is of type {kind!r}, not a T5.",
            where=f"{where}, model_type",
            fix="Give a directory whose config.json says t5, mt5 or umt5.",
        )
    if config.get("auto_map"):
        raise UserError(
            "The model computes with code of its own beside its weights, as MADLAD-400's language"
            " model of 8 billion parameters does. Such models are not supported.",
            where=f"{where}, auto_map",
            fix="Give a model that transformers loads with its own T5, mT5 or umT5.",
        )
    for name in config.get("architectures") or ():
        for end, meaning in _OTHER_CLASSES.items():
            if str(name).endswith(end):
                raise UserError(
                    f"The model is a {name}: {meaning}.",
                    where=f"{where}, architectures",
                    fix="Give a model that was saved as T5ForConditionalGeneration.",
                )


def is_encoder(config: Mapping[str, Any]) -> bool:
    """Whether config.json is of an encoder alone, which has neither a decoder nor logits."""
    names = config.get("architectures") or ()
    return any(str(name).endswith(_ENCODER_CLASS) for name in names)


@dataclasses.dataclass(frozen=True)
class TokenIds:
    """Ids with a meaning of their own; the defaults are T5's.

    Attributes:
      pad: fills rows. T5X fills with id 0 in any vocabulary.
      eos: ends inputs and targets.
    """

    pad: int = 0
    eos: int = 1


def token_ids(config: Mapping[str, Any]) -> TokenIds:
    """Reads the ids from the content of config.json; MADLAD-400 pads with 1 and ends with 2."""
    ids = {name: config.get(f"{name}_token_id") for name in ("pad", "eos")}
    return TokenIds(**{name: value for name, value in ids.items() if type(value) is int})


def _number(config: Mapping[str, Any], field: str, default: float, kind: Any, where: str) -> float:
    """A field that is a positive number."""
    value = config.get(field, default)
    # Python treats a bool as an int, and a NaN is not above 0.
    if not isinstance(value, kind) or isinstance(value, bool) or not 0 < value < math.inf:
        noun = "whole number" if kind is int else "number"
        raise UserError(
            f"{field} is {value!r}, not a {noun} above 0.",
            where=f"{where}, {field}",
            fix="Copy the file again, or write the value that the model was trained with.",
        )
    return value


# Fields of config.json -> fields of the model inferred from its weights.
_SIZES = {
    "d_model": "d_model",
    "d_kv": "d_kv",
    "d_ff": "d_ff",
    "num_heads": "num_heads",
    "num_layers": "num_encoder_layers",
    "num_decoder_layers": "num_decoder_layers",
    "vocab_size": "vocab_size",
    "relative_attention_num_buckets": "relative_attention_num_buckets",
}


def check_sizes(config: Mapping[str, Any], family: ModelShape, where: str) -> None:
    """Checks that the sizes in config.json equal those of the weights.

    Args:
      config: The content of config.json; missing fields are not compared.
      family: The model inferred from the weights.
      where: The file, for messages.

    Raises:
      UserError: Naming the field, its value and the weights'.
    """
    if family.encoder_only and not is_encoder(config):
        raise UserError(
            "The decoder's tensors are missing.",
            where=where,
            fix="Copy all of the model's files again. If the model is an encoder alone, write"
            ' "architectures": ["T5EncoderModel"] in config.json.',
        )
    # Without num_decoder_layers, transformers gives both towers the same depth.
    depth = {"num_decoder_layers": config.get("num_layers")}
    said = depth | {field: value for field, value in config.items() if value is not None}
    if family.encoder_only:
        # transformers writes the depth of the decoder that the encoder once had.
        said.pop("num_decoder_layers")
    for field, name in _SIZES.items():
        size = getattr(family, name)
        if said.get(field) is not None and (type(said[field]) is not int or said[field] != size):
            raise _contradicts(field, said[field], f"of a model with {size}", where)
    gated = {"is_gated_act": len(_activations(config, where)) == 2}
    if "feed_forward_proj" in config:
        gated["feed_forward_proj"] = str(config["feed_forward_proj"]).startswith("gated-")
    for field, value in gated.items():
        if value != family.gated:
            kernels = "gated (wi_0 and wi_1)" if family.gated else "not gated (wi)"
            if not gated.keys() & config.keys():
                kind, default = config["model_type"], _default_projection(config)
                raise UserError(
                    f"config.json names no feed_forward_proj, which stands for {default} in a"
                    f" {kind}, but the weights are {kernels}.",
                    where=f"{where}, feed_forward_proj",
                    fix="Add the one that the model was trained with; T5 1.1's is gated-gelu, T5"
                    " 1.0's relu, UL2's gated-silu.",
                )
            raise _contradicts(field, config.get(field), kernels, where)
    if family.shared_towers:
        raise UserError(
            "The encoder's tensors are missing.",
            where=where,
            fix="Copy all of the model's files again.",
        )


def _contradicts(field: str, said: Any, weights: str, where: str) -> UserError:
    fix = "Copy all of the model's files again: some are missing, damaged or of another model."
    if field == "vocab_size":
        fix = f"If its embeddings were resized, correct vocab_size in config.json. Otherwise: {fix}"
    return UserError(
        f"config.json says that {field} is {said!r}, but the weights are {weights}.",
        where=f"{where}, {field}",
        fix=fix,
    )


def describe_assumed_activation(config: Mapping[str, Any]) -> str | None:
    """The activation assumed for a gated model whose config.json names none; else None."""
    if {"feed_forward_proj", "dense_act_fn"} & config.keys() or not config.get(
        "is_gated_act", config["model_type"] != "t5"
    ):
        return None
    return f"{_default_projection(config)}, as transformers takes for a {config['model_type']}"


def _default_projection(config: Mapping[str, Any]) -> str:
    return "relu" if config["model_type"] == "t5" else "gated-gelu"


def _activations(config: Mapping[str, Any], where: str) -> tuple[Activation, ...]:
    projection = str(config.get("feed_forward_proj", _default_projection(config)))
    *gate, name = projection.split("-", 1) if projection.startswith("gated-") else [projection]
    # For T5 1.1's sake, transformers computes "gated-gelu" in the tanh form, but "gelu" exactly.
    # Both versions also save their interpretation of feed_forward_proj, and trust it on loading.
    name = str(config.get("dense_act_fn", "gelu_new" if gate and name == "gelu" else name))
    gated = bool(config.get("is_gated_act", gate))
    if name not in _ACTIVATIONS:
        raise UserError(
            f"The activation {name!r} is in no T5 that is supported here.",
            where=f"{where}, feed_forward_proj",
            fix=f"Convert a model with one of these: {', '.join(_ACTIVATIONS)}.",
        )
    return (_ACTIVATIONS[name], "linear") if gated else (_ACTIVATIONS[name],)


def is_tied(config: Mapping[str, Any]) -> bool:
    """Whether the content of config.json says that the logits come from the embedding."""
    # transformers' default: only 4's mT5 is untied.
    default = config["model_type"] != "mt5" or (_transformers_version(config) or 0) >= 5
    return bool(config.get("tie_word_embeddings", default))


def _transformers_version(config: Mapping[str, Any]) -> int | None:
    """The major version of transformers that wrote a config.json; None if it does not say."""
    version = re.match(r"(\d+)\.", str(config.get("transformers_version")))
    return int(version[1]) if version else None


def is_scaled(config: Mapping[str, Any], where: str) -> bool:
    """Whether logits come from the embedding, scaled by d_model**-0.5; see `logits_of`.

    Raises:
      UserError: if it is unknown which version wrote a tied mT5.
    """
    if config["model_type"] in ("t5", "umt5"):
        return bool(config.get("scale_decoder_outputs", is_tied(config)))
    if not is_tied(config):
        return False
    version = _transformers_version(config)
    if version is None:
        raise UserError(
            "The mT5 is tied, and config.json does not say which transformers wrote it;"
            " transformers 4 scales its logits, 5 does not.",
            where=f"{where}, transformers_version",
            fix='Add it: "transformers_version": "4.57.0", for instance.',
        )
    return version < 5


def logits_of(config: Mapping[str, Any], has_kernel: bool, where: str) -> Logits:
    """The source of the logits: a kernel, or the embedding, scaled by d_model**-0.5 or not.

    transformers 4 scales a tied T5 and mT5 and gives an untied one a kernel. transformers 5 ties
    all of them and lets an lm_head.weight in the file override the tie: its T5 has the field
    scale_decoder_outputs, as its umT5 from 5.24 on, and its mT5 never scales. Both scale a tied
    umT5. An untied umT5, which transformers 4 and T5X do not scale, counts as tied and scaled in
    transformers 5.0 to 5.23.

    Args:
      config: the content of config.json.
      has_kernel: whether there is an lm_head.weight.
      where: the file, for messages.

    Raises:
      UserError: if the config says that the logits are not tied but there is no kernel, or if it is
        unknown which version wrote a tied mT5.
    """
    if not (is_tied(config) or has_kernel):
        raise UserError(
            "The logits are not tied to the embedding, and lm_head.weight is missing.",
            where=f"{where}, tie_word_embeddings",
            fix="Copy all of the model's files again.",
        )
    if is_scaled(config, where):
        return "scaled embedding"
    return "kernel" if has_kernel else "embedding"


def check_target_computes(arithmetic: Computation, shape: ModelShape, to: str, where: str) -> None:
    """Checks that the software of a format supports a model's arithmetic.

    The JAX stack supports all of it.

    Args:
      arithmetic: the model's arithmetic.
      shape: its sizes.
      to: the format.
      where: the place that sets it, for messages.

    Raises:
      UserError: naming the unsupported field of config.json, or t0repro's own binding.
    """
    if to == "jax":
        return
    if arithmetic.scale_queries and to != "t5x":
        raise UserError(
            "The model was trained with queries divided by the root of head_dim (scale_attn_logits"
            f" in T5X's contrib/gpu), and {to} has no model that divides them.",
            where=where,
            fix="Convert to jax or t5x.",
        )
    if shape.tied and not arithmetic.scale_tied_logits:
        raise UserError(
            "The logits come from the embedding and are not scaled (scale_tied_logits); only the"
            " JAX stack has such a model.",
            where=f"{where}, scale_tied_logits",
            fix="Convert to jax.",
        )
    if to == "hf":
        return
    peer = "Mesh TensorFlow" if to == "mtf" else "T5X"
    fix = "Convert to jax or hf."
    if arithmetic.max_distance != _MAX_DISTANCE:
        raise UserError(
            f"relative_attention_max_distance is {arithmetic.max_distance}; in {peer} it is"
            f" {_MAX_DISTANCE}, and no gin file can change it.",
            where=f"{where}, relative_attention_max_distance",
            fix=fix,
        )
    if "gelu_exact" in arithmetic.activations:
        raise UserError(
            f'The activation is transformers\' "gelu" with the error function; {peer} has only its'
            " tanh form, under the same name.",
            where=f"{where}, feed_forward_proj",
            fix=fix,
        )
    if to == "t5x" and arithmetic.epsilon != _EPSILON:
        raise UserError(
            f"layer_norm_epsilon is {arithmetic.epsilon}; in T5X it is {_EPSILON}, and no gin file"
            " can change it.",
            where=f"{where}, layer_norm_epsilon",
            fix="Convert to mtf, jax or hf.",
        )


def gin_text(arithmetic: Computation, shape: ModelShape, source: str) -> str:
    """A gin file of the model, in Mesh TensorFlow's bindings and otherwise t0repro's own.

    Args:
      arithmetic: the target's arithmetic.
      shape: the sizes.
      source: where the model came from, for the first line.
    """
    name, *gate = (x.replace("gelu_exact", "gelu") for x in arithmetic.activations)
    activation = [name, *gate] if gate else name
    bias = "bias" if shape.position_bias_per_layer else "bias_shared"
    extra = ""
    if arithmetic.max_distance != _MAX_DISTANCE:
        distance = arithmetic.max_distance
        extra += f"t0repro.jax_model.relative_attention_max_distance = {distance}\n"
    if "gelu_exact" in arithmetic.activations:
        extra += "t0repro.jax_model.exact_gelu = True\n"
    # Later bindings win: every size bound in the included file is bound again below.
    return f"""\
# The model of {source}, from its config.json and its weights.
include 'models/t5.1.0.base.gin'

d_model = {shape.d_model}
d_ff = {shape.d_ff}
d_kv = {shape.d_kv}
num_heads = {shape.num_heads}
encoder/transformer.make_layer_stack.num_layers = {shape.num_encoder_layers}
decoder/transformer.make_layer_stack.num_layers = {shape.num_decoder_layers}
SelfAttention.relative_attention_num_buckets = {shape.relative_attention_num_buckets}
SelfAttention.relative_attention_type = {bias!r}
DenseReluDense.activation = {activation!r}
transformer.sublayer_rms_norm.epsilon = {arithmetic.epsilon!r}
Unitransformer.shared_embedding_and_softmax_weights = {shape.tied}
{extra}"""


def feed_forward_proj(arithmetic: Computation) -> dict[str, Any]:
    """The fields of config.json that set a feed-forward layer's activation."""
    name, *gate = arithmetic.activations
    theirs = {"gelu": "gelu_new", "gelu_exact": "gelu", "swish": "silu"}.get(name, name)
    if gate:
        # "gated-gelu" is the tanh form; only dense_act_fn can name the exact one.
        projection = "gated-gelu" if name in ("gelu", "gelu_exact") else f"gated-{theirs}"
    else:
        projection = theirs
    return {"feed_forward_proj": projection, "dense_act_fn": theirs, "is_gated_act": bool(gate)}
