"""Turns T5X's model record into ModelConfig and DTypePolicy: shape, loss and arithmetic."""

from __future__ import annotations

import typing
from typing import Any

from t0repro.config.run_config import (
    Activation,
    Arithmetic,
    DType,
    DTypePolicy,
    LossDenominator,
    ModelConfig,
    Recompute,
)
from t0repro.config.t5x import records
from t0repro.config.t5x.places import Places
from t0repro.errors import nearest_names

MODEL, SHAPE = "models.EncoderDecoderModel", "network.T5Config"
# T5X looks an activation up in flax.linen by name; `linear` is its own.
_ACTIVATIONS = frozenset(typing.get_args(Activation)) - {"gelu_exact"}

# Field of ModelConfig -> argument of T5X's, for `explain` and for errors.
FIELDS = {
    "num_encoder_layers": f"{SHAPE}.num_encoder_layers",
    "num_decoder_layers": f"{SHAPE}.num_decoder_layers",
    "d_model": f"{SHAPE}.emb_dim",
    "d_ff": f"{SHAPE}.mlp_dim",
    "num_heads": f"{SHAPE}.num_heads",
    "d_kv": f"{SHAPE}.head_dim",
    "vocab_size": f"{SHAPE}.vocab_size",
    "activations": f"{SHAPE}.mlp_activations",
    "logits_from_embedding": f"{SHAPE}.logits_via_embedding",
    "dropout_rate": f"{SHAPE}.dropout_rate",
    "arithmetic.float32_attention_logits": f"{SHAPE}.float32_attention_logits",
    "label_smoothing": f"{MODEL}.label_smoothing",
    "z_loss": f"{MODEL}.z_loss",
    "loss_denominator": f"{MODEL}.loss_normalizing_factor",
    "scale_queries": f"{SHAPE}.scale_attn_logits",
    "recompute": f"{SHAPE}.remat_policy",
    "scan_layers": f"{SHAPE}.scan_layers",
}
_VOCABULARIES = (
    records.SentencePieceVocabulary,
    records.ByteVocabulary,
    records.PassThroughVocabulary,
)
# T5X's None is the plain sum; here None, as in Mesh TensorFlow, divides by all targets of a batch.
_DENOMINATORS: dict[Any, float | LossDenominator | None] = {
    None: 1.0,
    "NUM_TOTAL_TARGET_TOKENS": None,
    "NUM_REAL_TARGET_TOKENS": "NUM_REAL_TARGET_TOKENS",
    "AVERAGE_PER_SEQUENCE": "AVERAGE_PER_SEQUENCE",
}


def model_config(model: records.EncoderDecoderModel, places: Places) -> ModelConfig:
    """The model that a record describes, computed as T5X computes it.

    Raises:
      UserError: For an argument without a counterpart here, with its place.
    """
    shape = model.module.config
    places.check_unset(
        model,
        MODEL,
        {
            "feature_converter_cls": "examples are converted as seqio.EncDecFeatureConverter does;"
            " there is no other converter.",
        },
    )
    for name in ("input_vocabulary", "output_vocabulary"):
        vocabulary = getattr(model, name)
        _check_vocabulary(vocabulary, f"{MODEL}.{name}", places)
        if isinstance(vocabulary, records.SentencePieceVocabulary):
            whys = {"use_fast_tokenizer": "texts are encoded by SentencePiece itself."}
            places.check_unset(vocabulary, "seqio.SentencePieceVocabulary", whys)
    several_layers = max(shape.num_encoder_layers, shape.num_decoder_layers) > 1
    return ModelConfig(
        num_encoder_layers=shape.num_encoder_layers,
        num_decoder_layers=shape.num_decoder_layers,
        d_model=shape.emb_dim,
        d_ff=shape.mlp_dim,
        num_heads=shape.num_heads,
        d_kv=shape.head_dim,
        vocab_size=shape.vocab_size,
        activations=_activations(shape, places),
        logits_from_embedding=shape.logits_via_embedding,
        relative_attention_num_buckets=32,  # T5X's network always has this number
        # scalable_t5 has a position bias in each layer; with one layer, that equals a shared one.
        position_bias_per_layer=isinstance(shape, records.ScannedT5Config) and several_layers,
        dropout_rate=shape.dropout_rate,
        label_smoothing=model.label_smoothing,
        z_loss=model.z_loss,
        loss_denominator=_denominator(model, places),
        scale_queries=getattr(shape, "scale_attn_logits", False),
        recompute=_recompute(shape),
        # scalable_t5 scans by default; results are equal, so here depth decides.
        scan_layers=None if getattr(shape, "scan_layers", True) else False,
        arithmetic=Arithmetic(
            float32_attention_logits=shape.float32_attention_logits,
            # T5X differs from Mesh TensorFlow in these too, and gin can bind none of them.
            float32_vocabulary_logits=True,
            cast_before_norm_scale=True,
            epsilon_in_position_bucket=True,
            encoder_output_dropout_per_position=True,
            smoothing_spares_target=True,
            z_loss_in_evaluation=True,
            rescaled_truncated_normal=True,
        ),
    )


def _check_vocabulary(vocabulary: Any, name: str, places: Places) -> None:
    """Refuses a vocabulary that is neither SeqIO's nor a user's own."""
    # A user's own subclasses seqio.Vocabulary, but reading gin files does not import seqio.
    if not isinstance(vocabulary, _VOCABULARIES) and not hasattr(vocabulary, "encode_tf"):
        raise places.refused(
            name,
            vocabulary,
            "it must be a vocabulary.",
            "Bind @seqio.SentencePieceVocabulary(), @seqio.ByteVocabulary() or"
            " @seqio.PassThroughVocabulary().",
        )


def dtypes(model: records.EncoderDecoderModel, places: Places, saved: Any) -> DTypePolicy:
    """The dtypes of a run's computation and checkpoints; parameters in memory are float32.

    Args:
      model: The model's record.
      places: Where its values were set.
      saved: Dtype of parameters in checkpoints; None for float32.
    """
    activation = dtype(model.module.config.dtype, f"{SHAPE}.dtype", places)
    master = dtype(saved or "float32", "utils.SaveCheckpointConfig.dtype", places)
    return DTypePolicy(master=master, slice="float32", activation=activation)


def dtype(value: Any, name: str, places: Places) -> DType:
    """A dtype by its name, or as an attribute of jax.numpy.

    Raises:
      UserError: If it is neither float32 nor bfloat16.
    """
    text = value if isinstance(value, str) else getattr(value, "__name__", str(value))
    for known in typing.get_args(DType):
        if text == known:
            return known
    raise places.refused(name, value, "the type must be float32 or bfloat16.", "Bind one of them.")


def _activations(shape: records.T5Config, places: Places) -> tuple[Activation, ...]:
    for name in shape.mlp_activations:
        if name not in _ACTIVATIONS:
            raise places.refused(
                f"{SHAPE}.mlp_activations",
                shape.mlp_activations,
                f"there is no activation {name!r} here.",
                f"Nearest names: {nearest_names(str(name), _ACTIVATIONS)}.",
            )
    return tuple(shape.mlp_activations)  # pyright: ignore[reportReturnType]


def _recompute(shape: records.T5Config) -> Recompute:
    """The policy that scalable_t5 has; `none` for the other networks."""
    policy = getattr(shape, "remat_policy", None) or "none"
    # In scalable_t5, a policy of any other name keeps only a layer's input.
    return policy if policy in ("none", "minimal") else "full"


def _denominator(
    model: records.EncoderDecoderModel, places: Places
) -> float | LossDenominator | None:
    factor = model.loss_normalizing_factor
    # bool is a subclass of int, and True is no divisor.
    if isinstance(factor, int | float) and not isinstance(factor, bool):
        return float(factor)
    # T5X accepts these words in lower case too.
    word = factor.upper() if isinstance(factor, str) else factor
    if word not in _DENOMINATORS:
        raise places.refused(
            f"{MODEL}.loss_normalizing_factor",
            factor,
            "it must be None, a number or the name of a way to normalise.",
            f"Bind one of {', '.join(str(name) for name in _DENOMINATORS)}, or a number.",
        )
    return _DENOMINATORS[word]
