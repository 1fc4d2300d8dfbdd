"""LoRA and (IA)3: which kernels have an adapter, its parameters, and how they join the base's.

An adapter's parameters stand beside the kernel that they change, in the same tree:

    decoder/layers_3/self_attention/query/kernel       the base's, [in, out]
    decoder/layers_3/self_attention/query/lora_a       [in, rank]
    decoder/layers_3/self_attention/query/lora_b       [rank, out]
    decoder/layers_3/self_attention/key/ia3_output     [out], multiplies the kernel's output
    decoder/layers_3/mlp/wo/ia3_input                  [in], multiplies the kernel's input

The layer that owns a kernel applies the adapter parameters beside it (t0repro.model.layers), so
code that takes a model's parameters takes adapted ones unchanged.

Sources: LoRA, https://arxiv.org/abs/2106.09685; (IA)3, https://arxiv.org/abs/2205.05638; the
default targets are PEFT's for T5.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, get_args

from t0repro.errors import UserError, nearest_names
from t0repro.parameters.shape import ModelShape

Kind = Literal["lora", "ia3"]
LORA_A, LORA_B, IA3_INPUT, IA3_OUTPUT = "lora_a", "lora_b", "ia3_input", "ia3_output"
NAMES = (LORA_A, LORA_B, IA3_INPUT, IA3_OUTPUT)

LORA_TARGETS = (r".*/(query|value)/kernel",)
IA3_TARGETS = (r".*/(key|value)/kernel", r".*/mlp/wo/kernel")


@dataclasses.dataclass(frozen=True)
class Adapter:
    """What is trained in place of a model's own parameters.

    Attributes:
      kind: "lora" or "ia3".
      targets: Regular expressions; each kernel whose full T5X path matches one has an adapter.
      rank: Columns of `lora_a`; 0 for (IA)3.
      alpha: LoRA's update is scaled by alpha / rank.
      dropout: Dropout rate on the input of `lora_a`, with an independent mask entry per element.
      base_dtype: Dtype of the frozen parameters in memory.
    """

    IN_GIN: ClassVar = "@adapters.lora() or @adapters.ia3()"

    kind: Kind
    targets: tuple[str, ...]
    rank: int = 0
    alpha: float = 1.0
    dropout: float = 0.0
    base_dtype: Literal["float32", "bfloat16"] = "float32"

    @property
    def scale(self) -> float:
        """Factor of LoRA's update, `lora_a @ lora_b`; 1 for (IA)3."""
        return self.alpha / self.rank if self.kind == "lora" else 1.0

    def adapted_kernels(self, shape: ModelShape, where: str | None = None) -> list[str]:
        """Paths of the kernels that have an adapter, in the table's order.

        Raises:
          UserError: If a target is not a regular expression or matches no kernel, or if the rank is
            above a kernel's smaller side.
        """
        all_kernels, matched = kernels(shape), set[str]()
        where = where or f"adapters.{self.kind}.targets"
        for target in self.targets:
            try:
                matching = [path for path in all_kernels if re.fullmatch(target, path)]
            except (re.error, OverflowError, RecursionError) as error:
                raise UserError(
                    f"{target!r} is not a regular expression: {error}.",
                    where=where,
                    fix="Correct it; it is matched with the parameters' whole names.",
                ) from error
            if not matching:
                raise UserError(
                    f"The target {target!r} matches no kernel of a layer.",
                    where=where,
                    fix=f"Nearest: {nearest_names(target, all_kernels, count=3)}. A target is a"
                    " regular expression of kernels' full names, such as '.*/query/kernel'.",
                )
            matched.update(matching)
        if not matched:
            raise UserError("The adapter has no target.", where=where, fix="Name at least one.")
        for path in all_kernels:
            # A product of a higher rank has more parameters, but no updates that this one lacks.
            if path in matched and self.rank > min(all_kernels[path]):
                raise UserError(
                    f"rank = {self.rank} is above that of {path}, which is {all_kernels[path][0]} x"
                    f" {all_kernels[path][1]}.",
                    where="adapters.lora.rank",
                    fix=f"Choose at most {min(all_kernels[path])}, or leave the kernel out of the"
                    " targets.",
                )
        return [path for path in all_kernels if path in matched]

    def parameter_shapes(
        self, shape: ModelShape, where: str | None = None
    ) -> dict[str, tuple[int, ...]]:
        """Path -> shape of every parameter of the adapter.

        Raises:
          UserError: See `adapted_kernels`.
        """
        shapes: dict[str, tuple[int, ...]] = {}
        for path in self.adapted_kernels(shape, where):
            owner, (size_in, size_out) = path.removesuffix("kernel"), kernels(shape)[path]
            if self.kind == "lora":
                shapes[owner + LORA_A] = (size_in, self.rank)
                shapes[owner + LORA_B] = (self.rank, size_out)
            elif owner.endswith("mlp/wo/"):
                shapes[owner + IA3_INPUT] = (size_in,)
            else:
                shapes[owner + IA3_OUTPUT] = (size_out,)
        return shapes


def lora(
    rank: int = 8,
    alpha: float = 8.0,
    dropout: float = 0.0,
    targets: Sequence[str] | str = LORA_TARGETS,
    base_dtype: Literal["float32", "bfloat16"] = "float32",
) -> Adapter:
    """LoRA: x @ kernel + x @ lora_a @ lora_b * alpha / rank.

    Rank and alpha are PEFT's defaults.

    Args:
      rank: See `Adapter`.
      alpha: See `Adapter`.
      dropout: See `Adapter`.
      targets: See `Adapter`; by default queries and values.
      base_dtype: See `Adapter`.

    Raises:
      UserError: For a value out of its range.
    """
    adapter = check_adapter(Adapter("lora", _as_tuple(targets), rank, alpha, dropout, base_dtype))
    return dataclasses.replace(adapter, alpha=float(alpha))


def ia3(
    targets: Sequence[str] | str = IA3_TARGETS,
    base_dtype: Literal["float32", "bfloat16"] = "float32",
) -> Adapter:
    """(IA)3: a vector that multiplies a kernel's output or, for `mlp/wo`, its input.

    Args:
      targets: See `Adapter`; by default keys, values and the feed-forward layer's `wo`.
      base_dtype: See `Adapter`.

    Raises:
      UserError: For a value out of its range.
    """
    return check_adapter(Adapter("ia3", _as_tuple(targets), base_dtype=base_dtype))


def _as_tuple(targets: Sequence[str] | str) -> tuple[str, ...]:
    if isinstance(targets, str) or not isinstance(targets, Iterable):
        return (targets,)  # `check_adapter` refuses what is neither
    return tuple(targets)


def check_adapter(adapter: Adapter) -> Adapter:
    """The adapter itself.

    Raises:
      UserError: For a value out of its range, or not of its type.
    """
    where = f"adapters.{adapter.kind}"
    if adapter.kind not in get_args(Kind):
        kinds = " or ".join(get_args(Kind))
        raise UserError(
            f"There is no adapter {adapter.kind!r}.", where="adapters", fix=f"Choose {kinds}."
        )
    if not adapter.targets or not all(isinstance(each, str) for each in adapter.targets):
        raise UserError(
            f"targets is {list(adapter.targets)!r}; it must be a list of regular expressions.",
            where=f"{where}.targets",
            fix="Name at least one kernel, or leave targets out.",
        )
    # Not isinstance: in Python, a bool is an int.
    if type(adapter.rank) is not int or (adapter.rank < 1) != (adapter.kind == "ia3"):
        raise UserError(
            f"rank is {adapter.rank!r}; for LoRA it must be a whole number of at least 1.",
            where=f"{where}.rank",
            fix="Bind a rank such as 8. (IA)3 has none.",
        )
    if type(adapter.alpha) not in (int, float) or not 0 < adapter.alpha < 2**31:
        raise UserError(
            f"alpha is {adapter.alpha!r}; it must be a number above 0 and below 2**31.",
            where=f"{where}.alpha",
            fix="Bind a number such as 8.0.",
        )
    if type(adapter.dropout) not in (int, float) or not 0 <= adapter.dropout < 1:
        raise UserError(
            f"dropout is {adapter.dropout!r}; it must be at least 0 and below 1.",
            where=f"{where}.dropout",
            fix="Bind a rate such as 0.1.",
        )
    if adapter.base_dtype not in ("float32", "bfloat16"):
        raise UserError(
            f"base_dtype is {adapter.base_dtype!r}, which is not supported.",
            where=f"{where}.base_dtype",
            fix="Bind 'float32' or 'bfloat16'.",
        )
    return adapter


def kernels(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """The kernels that can have an adapter, those of a model's layers: path -> (in, out)."""
    return {
        path: (size[0], size[1])
        for path, size in shape.parameters().items()
        if "/layers_" in path and path.endswith("/kernel") and len(size) == 2
    }


def is_even(paths: Iterable[str], shape: ModelShape) -> bool:
    """Whether all layers of a tower have the same adapter, or none has one."""
    layers = {"encoder": shape.num_encoder_layers, "decoder": shape.num_decoder_layers}
    by_layer: dict[tuple[str, str], set[str]] = {}
    for path in paths:
        tower, layer, kernel = path.split("/", 2)
        by_layer.setdefault((tower, layer), set()).add(kernel)
    for tower, count in layers.items():
        adapted = [names for (name, _), names in by_layer.items() if name == tower]
        if adapted and (len(adapted) < count or any(names != adapted[0] for names in adapted)):
            return False
    return True


def join_adapter(
    base: Mapping[str, Any], adapter: Mapping[str, Any], scale: float = 1.0
) -> dict[str, Any]:
    """A model's parameters with an adapter's beside their kernels; `lora_b` is scaled.

    Args:
      base: The model's parameters, a nested dictionary, which is not modified.
      adapter: The adapter's, with layers stacked as in `base`.
      scale: `Adapter.scale`.
    """
    params = dict(base)
    for name, value in adapter.items():
        if isinstance(value, Mapping):
            params[name] = join_adapter(base.get(name, {}), value, scale)
        else:
            # Scaled here, so that layers need neither alpha nor rank.
            params[name] = value * scale if name == LORA_B and scale != 1.0 else value
    return params
