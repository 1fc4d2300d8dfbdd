"""Reads a ModelConfig off the model objects that Mesh TensorFlow's build_model makes.

Whatever those objects hold that the JAX model does not do is refused by the name of the binding
that asked for it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NoReturn

from t0repro.config.provenance import Bindings
from t0repro.config.run_config import ModelConfig
from t0repro.errors import UserError

_TRANSFORMER = "mesh_tensorflow.transformer.transformer"
_LAYERS = "mesh_tensorflow.transformer.transformer_layers"
_STACK = f"{_TRANSFORMER}.LayerStack"
_UNITRANSFORMER = f"{_TRANSFORMER}.Unitransformer"

_ENCODER_LAYERS = ("SelfAttention", "DenseReluDense")
_DECODER_LAYERS = ("SelfAttention", "EncDecAttention", "DenseReluDense")
# The sublayers around each layer, by function name; "norm" stands for the three names that RMS norm
# goes by in released configurations. They differ only in the variable's name.
_SUBLAYERS = {
    "sublayers_initial": ["dropout"],
    "sublayers_per_layer": ["norm", "sublayer_call_layer", "dropout", "sublayer_residual"],
    "sublayers_final": ["norm", "dropout"],
}
_SYNONYMS = {
    "sublayer_rms_norm": "norm",
    "sublayer_legacy_rms_norm": "norm",
    "sublayer_legacy_final_rms_norm": "norm",
    "sublayer_dropout": "dropout",
}

# For mtf_gin: configurables that make up the model, with the arguments read here.
KNOWN_BINDINGS: Mapping[str, Any] = {
    _UNITRANSFORMER: {
        "d_model", "max_length", "shared_embedding_and_softmax_weights", "label_smoothing",
        "z_loss", "vocab_divisor", "positional_embedding", "loss_denominator",
    },
    _STACK: {*_SUBLAYERS, "dropout_rate", "norm_epsilon", "recompute_grads"},
    f"{_TRANSFORMER}.make_layer_stack": {"layers", "num_layers"},
    f"{_TRANSFORMER}.make_bitransformer": set(),
    f"{_TRANSFORMER}.Bitransformer": set(),
    f"{_TRANSFORMER}.VocabEmbedding": set(),
    f"{_TRANSFORMER}.get_vocab_embedding_cls": set(),
    f"{_TRANSFORMER}.shift_targets": set(),
    f"{_TRANSFORMER}.sublayer_dropout": {"dropout_rate"},
    f"{_TRANSFORMER}.sublayer_rms_norm": set(),
    f"{_TRANSFORMER}.sublayer_call_layer": set(),
    f"{_TRANSFORMER}.sublayer_mask_padding": set(),
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
    "num_encoder_layers": (f"{_TRANSFORMER}.make_layer_stack", "num_layers", ("encoder",)),
    "num_decoder_layers": (f"{_TRANSFORMER}.make_layer_stack", "num_layers", ("decoder",)),
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
    "dropout_rate": (f"{_TRANSFORMER}.sublayer_dropout", "dropout_rate", ("decoder",)),
    "label_smoothing": (_UNITRANSFORMER, "label_smoothing", ("decoder",)),
    "z_loss": (_UNITRANSFORMER, "z_loss", ("decoder",)),
    "loss_denominator": (_UNITRANSFORMER, "loss_denominator", ("decoder",)),
}


def read_model(model: Any, bindings: Bindings) -> ModelConfig:
    """The ModelConfig of a Bitransformer.

    Args:
      model: what mesh_tensorflow.transformer.utils.build_model returned.
      bindings: for the place of a binding that is refused.

    Raises:
      UserError: if the model has a layer or an option that the JAX model lacks.
    """
    reader = _ModelReader(bindings)
    encoder, decoder = model.encoder, model.decoder
    reader.check_tower(encoder, _ENCODER_LAYERS, "encoder")
    reader.check_tower(decoder, _DECODER_LAYERS, "decoder")
    attention, feed_forward = decoder.layer_stack._layers[0], decoder.layer_stack._layers[2]
    reader.check_towers_agree(encoder, decoder)
    if not model.shared_embedding or encoder.input_vocab_dim != decoder.output_vocab_dim:
        reader.refuse(
            "separate embeddings of encoder and decoder", _UNITRANSFORMER, "vocab_divisor"
        )
    activation = feed_forward.activation
    return ModelConfig(
        num_encoder_layers=len(encoder.layer_stack._layers) // len(_ENCODER_LAYERS),
        num_decoder_layers=len(decoder.layer_stack._layers) // len(_DECODER_LAYERS),
        d_model=decoder.model_dim.size,
        d_ff=feed_forward.hidden_size,
        num_heads=attention.num_heads,
        d_kv=attention.key_value_size,
        vocab_size=decoder.output_vocab_dim.size,
        activations=(activation,) if isinstance(activation, str) else tuple(activation),
        logits_from_embedding=decoder.shared_embedding_and_softmax_weights,
        relative_attention_num_buckets=attention.relative_attention_num_buckets,
        dropout_rate=reader.dropout_rate(encoder, decoder),
        label_smoothing=decoder.label_smoothing,
        z_loss=decoder.z_loss,
        loss_denominator=decoder._loss_denominator,
    )


class _ModelReader:
    """Checks model objects against what the JAX model does."""

    def __init__(self, bindings: Bindings):
        self._bindings = bindings

    def refuse(self, what: str, selector: str, argument: str, *scopes: str) -> NoReturn:
        """Raises UserError; its place is the binding in the scopes given, or in either tower."""
        raise UserError(
            f"The JAX stack does not support {what} ({selector.rpartition('.')[2]}.{argument}).",
            where=self._bindings.find(scopes[::-1] or ("decoder", "encoder"), selector, argument),
            fix="Change the binding, or run with --backend=mtf.",
        )

    def check_tower(self, tower: Any, kinds: tuple[str, ...], scope: str) -> None:
        if tower.positional_embedding:
            self.refuse(
                "learned position embeddings", _UNITRANSFORMER, "positional_embedding", scope
            )
        stack = tower.layer_stack
        for index, layer in enumerate(stack._layers):
            kind = kinds[index % len(kinds)]
            if type(layer).__name__ != kind:
                self.refuse(
                    f"the layer {type(layer).__name__} ({scope} layer {index}, expected {kind})",
                    f"{_TRANSFORMER}.make_layer_stack",
                    "layers",
                    scope,
                )
            self._check_layer(layer, kind, scope)
        for argument, expected in _SUBLAYERS.items():
            names = [function.__name__ for function in getattr(stack, f"_{argument}")]
            if [_SYNONYMS.get(name, name) for name in names] != expected:
                self.refuse(f"the sublayers {names}", _STACK, argument, scope)

    def _check_layer(self, layer: Any, kind: str, scope: str) -> None:
        """Every option of a layer that the JAX model has not must be at its default."""
        selector = f"{_LAYERS}.{kind}"
        for name, parameter in inspect.signature(
            type(layer).__mro__[0].__init__
        ).parameters.items():
            if name in KNOWN_BINDINGS[selector] or not hasattr(layer, name):
                continue
            value = getattr(layer, name)
            if value != parameter.default and not (value == {} and parameter.default is None):
                self.refuse(f"{name} = {value!r} of {kind}", selector, name, scope)
        if kind == "SelfAttention" and layer.relative_attention_type != "bias_shared":
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

    def _check_activation(self, activation: Any, scope: str) -> None:
        names = (activation,) if isinstance(activation, str) else tuple(activation)
        known = ("relu", "gelu", "linear")
        if not all(isinstance(name, str) and name in known for name in names):
            self.refuse(
                f"the activation {activation!r} (known: {', '.join(known)})",
                f"{_LAYERS}.DenseReluDense",
                "activation",
                scope,
            )

    def check_towers_agree(self, encoder: Any, decoder: Any) -> None:
        """The JAX model has one size for both towers; only their depths may differ."""
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
        ]
        for argument, selector, fact in facts:
            values = [fact(tower, tower.layer_stack._layers) for tower in (encoder, decoder)]
            if values[0] != values[1]:
                self.refuse(
                    f"{argument} = {values[0]!r} in the encoder and {values[1]!r} in the decoder",
                    selector,
                    argument,
                )

    def dropout_rate(self, encoder: Any, decoder: Any) -> float:
        """The one rate that all dropouts share."""
        import gin

        rates = {
            layer.dropout_rate
            for tower in (encoder, decoder)
            for layer in tower.layer_stack._layers
        }
        for scope in ("encoder", "decoder"):
            with gin.config_scope(scope):
                bound = gin.get_bindings(f"{_TRANSFORMER}.sublayer_dropout")
            rates.add(bound.get("dropout_rate", 0.0))
        if len(rates) != 1:
            self.refuse(
                f"different dropout rates in one model ({sorted(rates)})",
                f"{_TRANSFORMER}.sublayer_dropout",
                "dropout_rate",
            )
        return rates.pop()
