"""The table of parameter names and axes through which every checkpoint format is translated.

Inside the package, a tensor of a checkpoint is identified by its path in T5X's tree, as a flat key:

    target/<path>                          a parameter
    state/param_states/<path>/<slot>       an optimizer slot: v, v_row, v_col or m
    state/step                             the global step, int32

and each format translates its own names to and from these. Mesh TensorFlow's names come from
checkpoints that mesh_tensorflow 0.1.21 and t5 0.9.4 wrote, T5X's from t5x/checkpoint_importer.py.
Neither direction transposes or scales anything; only the factored slots of square matrices swap
names (`factored_slots`).
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal

STEP = "state/step"
MTF_STEP = "global_step"
PARAMETERS = "target/"
SLOTS = "state/param_states/"
ADAFACTOR_SLOTS = ("v_row", "v_col", "v", "m")  # T5X's names
# Of mesh_tensorflow.optimize's AdamWeightDecayOptimizer and MomentumOptimizer; each slot has its
# parameter's shape.
ADAM_SLOTS, MOMENTUM_SLOTS = ("adam_m", "adam_v"), ("momentum_v",)
# Slots -> what stands between a variable's name and theirs in Mesh TensorFlow; Adafactor's: _slot_.
WHOLE_SLOTS = {ADAM_SLOTS: "/", MOMENTUM_SLOTS: "_"}
_JOINED_BY = {slot: sign for slots, sign in WHOLE_SLOTS.items() for slot in slots}
# optax's names for Adam's moments in a checkpoint with T5X's tree.
_OPTAX = {"adam_m": "mu", "adam_v": "nu"}
OPTAX_COUNT = f"{SLOTS}0/count"
SLOT_NAMES = (*ADAFACTOR_SLOTS, *_JOINED_BY)
RELATIVE_BIAS = "relpos_bias/rel_embedding"  # of a tower or, in umT5, of each of its layers
# Replaces a tower's single layers while they are stacked; never in a checkpoint.
LAYERS = "layers_*"

# bi_v1_shared names the decoder's layers by kind while other models number them, so that the
# encoder's layers are the same variables.
SHARED_LAYERS = ("self_attention", "enc_dec_attention", "dense_relu_dense")

NormNames = Literal["rms_norm", "layer_norm"]
Column = Literal["t5x", "mtf", "hf"]


@dataclasses.dataclass(frozen=True)
class Row:
    """One kind of parameter: its name in each format, and its axes.

    Attributes:
      t5x: Path in T5X's tree; `{layer}` stands for the layer number, as it does in `mtf` and `hf`.
      mtf: Name of Mesh TensorFlow's variable.
      hf: Name in transformers' T5ForConditionalGeneration; "" if it has no such model.
      axes: The size of each axis, as a field or property of `ModelShape`
        (t0repro.parameters.shape); `joined_kv` is num_heads * d_kv.
    """

    t5x: str
    mtf: str
    hf: str
    axes: tuple[str, ...]

    @property
    def tower(self) -> str | None:
        """The tower that has the parameter in every layer; None if it occurs only once."""
        return self.t5x.partition("/")[0] if "{layer}" in self.t5x else None

    @property
    def bias_per_layer(self) -> bool | None:
        """Whether it occurs only in models with a position bias per layer; None: in all models."""
        return bool(self.tower) if self.t5x.endswith(RELATIVE_BIAS) else None

    @property
    def transposed_in_hf(self) -> bool:
        """Whether Hugging Face stores the transpose, as for every matrix but the embedding."""
        return len(self.axes) == 2 and self.axes != ("vocab_size", "d_model")


def _attention(tower: str, t5x: str, sublayer: int, hf: str, mtf_tower: str) -> list[Row]:
    kernels = {"q": "query", "k": "key", "v": "value", "o": "out"}
    return [
        Row(
            f"{tower}/layers_{{layer}}/{t5x}/{name}/kernel",
            f"{mtf_tower}/block_{{layer}}/layer_{sublayer:03d}/{hf}/{letter}",
            f"{tower}.block.{{layer}}.layer.{sublayer}.{hf}.{letter}.weight",
            ("joined_kv", "d_model") if letter == "o" else ("d_model", "joined_kv"),
        )
        for letter, name in kernels.items()
    ]


def _feed_forward(tower: str, sublayer: int, mtf_tower: str) -> list[Row]:
    return [
        Row(
            f"{tower}/layers_{{layer}}/mlp/{kernel}/kernel",
            f"{mtf_tower}/block_{{layer}}/layer_{sublayer:03d}/DenseReluDense/{kernel}/kernel",
            f"{tower}.block.{{layer}}.layer.{sublayer}.DenseReluDense.{kernel}.weight",
            ("d_ff", "d_model") if kernel == "wo" else ("d_model", "d_ff"),
        )
        for kernel in ("wi", "wi_0", "wi_1", "wo")
    ]


def _norms(tower: str, names: Sequence[str], mtf_tower: str) -> list[Row]:
    return [
        Row(
            f"{tower}/layers_{{layer}}/{name}/scale",
            f"{mtf_tower}/block_{{layer}}/layer_{sublayer:03d}/rms_norm/scale",
            f"{tower}.block.{{layer}}.layer.{sublayer}.layer_norm.weight",
            ("d_model",),
        )
        for sublayer, name in enumerate(names)
    ]


def _position_biases(tower: str, mtf_tower: str) -> list[Row]:
    mtf = f"{mtf_tower}/block_{{}}/layer_000/SelfAttention/relative_attention_bias"
    hf = f"{tower}.block.{{}}.layer.0.SelfAttention.relative_attention_bias.weight"
    axes = ("num_heads", "relative_attention_num_buckets")
    return [
        # In the first layer, shared by the others ('bias_shared').
        Row(f"{tower}/{RELATIVE_BIAS}", mtf.format("000"), hf.format("0"), axes),
        # One in every layer ('bias'), as in umT5 and scalable_t5.
        Row(
            f"{tower}/layers_{{layer}}/{RELATIVE_BIAS}",
            mtf.format("{layer}"),
            hf.format("{layer}"),
            axes,
        ),
    ]


def _tower_ends(tower: str, mtf_tower: str) -> list[Row]:
    return [
        *_position_biases(tower, mtf_tower),
        Row(
            f"{tower}/{tower}_norm/scale",
            f"{mtf_tower}/rms_norm/scale",
            f"{tower}.final_layer_norm.weight",
            ("d_model",),
        ),
    ]


TABLE: tuple[Row, ...] = (
    Row("token_embedder/embedding", "shared/embedding", "shared.weight", ("vocab_size", "d_model")),
    *_norms("encoder", ["pre_attention_layer_norm", "pre_mlp_layer_norm"], "encoder"),
    *_attention("encoder", "attention", 0, "SelfAttention", "encoder"),
    *_feed_forward("encoder", 1, "encoder"),
    *_tower_ends("encoder", "encoder"),
    *_norms(
        "decoder",
        ["pre_self_attention_layer_norm", "pre_cross_attention_layer_norm", "pre_mlp_layer_norm"],
        "decoder",
    ),
    *_attention("decoder", "self_attention", 0, "SelfAttention", "decoder"),
    *_attention("decoder", "encoder_decoder_attention", 1, "EncDecAttention", "decoder"),
    *_feed_forward("decoder", 2, "decoder"),
    *_tower_ends("decoder", "decoder"),
    Row(
        "decoder/logits_dense/kernel",
        "decoder/logits/kernel",
        "lm_head.weight",
        ("d_model", "vocab_size"),
    ),
)

# A decoder-only model: Mesh TensorFlow calls the tower `transformer`, T5X `decoder`. Hugging Face's
# T5 has no such model.
DECODER_ONLY: tuple[Row, ...] = tuple(
    dataclasses.replace(row, hf="")
    for row in (
        Row(
            "decoder/token_embedder/embedding",
            "transformer/embedding",
            "",
            ("vocab_size", "d_model"),
        ),
        *_norms("decoder", ["pre_self_attention_layer_norm", "pre_mlp_layer_norm"], "transformer"),
        *_attention("decoder", "self_attention", 0, "SelfAttention", "transformer"),
        *_feed_forward("decoder", 1, "transformer"),
        *_tower_ends("decoder", "transformer"),
        Row(
            "decoder/logits_dense/kernel",
            "transformer/logits/kernel",
            "",
            ("d_model", "vocab_size"),
        ),
    )
)
DECODER_ONLY_EMBEDDING = PARAMETERS + DECODER_ONLY[0].t5x


def layer_name(index: int) -> str:
    """Returns the name of a layer in T5X's tree."""
    return f"layers_{index}"


@functools.cache
def _patterns(
    column: Column, decoder_only: bool, bias_per_layer: bool | None
) -> tuple[tuple[re.Pattern[str], Row], ...]:
    # Mesh TensorFlow pads layer numbers to three digits and does not truncate longer ones.
    number = r"(?P<layer>\d{3,})" if column == "mtf" else r"(?P<layer>\d+)"
    return tuple(
        # re.escape has put backslashes before the braces of {layer}.
        (re.compile(re.escape(getattr(row, column)).replace(r"\{layer\}", number)), row)
        for row in (DECODER_ONLY if decoder_only else TABLE)
        if getattr(row, column)
        and (bias_per_layer is None or row.bias_per_layer in (None, bias_per_layer))
    )


def find_row(
    name: str,
    column: Column,
    decoder_only: bool = False,
    bias_per_layer: bool | None = None,
) -> tuple[Row, int | None] | None:
    """Finds the row and layer number of a parameter by its name in one format, or returns None.

    Args:
      name: The name.
      column: The format.
      decoder_only: Whether the model has no encoder.
      bias_per_layer: Whether each layer of the model has its own position bias. In every format but
        T5X's, the first layer's has the name of the bias that other models share; None assumes the
        shared one.
    """
    for pattern, row in _patterns(column, decoder_only, bias_per_layer):
        if match := pattern.fullmatch(name):
            layer = int(match["layer"]) if row.tower else None
            # Accept only the canonical spelling of a number: not block_0001, not layers_01.
            return (row, layer) if name_of(row, layer, column) == name else None
    return None


def name_of(row: Row, layer: int | None, column: Column) -> str:
    """Returns the name of a row's parameter in one layer, in one format."""
    number = f"{layer:03d}" if column == "mtf" and layer is not None else str(layer)
    return getattr(row, column).replace("{layer}", number)


def mtf_to_path(variable: str, bias_per_layer: bool | None = None) -> str | None:
    """Returns T5X's path of a Mesh TensorFlow parameter (old norm names too), None if unknown.

    Args:
      variable: Its name.
      bias_per_layer: See `find_row`.
    """
    # Only decoder-only models have this tower; no other variable's name starts like this.
    decoder_only = variable.startswith("transformer/")
    name = _number_layers(modern_norm_name(variable))
    found = find_row(name, "mtf", decoder_only, bias_per_layer)
    return found and name_of(*found, "t5x")


def has_bias_per_layer(paths: Iterable[str | None]) -> bool:
    """Returns whether T5X's paths belong to a model with a position bias in each layer.

    If each tower has one layer and the paths come from another format's names, the two cases have
    the same names, and the model counts as one with a shared bias.
    """
    return any(path and path.endswith(RELATIVE_BIAS) and "/layers_" in path for path in paths)


def path_to_mtf(
    path: str,
    norm_names: NormNames = "rms_norm",
    decoder_only: bool = False,
    shared_towers: bool = False,
) -> str | None:
    """Returns Mesh TensorFlow's name of the parameter at a T5X path, or None if it is unknown."""
    found = find_row(path, "t5x", decoder_only)
    if not found:
        return None
    name = name_of(*found, "mtf")
    if shared_towers:
        for number, layer in enumerate(SHARED_LAYERS):
            name = name.replace(f"/layer_{number:03d}/", f"/{layer}/")
    return old_norm_name(name) if norm_names == "layer_norm" else name


def names_shared_layer(variable: str) -> bool:
    """Returns whether a Mesh TensorFlow variable belongs to a shared layer (bi_v1_shared)."""
    return _number_layers(variable) != variable


def _number_layers(variable: str) -> str:
    """Returns the name of a shared layer's variable in an ordinary decoder."""
    for number, layer in enumerate(SHARED_LAYERS):
        variable = re.sub(rf"^(decoder/block_\d+)/{layer}/", rf"\1/layer_{number:03d}/", variable)
    return variable


def has_shared_towers(names: Collection[str]) -> bool:
    """Returns whether the keys belong to a bi_v1_shared model, whose encoder has no parameters."""
    encoder = PARAMETERS + "encoder/"
    return PARAMETERS + TABLE[0].t5x in names and not any(n.startswith(encoder) for n in names)


def is_decoder_only(names: Collection[str]) -> bool:
    """Returns whether the flat keys belong to a decoder-only model."""
    return DECODER_ONLY_EMBEDDING in names


def known_names(column: Column, layers: Iterable[int], decoder_only: bool = False) -> list[str]:
    """Lists every parameter's name in one format, for suggesting the nearest to unknown ones."""
    layers = sorted({*layers, 0})
    names = [
        name_of(row, layer, column)
        for row in (DECODER_ONLY if decoder_only else TABLE)
        for layer in layers
    ]
    # Remove duplicates: rows outside of layers repeat, and two kinds of position bias share a name.
    return list(dict.fromkeys(names))


def modern_norm_name(variable: str) -> str:
    """Replaces the norm names of T5 1.0's released checkpoints (layer_norm) with today's.

    Mesh TensorFlow uses the old names when gin binds LayerStack.norm_epsilon (its legacy mode).
    """
    tower = "(encoder|decoder|transformer)"
    if re.fullmatch(rf"{tower}/block_\d+/\w+/layer_norm/scale", variable):
        return variable.replace("/layer_norm/", "/rms_norm/")
    if re.fullmatch(rf"{tower}/final_layer_norm/scale", variable):
        return variable.replace("/final_layer_norm/", "/rms_norm/")
    return variable


def old_norm_name(variable: str) -> str:
    """The inverse of `modern_norm_name`."""
    old = "/layer_norm/" if "/block_" in variable else "/final_layer_norm/"
    return variable.replace("/rms_norm/", old)


def split_mtf_slot(variable: str) -> tuple[str, str | None]:
    """Splits a Mesh TensorFlow variable into parameter and slot: `a/b_slot_vr` is ("a/b", "vr")."""
    if match := re.fullmatch(r"(.+)_slot_(vr|vc|v|m)", variable):
        return match[1], match[2]
    for slot, sign in _JOINED_BY.items():
        if variable.endswith(f"{sign}{slot}"):
            return variable.removesuffix(f"{sign}{slot}"), slot
    return variable, None


def join_mtf_slot(variable: str, slot: str) -> str:
    """The inverse of `split_mtf_slot`."""
    return f"{variable}{_JOINED_BY.get(slot, '_slot_')}{slot}"


def slot_key(path: str, slot: str) -> str:
    """Returns the flat key of a parameter's slot."""
    return f"{SLOTS}{path}/{slot}"


def split_key(key: str) -> tuple[str, str | None]:
    """Splits a flat key into parameter path and slot: `state/param_states/a/b/v` is ("a/b", "v").

    Raises:
      ValueError: If the key is neither a parameter's nor a slot's.
    """
    if key.startswith(PARAMETERS):
        return key.removeprefix(PARAMETERS), None
    path, _, slot = key.removeprefix(SLOTS).rpartition("/")
    if key.startswith(SLOTS) and path and slot in SLOT_NAMES:
        return path, slot
    raise ValueError(f"{key!r} is neither a parameter nor a slot.")


def to_optax(key: str) -> str:
    """Returns a flat key's name in T5X's tree; Adam's moments get their places in optax.adam.

    Raises:
      ValueError: See `split_key`.
    """
    path, slot = ("", None) if key == STEP else split_key(key)
    return f"{SLOTS}0/{_OPTAX[slot]}/{path}" if slot in _OPTAX else key


def from_optax(name: str) -> str | None:
    """Returns the flat key of a name in T5X's tree; None for optax's step counters.

    optax.adam may be anywhere in a chain of transformations, nested chains included.
    """
    if match := re.fullmatch(rf"{SLOTS}(?:\d+/)+(mu|nu)/(.+)", name):
        slot = {moment: slot for slot, moment in _OPTAX.items()}[match[1]]
        return slot_key(match[2], slot)
    return None if re.fullmatch(rf"{SLOTS}(\d+/)+count", name) else name


def mtf_dropped_axes(shape: Sequence[int]) -> dict[str, int]:
    """Returns the axis that each of Mesh TensorFlow's factored slots averages over.

    AdafactorOptimizer._factored_dims sorts the dimensions by size, descending and stably; vr drops
    the first, vc the second.
    """
    first, second = sorted(range(len(shape)), key=lambda axis: -shape[axis])[:2]
    return {"vr": first, "vc": second}


def t5x_dropped_axes(shape: Sequence[int]) -> dict[str, int]:
    """Returns the axis that each of T5X's factored slots averages over.

    t5x/adafactor.py takes np.argsort(shape), ascending; v_row drops the last, v_col the one before.
    np.argsort is stable for so few elements, because it uses insertion sort for them.
    """
    *_, before_last, last = sorted(range(len(shape)), key=lambda axis: shape[axis])
    return {"v_row": last, "v_col": before_last}


def factored_slots(shape: Sequence[int]) -> dict[str, str]:
    """Maps Mesh TensorFlow's factored slots to T5X's: {"vr": ..., "vc": ...}.

    Two slots are the same if they average over the same axis of the parameter. So vr is v_row and
    vc is v_col if the two largest axes differ in size. If they are equal, as in nearly every
    attention kernel, vr is v_col and vc is v_row. (T5X's own importer always uses the former.)

    Args:
      shape: The parameter's shape, two axes or more.

    Raises:
      ValueError: If the two libraries factor different pairs of axes, which needs three axes of
        which the second and third largest are equal; no T5 has such a parameter.
    """
    t5x = {axis: slot for slot, axis in t5x_dropped_axes(shape).items()}
    mtf = mtf_dropped_axes(shape)
    if set(t5x) != set(mtf.values()):
        raise ValueError(f"The factored slots of shape {tuple(shape)} have no counterparts.")
    return {slot: t5x[axis] for slot, axis in mtf.items()}


def slot_from_mtf(slot: str, shape: Sequence[int]) -> str:
    """Returns T5X's name of Mesh TensorFlow's slot (vr, vc, v or m) for a parameter's shape."""
    return factored_slots(shape)[slot] if slot in ("vr", "vc") else slot


def slot_to_mtf(slot: str, shape: Sequence[int]) -> str:
    """The inverse of `slot_from_mtf`."""
    if slot not in ("v_row", "v_col"):
        return slot
    return {t5x: mtf for mtf, t5x in factored_slots(shape).items()}[slot]


def exchange_tied_slots(key: str, shapes: Mapping[str, Sequence[int]]) -> str:
    """Translates a slot's key to the one that T5X's importer gives it, or back.

    The importer always renames vr to v_row and vc to v_col, so the two are swapped exactly where
    the parameter's two largest axes have the same size.

    Args:
      key: Any flat key; those of other tensors are returned unchanged.
      shapes: Flat key -> shape of each parameter.
    """
    if not key.startswith(SLOTS):
        return key
    path, slot = split_key(key)
    other = {"v_row": "v_col", "v_col": "v_row"}.get(slot or "")
    shape = shapes.get(PARAMETERS + path, ())
    # Where vr is v_row, T5X's importer and this table agree.
    if other is None or len(shape) < 2 or factored_slots(shape)["vr"] == "v_row":
        return key
    return slot_key(path, other)


def slot_shape(slot: str, shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the shape of a T5X slot, given its parameter's shape."""
    if slot not in ("v_row", "v_col"):
        return tuple(shape)
    dropped = t5x_dropped_axes(shape)[slot]
    return tuple(size for axis, size in enumerate(shape) if axis != dropped)
