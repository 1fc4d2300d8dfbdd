"""Which T5 a checkpoint holds, told from the names and shapes of its tensors alone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from t0repro.errors import UserError, nearest_names
from t0repro.parameters import layout

if TYPE_CHECKING:
    from t0repro.config.run_config import ModelConfig

# Sizes by (layers, d_model, d_ff, num_heads, d_kv), from the gin files models/t5.1.{0,1}.*.gin of
# t5 0.9.4. mT5 has T5 1.1's; ByT5's own are in `Family._relative`.
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
    },
}


@dataclasses.dataclass(frozen=True)
class Family:
    """The shape of a T5.

    Attributes:
      num_encoder_layers: 0 in a decoder-only model.
      vocab_size: rows of the embedding, padding included.
      wi_kernels: input kernels of the feed-forward layer: ("wi",), or ("wi_0", "wi_1") when gated.
      tied: the logits come from the embedding; there is no kernel of their own.
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

    @property
    def gated(self) -> bool:
        """Whether the feed-forward layer is T5 1.1's."""
        return len(self.wi_kernels) == 2

    @property
    def name(self) -> str:
        """Family and size, for instance "T5 1.1 XL"; the family alone for a size without a name."""
        if self.decoder_only:
            return "T5, decoder only"
        if self.gated == self.tied:
            return f"T5, {'gated' if self.gated else 'ReLU'}, {'tied' if self.tied else 'untied'}"
        family = "T5 1.1" if self.gated else "T5 1.0"
        if self.gated and self.vocab_size == 384:
            return self._relative("ByT5")
        if self.gated and self.vocab_size >= 250_000:
            return self._relative("mT5")
        sizes = (self.d_model, self.d_ff, self.num_heads, self.d_kv)
        if self.num_encoder_layers != self.num_decoder_layers:
            return family
        size = _SIZES[family].get((self.num_encoder_layers, *sizes))
        return f"{family} {size}" if size else family

    def _relative(self, family: str) -> str:
        """The name of a model of T5 1.1's shape with another vocabulary (and, small, its own)."""
        own = {
            ("ByT5", 12, 4, 1472): "small",
            ("ByT5", 18, 6, 1536): "base",
            ("ByT5", 36, 12, 1536): "large",
            ("ByT5", 36, 12, 2560): "XL",
            ("ByT5", 36, 12, 4672): "XXL",
        }
        layers = (self.num_encoder_layers, self.num_decoder_layers)
        sizes = (self.d_model, self.d_ff, self.num_heads, self.d_kv)
        size = own.get((family, *layers, self.d_model))
        if not size and layers[0] == layers[1]:
            size = _SIZES["T5 1.1"].get((layers[0], *sizes))
        return f"{family} {size}" if size else family

    @property
    def decoder_only(self) -> bool:
        """Whether there is no encoder."""
        return self.num_encoder_layers == 0

    @property
    def joined_kv(self) -> int:
        """Width of an attention kernel."""
        return self.num_heads * self.d_kv

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """T5X path -> shape of every parameter of such a model, in the table's order."""
        layers = {"encoder": self.num_encoder_layers, "decoder": self.num_decoder_layers}
        shapes = {}
        for row in layout.DECODER_ONLY if self.decoder_only else layout.TABLE:
            if not self._has(row):
                continue
            shape = tuple(getattr(self, axis) for axis in row.axes)
            for layer in range(layers[row.tower]) if row.tower else [None]:
                shapes[layout.name_of(row, layer, "t5x")] = shape
        return shapes

    def _has(self, row: layout.Row) -> bool:
        if row.t5x == "decoder/logits_dense/kernel":
            return not self.tied
        kernel = row.t5x.split("/")[-2]
        return not kernel.startswith("wi") or kernel in self.wi_kernels

    def parameter_count(self) -> int:
        """Number of parameters, slots not counted."""
        return sum(math.prod(shape) for shape in self.parameters().values())


def recognise(names_and_shapes: Mapping[str, Iterable[int]]) -> Family:
    """Reads a model's shape off its parameters.

    Args:
      names_and_shapes: shapes by Mesh TensorFlow's variable names, by T5X's flat keys or by T5X's
        paths. Slots and the step are passed over; so are names that no T5 has.

    Raises:
      UserError: if there is no T5's skeleton to read it from. `check_parameters` tells whether
        every tensor then is there and of the right shape.
    """
    shapes = dict(_parameter_shapes(names_and_shapes))
    decoder_only = layout.DECODER_ONLY[0].t5x in shapes
    tower = "decoder" if decoder_only else "encoder"
    attention = f"{tower}/layers_0/{'self_attention' if decoder_only else 'attention'}"
    embedding = _matrix(shapes, ("decoder/" if decoder_only else "") + "token_embedder/embedding")
    bias = _matrix(shapes, f"{tower}/relpos_bias/rel_embedding")
    query = _matrix(shapes, f"{attention}/query/kernel")
    output = _matrix(shapes, f"{tower}/layers_0/mlp/wo/kernel")
    mlp = f"{tower}/layers_0/mlp/{{}}/kernel"
    gated = mlp.format("wi_0") in shapes or mlp.format("wi_1") in shapes
    if bias[0] == 0 or query[1] % bias[0]:
        raise UserError(
            f"The shapes fit no T5: attention kernels are {query[1]} wide, which is no multiple of"
            f" the {bias[0]} heads that the relative position bias has.",
            where=f"{attention}/query/kernel, {tower}/relpos_bias/rel_embedding",
        )
    return Family(
        num_encoder_layers=_count_layers(shapes, "encoder"),
        num_decoder_layers=_count_layers(shapes, "decoder"),
        d_model=embedding[1],
        d_ff=output[0],
        num_heads=bias[0],
        d_kv=query[1] // bias[0],
        vocab_size=embedding[0],
        relative_attention_num_buckets=bias[1],
        wi_kernels=("wi_0", "wi_1") if gated else ("wi",),
        tied="decoder/logits_dense/kernel" not in shapes,
    )


def _parameter_shapes(names_and_shapes: Mapping[str, Iterable[int]]):
    for name, shape in names_and_shapes.items():
        path = name.removeprefix(layout.PARAMETERS)
        if not any(layout.find_row(path, "t5x", decoder_only) for decoder_only in (False, True)):
            path = layout.mtf_to_path(name)
        if path:
            yield path, tuple(shape)


def _matrix(shapes: Mapping[str, tuple[int, ...]], path: str) -> tuple[int, ...]:
    if path not in shapes:
        raise UserError(
            f"This is no T5 encoder-decoder: it has no {path} (in Mesh TensorFlow's names:"
            f" {layout.path_to_mtf(path)}).",
            fix="Check the path; of models without an encoder only those with one shared relative"
            " position bias and no positions of another kind can be converted.",
        )
    if len(shapes[path]) != 2:
        raise UserError(f"{path} should be a matrix, but has the shape {shapes[path]}.")
    return shapes[path]


def _count_layers(shapes: Mapping[str, tuple[int, ...]], tower: str) -> int:
    found = (layout.find_row(path, "t5x") for path in shapes)
    numbers = [
        layer for row, layer in filter(None, found) if row.tower == tower and layer is not None
    ]
    return max(numbers, default=-1) + 1


def check_parameters(
    shapes: Mapping[str, tuple[int, ...]],
    where: str,
    native_name: Callable[[str], str] = str,
) -> Family:
    """Checks that T5X paths and shapes are exactly those of one T5, and says of which.

    Args:
      shapes: T5X path -> shape of every parameter in the checkpoint.
      where: the checkpoint's path, for messages.
      native_name: T5X path -> the name that the user knows it by.

    Raises:
      UserError: naming each parameter that is missing, unknown or of another shape.
    """
    family = recognise(shapes)
    expected = family.parameters()
    if missing := [native_name(path) for path in expected if path not in shapes]:
        raise UserError(
            f"{_count(missing, 'variable')} of a {family.name} missing: {_listing(missing)}.",
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
            )
    return family


def unknown_variable(names: list[str], known: Iterable[str], where: str) -> UserError:
    """The error for variables that are no part of any T5: each with the names most like it."""
    known = list(known)
    nearest = "; ".join(
        f"{name!r} (nearest: {nearest_names(name, known, 3)})" for name in names[:5]
    )
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return UserError(
        f"{_count(names, 'unknown variable')}: {nearest}{more}.",
        where=where,
        fix="Only T5s and their Adafactor or Adam slots can be converted.",
    )


def _count(names: list[str], noun: str) -> str:
    return f"1 {noun}" if len(names) == 1 else f"{len(names)} {noun}s"


def _listing(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _hint(path: str) -> str:
    if path == "decoder/logits_dense/kernel":
        return " The vocabularies of the embedding and of the logits differ."
    return ""


def describe(family: Family) -> str:
    """A family's sizes in one line."""
    return (
        f"{family.num_encoder_layers}+{family.num_decoder_layers} layers, d_model {family.d_model},"
        f" d_ff {family.d_ff}, {family.num_heads} heads of {family.d_kv},"
        f" vocabulary {family.vocab_size}"
    )


def check_fits(family: Family, model: ModelConfig, where: str) -> None:
    """Checks that a checkpoint is of the model that a run describes.

    Args:
      family: what `recognise` found in the checkpoint.
      model: the run's model.
      where: the checkpoint's path, for the message.

    Raises:
      UserError: naming every size that differs, with both values; a vocabulary's size first.
    """
    pairs = {
        "vocabulary": (family.vocab_size, model.vocab_size),
        "encoder layers": (family.num_encoder_layers, model.num_encoder_layers),
        "decoder layers": (family.num_decoder_layers, model.num_decoder_layers),
        "d_model": (family.d_model, model.d_model),
        "d_ff": (family.d_ff, model.d_ff),
        "heads": (family.num_heads, model.num_heads),
        "d_kv": (family.d_kv, model.d_kv),
        "relative attention buckets": (
            family.relative_attention_num_buckets,
            model.relative_attention_num_buckets,
        ),
        "input kernels of the feed-forward layer": (
            len(family.wi_kernels),
            len(model.activations),
        ),
        "logits from the embedding": (family.tied, model.logits_from_embedding),
    }
    differences = [
        f"{name}: {checkpoint} in the checkpoint, {run} in this run"
        for name, (checkpoint, run) in pairs.items()
        if checkpoint != run
    ]
    if not differences:
        return
    fix = "Give the gin file of the model that the checkpoint holds."
    if family.vocab_size != model.vocab_size:
        fix = (
            "Give the vocabulary that the checkpoint was trained with (sizes are padded to a"
            " multiple of 128), or another checkpoint."
        )
    raise UserError(
        f"The checkpoint does not fit this run's model; {'; '.join(differences)}.",
        where=where,
        fix=fix,
    )
