"""PEFT's adapter_config.json: what an adapter is, and which modules of a model have it.

Facts of PEFT 0.21.0 (peft/tuners/lora/config.py, peft/tuners/ia3/config.py and model.py,
check_target_module_exists in peft/tuners/tuners_utils.py).
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from t0repro import storage
from t0repro.adapters import Adapter, Kind
from t0repro.errors import UserError
from t0repro.words import some

PEFT_CONFIG = "adapter_config.json"

_KINDS: dict[str, Kind] = {"LORA": "lora", "IA3": "ia3"}
# What PEFT adapts in a T5 if target_modules is null.
_DEFAULT_TARGETS = {"lora": ["q", "v"], "ia3": ["k", "v", "wo"]}
_DEFAULT_READS = ["wo"]
# Modules that PEFT can adapt besides the kernels of layers; "all-linear" has none of them.
_NOT_OF_A_LAYER = (
    "shared",
    "lm_head",
    *(
        f"{tower}.{name}"
        for tower in ("encoder", "decoder")
        for name in ("embed_tokens", "block.0.layer.0.SelfAttention.relative_attention_bias")
    ),
)
# Up to 0.19, layers_to_transform without layers_pattern meant the last number in a module's name.
# In a T5, that is the part of a block (0: self-attention), not the block.
_COUNTS_PARTS = re.compile(r"|0\.1?\d\..*")

_READ = {
    *("peft_type", "base_model_name_or_path", "peft_version", "target_modules", "exclude_modules")
}
_READ_OF_KIND: dict[Kind, set[str]] = {
    "lora": {
        *("r", "lora_alpha", "lora_dropout", "use_rslora", "rank_pattern", "alpha_pattern"),
        *("layers_to_transform", "layers_pattern"),
    },
    "ia3": {"feedforward_modules"},
}
# What changes nothing about a trained adapter: who wrote it, what it is for, how it started.
_WITHOUT_EFFECT = {
    *("auto_mapping", "inference_mode", "revision", "task_type"),
    *("init_ia3_weights", "eva_config", "runtime_config", "ephemeral_gpu_offload"),
    # Parameters of options that are off.
    *("megatron_core", "qalora_group_size", "loftq_config"),
    # When PEFT before 0.3 added the product to the kernel; the sum is the same.
    "merge_weights",
}
# Other initializations change the base (pissa, olora, corda, loftq, lora_ga) or what is trained.
_HARMLESS_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")

_Names = str | list[str]


@dataclasses.dataclass(frozen=True)
class PeftConfig:
    """The content of a PEFT_CONFIG.

    Attributes:
      where: The file.
      kind: The kind of adapter.
      base: The name or path of its base; "" if it names none.
      rank, dropout: LoRA's; see `Adapter`.
      alpha: The product of LoRA's matrices is scaled by alpha / rank.
      is_root_scaled: Whether it is scaled by alpha / rank**0.5 instead (rsLoRA).
      ranks, alphas: Regular expressions of modules -> those that are not `rank` and `alpha`.
      targets, excluded: Names of modules, or a regular expression.
      layers: Numbers of the layers that have an adapter; all if it is empty.
      patterns: What stands before a layer's number in a module's name; by default, anything.
      counts_parts: See `_COUNTS_PARTS`.
      reads: (IA)3's modules whose input is multiplied, or a regular expression.
    """

    where: str
    kind: Kind
    base: str
    rank: int
    alpha: float
    is_root_scaled: bool
    ranks: Mapping[str, float]
    alphas: Mapping[str, float]
    dropout: float
    targets: _Names
    excluded: _Names
    layers: list[int]
    patterns: list[str]
    counts_parts: bool
    reads: _Names

    @classmethod
    def read(cls, folder: str) -> PeftConfig:
        """Reads it from a folder.

        Raises:
          UserError: If it is damaged; naming the field that has no meaning here, or a value that is
            none of its field's.
        """
        where = storage.join(folder, PEFT_CONFIG)
        try:
            config = json.loads(storage.read(where))
            if not isinstance(config, dict):
                raise TypeError("expected a JSON object")
        except (ValueError, TypeError, RecursionError) as error:
            raise UserError(
                f"{PEFT_CONFIG} cannot be read: {error}.", where=where, fix="Copy the file again."
            ) from error
        return _parse(_Fields(config, where))

    def adapter(self, targets: tuple[str, ...], modules: Collection[str]) -> Adapter:
        """What it describes, on the kernels that match; LoRA with its modules' largest rank."""
        if self.kind == "ia3":
            return Adapter("ia3", targets)
        rank, alpha = self.rank, self.alpha * (math.sqrt(self.rank) if self.is_root_scaled else 1)
        if self.has_patterns and modules:
            rank = max(map(self.rank_of, modules))
            alpha = max(map(self.scale_of, modules)) * rank
        return Adapter("lora", targets, rank, alpha, self.dropout)

    @property
    def has_patterns(self) -> bool:
        """Whether LoRA's modules may differ in rank and scale."""
        return bool(self.ranks or self.alphas)

    def rank_of(self, module: str) -> int:
        """LoRA's rank on a module."""
        return int(self._find_value("rank_pattern", self.ranks, module, self.rank))

    def scale_of(self, module: str) -> float:
        """The factor of LoRA's product on a module."""
        rank = self.rank_of(module)
        alpha = self._find_value("alpha_pattern", self.alphas, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.is_root_scaled else rank)

    def _find_value(
        self, field: str, values: Mapping[str, float], module: str, default: float
    ) -> float:
        # As PEFT does since 0.14: the first one that matches the end of a module's name.
        matching = [p for p in values if self._fullmatch(field, rf"(.*\.)?({p})$", module)]
        # PEFT saves them sorted, so which one was first in training is lost. Tensors show a rank.
        if field == "alpha_pattern" and len({values[pattern] for pattern in matching}) > 1:
            raise UserError(
                f"alpha_pattern has several values for {module}: {some(matching)}. PEFT takes the"
                " first, but saves them in the order of the alphabet.",
                where=f"{self.where}, alpha_pattern",
                fix="Leave the one of them that was first when the adapter was trained.",
            )
        return values[matching[0]] if matching else default

    def chosen(self, modules: Iterable[str], tensors: Iterable[str]) -> set[str]:
        """The modules that have an adapter.

        Args:
          modules: The modules of the model's layers, as transformers names them.
          tensors: The modules that the file has tensors of, for files of versions that are not
            recorded and counted layers in two ways.

        Raises:
          UserError: If a pattern is not a regular expression, or chooses no layer's module.
        """
        known = list(modules)
        if isinstance(self.targets, str) and self.targets.lower() == "all-linear":
            return {name for name in known if not self._matches("exclude_modules", name)}
        for name in _NOT_OF_A_LAYER:
            if self._is_chosen(name, by_part=False):
                raise UserError(
                    f"target_modules ({self.targets!r}) chooses {name}, which is not a kernel of a"
                    " T5's layer.",
                    where=f"{self.where}, target_modules",
                    fix="Train the adapter on layers alone.",
                )
        blocks = {name for name in known if self._is_chosen(name, by_part=False)}
        if self.counts_parts and self.layers and not self.patterns:
            parts = {name for name in known if self._is_chosen(name, by_part=True)}
            return parts if parts == set(tensors) else blocks
        return blocks

    def multiplies_input(self, module: str) -> bool:
        """Whether (IA)3 multiplies what a module reads, rather than what it gives."""
        if isinstance(self.reads, str):
            return self._fullmatch("feedforward_modules", self.reads, module)
        # As PEFT does: without a dot, unlike target_modules.
        return any(module.endswith(name) for name in self.reads)

    def _is_chosen(self, module: str, *, by_part: bool) -> bool:
        return (
            not self._matches("exclude_modules", module)
            and self._matches("target_modules", module)
            and (not self.layers or self._number(module, by_part) in self.layers)
        )

    def _matches(self, field: str, module: str) -> bool:
        names = self.targets if field == "target_modules" else self.excluded
        if isinstance(names, str):
            return self._fullmatch(field, names, module)
        return any(module == name or module.endswith(f".{name}") for name in names)

    def _number(self, module: str, last: bool) -> int | None:
        """The layer's number in a module's name."""
        lazy = "" if last else "?"
        for pattern in self.patterns or [r"[^.]*"]:
            try:
                match = re.match(rf"(?:^|.*{lazy}\.){pattern}\.(?P<idx>\d+)\.", module)
            except (re.error, OverflowError, RecursionError) as error:
                raise self._no_pattern("layers_pattern", pattern, error) from error
            if match:
                return int(match["idx"])
        return None

    def _fullmatch(self, field: str, pattern: str, module: str) -> bool:
        try:
            return re.fullmatch(pattern, module) is not None
        except (re.error, OverflowError, RecursionError) as error:
            raise self._no_pattern(field, pattern, error) from error

    def _no_pattern(self, field: str, pattern: str, error: Exception) -> UserError:
        return UserError(
            f"{field} is {pattern!r}, which is not a regular expression: {error}.",
            where=f"{self.where}, {field}",
            fix="Copy the file again.",
        )


def _parse(fields: _Fields) -> PeftConfig:
    config, where = fields.config, fields.where
    peft_type = config.get("peft_type")
    kind = _KINDS.get(peft_type) if isinstance(peft_type, str) else None
    if kind is None:
        raise fields.refusal("peft_type", "there are LoRA (LORA) and (IA)3 (IA3)")
    neutral: dict[str, tuple[Any, ...]] = {"bias": ("none",), "init_lora_weights": _HARMLESS_STARTS}
    for name, value in config.items():
        # PEFT writes these for options that are off, those of newer versions included.
        accepted = neutral.get(name, (None, False, [], {}))
        if name not in _READ | _READ_OF_KIND[kind] | _WITHOUT_EFFECT and value not in accepted:
            raise fields.refusal(name, "it has no meaning for an adapter here")
    targets, layers = fields.names("target_modules"), fields.numbers("layers_to_transform")
    patterns = fields.names("layers_pattern")
    if isinstance(targets, str):
        for name in ("layers_to_transform", "layers_pattern"):
            if config.get(name) is not None:
                raise fields.refusal(name, "PEFT takes it only beside a list of target_modules")
    elif patterns and config.get("layers_to_transform") is None:
        raise fields.refusal("layers_pattern", "PEFT takes it only beside layers_to_transform")
    # PEFT's own defaults, for a file that leaves them out.
    rank = int(fields.number("r", 8, whole=True)) if kind == "lora" else 0
    alpha = fields.number("lora_alpha", 8) if kind == "lora" else 1.0
    reads = fields.names("feedforward_modules")
    return PeftConfig(
        where=where,
        kind=kind,
        base=fields.text("base_model_name_or_path"),
        rank=rank,
        alpha=float(alpha),
        is_root_scaled=fields.flag("use_rslora"),
        ranks=fields.patterns("rank_pattern", whole=True),
        alphas=fields.patterns("alpha_pattern"),
        dropout=fields.rate("lora_dropout"),
        targets=_DEFAULT_TARGETS[kind] if targets is None else targets,
        excluded=fields.names("exclude_modules") or [],
        layers=layers,
        patterns=[patterns] if isinstance(patterns, str) else patterns or [],
        counts_parts=bool(_COUNTS_PARTS.fullmatch(fields.text("peft_version"))),
        reads=_DEFAULT_READS if reads is None else reads,
    )


@dataclasses.dataclass(frozen=True)
class _Fields:
    """The fields of the file, each read as what it has to be.

    Nothing is converted: PEFT takes the text "false" for true, and so would anything that read it
    as a truth value.
    """

    config: Mapping[str, Any]
    where: str

    def refusal(self, name: str, why: str) -> UserError:
        return UserError(
            f"{name} is {self.config.get(name)!r}, but {why}.",
            where=f"{self.where}, {name}",
            fix="Train the adapter without this option, or merge it into its base in PEFT"
            " (merge_and_unload) and give the merged model.",
        )

    def _not(self, name: str, what: str) -> UserError:
        return UserError(
            f"{name} is {self.config.get(name)!r}, not {what}.",
            where=f"{self.where}, {name}",
            fix="Copy the file again, or write the value that the adapter was trained with.",
        )

    def text(self, name: str) -> str:
        value = self.config.get(name)
        if value is not None and not (isinstance(value, str) and value.isprintable()):
            raise self._not(name, "a printable string")
        return value or ""

    def flag(self, name: str) -> bool:
        value = self.config.get(name)
        if not isinstance(value, bool | None):
            raise self._not(name, "true or false")
        return bool(value)

    def number(self, name: str, default: float, *, whole: bool = False) -> float:
        value = self.config.get(name, default)
        if not _is_number(value, whole):
            raise self._not(name, f"a {'whole ' if whole else ''}number above 0 and below 2**31")
        return value

    def patterns(self, name: str, *, whole: bool = False) -> Mapping[str, float]:
        value = self.config.get(name) or {}
        if not isinstance(value, dict) or not all(_is_number(n, whole) for n in value.values()):
            kind = "whole numbers" if whole else "numbers"
            raise self._not(name, f"names of modules with {kind} above 0 and below 2**31")
        return value

    def rate(self, name: str) -> float:
        value = self.config.get(name, 0)
        if type(value) not in (int, float) or not 0 <= value < 1:
            raise self._not(name, "a rate of at least 0 and below 1")
        return float(value)

    def names(self, name: str) -> _Names | None:
        value = self.config.get(name)
        listed = isinstance(value, list) and all(isinstance(each, str) for each in value)
        if value is not None and not isinstance(value, str) and not listed:
            raise self._not(name, "a string or a list of strings")
        return value

    def numbers(self, name: str) -> list[int]:
        value = self.config.get(name)
        listed = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(each) is int for each in listed):
            raise self._not(name, "a whole number or a list of them")
        return listed


def _is_number(value: Any, whole: bool) -> bool:
    # Not isinstance: in Python, a bool is an int, and `true` would pass for 1.
    return type(value) in ((int,) if whole else (int, float)) and 0 < value < 2**31
