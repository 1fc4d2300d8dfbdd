"""Turns T5X's model and partitioner into ModelConfig, DTypePolicy and Layout.

`differences` lists what a run does otherwise than T5X with equal results.
"""

from __future__ import annotations

import math
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from t0repro.config.run_config import (
    Activation,
    Arithmetic,
    DType,
    DTypePolicy,
    Layout,
    LossDenominator,
    ModelConfig,
    Recompute,
)
from t0repro.config.t5x import records
from t0repro.config.t5x.gin_files import Parsed, Places
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


def model_fields() -> dict[str, str]:
    """Fields of the model and of its dtypes."""
    names = {f"model.{field}": name for field, name in FIELDS.items()}
    return names | {"dtypes.activation": "network.T5Config.dtype"}


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


# ---- The partitioner -----------------------------------------------------------------------------

# T5X's rules for axes that are sharded here too: (logical axis, mesh axis). The rule ("embed",
# "data"), for parameters, means full sharding.
_KNOWN = {
    ("batch", "data"),
    ("vocab", "model"),
    ("mlp", "model"),
    ("heads", "model"),
    ("joined_kv", "model"),
}
_FULLY_SHARDED = ("embed", "data")
_MESH_AXES = ("data", "model", "replica")
_PARTITIONER = "partitioning.PjitPartitioner"
_RULES = "partitioning.standard_logical_axis_rules"
_NOT_DONE = "not done here; it would change memory and speed, not results"


def layout_of(partitioner: records.PjitPartitioner, places: Places) -> Layout:
    """The layout of a PjitPartitioner; its data axis follows the number of devices.

    Raises:
      UserError: for sizes or rules that T5X would refuse too, with the place that set them.
    """
    _check(partitioner, places)
    name = next(iter(_sizes(partitioner)), None)
    ici, dcn = partitioner.ici_mesh_shape or {}, partitioner.dcn_mesh_shape or {}
    by_shape = name in ("ici_mesh_shape", "dcn_mesh_shape")
    return Layout(
        data=_along("data", ici, dcn) * _along("replica", ici, dcn) if by_shape else None,
        model=_sizes(partitioner)[name] if name else 1,
        fully_sharded=_fully_sharded(partitioner.logical_axis_rules),
    )


def partitioner_differences(partitioner: records.PjitPartitioner, places: Places) -> Iterator[str]:
    """What a partitioner requests but does not get here, with the place that requests it."""
    used, *unused = [*_sizes(partitioner), None]
    for name in unused:
        if name is not None:
            yield places.said(
                f"{_PARTITIONER}.{name}",
                f" = {getattr(partitioner, name)!r} has no effect: {used} wins, as in T5X",
            )
    rules = partitioner.logical_axis_rules
    if isinstance(rules, records.AxisRules) and rules.activation_partitioning_dims == 2:
        yield places.said(f"{_RULES}.activation_partitioning_dims", f" = 2: {_NOT_DONE}")
    for rule in _pairs(rules):
        if rule[1] is not None and rule not in _KNOWN | {_FULLY_SHARDED}:
            yield places.said(_name_of_rules(rules), f": the rule {rule!r}: {_NOT_DONE}")


def _sizes(partitioner: records.PjitPartitioner) -> dict[str, int]:
    """The number of devices that share a model, by argument; the first argument counts.

    T5X reads both mesh shapes or neither, then the submesh, then the number of partitions.
    """
    ici, dcn = partitioner.ici_mesh_shape, partitioner.dcn_mesh_shape
    submesh = partitioner.model_parallel_submesh
    along = _along("model", ici or {}, dcn or {})
    shapes = {
        name: along for name, shape in (("ici_mesh_shape", ici), ("dcn_mesh_shape", dcn)) if shape
    }
    sizes = {
        "model_parallel_submesh": math.prod(submesh) if submesh else None,
        "num_partitions": partitioner.num_partitions,
    }
    others = {name: size for name, size in sizes.items() if size is not None}
    if len(shapes) == 2:
        return {"ici_mesh_shape": along, **others}
    # T5X reads no single mesh shape, so one counts only if nothing else is given.
    return {**others, **shapes}


def _check(partitioner: records.PjitPartitioner, places: Places) -> None:
    submesh = partitioner.model_parallel_submesh
    if submesh and (len(submesh) != 4 or min(submesh) < 1):
        raise places.refused(
            f"{_PARTITIONER}.model_parallel_submesh",
            submesh,
            "a submesh has four sizes of at least 1: x, y, z and cores.",
            "Bind four sizes, such as (2, 1, 1, 1).",
        )
    for name in ("ici_mesh_shape", "dcn_mesh_shape"):
        shape = getattr(partitioner, name) or {}
        if not set(shape) <= set(_MESH_AXES) or min(shape.values(), default=1) < 1:
            raise places.refused(
                f"{_PARTITIONER}.{name}",
                shape,
                f"a mesh has sizes of at least 1 along {', '.join(_MESH_AXES)}.",
                "Bind {'data': 4, 'model': 2}, say.",
            )
    rules = partitioner.logical_axis_rules
    if isinstance(rules, records.AxisRules):
        for name in ("activation_partitioning_dims", "parameter_partitioning_dims"):
            if getattr(rules, name) not in (1, 2):
                raise places.refused(
                    f"{_RULES}.{name}", getattr(rules, name), "it must be 1 or 2.", "Bind 1 or 2."
                )
    for axis, along in _pairs(rules):
        if along not in (None, *_MESH_AXES):
            raise places.refused(
                _name_of_rules(rules),
                (axis, along),
                f"a mesh has no axis {along!r}.",
                f"Choose one of {', '.join(_MESH_AXES)}, or None.",
            )


def _along(axis: str, *meshes: Mapping[str, int]) -> int:
    """Devices along an axis, within slices and across them."""
    return math.prod(mesh.get(axis, 1) for mesh in meshes)


def _fully_sharded(rules: Any) -> bool:
    """Whether the rules shard parameters along the data axis."""
    # Two dimensions mean that parameters are sharded along data as well.
    both = isinstance(rules, records.AxisRules) and rules.parameter_partitioning_dims == 2
    return both or _FULLY_SHARDED in _pairs(rules)


def _pairs(rules: Any) -> list[tuple[str, str | None]]:
    """The rules that a user adds to T5X's own, with one mesh axis each."""
    given = rules.additional_rules if isinstance(rules, records.AxisRules) else rules
    return [
        (axis, part)
        for axis, along in given or ()
        # JAX takes several mesh axes for one axis of an array.
        for part in ([along] if along is None or isinstance(along, str) else along)
    ]


def _name_of_rules(rules: Any) -> str:
    if isinstance(rules, records.AxisRules):
        return f"{_RULES}.additional_rules"
    return f"{_PARTITIONER}.logical_axis_rules"


# ---- What a run reads but does differently from T5X without changing its results -----------------


def differences(parsed: Parsed) -> list[str]:
    """A line for each argument that takes effect differently here, with the place that sets it."""
    program, places = parsed.program, Places.of(parsed.values)
    lines = list(partitioner_differences(program.partitioner, places))
    if getattr(program, "use_hardware_rng", False):
        lines.append(
            places.said(
                "train.use_hardware_rng",
                " = True: JAX's default generator is used all the same, whose numbers are the same"
                " on every device",
            )
        )
    return lines
