"""The sizes of a T5, recognized from its tensors, and what follows from them.

They give its parameters, name, variables and factored axes.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from t0repro.errors import UserError, nearest_names
from t0repro.parameters import naming
from t0repro.words import counted, some

# Sizes by (layers, d_model, d_ff, num_heads, d_kv), from the gin files models/t5.1.{0,1}.*.gin of
# t5 0.9.4; UL2's from its model card. mT5 has T5 1.1's; others' own are in `ModelShape._relative`.
_SIZES = {
    "T5 1.0": {
        (6, 512, 2048, 8, 64): "small",
        (12, 768, 3072, 12, 64): "base",
        (24, 1024, 4096, 16, 64): "large",
        (24, 1024, 16384, 32, 128): "3B",
        (24, 1024, 65536, 128, 128): "11B",
    },
    "T5 1.1": {
        (8, 512, 1024, 6, 64): "small",
        (12, 768, 2048, 12, 64): "base",
        (24, 1024, 2816, 16, 64): "large",
        (24, 2048, 5120, 32, 64): "XL",
        (24, 4096, 10240, 64, 64): "XXL",
        (32, 4096, 16384, 16, 256): "UL2",
    },
}


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """The sizes of a T5.

    Attributes:
      num_encoder_layers: 0 in a decoder-only model.
      num_decoder_layers: 0 in an encoder alone.
      d_kv: Width of one attention head.
      vocab_size: Rows of the embedding, including padding.
      wi_kernels: Input kernels of the feed-forward layer: ("wi",), or ("wi_0", "wi_1") when gated.
      tied: The logits come from the embedding; they have no kernel of their own.
      shared_towers: The encoder uses the decoder's parameters and has none of its own
        (bi_v1_shared).
      position_bias_per_layer: Each layer has its own relative position bias, as in umT5; otherwise
        all layers of a tower share one.
    """

    num_encoder_layers: int
    num_decoder_layers: int
    d_model: int
    d_ff: int
    num_heads: int
    d_kv: int
    vocab_size: int
    relative_attention_num_buckets: int
    wi_kernels: tuple[str, ...]
    tied: bool
    shared_towers: bool = False
    position_bias_per_layer: bool = False

    @property
    def gated(self) -> bool:
        """Whether the feed-forward layer is gated, as in T5 1.1."""
        return len(self.wi_kernels) == 2

    @property
    def name(self) -> str:
        """Family and size, for instance "T5 1.1 XL"; the family alone if the size has no name."""
        if self.decoder_only:
            return "T5, decoder only"
        if self.encoder_only:
            return f"encoder of {self._family_of_encoder()}"
        if self.shared_towers:
            return "T5, shared towers"
        if self.position_bias_per_layer:
            umt5 = self.gated and not self.tied
            return self._relative("umT5") if umt5 else "T5, a position bias in each layer"
        # T5 1.0 is ReLU and tied, T5 1.1 gated and untied; other combinations have no name.
        if self.gated == self.tied:
            return f"T5, {'gated' if self.gated else 'ReLU'}, {'tied' if self.tied else 'untied'}"
        family = "T5 1.1" if self.gated else "T5 1.0"
        # These families share T5 1.1's architecture; only their vocabularies distinguish them.
        if self.gated and self.vocab_size == 384:
            return self._relative("ByT5")
        if self.gated and self.vocab_size == 256_000:
            return self._relative("MADLAD-400")
        if self.gated and self.vocab_size >= 250_000:
            return self._relative("mT5")
        sizes = (self.d_model, self.d_ff, self.num_heads, self.d_kv)
        # Every published size has equally many layers in both towers.
        if self.num_encoder_layers != self.num_decoder_layers:
            return family
        size = _SIZES[family].get((self.num_encoder_layers, *sizes))
        return f"{family} {size}" if size else family

    def _family_of_encoder(self) -> str:
        """The family of which this could be the encoder, whose decoder would be as deep."""
        # What is tied to the embedding belongs to the decoder: T5 1.0 is the family without gates.
        whole = dataclasses.replace(
            self, num_decoder_layers=self.num_encoder_layers, tied=not self.gated
        )
        return whole.name

    def _relative(self, family: str) -> str:
        """Family and size of a model built like T5 1.1, possibly in sizes of its own."""
        own = {
            ("ByT5", 12, 4, 1472): "small",
            ("ByT5", 18, 6, 1536): "base",
            ("ByT5", 36, 12, 1536): "large",
            ("ByT5", 36, 12, 2560): "XL",
            ("ByT5", 36, 12, 4672): "XXL",
            ("MADLAD-400", 32, 32, 1024): "3B",
            ("MADLAD-400", 48, 48, 2048): "7B",
            ("MADLAD-400", 32, 32, 2048): "10B",
        }
        layers = (self.num_encoder_layers, self.num_decoder_layers)
        sizes = (self.d_model, self.d_ff, self.num_heads, self.d_kv)
        # ByT5's towers differ in depth; its widths and MADLAD-400's differ from T5's.
        size = own.get((family, *layers, self.d_model))
        if not size and layers[0] == layers[1]:
            size = _SIZES["T5 1.1"].get((layers[0], *sizes))
        return f"{family} {size}" if size else family

    @property
    def decoder_only(self) -> bool:
        """Whether there is no encoder."""
        return self.num_encoder_layers == 0

    @property
    def encoder_only(self) -> bool:
        """Whether there is an encoder alone, as in transformers' T5EncoderModel."""
        return self.num_decoder_layers == 0

    @property
    def joined_kv(self) -> int:
        """Width of an attention kernel: all heads together."""
        return self.num_heads * self.d_kv

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Returns T5X path -> shape of every parameter, in the table's order."""
        layers = {"encoder": self.num_encoder_layers, "decoder": self.num_decoder_layers}
        shapes = {}
        for row in naming.DECODER_ONLY if self.decoder_only else naming.TABLE:
            absent = "encoder/" if self.shared_towers else "decoder/" if self.encoder_only else None
            if not self._has(row) or (absent and row.t5x.startswith(absent)):
                continue
            shape = tuple(getattr(self, axis) for axis in row.axes)
            for layer in range(layers[row.tower]) if row.tower else [None]:
                shapes[naming.name_of(row, layer, "t5x")] = shape
        return shapes

    def mesh_variables(self, norm_names: naming.NormNames = "rms_norm") -> dict[str, str]:
        """Returns T5X path -> Mesh TensorFlow's variable name, for every parameter."""
        names = {}
        for path in self.parameters():
            name = naming.path_to_mtf(path, norm_names, self.decoder_only, self.shared_towers)
            assert name is not None, path
            names[path] = name
        return names

    def _has(self, row: naming.Row) -> bool:
        if row.bias_per_layer is not None:
            return row.bias_per_layer == self.position_bias_per_layer
        if row.t5x == "decoder/logits_dense/kernel":
            return not self.tied
        # Keep only this model's kernels of wi, wi_0 and wi_1; all models have every other
        # parameter.
        kernel = row.t5x.split("/")[-2]
        return not kernel.startswith("wi") or kernel in self.wi_kernels

    def parameter_count(self) -> int:
        """Returns the number of parameters, not counting slots."""
        return sum(math.prod(shape) for shape in self.parameters().values())


def describe(shape: ModelShape) -> str:
    """Describes a model's sizes in one line."""
    return (
        f"{shape.num_encoder_layers}+{shape.num_decoder_layers} layers, d_model {shape.d_model},"
        f" d_ff {shape.d_ff}, {shape.num_heads} heads of {shape.d_kv},"
        f" vocabulary {shape.vocab_size}"
    )


def both_sizes(stored: Mapping[str, Sequence[int]], model: Mapping[str, Sequence[int]]) -> str:
    """A sentence on the sizes of a checkpoint and of a model, whose parameters have these shapes.

    It is empty if one of them is no T5.
    """
    try:
        return f" It has {describe(recognize(stored))}; the model {describe(recognize(model))}."
    except UserError:
        return ""


# Mesh TensorFlow factors the two longest axes of a parameter of any rank. T5X requires a rule for
# every parameter with more than two axes, and ignores it for most others. Here, a rule is text:
#
#     unfactored        the second moment is not factored (in T5X, None)
#     heuristic         the two longest axes, as in Mesh TensorFlow; at most two axes
#     batch row column column
#                       a word for each axis. v_row is the mean over all columns and v_col the mean
#                       over all rows. Along a batch axis the parameter is a stack of parameters
#                       that are scaled and clipped by themselves. "none" leaves an axis out.
#
# Source: t5x/adafactor.py, `Adafactor._parse_rule`.


UNFACTORED, HEURISTIC = "unfactored", "heuristic"
AXIS_WORDS = ("row", "column", "batch", "none")
# T5X's rules for an Adafactor without a factor map.
ALL_HEURISTIC: tuple[tuple[str, str], ...] = ((".*", HEURISTIC),)


class FactorRuleError(UserError, ValueError):
    """A parameter without a rule, or with one that does not fit it."""


class Factoring(NamedTuple):
    """The axes of one parameter over which Adafactor averages.

    Attributes:
      dropped: the axes that v_row lacks, and those that v_col lacks; None if it is not factored.
      scaled: the axes over which its own size and its update's size are measured; None for all.
    """

    dropped: tuple[tuple[int, ...], tuple[int, ...]] | None
    scaled: tuple[int, ...] | None = None

    def slot_shapes(self, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """The shapes of the second moment's slots."""
        if self.dropped is None:
            return {"v": tuple(shape)}
        return {
            slot: tuple(size for axis, size in enumerate(shape) if axis not in dropped)
            for slot, dropped in zip(("v_row", "v_col"), self.dropped, strict=True)
        }


class Options(Protocol):
    """Adafactor's options about factoring."""

    @property
    def factored(self) -> bool:
        """Whether any parameter is factored."""
        ...

    @property
    def min_dim_size_to_factor(self) -> int:
        """The two longest axes are averaged over if both have at least this length."""
        ...

    @property
    def factor_map(self) -> Sequence[tuple[str, str]]:
        """Regular expressions, searched for in a path, and their rules; the first match counts.

        Empty for Mesh TensorFlow's rule.
        """
        ...


def factoring(path: str, shape: Sequence[int], options: Options) -> Factoring:
    """How Adafactor factors the parameter of a path and a shape.

    Raises:
      FactorRuleError: if no expression matches, or the rule does not fit the number of axes.
    """
    if not options.factored:
        return Factoring(None)
    rule = rule_of(path, options.factor_map) if options.factor_map else HEURISTIC
    if rule == UNFACTORED:
        return Factoring(None)
    if rule == HEURISTIC:
        if options.factor_map and len(shape) > 2:
            raise FactorRuleError(
                f"{path} of shape {list(shape)} has more than two axes and no factor rule.",
                where="adafactor.Adafactor.factor_map",
                fix="Give it a word for each axis (row, column, batch or none), or None.",
            )
        return _of_longest_axes(shape, options.min_dim_size_to_factor)
    words = rule.split()
    if len(words) != len(shape):
        raise FactorRuleError(
            f"The factor rule of {path} is for {len(words)} axes, and its shape is {list(shape)}.",
            where="adafactor.Adafactor.factor_map",
            fix="Give a word for each axis.",
        )
    rows, columns, batch = (
        tuple(axis for axis, word in enumerate(words) if word == kind)
        for kind in ("row", "column", "batch")
    )
    # T5X ignores a rule where it leaves no choice.
    if len(shape) <= 2 and not batch:
        return _of_longest_axes(shape, options.min_dim_size_to_factor)
    scaled = tuple(axis for axis in range(len(shape)) if axis not in batch)
    return Factoring((columns, rows) if rows or columns else None, scaled if batch else None)


def rule_of(path: str, factor_map: Sequence[tuple[str, str]]) -> str:
    """The rule of a parameter.

    Raises:
      FactorRuleError: if no expression of the map matches its path.
    """
    for pattern, rule in factor_map:
        if re.search(pattern, path):
            return rule
    raise FactorRuleError(
        f"No factor rule matches {path}.",
        where="adafactor.Adafactor.factor_map",
        fix="End the rules with ('.*', 'heuristic').",
    )


def _of_longest_axes(shape: Sequence[int], least: int) -> Factoring:
    if len(shape) < 2:
        return Factoring(None)
    dropped = naming.t5x_dropped_axes(shape)
    row, column = dropped["v_row"], dropped["v_col"]
    return Factoring(((row,), (column,)) if shape[column] >= least else None)


def recognize(names_and_shapes: Mapping[str, Iterable[int]]) -> ModelShape:
    """Infers a model's sizes from its parameters.

    Reads only the few parameters that determine the sizes; `check_parameters` checks all.

    Args:
      names_and_shapes: Shapes by Mesh TensorFlow's variable names, by T5X's flat keys or by T5X's
        paths. Ignores slots, the step and names that no T5 has.

    Raises:
      UserError: If one of these parameters is missing or its shape fits no T5.
    """
    shapes = _parameter_shapes(names_and_shapes)
    decoder_only = naming.DECODER_ONLY[0].t5x in shapes
    shared = naming.has_shared_towers({naming.PARAMETERS + path for path in shapes})
    tower = "decoder" if decoder_only or shared else "encoder"
    attention = f"{tower}/layers_0/{'attention' if tower == 'encoder' else 'self_attention'}"
    embedding = _matrix(shapes, ("decoder/" if decoder_only else "") + "token_embedder/embedding")
    bias_per_layer = naming.has_bias_per_layer(shapes)
    first_bias = f"{tower}/{'layers_0/' if bias_per_layer else ''}{naming.RELATIVE_BIAS}"
    bias = _matrix(shapes, first_bias)
    query = _matrix(shapes, f"{attention}/query/kernel")
    output = _matrix(shapes, f"{tower}/layers_0/mlp/wo/kernel")
    # wi_0 or wi_1: if one is missing, check_parameters reports it by name later.
    mlp = f"{tower}/layers_0/mlp/{{}}/kernel"
    gated = mlp.format("wi_0") in shapes or mlp.format("wi_1") in shapes
    if bias[0] == 0 or query[1] % bias[0]:
        raise UserError(
            f"The shapes fit no T5: attention kernels are {query[1]} wide, which is not a multiple"
            f" of the {bias[0]} heads of the relative position bias.",
            where=f"{attention}/query/kernel, {first_bias}",
            fix=_ANOTHER,
        )
    return ModelShape(
        num_encoder_layers=_count_layers(shapes, "decoder" if shared else "encoder"),
        num_decoder_layers=_count_layers(shapes, "decoder"),
        d_model=embedding[1],
        d_ff=output[0],
        num_heads=bias[0],
        d_kv=query[1] // bias[0],
        vocab_size=embedding[0],
        relative_attention_num_buckets=bias[1],
        wi_kernels=("wi_0", "wi_1") if gated else ("wi",),
        tied="decoder/logits_dense/kernel" not in shapes,
        shared_towers=shared,
        position_bias_per_layer=bias_per_layer,
    )


def _parameter_shapes(
    names_and_shapes: Mapping[str, Iterable[int]],
) -> dict[str, tuple[int, ...]]:
    """T5X path -> shape of every parameter."""
    paths = {name: _path(name) for name in names_and_shapes}
    # A bias variable of Mesh TensorFlow belongs to its tower or to its layer, depending on whether
    # other layers also have one, so read the names again once that is known.
    if naming.has_bias_per_layer(paths.values()):
        paths = {name: _path(name, bias_per_layer=True) for name in names_and_shapes}
    return {path: tuple(names_and_shapes[name]) for name, path in paths.items() if path}


def _path(name: str, bias_per_layer: bool | None = None) -> str | None:
    path = name.removeprefix(naming.PARAMETERS)
    if any(naming.find_row(path, "t5x", decoder_only) for decoder_only in (False, True)):
        return path
    return naming.mtf_to_path(name, bias_per_layer)


_ANOTHER = "Name a T5's checkpoint; if this is one, get it again from where it came from."


def _matrix(shapes: Mapping[str, tuple[int, ...]], path: str) -> tuple[int, ...]:
    if path not in shapes:
        raise UserError(
            f"This is not a T5 encoder-decoder: it has no {path} (in Mesh TensorFlow's names:"
            f" {naming.path_to_mtf(path)}).",
            fix="Check the path; of models without an encoder only those with one shared relative"
            " position bias and no positions of another kind can be converted.",
        )
    if len(shapes[path]) != 2:
        raise UserError(
            f"{path} should be a matrix, but has the shape {shapes[path]}.", fix=_ANOTHER
        )
    return shapes[path]


def _count_layers(shapes: Mapping[str, tuple[int, ...]], tower: str) -> int:
    # Decoder-only trees use the decoder's names, so the common table applies.
    found = (naming.find_row(path, "t5x") for path in shapes)
    numbers = [
        layer for row, layer in filter(None, found) if row.tower == tower and layer is not None
    ]
    return max(numbers, default=-1) + 1


def check_parameters(
    shapes: Mapping[str, tuple[int, ...]],
    where: str,
    native_name: Callable[[str], str] = str,
) -> ModelShape:
    """Checks that paths and shapes are exactly those of one T5, and returns its sizes.

    Args:
      shapes: T5X path -> shape of every parameter in the checkpoint.
      where: The checkpoint's path, for messages.
      native_name: T5X path -> the name familiar to the user.

    Raises:
      UserError: Naming parameters that are missing, unknown or of the wrong shape.
    """
    family = recognize(shapes)
    expected = family.parameters()
    if missing := [native_name(path) for path in expected if path not in shapes]:
        raise UserError(
            f"{counted(len(missing), 'variable')} of a {family.name} missing: {some(missing)}.",
            where=where,
            fix="The checkpoint is incomplete; get it again from where it came from.",
        )
    if unknown := [path for path in shapes if path not in expected]:
        raise unknown_variable(
            [native_name(path) for path in unknown], map(native_name, expected), where
        )
    for path, shape in expected.items():
        if shapes[path] != shape:
            raise UserError(
                f"{native_name(path)} has the shape {shapes[path]}, but the other variables call"
                f" for {shape} ({describe(family)}).{_hint(path)}",
                where=where,
                fix=_ANOTHER,
            )
    return family


def unknown_variable(names: list[str], known: Iterable[str], where: str) -> UserError:
    """Returns the error for variables that belong to no T5, each with the nearest known names."""
    known = list(known)
    # Finding the nearest of thousands takes time, and only five are shown.
    shown = [f"{name!r} (nearest: {nearest_names(name, known, 3)})" for name in names[:5]]
    nearest = some([*shown, *names[5:]], separator="; ")
    return UserError(
        f"{counted(len(names), 'unknown variable')}: {nearest}.",
        where=where,
        fix="Only T5s and their Adafactor or Adam slots can be converted.",
    )


def _hint(path: str) -> str:
    if path == "decoder/logits_dense/kernel":
        return " The vocabularies of the embedding and of the logits differ."
    return ""
