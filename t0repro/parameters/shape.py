"""The sizes of a T5 and what follows from them: its parameters, name and variables."""

from __future__ import annotations

import dataclasses
import math

from t0repro.parameters import layout

# Sizes by (layers, d_model, d_ff, num_heads, d_kv), from the gin files models/t5.1.{0,1}.*.gin of
# t5 0.9.4. mT5 has T5 1.1's; ByT5's own are in `ModelShape._relative`.
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
class ModelShape:
    """The sizes of a T5.

    Attributes:
      num_encoder_layers: 0 in a decoder-only model.
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
        if self.shared_towers:
            return "T5, shared towers"
        if self.position_bias_per_layer:
            umt5 = self.gated and not self.tied
            return self._relative("umT5") if umt5 else "T5, a position bias in each layer"
        # T5 1.0 is ReLU and tied, T5 1.1 gated and untied; other combinations have no name.
        if self.gated == self.tied:
            return f"T5, {'gated' if self.gated else 'ReLU'}, {'tied' if self.tied else 'untied'}"
        family = "T5 1.1" if self.gated else "T5 1.0"
        # These families have T5 1.1's architecture; only their vocabularies tell them apart.
        if self.gated and self.vocab_size == 384:
            return self._relative("ByT5")
        if self.gated and self.vocab_size >= 250_000:
            return self._relative("mT5")
        sizes = (self.d_model, self.d_ff, self.num_heads, self.d_kv)
        # Every published size has as many layers in one tower as in the other.
        if self.num_encoder_layers != self.num_decoder_layers:
            return family
        size = _SIZES[family].get((self.num_encoder_layers, *sizes))
        return f"{family} {size}" if size else family

    def _relative(self, family: str) -> str:
        """Family and size of a model built like T5 1.1, possibly in sizes of its own."""
        own = {
            ("ByT5", 12, 4, 1472): "small",
            ("ByT5", 18, 6, 1536): "base",
            ("ByT5", 36, 12, 1536): "large",
            ("ByT5", 36, 12, 2560): "XL",
            ("ByT5", 36, 12, 4672): "XXL",
        }
        layers = (self.num_encoder_layers, self.num_decoder_layers)
        sizes = (self.d_model, self.d_ff, self.num_heads, self.d_kv)
        # ByT5's towers differ in depth, and its widths are its own.
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
        """Width of an attention kernel: all heads together."""
        return self.num_heads * self.d_kv

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Returns T5X path -> shape of every parameter, in the table's order."""
        layers = {"encoder": self.num_encoder_layers, "decoder": self.num_decoder_layers}
        shapes = {}
        for row in layout.DECODER_ONLY if self.decoder_only else layout.TABLE:
            if not self._has(row) or (self.shared_towers and row.t5x.startswith("encoder/")):
                continue
            shape = tuple(getattr(self, axis) for axis in row.axes)
            for layer in range(layers[row.tower]) if row.tower else [None]:
                shapes[layout.name_of(row, layer, "t5x")] = shape
        return shapes

    def mesh_variables(self, norm_names: layout.NormNames = "rms_norm") -> dict[str, str]:
        """Returns T5X path -> Mesh TensorFlow's variable name, for every parameter."""
        names = {}
        for path in self.parameters():
            name = layout.path_to_mtf(path, norm_names, self.decoder_only, self.shared_towers)
            assert name is not None, path
            names[path] = name
        return names

    def _has(self, row: layout.Row) -> bool:
        if row.bias_per_layer is not None:
            return row.bias_per_layer == self.position_bias_per_layer
        if row.t5x == "decoder/logits_dense/kernel":
            return not self.tied
        # Of wi, wi_0 and wi_1 only the model's own; every other parameter is in all models.
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
