"""T5X's `adafactor.Adafactor` and `optimizers.MultiOptimizer`, with T5X's arguments.

A T5X model that takes an `optimizer_def` takes these as well as those of
t0repro.training.optimizers. Sources: t5x/adafactor.py and t5x/optimizers.py at cc342d4.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import flax.traverse_util
import jax
import jax.numpy as jnp

from t0repro.config.optimizer import AdafactorConfig
from t0repro.parameters.shape import ALL_HEURISTIC, HEURISTIC, UNFACTORED
from t0repro.training.optimizers import Optimizer, combine_optimizers, make_optimizer


class FactorDim(enum.Enum):
    """The role of a parameter's axis in Adafactor's slots (t0repro.parameters.shape)."""

    NONE = None
    BATCH = 1
    ROW = 2
    COLUMN = 3


class HeuristicRule(enum.Enum):
    """The type of HEURISTIC_RULE."""

    token = 1


HEURISTIC_RULE = HeuristicRule.token
FactorRule = HeuristicRule | tuple[FactorDim, ...]


def standard_logical_factor_rules() -> dict[str, FactorDim]:
    """T5X's rules: the logical name of an axis -> its role in the slots."""
    kinds = {
        FactorDim.ROW: "embed",
        FactorDim.COLUMN: "vocab mlp heads kv joined_kv q_wi_fused o_wo_fused multiquery_heads"
        " kv_fused mlp_activations",
        FactorDim.BATCH: "layers stack",
        FactorDim.NONE: "relpos_buckets layer_norm_scale",
    }
    return {name: kind for kind, names in kinds.items() for name in names.split()}


def factor_name_to_factordim(name: str | FactorDim) -> FactorDim:
    """The FactorDim of a word: row, column (col), batch, or none (unfactorized); case is ignored.

    Raises:
      KeyError: for any other word.
    """
    if not isinstance(name, str):
        return name
    words = {dim.name.lower(): dim for dim in FactorDim}
    return (words | {"col": FactorDim.COLUMN, "unfactorized": FactorDim.NONE})[name.lower()]


class HParamMap:
    """A value for each parameter: that of the first expression found in its path.

    Args:
      rules: pairs of a regular expression and a value.
    """

    def __init__(self, rules: Iterable[tuple[str, Any]]):
        self.rules = tuple((pattern, value) for pattern, value in rules)

    def __getitem__(self, path: str) -> Any:
        for pattern, value in self.rules:
            if re.search(pattern, path):
                return value
        raise KeyError(f"No rule matches the parameter {path}.")

    def __call__(self, params: Any) -> Any:
        """The tree of parameters with each one's value in its place."""
        flat = flax.traverse_util.flatten_dict(params, sep="/")
        return flax.traverse_util.unflatten_dict({path: self[path] for path in flat}, sep="/")


class Adafactor(Optimizer):
    """T5X's Adafactor.

    Unlike Mesh TensorFlow's, it needs a factor rule for every parameter with more than two axes. A
    run gives it the learning rate of each update; `learning_rate` is for an update without one.

    Raises:
      FactorRuleError: a ValueError, from `init` and `update`, for a parameter without a rule.
      ValueError: if rules are given although nothing is factored.
      TypeError: if an argument that is a map in T5X is of another type.
    """

    config: AdafactorConfig

    # optax's class is a NamedTuple, whose fields only __new__ can set.
    def __new__(
        cls,
        learning_rate: float | None = None,
        factored: bool = True,
        multiply_by_parameter_scale: bool | HParamMap = True,
        beta1: float | None = None,
        decay_rate: float = 0.8,
        step_offset: int = 0,
        clipping_threshold: float | None = 1.0,
        weight_decay_rate: float | None = None,
        min_dim_size_to_factor: int = 128,
        epsilon1: float = 1e-30,
        epsilon2: float = 1e-3,
        dtype_momentum: Any = jnp.float32,
        factor_map: HParamMap | None = None,
        logical_factor_rules: Mapping[str, FactorDim | str] | None = None,
        weight_decay_rate_lr_exponent: float | None = None,
        global_norm_clip_threshold: float | None = None,
        max_parameter_scale: float | None = None,
        skip_nan_updates: bool | None = False,
    ) -> Adafactor:
        """Takes T5X's arguments."""
        if not factored and factor_map is not None:
            raise ValueError("factored is False, so factor_map has no effect.")
        for name, value, kinds in (
            ("multiply_by_parameter_scale", multiply_by_parameter_scale, bool | HParamMap),
            ("factor_map", factor_map, HParamMap | None),
        ):
            if not isinstance(value, kinds):
                raise TypeError(f"{name} must be {kinds}, and is {value!r}.")
        if jnp.dtype(dtype_momentum) != jnp.float32:
            raise ValueError("dtype_momentum must be float32: slots have no other type here.")
        scales = multiply_by_parameter_scale

        def make(params: Any) -> Optimizer:
            """The optimizer for these parameters, with its exceptions by path."""
            # Read at each call, since `TrainState.create` calls `set_param_axes` later.
            config = self.config
            if isinstance(scales, HParamMap):
                paths = flax.traverse_util.flatten_dict(params, sep="/")
                unscaled = tuple(path for path in paths if not scales[path])
                config = dataclasses.replace(config, exclude_from_parameter_scale=unscaled)
            return make_optimizer(config)

        def init(params: Any) -> Any:
            return make(params).init(params)

        def update(
            gradients: Any,
            state: Any,
            params: Any = None,
            *,
            step: jax.Array,
            learning_rate: Any = learning_rate,
            **_: Any,
        ) -> tuple[Any, Any]:
            if learning_rate is None:
                raise ValueError("Neither Adafactor nor the update has a learning rate.")
            optimizer = make(params)
            return optimizer.update(
                gradients, state, params, step=step, learning_rate=jnp.float32(learning_rate)
            )

        self = super().__new__(cls, init, update)  # pyright: ignore[reportArgumentType]
        self.logical_factor_rules = logical_factor_rules
        self.config = AdafactorConfig(
            multiply_by_parameter_scale=scales is not False,
            decay_exponent=decay_rate,
            decay_offset=step_offset,
            beta1=beta1 or 0.0,
            clipping_threshold=clipping_threshold,
            factored=factored,
            epsilon1=epsilon1,
            epsilon2=epsilon2,
            min_dim_size_to_factor=min_dim_size_to_factor,
            # T5X keeps the momentum's slot for beta1 = 0 too.
            momentum_slot=beta1 is not None,
            weight_decay_rate=weight_decay_rate,
            weight_decay_rate_lr_exponent=weight_decay_rate_lr_exponent or None,
            # T5X only tests whether it is true, so 0 does not clip either.
            global_norm_clip=global_norm_clip_threshold or None,
            max_parameter_scale=max_parameter_scale,
            skip_nan_updates=bool(skip_nan_updates),
            # Without rules T5X falls back to its heuristic, which refuses more than two axes.
            factor_map=_plain(factor_map.rules) if factor_map else ALL_HEURISTIC,
        )
        return self

    def set_param_axes(self, param_logical_axes: Any) -> None:
        """Takes the factor rules from the logical axes of parameters and `logical_factor_rules`.

        Args:
          param_logical_axes: the tree of parameters, with the names of its axes in place of each.

        Raises:
          ValueError: if a parameter has rows, columns and an axis that is neither.
          KeyError: for an axis without a rule.
        """
        if self.logical_factor_rules is None:
            return
        axes: Any = flax.traverse_util.flatten_dict(param_logical_axes, sep="/")
        rules = {path: self._rule(tuple(names)) for path, names in axes.items()}
        # Anchored, since rules are searched for anywhere in a path.
        factor_map = _plain((f"^{re.escape(path)}$", rule) for path, rule in rules.items())
        self.config = dataclasses.replace(self.config, factor_map=factor_map)

    def _rule(self, axes: tuple[str, ...]) -> tuple[FactorDim, ...]:
        assert self.logical_factor_rules is not None
        rule = tuple(factor_name_to_factordim(self.logical_factor_rules[name]) for name in axes)
        both = {FactorDim.ROW, FactorDim.COLUMN}
        if both <= set(rule):
            if FactorDim.NONE in rule:
                raise ValueError(f"The axes {axes} have rows, columns and one that is neither.")
            return rule
        # With rows or columns alone nothing can be factored.
        return tuple(FactorDim.NONE if dim in both else dim for dim in rule)


def _plain(rules: Iterable[tuple[str, Any]]) -> tuple[tuple[str, str], ...]:
    """A factor map as a configuration writes it."""

    def plain(rule: Any) -> str:
        if rule is None:
            return UNFACTORED
        if rule is HEURISTIC_RULE:
            return HEURISTIC
        return " ".join(factor_name_to_factordim(dim).name.lower() for dim in rule)

    return tuple((pattern, plain(rule)) for pattern, rule in rules)


class Traversal(Protocol):
    """A choice of a tree's leaves, such as flax.traverse_util.ModelParamTraversal."""

    def iterate(self, inputs: Any) -> Iterable[Any]:
        """The leaves chosen."""
        ...


class MultiOptimizer(Optimizer):
    """Assigns an optimizer to each of several sets of parameters; the rest is not trained.

    Its state is that of one optimizer: each parameter's slots at the parameter's path.

    Args:
      traversals_and_optimizers: pairs of a choice of parameters and their optimizer, which keeps
        slots by parameter: `Adafactor`, or one of t0repro.training.optimizers. For optimizers of
        optax use `optax.multi_transform`.

    Raises:
      ValueError: from `init`, if two choices have a parameter in common.
    """

    def __new__(
        cls, traversals_and_optimizers: Sequence[tuple[Traversal, Optimizer]]
    ) -> MultiOptimizer:
        """Takes T5X's argument."""

        def choice(traversal: Traversal) -> Any:
            def choose(paths: Sequence[str]) -> set[str]:
                # Each leaf is its own path, so what the traversal yields are the paths chosen.
                tree = flax.traverse_util.unflatten_dict({path: path for path in paths}, sep="/")
                return set(traversal.iterate(tree))

            return choose

        parts = [(choice(traversal), part) for traversal, part in traversals_and_optimizers]
        self = super().__new__(cls, *combine_optimizers(parts))
        self.parts = tuple(part for _, part in traversals_and_optimizers)
        return self

    def set_param_axes(self, param_logical_axes: Any) -> None:
        """See `Adafactor.set_param_axes`; each optimizer has the axes of all parameters."""
        for part in self.parts:
            if isinstance(part, Adafactor | MultiOptimizer):
                part.set_param_axes(param_logical_axes)
