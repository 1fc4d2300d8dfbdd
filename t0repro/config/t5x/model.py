"""Turns T5X's model into a ModelConfig, a DTypePolicy, and how it generates."""

from __future__ import annotations

import typing
from typing import Any

from t0repro.config.data import VOCABULARIES, Converter
from t0repro.config.decoding import DecodingPlan
from t0repro.config.model import (
    Activation,
    Arithmetic,
    DType,
    DTypePolicy,
    LossDenominator,
    ModelConfig,
)
from t0repro.config.t5x.arguments import DECODER_ONLY, PASS_THROUGH
from t0repro.config.t5x.calls import Call, build, call_with_defaults
from t0repro.errors import nearest_names

# T5X looks an activation up in flax.linen by name; `linear` is its own.
_ACTIVATIONS = frozenset(typing.get_args(Activation)) - {"gelu_exact"}
_CASTS_NO_LOGITS = {"float32_attention_logits": False}
# T5X's None is the plain sum; here None, as in Mesh TensorFlow, divides by all targets of a batch.
_DENOMINATORS: dict[Any, float | LossDenominator | None] = {
    None: 1.0,
    "NUM_TOTAL_TARGET_TOKENS": None,
    "NUM_REAL_TARGET_TOKENS": "NUM_REAL_TARGET_TOKENS",
    "AVERAGE_PER_SEQUENCE": "AVERAGE_PER_SEQUENCE",
}


def read_model(program: Call, places: dict[str, str]) -> ModelConfig:
    """The model of a program, computed as T5X computes it, without an adapter.

    Raises:
      UserError: For a value without a counterpart here, with its place.
    """
    model: Call = program["model"]
    shape = model["module"]["config"]
    for name in shape["mlp_activations"]:
        if name not in _ACTIVATIONS:
            why = f"there is no activation {name!r} here."
            fix = f"Nearest names: {nearest_names(str(name), _ACTIVATIONS)}."
            shape.refuse("mlp_activations", why, fix)
    decoder_only = {}
    if model.configurable == DECODER_ONLY:
        places["model.num_decoder_layers"] = shape.places.get("num_layers", "")
        decoder_only = {
            "model_type": "lm",
            "num_encoder_layers": 0,
            "num_decoder_layers": shape["num_layers"],
            "input_full_attention": model["inputs_bidirectional_attention"],
        }
    layers = [shape.arguments.get(f"num_{tower}_layers", 0) for tower in ("encoder", "decoder")]
    # The decoder-only network has no such argument and casts nothing.
    casts = {} if "float32_attention_logits" in shape.arguments else _CASTS_NO_LOGITS
    # The policy that scalable_t5 has; there, one of any other name keeps only a layer's input.
    policy = shape.arguments.get("remat_policy") or "none"
    return program.read(
        ModelConfig,
        places,
        "model.",
        # scalable_t5 has a position bias in each layer; with one layer, that equals a shared one.
        position_bias_per_layer=shape.configurable.startswith("scalable_t5") and max(layers) > 1,
        loss_denominator=_denominator(model),
        recompute=policy if policy in ("none", "minimal") else "full",
        arithmetic=program.read(Arithmetic, places, "model.arithmetic.", **casts),
        adapter=None,
        choice_loss=None,
        **decoder_only,
    )


def read_converter(model: Call) -> Converter:
    """How a model's examples become batches.

    Raises:
      UserError: For a converter that is not supported here.
    """
    is_decoder_only, converter = model.configurable == DECODER_ONLY, model["feature_converter_cls"]
    if isinstance(converter, Call) and converter.configurable == PASS_THROUGH:
        return "pass_through"
    standard = (
        "seqio.DecoderFeatureConverter" if is_decoder_only else "seqio.EncDecFeatureConverter"
    )
    name = converter.configurable if isinstance(converter, Call) else converter
    if name not in (None, standard):
        model.refuse(
            "feature_converter_cls",
            f"examples are converted as {standard} does, or passed through; there is no other"
            " converter.",
            f"Remove the binding, or bind @{PASS_THROUGH}.",
        )
    return "decoder" if is_decoder_only else "encoder_decoder"


def read_vocabularies(model: Call, places: dict[str, str]) -> tuple[Any, Any]:
    """A model's vocabularies of inputs and of outputs.

    Raises:
      UserError: For a value that is neither a vocabulary of SeqIO's nor a user's own.
    """
    vocabularies = []
    names = ("input_vocabulary", "output_vocabulary")
    for name in ("vocabulary",) * 2 if model.configurable == DECODER_ONLY else names:
        vocabulary = build(model[name], places, f"{name}.")
        # A user's own subclasses seqio.Vocabulary, but reading gin files does not import seqio.
        if not isinstance(vocabulary, VOCABULARIES) and not hasattr(vocabulary, "encode_tf"):
            model.refuse(
                name,
                "it must be a vocabulary.",
                "Bind @seqio.SentencePieceVocabulary(), @seqio.ByteVocabulary() or"
                " @seqio.PassThroughVocabulary().",
            )
        vocabularies.append(vocabulary)
    return vocabularies[0], vocabularies[1]


def read_dtypes(program: Call, places: dict[str, str], saved: Any) -> DTypePolicy:
    """The dtypes of a run's computation and checkpoints; parameters in memory are float32.

    Args:
      program: The run's call.
      places: Field -> where its value was set; filled in.
      saved: Dtype of parameters in checkpoints; None for float32.

    Raises:
      UserError: If the computation's is neither float32 nor bfloat16.
    """
    shape = program["model"]["module"]["config"]
    value = shape["dtype"]
    # By its name, or as an attribute of jax.numpy.
    name = value if isinstance(value, str) else getattr(value, "__name__", str(value))
    if name not in typing.get_args(DType):
        shape.refuse("dtype", "the type must be float32 or bfloat16.", "Bind one of them.")
    saved = saved or "float32"
    return program.read(DTypePolicy, places, "dtypes.", master=saved, activation=name)


def _denominator(model: Call) -> float | LossDenominator | None:
    factor = model["loss_normalizing_factor"]
    # bool is a subclass of int, and True is not a divisor.
    if isinstance(factor, int | float) and not isinstance(factor, bool):
        return float(factor)
    # T5X accepts these words in lower case too.
    word = factor.upper() if isinstance(factor, str) else factor
    if word not in _DENOMINATORS:
        model.refuse(
            "loss_normalizing_factor",
            "it must be None, a number or the name of a way to normalize.",
            f"Bind one of {', '.join(str(name) for name in _DENOMINATORS)}, or a number.",
        )
    return _DENOMINATORS[word]


def read_decoding(program: Call, places: dict[str, str], prefix: str) -> DecodingPlan:
    """The decoding options of a program's model.

    T5X's default is a beam search or, without an encoder, sampling.

    Raises:
      UserError: For an option that is not supported here, with its place.
    """
    model: Call = program["model"]
    function = model["decode_fn"]
    if function is None:
        samples = model.configurable == DECODER_ONLY
        name = "temperature_sample" if samples else "beam_search"
        function = call_with_defaults(f"decoding.{name}")
    if not isinstance(function, Call) or not function.configurable.startswith("decoding."):
        model.refuse(
            "decode_fn",
            "outputs are found by beam search or by sampling.",
            "Bind @decoding.beam_search or @decoding.temperature_sample.",
        )
    method: Any = function.configurable.partition(".")[2]
    predict = model["predict_batch_with_aux"]
    # Option -> the call and the argument that decide it. T5X passes the parameters and its own
    # number of decodes as arguments, so they override what gin binds for the function.
    set_by = {key: (function, key) for key in function.arguments}
    options = dict(function.arguments)
    for call, argument in ((model, "default_decoder_params"), (predict, "decoder_params")):
        given = call.arguments.get(argument) or {}
        set_by |= dict.fromkeys(given, (call, argument))
        options |= given
    options.pop("num_decodes", None)
    # T5X takes the lower of the two, so one number is enough.
    limit, steps = options.pop("max_decode_steps_hard_limit", None), options.get("max_decode_steps")
    if limit and steps is not None:
        options["max_decode_steps"] = min(steps, limit)
    known = DecodingPlan.__dataclass_fields__.keys() - {"num_decodes"}
    for key, value in options.items():
        call, argument = set_by[key]
        if key not in known:
            call.refuse(
                argument,
                f"decoding.{method} has no argument {key} here.",
                f"Known: {', '.join(sorted(known))}.",
                value={key: value},
            )
        if argument in call.places:
            places[f"{prefix}{key}"] = call.places[argument]
    # T5X raises for this too, but only once it decodes.
    if method == "temperature_sample" and options["topk"] and options["topp"]:
        call, argument = set_by["topp"]
        call.refuse(
            argument,
            f"at most one of topk ({options['topk']}) and topp may be other than 0.",
            "Bind decoding.temperature_sample.topk = 0.",
            value=options["topp"],
        )
    return program.read(DecodingPlan, places, prefix, method=method, **options)
