"""The rules by which gin's bindings make a model, its dtypes and its layout.

Mesh TensorFlow builds a tower from a list of layer classes, each called in the tower's scope. What
its layers are called with is read here, and a layer or an option that the JAX model lacks is an
error that names the binding.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast, get_args

from t0repro.adapters import Adapter
from t0repro.config.configuration import NotOnJax, RunInputs
from t0repro.config.gin import door
from t0repro.config.gin.folders import is_shipped
from t0repro.config.model import Activation, DType, DTypePolicy, Layout, ModelConfig
from t0repro.config.mtf.arguments import Arguments, full_name
from t0repro.config.mtf.inputs import count_shards, mesh_dimensions, read_dtype_name
from t0repro.config.settings import check_field
from t0repro.errors import UserError
from t0repro.parameters.naming import SHARED_LAYERS

_MAKE_STACK = "transformer.make_layer_stack"
_STACK = "transformer.LayerStack"
_TOWER = "transformer.Unitransformer"
_ENCODER_LAYERS = ("SelfAttention", "DenseReluDense")
_DECODER_LAYERS = ("SelfAttention", "EncDecAttention", "DenseReluDense")
# Of a layer: its arguments, the first ones of which must be the same in all layers of a kind.
_SIZES = {
    "SelfAttention": (
        "num_heads", "key_value_size", "relative_attention_num_buckets", "relative_attention_type",
    ),
    "EncDecAttention": ("num_heads", "key_value_size"),
    "DenseReluDense": ("hidden_size", "activation"),
}  # fmt: skip
# The sublayers around each layer, by function name and by the names of the norms' variables. The
# legacy ones are those of T5 1.0's released checkpoints; they differ in names only.
_SUBLAYERS = {
    "rms_norm": {
        "sublayers_initial": ["sublayer_dropout"],
        "sublayers_per_layer": [
            "sublayer_rms_norm", "sublayer_call_layer", "sublayer_dropout", "sublayer_residual",
        ],
        "sublayers_final": ["sublayer_rms_norm", "sublayer_dropout"],
    },
    "layer_norm": {
        "sublayers_initial": ["sublayer_dropout"],
        "sublayers_per_layer": [
            "sublayer_legacy_rms_norm", "sublayer_call_layer", "sublayer_dropout",
            "sublayer_residual",
        ],
        "sublayers_final": ["sublayer_legacy_final_rms_norm", "sublayer_dropout"],
    },
}  # fmt: skip
# Of the activations of T5 and its variants, those that Mesh TensorFlow has; it has no silu.
_ACTIVATIONS = ("relu", "gelu", "swish", "sigmoid", "tanh", "linear")


@dataclasses.dataclass(frozen=True)
class _Layer:
    """A layer: its class, its name in a checkpoint's variables, and the arguments of its class."""

    kind: str
    name: str
    arguments: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class _Tower:
    """The encoder, the decoder, or a language model's only tower, whose scope is ""."""

    scope: str
    kinds: tuple[str, ...]
    name: str
    layers: Sequence[_Layer]
    options: Mapping[str, Any]
    stack: Mapping[str, Any]


def read_model(arguments: Arguments, vocabulary_sizes: tuple[int, int]) -> ModelConfig:
    """The ModelConfig of an encoder-decoder model or of a language model.

    Args:
      arguments: gin's.
      vocabulary_sizes: of inputs and targets, before they are padded.

    Raises:
      UserError: if the model has a layer or an option that the JAX model lacks.
    """
    for scope in ("", "encoder", "decoder"):
        depth = arguments.read(_MAKE_STACK, scope).get("num_layers")
        place = arguments.place("num_layers", _MAKE_STACK, scope)
        check_field(ModelConfig, "num_decoder_layers", depth, place, "num_layers")
    towers = _read_towers(arguments)
    for tower in towers:
        _check_tower(arguments, tower)
    sizes = vocabulary_sizes[-len(towers) :]
    rows = [_pad_rows(arguments, *each) for each in zip(towers, sizes, strict=True)]
    if len(towers) == 2:
        _check_encoder_and_decoder(arguments, towers[0], towers[1], rows)
    # If both towers must agree on a value, take it from the decoder, or from the only tower.
    decoder = towers[-1]
    attention, feed_forward = decoder.layers[0].arguments, decoder.layers[-1].arguments
    # A tower lists every sublayer's layer: two or three of them form one block.
    layers = [len(tower.layers) // len(tower.kinds) for tower in towers]
    jax_model = arguments.read("t0repro.jax_model")
    recompute = jax_model["recompute"]
    name, where = "t0repro.jax_model.recompute", arguments.place("recompute", "t0repro.jax_model")
    check_field(ModelConfig, "recompute", recompute, where, name)
    # None decides by memory. recompute_grads = False cannot mean `none`: T0's commands have this
    # default and must fit their TPU slices.
    by_stack = "full" if any(tower.stack["recompute_grads"] for tower in towers) else None
    model = arguments.settings(
        ModelConfig,
        "model.",
        num_encoder_layers=layers[0] if len(towers) == 2 else 0,
        num_decoder_layers=layers[-1],
        d_ff=feed_forward["hidden_size"],
        num_heads=attention["num_heads"],
        d_kv=attention["key_value_size"],
        relative_attention_num_buckets=attention["relative_attention_num_buckets"],
        vocab_size=rows[-1],
        activations=_activations(feed_forward["activation"], jax_model["exact_gelu"]),
        dropout_rate=_dropout_rate(arguments, towers),
        shared_towers=len({tower.name for tower in towers}) < len(towers),
        recompute=recompute or by_stack,
        norm_names=_norm_names(arguments, towers),
        # In a tower of one layer, its own bias equals a shared one, and the variable has the
        # same name.
        position_bias_per_layer=attention["relative_attention_type"] == "bias" and max(layers) > 1,
        # Added where the run trains.
        adapter=None,
        choice_loss=None,
    )
    padding = arguments.provenance["model.vocab_size"]
    arguments.provenance["model.vocab_size"] = f"{sizes[-1]} of the vocabulary, padded ({padding})"
    if recompute is not None:
        arguments.note("model.recompute", "t0repro.jax_model", "recompute")
    return model


def add_adapter_and_loss(arguments: Arguments, model: ModelConfig) -> ModelConfig:
    """The model with the adapter and the loss over answer choices that gin binds, if any.

    Raises:
      UserError: If one does not suit the model.
    """
    training, places = arguments.read("t0repro.jax_training"), arguments.provenance
    if (adapter := training["adapter"]) is not None:
        if not isinstance(adapter, Adapter):  # such as @adapters.lora uncalled
            raise UserError(
                f"The adapter is not an adapter, but a {type(adapter).__name__}.",
                where=places["model.adapter"],
                fix="Bind @t0repro.adapters.lora() or @t0repro.adapters.ia3(), with the"
                " parentheses.",
            )
        targets = arguments.place("targets", f"t0repro.adapters.{adapter.kind}")
        model = model.with_adapter(adapter, targets or places["model.adapter"])
    return model.with_choice_loss(training["choice_loss"], places.get("model.loss_denominator"))


def read_dtypes(arguments: Arguments, float32_activations: bool) -> DTypePolicy:
    """The dtypes; activations are float32 whatever gin binds if `float32_activations`.

    Raises:
      NotOnJax: For a dtype in which the JAX stack does not compute.
    """
    configurable = "utils.get_variable_dtype"
    names: dict[str, Any] = {
        field: read_dtype_name(arguments, f"{field}_dtype")
        for field in ("master", "slice", "activation")
    }
    # As t5's main does without --tpu, whatever gin binds.
    if float32_activations:
        names |= dict.fromkeys(("slice", "activation"), "float32")
    # In evaluation, 16-bit weights and 16-bit activations give the same results.
    if names["slice"] != "float32" and (
        arguments.run["mode"] == "train" or names["activation"] == "float32"
    ):
        arguments.refuse(f"slice_dtype {names['slice']!r}", "slice_dtype", configurable)
    for field, name in names.items():
        if name not in get_args(DType):
            arguments.refuse(f"{field}_dtype {name!r}", f"{field}_dtype", configurable)
    dtypes = arguments.settings(DTypePolicy, "dtypes.", **names)
    if float32_activations:
        for field in ("slice", "activation"):
            arguments.provenance[f"dtypes.{field}"] = "set by t5_mesh_transformer without --tpu"
    return dtypes


def read_layout(arguments: Arguments, tpu_mesh: str | None) -> Layout:
    """The Layout that mesh_shape and layout_rules define; without a mesh, all devices along data.

    Args:
      arguments: gin's.
      tpu_mesh: see `RunInputs.tpu_mesh`.

    Raises:
      NotOnJax: for a rule that shards d_model.
    """
    # One device: there is nothing to shard, and rules without a mesh have no meaning.
    if math.prod(each.size for each in mesh_dimensions(arguments.run["mesh_shape"])) == 1:
        return Layout()

    if count_shards(arguments, "d_model") > 1:
        arguments.refuse("a rule that divides d_model", "layout_rules")
    # Only a mesh computed for a TPU adapts to the devices of this machine.
    topology = arguments.read("utils.tpu_mesh_shape")["tpu_topology"] if tpu_mesh else None
    # Mesh TensorFlow may shard only some of these three; here, all of them are sharded.
    model = count_shards(arguments, "d_ff", "heads", "vocab")
    return Layout(count_shards(arguments, "batch"), model, topology=topology)


def _read_towers(arguments: Arguments) -> list[_Tower]:
    if arguments.model_type != "bitransformer":
        return [_read_tower(arguments, "", _ENCODER_LAYERS, "transformer")]
    names = arguments.read("transformer.make_bitransformer")
    return [
        _read_tower(arguments, "encoder", _ENCODER_LAYERS, names["encoder_name"]),
        _read_tower(arguments, "decoder", _DECODER_LAYERS, names["decoder_name"]),
    ]


def _read_tower(arguments: Arguments, scope: str, kinds: tuple[str, ...], name: str) -> _Tower:
    items = door.value_of(full_name(_MAKE_STACK), "layers", scope)
    if not isinstance(items, list | tuple) or not items:
        arguments.refuse(f"layers = {door.format_value(items)}", "layers", _MAKE_STACK, scope)
    block = [_read_layer(arguments, item, number, scope) for number, item in enumerate(items)]
    options = arguments.read(_TOWER, scope)
    if "max_length" not in options:
        raise UserError(
            "Unitransformer.max_length is not bound, and it has no default.",
            fix='Include a model\'s gin file, or add --gin_param="Unitransformer.max_length = N".',
        )
    depth = arguments.read(_MAKE_STACK, scope)["num_layers"]
    return _Tower(scope, kinds, name, block * depth, options, arguments.read(_STACK, scope))


def _read_layer(arguments: Arguments, item: Any, number: int, scope: str) -> _Layer:
    """A layer of the list: a class, or a list of a class, a name and arguments."""
    parts = [door.follow_macros(x) for x in (item if isinstance(item, list | tuple) else [item])]
    references = [reference for x in parts if (reference := door.reference_to(x, within=scope))]
    given = [x for x in parts if isinstance(x, dict)]
    names = [x for x in parts if isinstance(x, str)]
    if len(references) != 1 or len(parts) != 1 + len(given) + len(names):
        arguments.refuse(f"{door.format_value(item)} as a layer", "layers", _MAKE_STACK, scope)
    reference = references[0]
    values = arguments.read(reference.selector, reference.scope)
    if reference.name == "EncDecAttention":
        # It passes on to its base class what it does not read, and gin adds that class's bindings.
        values = {**arguments.read("transformer_layers.SelfAttention", reference.scope), **values}
    # Mesh TensorFlow goes through an item in order, so the last name and arguments win.
    given_last = given[-1] if given else {}
    return _Layer(
        reference.name,
        # The names become parts of the variables' names in a checkpoint.
        names[-1] if names else f"layer_{number:03d}",
        {**values, **given_last},
    )


def _pad_rows(arguments: Arguments, tower: _Tower, size: int) -> int:
    """Rows of the embedding, padded so that any mesh can shard them."""
    divisor = tower.options["vocab_divisor"]
    place = arguments.place("vocab_divisor", _TOWER, tower.scope)
    check_field(RunInputs, "vocab_divisor", divisor, place, "Unitransformer.vocab_divisor")
    return -(-size // divisor) * divisor


def _check_tower(arguments: Arguments, tower: _Tower) -> None:
    """Refuses a layer, sublayer or option of a tower that the JAX model lacks."""
    scope, kinds, layers = tower.scope, tower.kinds, tower.layers
    if tower.options["positional_embedding"] or tower.options["sinusoid_positional_embedding"]:
        arguments.refuse("learned position embeddings", "positional_embedding", _TOWER, scope)

    def refuse_layer(what: str) -> None:
        article = f"{scope} " if scope else ""
        arguments.refuse(f"the {article}layer {what}", "layers", _MAKE_STACK, scope)

    for index, layer in enumerate(layers):
        kind = kinds[index % len(kinds)]
        if layer.kind != kind:
            refuse_layer(f"{layer.kind} ({index}, expected {kind})")
        _check_layer(arguments, layer, scope)
        # ModelConfig has a single size for all layers of a kind.
        for size in _SIZES[kind]:
            first, value = layers[kinds.index(kind)].arguments[size], layer.arguments[size]
            if first != value:
                refuse_layer(f"{kind} with {size} = {value!r} ({index}) after one with {first!r}")


def _check_layer(arguments: Arguments, layer: _Layer, scope: str) -> None:
    """Refuses a layer's option that the JAX model lacks, unless it has its default."""
    name = f"transformer_layers.{layer.kind}"
    defaults = arguments.defaults(name)
    known = (*_SIZES[layer.kind], "dropout_rate")
    for argument, value in layer.arguments.items():
        is_own = argument in defaults and argument not in known
        if is_own and value != defaults[argument] and (value, argument) != ({}, "attention_kwargs"):
            arguments.refuse(f"{argument} = {value!r} of {layer.kind}", argument, name, scope)
    position = "relative_attention_type"
    if layer.kind == "SelfAttention" and layer.arguments[position] not in ("bias_shared", "bias"):
        what = f"{position} = {layer.arguments[position]!r}"
        arguments.refuse(what, position, name, scope)
    if layer.kind == "EncDecAttention" and layer.arguments[position] is not None:
        arguments.refuse("relative attention to the encoder", position, name, scope)
    if layer.kind == "DenseReluDense":
        activation = layer.arguments["activation"]
        names = activation if isinstance(activation, list | tuple) else (activation,)
        if not all(isinstance(each, str) and each in _ACTIVATIONS for each in names):
            words = [
                f"@{getattr(each, '__name__', each)}" if callable(each) else repr(each)
                for each in names
            ]
            shown = words[0] if names == (activation,) else f"[{', '.join(words)}]"
            what = f"the activation {shown}"
            arguments.refuse(
                f"{what} (known: {', '.join(_ACTIVATIONS)})", "activation", name, scope
            )


def _check_encoder_and_decoder(
    arguments: Arguments, encoder: _Tower, decoder: _Tower, rows: Sequence[int]
) -> None:
    """Checks what encoder and decoder must share, and refuses options of language models."""
    if rows[0] != rows[1]:
        arguments.refuse("separate embeddings of encoder and decoder", "vocab_divisor", _TOWER)
    for argument in ("input_full_attention", "loss_on_targets_only"):
        for tower in (decoder, encoder):
            if tower.options[argument]:
                what = f"{argument} with an encoder"
                arguments.refuse(what, argument, _TOWER, tower.scope)
    names = (encoder.name, decoder.name)
    # ("decoder", "decoder") is how bi_v1_shared makes its towers share variables.
    if names not in (("encoder", "decoder"), ("decoder", "decoder")):
        wrong = "encoder_name" if encoder.name != "encoder" else "decoder_name"
        arguments.refuse(f"towers called {names}", wrong, "transformer.make_bitransformer")
    _check_sizes_agree(arguments, encoder, decoder)
    is_shared = encoder.name == decoder.name
    for tower in (encoder, decoder):
        for index, layer in enumerate(tower.layers):
            number = index % len(tower.kinds)
            expected = f"layer_{number:03d}"
            if is_shared:
                expected = SHARED_LAYERS[_DECODER_LAYERS.index(tower.kinds[number])]
            if layer.name != expected:
                # Layer names are part of the variables' names.
                what = f"a layer called {layer.name!r} (expected {expected!r})"
                arguments.refuse(what, "layers", _MAKE_STACK, tower.scope)
    # The encoder has two layers per block, the decoder three.
    if is_shared and len(encoder.layers) * 3 != len(decoder.layers) * 2:
        arguments.refuse("shared towers of different depths", "num_layers", _MAKE_STACK)


def _check_sizes_agree(arguments: Arguments, encoder: _Tower, decoder: _Tower) -> None:
    """Refuses sizes that differ between towers, or between both kinds of attention."""
    towers = (encoder, decoder)
    sizes = [("d_model", _TOWER, *(tower.options["d_model"] for tower in towers))]
    for kind, number in (("DenseReluDense", -1), ("SelfAttention", 0)):
        layers = [tower.layers[number].arguments for tower in towers]
        name = f"transformer_layers.{kind}"
        sizes += [(size, name, layers[0][size], layers[1][size]) for size in _SIZES[kind]]
    for argument, name, in_encoder, in_decoder in sizes:
        if in_encoder != in_decoder:
            what = f"{argument} = {in_encoder!r} in the encoder and {in_decoder!r} in the decoder"
            arguments.refuse(what, argument, name)
    for argument in _SIZES["EncDecAttention"]:
        to_self, to_encoder = (layer.arguments[argument] for layer in decoder.layers[:2])
        if to_self != to_encoder:
            what = (
                f"{argument} = {to_self!r} in SelfAttention and {to_encoder!r} in EncDecAttention"
            )
            arguments.refuse(what, argument, "transformer_layers.EncDecAttention", "decoder")


def _activations(names: str | Sequence[str], exact_gelu: bool) -> tuple[Activation, ...]:
    """The names of a feed-forward layer's activations, with `gelu_exact` if it is set."""
    names = (names,) if isinstance(names, str) else names
    renamed = ("gelu_exact" if exact_gelu and name == "gelu" else name for name in names)
    # `_check_layer` has refused every other name.
    return cast(tuple[Activation, ...], tuple(renamed))


def _norm_names(arguments: Arguments, towers: Sequence[_Tower]) -> Any:
    """The set of sublayers that all towers have: "rms_norm" or "layer_norm"."""
    by_tower = {tower.scope: _sublayers(arguments, tower) for tower in towers}
    first = next(iter(by_tower.values()))
    for scope, sublayers in by_tower.items():
        for argument, functions in sublayers.items():
            if functions not in [names[argument] for names in _SUBLAYERS.values()]:
                arguments.refuse(f"the sublayers {functions}", argument, _STACK, scope)
        # Each list is valid by itself; all lists of all towers must come from one set.
        if sublayers != first or sublayers not in _SUBLAYERS.values():
            what = f"sublayers of two kinds in one model: {sublayers}"
            arguments.refuse(what, "sublayers_per_layer", _STACK, scope)
    return next(name for name, sublayers in _SUBLAYERS.items() if sublayers == first)


def _sublayers(arguments: Arguments, tower: _Tower) -> dict[str, list[str]]:
    """Names of a tower's sublayer functions; both dropout functions under the newer name."""
    if _is_legacy(arguments, tower):
        return _SUBLAYERS["layer_norm"]
    return {
        argument: [
            reference.name.replace("legacy_dropout", "dropout")
            for item in door.value_of(full_name(_STACK), argument, tower.scope) or ()
            if (reference := door.reference_to(item))
        ]
        for argument in _SUBLAYERS["rms_norm"]
    }


def _is_legacy(arguments: Arguments, tower: _Tower) -> bool:
    """Whether a tower is T5 1.0's, whose stack ignores its lists of sublayers."""
    bound = {name: tower.stack[name] is not None for name in ("dropout_rate", "norm_epsilon")}
    if len({*bound.values()}) > 1:
        argument = next(name for name, is_bound in bound.items() if is_bound)
        raise UserError(
            f"LayerStack.{argument} is bound alone; Mesh TensorFlow takes both of"
            f" {' and '.join(f'LayerStack.{name}' for name in bound)}, or none.",
            where=arguments.place(argument, _STACK, tower.scope),
            fix="Bind both, as T5 1.0's gin files do, or remove this one.",
        )
    return bound["dropout_rate"]


def _dropout_rate(arguments: Arguments, towers: Sequence[_Tower]) -> float:
    """The one rate of all dropouts."""
    # Layers are built in their tower's scope, but sublayers are called outside of it, where a
    # scoped binding would have no effect; `misread` has refused those.
    of_sublayers = arguments.read("transformer.sublayer_dropout")["dropout_rate"]
    rates = {layer.arguments["dropout_rate"] for tower in towers for layer in tower.layers}
    for tower in towers:
        # Only the legacy layer stack has a rate.
        rates.add(tower.stack["dropout_rate"] if _is_legacy(arguments, tower) else of_sublayers)
    if len(rates) == 1:
        return rates.pop()
    bindings = arguments.bindings
    # Files of t5 bind all rates to one macro.
    places = [bindings.place(key) or "" for key in bindings.places if key[2] == "dropout_rate"]
    users = [place for place in places if not is_shipped(place)]
    raise NotOnJax(
        f"The JAX stack does not support different dropout rates in one model"
        f" ({', '.join(map(str, sorted(rates)))}; sublayer_dropout.dropout_rate is one of"
        " them).",
        where="; ".join(users)
        or bindings.source((), full_name("transformer.sublayer_dropout"), "dropout_rate"),
        fix="Bind the macro dropout_rate alone, or run with --backend=mtf.",
    )
