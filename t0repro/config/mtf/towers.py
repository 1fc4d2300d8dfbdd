"""How Mesh TensorFlow builds a model out of its configurables, as far as RunConfig describes one.

`build_model` calls the same constructors with the same arguments in the same gin scopes as the real
one, so that every binding takes effect where it would; the objects hold their arguments only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gin
from t0repro.config.gin_errors import not_described
from t0repro.config.mtf.meshes import Dimension
from t0repro.config.mtf.packages import NeedsPackages
from t0repro.tasks.task import find_tasks, is_described

_TRANSFORMER = "mesh_tensorflow.transformer.transformer"
_LAYERS = "mesh_tensorflow.transformer.transformer_layers"


def build_model(
    transformer: Any,
    *,
    model_type: str,
    input_vocab_size: int,
    output_vocab_size: int,
    layout_rules: Any,
    mesh_shape: Any,
) -> Any:
    """The model of utils.build_model, for the model types of the JAX stack."""
    common = {"layout": layout_rules, "mesh_shape": mesh_shape}
    sizes = {"input_vocab_size": input_vocab_size, "output_vocab_size": output_vocab_size}
    if model_type == "bitransformer":
        return transformer.make_bitransformer(**sizes, **common)
    stack = transformer.make_layer_stack()
    return transformer.Unitransformer(autoregressive=True, layer_stack=stack, **sizes, **common)


def _make_bitransformer(
    transformer: Any,
    input_vocab_size: int,
    output_vocab_size: int,
    layout: Any,
    mesh_shape: Any,
    encoder_name: str,
    decoder_name: str,
    bitransformer_cls: Any,
) -> Any:
    towers = [
        ("encoder", encoder_name, input_vocab_size, None, False),
        ("decoder", decoder_name, output_vocab_size, output_vocab_size, True),
    ]
    made = []
    # The scopes in which gin files bind each tower's layers: `encoder/make_layer_stack.layers`.
    for scope, name, inputs, outputs, autoregressive in towers:
        with gin.config_scope(scope):
            made.append(
                transformer.Unitransformer(
                    layer_stack=transformer.make_layer_stack(),
                    input_vocab_size=inputs,
                    output_vocab_size=outputs,
                    autoregressive=autoregressive,
                    name=name,
                    layout=layout,
                    mesh_shape=mesh_shape,
                )
            )
    return bitransformer_cls(*made)


def _make_layer_stack(
    _: Any, layers: Sequence[Any], layer_stack_cls: Any, num_layers: int, block_scope: bool
) -> Any:
    """The layers of all blocks. An item is a class, or a list of a class, a name and arguments."""
    stack: list[Any] = []
    for block in range(num_layers):
        for number, item in enumerate(layers):
            parts = item if isinstance(item, list | tuple) else [item]
            # Mesh TensorFlow goes through an item in order, so the last name and arguments win.
            name = next((part for part in reversed(parts) if isinstance(part, str)), None)
            given = next((part for part in reversed(parts) if isinstance(part, dict)), {})
            (made,) = (part for part in parts if not isinstance(part, str | dict))
            # The names become parts of the variables' names in a checkpoint.
            position = number if block_scope else len(stack)
            name = name or f"layer_{position:03d}"
            layer = made(**given)
            layer.name = f"block_{block:03d}/{name}" if block_scope else name
            stack.append(layer)
    return layer_stack_cls(stack)


def _get_vocabulary(_: Any, mixture_or_task_name: str | None) -> Any:
    """The vocabularies of inputs and targets of the mixture that is named, or that gin binds."""
    name = mixture_or_task_name
    if not name:
        try:
            name = gin.query_parameter("%MIXTURE_NAME")
        except ValueError as error:
            # Nothing binds the macro: t5 then takes a vocabulary of its own choice.
            raise NeedsPackages("t5's default vocabulary") from error
    if not isinstance(name, str) or not is_described(name):
        raise NeedsPackages(not_described(str(name)))
    features = find_tasks(name)[0].output_features
    return tuple(features[each].vocabulary for each in ("inputs", "targets"))


CALLED: Mapping[str, Callable[..., Any]] = {
    f"{_TRANSFORMER}.make_bitransformer": _make_bitransformer,
    f"{_TRANSFORMER}.make_layer_stack": _make_layer_stack,
    "t5.models.mesh_transformer.get_vocabulary": _get_vocabulary,
}
"""Configurables called while a configuration is read; the module's stand-in comes first."""


# ---- What a constructor adds to its arguments ----------------------------------------------------


def _finish_unitransformer(model: Any) -> None:
    # Rows of the embedding are padded so that any mesh can divide them.
    def padded(size: int | None) -> Dimension | None:
        divisor = model.vocab_divisor
        return Dimension("vocab", -(-size // divisor) * divisor) if size else None

    model.model_dim = Dimension("d_model", model.d_model)
    model.input_vocab_dim = padded(model.input_vocab_size)
    model.output_vocab_dim = padded(model.output_vocab_size)
    if model.sinusoid_positional_embedding:
        model.positional_embedding = True
    model._loss_denominator = model.loss_denominator
    if model.input_full_attention and not model.autoregressive:
        raise NeedsPackages("input_full_attention without autoregressive")


def _finish_stack(stack: Any) -> None:
    """Makes the arguments private; a dropout rate and an epsilon stand for T5 1.0's sublayers."""
    for name in ("layers", "recompute_grads", *_SUBLAYERS):
        setattr(stack, f"_{name}", vars(stack).pop(name))
    rate, epsilon = vars(stack).pop("dropout_rate"), vars(stack).pop("norm_epsilon")
    if (rate is None) != (epsilon is None):
        raise NeedsPackages("one of LayerStack.dropout_rate and norm_epsilon")
    # The legacy mode of T5 1.0's gin files, in which the stack ignores its lists of sublayers.
    if rate is not None:
        stack.dropout_rate, stack.norm_epsilon = rate, epsilon
        for name, functions in _SUBLAYERS.items():
            setattr(stack, f"_{name}", [_named(function) for function in functions])


_SUBLAYERS = {
    "sublayers_initial": ("sublayer_legacy_dropout",),
    "sublayers_per_layer": (
        "sublayer_legacy_rms_norm", "sublayer_call_layer", "sublayer_legacy_dropout",
        "sublayer_residual",
    ),
    "sublayers_final": ("sublayer_legacy_final_rms_norm", "sublayer_legacy_dropout"),
}  # fmt: skip


def _named(name: str) -> Any:
    def sublayer() -> None:
        """Stands for a function of which only the name is read."""

    sublayer.__name__ = name
    return sublayer


def _finish_nothing(made: Any) -> None:
    """For constructors that add nothing."""


def _finish_attention(layer: Any) -> None:
    layer.attention_kwargs = layer.attention_kwargs or {}


FINISHED: Mapping[str, Callable[[Any], None]] = {
    f"{_TRANSFORMER}.Unitransformer": _finish_unitransformer,
    f"{_TRANSFORMER}.Bitransformer": _finish_nothing,
    f"{_TRANSFORMER}.LayerStack": _finish_stack,
    f"{_LAYERS}.SelfAttention": _finish_attention,
    f"{_LAYERS}.EncDecAttention": _finish_nothing,
    f"{_LAYERS}.DenseReluDense": _finish_nothing,
}
"""The classes of which a configuration that the JAX stack supports has objects."""
