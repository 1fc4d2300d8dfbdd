"""Reads a ModelConfig off the model objects that Mesh TensorFlow's build_model makes.

If those objects have a property that the JAX model does not support, the error names the binding
that set it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NoReturn, cast

from t0repro.config import gin_door
from t0repro.config.configuration import NotOnJax
from t0repro.config.gin_door import Bindings
from t0repro.config.gin_errors import is_shipped
from t0repro.config.mtf.packages import TRANSFORMER
from t0repro.config.mtf.parser import JAX_MODEL, jax_model
from t0repro.config.run_config import Activation, ModelConfig, Recompute
from t0repro.errors import UserError
from t0repro.parameters.naming import SHARED_LAYERS

_LAYERS = "mesh_tensorflow.transformer.transformer_layers"
_STACK = f"{TRANSFORMER}.LayerStack"
_UNITRANSFORMER = f"{TRANSFORMER}.Unitransformer"
_DROPOUT = f"{TRANSFORMER}.sublayer_dropout"
_RMS_NORM = f"{TRANSFORMER}.sublayer_rms_norm"

_ENCODER_LAYERS = ("SelfAttention", "DenseReluDense")
_DECODER_LAYERS = ("SelfAttention", "EncDecAttention", "DenseReluDense")
_SIZES = {  # of a layer, the same in all layers of a kind
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

# For the reader: configurables that make up the model, with the arguments that are read here.
KNOWN_BINDINGS: Mapping[str, Any] = {
    _UNITRANSFORMER: {
        "d_model", "max_length", "shared_embedding_and_softmax_weights", "label_smoothing",
        "z_loss", "vocab_divisor", "positional_embedding", "loss_denominator",
        "input_full_attention", "loss_on_targets_only",
    },
    _STACK: {*_SUBLAYERS["rms_norm"], "dropout_rate", "norm_epsilon", "recompute_grads"},
    f"{TRANSFORMER}.make_layer_stack": {"layers", "num_layers"},
    f"{TRANSFORMER}.make_bitransformer": {"encoder_name", "decoder_name"},
    f"{TRANSFORMER}.Bitransformer": set(),
    f"{TRANSFORMER}.VocabEmbedding": set(),
    f"{TRANSFORMER}.get_vocab_embedding_cls": set(),
    f"{TRANSFORMER}.shift_targets": set(),
    _DROPOUT: {"dropout_rate"},
    _RMS_NORM: {"epsilon"},
    f"{TRANSFORMER}.sublayer_residual": set(),
    f"{TRANSFORMER}.sublayer_call_layer": set(),
    f"{TRANSFORMER}.sublayer_mask_padding": set(),
    f"{_LAYERS}.DenseReluDense": {"hidden_size", "dropout_rate", "activation"},
    f"{_LAYERS}.SelfAttention": {
        "num_heads", "key_value_size", "dropout_rate", "relative_attention_type",
        "relative_attention_num_buckets",
    },
    f"{_LAYERS}.EncDecAttention": {"num_heads", "key_value_size", "dropout_rate"},
    f"{_LAYERS}.enc_dec_attention": set(),
    f"{_LAYERS}.enc_dec_attention_bias": set(),
}  # fmt: skip

# ModelConfig field -> (configurable, argument, scopes from the outermost to the innermost).
FIELD_SOURCES: Mapping[str, tuple[str, str, tuple[str, ...]]] = {
    "num_encoder_layers": (f"{TRANSFORMER}.make_layer_stack", "num_layers", ("encoder",)),
    "num_decoder_layers": (f"{TRANSFORMER}.make_layer_stack", "num_layers", ("decoder",)),
    "d_model": (_UNITRANSFORMER, "d_model", ("decoder",)),
    "d_ff": (f"{_LAYERS}.DenseReluDense", "hidden_size", ("decoder",)),
    "num_heads": (f"{_LAYERS}.SelfAttention", "num_heads", ("decoder",)),
    "d_kv": (f"{_LAYERS}.SelfAttention", "key_value_size", ("decoder",)),
    "vocab_size": (_UNITRANSFORMER, "vocab_divisor", ("decoder",)),
    "activations": (f"{_LAYERS}.DenseReluDense", "activation", ("decoder",)),
    "logits_from_embedding": (
        _UNITRANSFORMER,
        "shared_embedding_and_softmax_weights",
        ("decoder",),
    ),
    "relative_attention_num_buckets": (
        f"{_LAYERS}.SelfAttention",
        "relative_attention_num_buckets",
        ("decoder",),
    ),
    "dropout_rate": (_DROPOUT, "dropout_rate", ()),
    "label_smoothing": (_UNITRANSFORMER, "label_smoothing", ("decoder",)),
    "z_loss": (_UNITRANSFORMER, "z_loss", ("decoder",)),
    "loss_denominator": (_UNITRANSFORMER, "loss_denominator", ("decoder",)),
    "model_type": ("mesh_tensorflow.transformer.utils.run", "model_type", ()),
    "input_full_attention": (_UNITRANSFORMER, "input_full_attention", ("decoder",)),
    "loss_on_targets_only": (_UNITRANSFORMER, "loss_on_targets_only", ("decoder",)),
    "shared_towers": (f"{TRANSFORMER}.make_bitransformer", "encoder_name", ()),
    "recompute": (_STACK, "recompute_grads", ("decoder",)),
    "norm_names": (_STACK, "norm_epsilon", ("decoder",)),
    "rms_norm_epsilon": (_RMS_NORM, "epsilon", ()),
    "relative_attention_max_distance": (
        JAX_MODEL,
        "relative_attention_max_distance",
        (),
    ),
    "scale_tied_logits": (JAX_MODEL, "scale_tied_logits", ()),
    "position_bias_per_layer": (
        f"{_LAYERS}.SelfAttention",
        "relative_attention_type",
        ("decoder",),
    ),
}


def read_model(model: Any, model_type: str, bindings: Bindings) -> ModelConfig:
    """The ModelConfig of a Bitransformer, or of a Unitransformer that is a language model.

    Args:
      model: what mesh_tensorflow.transformer.utils.build_model returned.
      model_type: the model type it was called with.
      bindings: to look up the place of a refused binding.

    Raises:
      UserError: if the model has a layer or an option that the JAX model lacks.
    """
    reader = _ModelReader(bindings)
    two_towers = model_type == "bitransformer"
    towers = {"encoder": model.encoder, "decoder": model.decoder} if two_towers else {"": model}
    kinds = {"encoder": _ENCODER_LAYERS, "decoder": _DECODER_LAYERS, "": _ENCODER_LAYERS}
    for scope, tower in towers.items():
        reader.check_depth(tower, scope)
        reader.check_tower(tower, kinds[scope], scope)
    if two_towers:
        reader.check_bitransformer(model)
    # If both towers must agree on a value, take it from the decoder, or from the only tower.
    decoder = list(towers.values())[-1]
    attention, *_, feed_forward = decoder.layer_stack._layers[: len(kinds[list(towers)[-1]])]
    layers = {
        # A layer stack lists every sublayer's layer: two or three of them form one block.
        scope: len(tower.layer_stack._layers) // len(kinds[scope])
        for scope, tower in towers.items()
    }
    several_layers = max(layers.values()) > 1
    own = jax_model()
    # Not a field of ModelConfig: it selects the activations' names.
    exact_gelu = own.pop("exact_gelu")
    return ModelConfig(
        num_encoder_layers=layers.pop("encoder", 0),
        # Arguments are evaluated in order: once `encoder` has been popped, one tower is left.
        num_decoder_layers=layers.popitem()[1],
        d_model=decoder.model_dim.size,
        d_ff=feed_forward.hidden_size,
        num_heads=attention.num_heads,
        d_kv=attention.key_value_size,
        vocab_size=decoder.output_vocab_dim.size,
        activations=reader.activations(feed_forward, exact_gelu),
        logits_from_embedding=decoder.shared_embedding_and_softmax_weights,
        relative_attention_num_buckets=attention.relative_attention_num_buckets,
        dropout_rate=reader.dropout_rate(towers),
        label_smoothing=decoder.label_smoothing,
        z_loss=decoder.z_loss,
        loss_denominator=decoder._loss_denominator,
        model_type=model_type,  # pyright: ignore[reportArgumentType]
        input_full_attention=decoder.input_full_attention,
        loss_on_targets_only=decoder.loss_on_targets_only,
        shared_towers=len({tower.name for tower in towers.values()}) < len(towers),
        recompute=own.pop("recompute") or reader.recompute(towers),
        norm_names=reader.norm_names(towers),
        rms_norm_epsilon=reader.norm_epsilon(),
        # In a tower of one layer, its own bias equals a shared one, and the variable has the
        # same name.
        position_bias_per_layer=attention.relative_attention_type == "bias" and several_layers,
        **own,
    )


class _ModelReader:
    """Checks that the JAX model supports everything in the model objects."""

    def __init__(self, bindings: Bindings):
        self._bindings = bindings

    def refuse(self, what: str, selector: str, argument: str, *scopes: str) -> NoReturn:
        """Raises NotOnJax; its place is the binding in the given scopes, or in either tower."""
        raise NotOnJax(
            f"The JAX stack does not support {what} ({selector.rpartition('.')[2]}.{argument}).",
            where=self._bindings.source(scopes[::-1] or ("decoder", "encoder"), selector, argument),
            fix="Change the binding, or run with --backend=mtf.",
        )

    def check_bitransformer(self, model: Any) -> None:
        """Checks what encoder and decoder must share, and refuses options of language models."""
        encoder, decoder = model.encoder, model.decoder
        if not model.shared_embedding or encoder.input_vocab_dim != decoder.output_vocab_dim:
            self.refuse(
                "separate embeddings of encoder and decoder", _UNITRANSFORMER, "vocab_divisor"
            )
        for argument in ("input_full_attention", "loss_on_targets_only"):
            if getattr(decoder, argument):
                self.refuse(f"{argument} with an encoder", _UNITRANSFORMER, argument)
        names = (encoder.name, decoder.name)
        # ("decoder", "decoder") is how bi_v1_shared makes its towers share variables.
        if names not in (("encoder", "decoder"), ("decoder", "decoder")):
            selector = f"{TRANSFORMER}.make_bitransformer"
            wrong = "encoder_name" if encoder.name != "encoder" else "decoder_name"
            self.refuse(f"towers called {names}", selector, wrong)
        self.check_towers_agree(encoder, decoder)
        self._check_cross_attention(decoder)
        shared = encoder.name == decoder.name
        for tower, kinds, scope in (
            (encoder, _ENCODER_LAYERS, "encoder"),
            (decoder, _DECODER_LAYERS, "decoder"),
        ):
            if shared:
                wanted = dict(zip(_DECODER_LAYERS, SHARED_LAYERS, strict=True))
                names = [wanted[kind] for kind in kinds]
            else:
                names = [f"layer_{number:03d}" for number in range(len(kinds))]
            self._check_layer_names(tower, names, scope)
        # The encoder has two layers per block, the decoder three.
        if shared and len(encoder.layer_stack._layers) * 3 != len(decoder.layer_stack._layers) * 2:
            self.refuse(
                "shared towers of different depths",
                f"{TRANSFORMER}.make_layer_stack",
                "num_layers",
            )

    def _check_layer_names(self, tower: Any, names: list[str], scope: str) -> None:
        """Refuses layer names bound in gin, since they are part of the variables' names."""
        for index, layer in enumerate(tower.layer_stack._layers):
            found, wanted = layer.name.rpartition("/")[2], names[index % len(names)]
            if found != wanted:
                self.refuse(
                    f"a layer called {found!r} (expected {wanted!r})",
                    f"{TRANSFORMER}.make_layer_stack",
                    "layers",
                    scope,
                )

    def check_depth(self, tower: Any, scope: str) -> None:
        """Raises UserError for a tower without layers, which has no sizes to read."""
        if not tower.layer_stack._layers:
            selector = f"{TRANSFORMER}.make_layer_stack"
            field = "num_encoder_layers" if scope == "encoder" else "num_decoder_layers"
            where = self._bindings.find((scope,), selector, "num_layers")
            raise UserError(
                f"model.{field} is 0; it must be a whole number, at least 1.",
                where=where,
                fix="Bind num_layers to a number of layers, or make_layer_stack.layers to a list.",
            )

    def check_tower(self, tower: Any, kinds: tuple[str, ...], scope: str) -> None:
        """Refuses a layer, sublayer or option of a tower that the JAX model lacks."""
        if tower.positional_embedding:
            self.refuse(
                "learned position embeddings", _UNITRANSFORMER, "positional_embedding", scope
            )
        layers = tower.layer_stack._layers
        for index, layer in enumerate(layers):
            kind = kinds[index % len(kinds)]
            if type(layer).__name__ != kind:
                self._refuse_layer(f"{type(layer).__name__} ({index}, expected {kind})", scope)
            self._check_layer(layer, kind, scope)
            # RunConfig has a single size for all layers of a kind.
            for size in _SIZES[kind]:
                first, this = getattr(layers[kinds.index(kind)], size), getattr(layer, size)
                if first != this:
                    self._refuse_layer(
                        f"{kind} with {size} = {this!r} ({index}) after one with {first!r}", scope
                    )

    def _refuse_layer(self, what: str, scope: str) -> NoReturn:
        self.refuse(
            f"the {scope + ' ' if scope else ''}layer {what}",
            f"{TRANSFORMER}.make_layer_stack",
            "layers",
            scope,
        )

    def norm_names(self, towers: Mapping[str, Any]) -> Any:
        """The set of sublayers that all towers have: "rms_norm" or "layer_norm"."""
        found = {scope: self._sublayers(tower) for scope, tower in towers.items()}
        # Compare all towers with the first.
        first = next(iter(found.values()))
        for scope, sublayers in found.items():
            for argument, functions in sublayers.items():
                known = [names[argument] for names in _SUBLAYERS.values()]
                if functions not in known:
                    self.refuse(f"the sublayers {functions}", _STACK, argument, scope)
            # Each list is valid by itself; all lists of all towers must come from one set.
            if sublayers != first or sublayers not in _SUBLAYERS.values():
                self.refuse(
                    f"sublayers of two kinds in one model: {sublayers}",
                    _STACK,
                    "sublayers_per_layer",
                    scope,
                )
        return next(name for name, sublayers in _SUBLAYERS.items() if sublayers == first)

    def _sublayers(self, tower: Any) -> dict[str, list[str]]:
        """Names of a tower's sublayer functions; both dropout functions under the newer name."""
        return {
            argument: [
                function.__name__.replace("legacy_dropout", "dropout")
                for function in getattr(tower.layer_stack, f"_{argument}")
            ]
            for argument in _SUBLAYERS["rms_norm"]
        }

    def _check_layer(self, layer: Any, kind: str, scope: str) -> None:
        """Refuses a layer's option that the JAX model lacks, unless it has its default."""
        selector = f"{_LAYERS}.{kind}"
        for name, parameter in inspect.signature(
            type(layer).__mro__[0].__init__
        ).parameters.items():
            if name in KNOWN_BINDINGS[selector] or not hasattr(layer, name):
                continue
            value = getattr(layer, name)
            # A layer's constructor replaces attention_kwargs = None by {}.
            if value != parameter.default and not (value == {} and parameter.default is None):
                self.refuse(f"{name} = {value!r} of {kind}", selector, name, scope)
        if kind == "SelfAttention" and layer.relative_attention_type not in (
            "bias_shared",
            "bias",
        ):
            self.refuse(
                f"relative_attention_type = {layer.relative_attention_type!r}",
                selector,
                "relative_attention_type",
                scope,
            )
        if kind == "EncDecAttention" and layer.relative_attention_type is not None:
            self.refuse(
                "relative attention to the encoder", selector, "relative_attention_type", scope
            )
        if kind == "DenseReluDense":
            self._check_activation(layer.activation, scope)

    def recompute(self, towers: Mapping[str, Any]) -> Recompute | None:
        """`full` if LayerStack.recompute_grads is True; otherwise None, which decides by memory."""
        asked = any(tower.layer_stack._recompute_grads for tower in towers.values())
        # False cannot mean `none`: T0's commands have this default and must fit their TPU slices.
        return "full" if asked else None

    def activations(self, feed_forward: Any, exact_gelu: bool) -> tuple[Activation, ...]:
        """The names of a feed-forward layer's activations, with `gelu_exact` if it is set."""
        names = feed_forward.activation
        names = (names,) if isinstance(names, str) else tuple(names)
        if exact_gelu:
            names = tuple("gelu_exact" if name == "gelu" else name for name in names)
        # `_check_activation` has refused every other name.
        return cast(tuple[Activation, ...], names)

    def _check_activation(self, activation: Any, scope: str) -> None:
        names = (activation,) if isinstance(activation, str) else tuple(activation)
        # Of the activations of T5 and its variants, those that Mesh TensorFlow has; it has no silu.
        known = ("relu", "gelu", "swish", "sigmoid", "tanh", "linear")
        if not all(isinstance(name, str) and name in known for name in names):
            self.refuse(
                f"the activation {activation!r} (known: {', '.join(known)})",
                f"{_LAYERS}.DenseReluDense",
                "activation",
                scope,
            )

    def _check_cross_attention(self, decoder: Any) -> None:
        """Refuses attention sizes that differ: the JAX model has one size for both kinds."""
        attention, cross_attention = decoder.layer_stack._layers[:2]
        for argument in _SIZES["EncDecAttention"]:
            sizes = getattr(attention, argument), getattr(cross_attention, argument)
            if sizes[0] != sizes[1]:
                self.refuse(
                    f"{argument} = {sizes[0]!r} in SelfAttention and {sizes[1]!r} in"
                    " EncDecAttention",
                    f"{_LAYERS}.EncDecAttention",
                    argument,
                    "decoder",
                )

    def check_towers_agree(self, encoder: Any, decoder: Any) -> None:
        """Refuses towers of different sizes: in the JAX model only their depths may differ."""
        facts = [
            ("d_model", _UNITRANSFORMER, lambda tower, layers: tower.model_dim.size),
            ("hidden_size", f"{_LAYERS}.DenseReluDense", lambda _, layers: layers[-1].hidden_size),
            ("activation", f"{_LAYERS}.DenseReluDense", lambda _, layers: layers[-1].activation),
            ("num_heads", f"{_LAYERS}.SelfAttention", lambda _, layers: layers[0].num_heads),
            (
                "key_value_size",
                f"{_LAYERS}.SelfAttention",
                lambda _, layers: layers[0].key_value_size,
            ),
            (
                "relative_attention_num_buckets",
                f"{_LAYERS}.SelfAttention",
                lambda _, layers: layers[0].relative_attention_num_buckets,
            ),
            (
                "relative_attention_type",
                f"{_LAYERS}.SelfAttention",
                lambda _, layers: layers[0].relative_attention_type,
            ),
        ]
        for argument, selector, fact in facts:
            values = [fact(tower, tower.layer_stack._layers) for tower in (encoder, decoder)]
            if values[0] != values[1]:
                self.refuse(
                    f"{argument} = {values[0]!r} in the encoder and {values[1]!r} in the decoder",
                    selector,
                    argument,
                )

    def norm_epsilon(self) -> float:
        """What every layer norm adds to the mean square; `misread` has refused scoped bindings."""
        # Nothing bound means 1e-6, the default of Mesh TensorFlow's sublayer_rms_norm.
        return float(gin_door.resolved("", _RMS_NORM).get("epsilon", 1e-6))

    def dropout_rate(self, towers: Mapping[str, Any]) -> float:
        """The one rate of all dropouts."""
        rates = {
            layer.dropout_rate for tower in towers.values() for layer in tower.layer_stack._layers
        }
        for tower in towers.values():
            # Only the legacy layer stack has a rate.
            stack = vars(tower.layer_stack).get("dropout_rate")
            rates.add(self._sublayers_rate() if stack is None else stack)
        if len(rates) != 1:
            self._refuse_rates(rates, towers)
        return rates.pop()

    def _refuse_rates(self, rates: set[float], towers: Mapping[str, Any]) -> NoReturn:
        """Names the rate bound for one kind of layer only, which is the one that differs."""
        kinds = [*(f"{_LAYERS}.{kind}" for kind in _SIZES), _STACK, _DROPOUT]
        keys = [(scope, kind) for kind in kinds for scope in (*towers, "")]
        places = (self._bindings.place((scope, kind, "dropout_rate")) for scope, kind in keys)
        # Files of t5 bind all rates to one macro.
        where = [place for place in places if place and not is_shipped(place)]
        raise NotOnJax(
            f"The JAX stack does not support different dropout rates in one model"
            f" ({', '.join(map(str, sorted(rates)))}; sublayer_dropout.dropout_rate is one of"
            " them).",
            where="; ".join(where) or self._bindings.source((), _DROPOUT, "dropout_rate"),
            fix="Bind the macro dropout_rate alone, or run with --backend=mtf.",
        )

    def _sublayers_rate(self) -> float:
        # Layers are built in their tower's scope, but sublayers are called outside of it, where a
        # scoped binding would have no effect; `misread` has refused those.
        # Nothing bound means 0, the default of Mesh TensorFlow's sublayer_dropout.
        return gin_door.resolved("", _DROPOUT).get("dropout_rate", 0.0)
