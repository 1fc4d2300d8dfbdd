"""The optimizers of both dialects, and the learning-rate schedule."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from t0repro.config.settings import MOST_32, RULE, Mtf, Only, Range, T5x, arguments, or_none
from t0repro.parameters import naming
from t0repro.parameters.shape import factoring


@arguments(t5x="adafactor.Adafactor", mtf="optimize.AdafactorOptimizer")
@dataclasses.dataclass(frozen=True)
class AdafactorConfig:
    """Mesh TensorFlow's AdafactorOptimizer, option by option, with its defaults.

    Attributes:
      decay_exponent: The second-moment decay is 1 - (step - decay_offset + 1)**-decay_exponent,
        where step is the *global* step.
      beta1: Decay of the momentum; 0 means no momentum slot.
      clipping_threshold: Limit for the update's RMS; None means no clipping.
      decay_rate: A constant second-moment decay, used instead of the power of the step.
      exclude_from_parameter_scale: Paths of parameters whose update is not scaled by their size.
      momentum_slot: Whether the momentum's slot exists even if beta1 is 0.
      weight_decay_rate: Fraction of a parameter that each update removes; None for no decay.
      weight_decay_rate_lr_exponent: That fraction is multiplied by the learning rate to this power.
      global_norm_clip: Limit for the norm of all gradients together, applied before anything else.
      max_parameter_scale: Upper limit for a parameter's size, by which its update is scaled.
      skip_nan_updates: Whether entries that would become NaN keep their values.
      factor_map: T5X's rules for factoring (t0repro.parameters.shape). Empty for Mesh TensorFlow's
        rule, which factors the two longest axes of any parameter.
      frozen: Paths of parameters that are not trained and have no slots; also in every optimizer
        below.
    """

    multiply_by_parameter_scale: Annotated[bool, T5x(hint=Any)] = True
    decay_exponent: Annotated[
        float,
        Range(at_least=0),
        T5x("decay_rate"),
        Mtf("optimize.adafactor_decay_rate_pow.exponent"),
    ] = 0.8
    decay_offset: Annotated[
        float,
        Range(),
        T5x("step_offset", hint=int),
        Mtf("optimize.adafactor_decay_rate_pow.offset"),
    ] = 0
    beta1: Annotated[float, Range(at_least=0, below=1), T5x(hint=float | None, default=None)] = 0.0
    clipping_threshold: Annotated[float | None, Range(above=0)] = 1.0
    factored: bool = True
    epsilon1: Annotated[float, Range(at_least=0)] = 1e-30
    epsilon2: Annotated[float, Range(at_least=0)] = 1e-3
    min_dim_size_to_factor: Annotated[int, Range(at_least=0)] = 128
    decay_rate: Annotated[float | None, Range(at_least=0, below=1), Only(t5x=None)] = None
    # Paths, not Mesh TensorFlow's patterns, so that the JAX core needs none of its names.
    exclude_from_parameter_scale: Annotated[
        tuple[str, ...], T5x("multiply_by_parameter_scale", hint=Any, default=True)
    ] = ()
    frozen: Annotated[tuple[str, ...], Only(t5x=()), Mtf("utils.run.variable_filter")] = ()
    # From here on, options that only T5X's Adafactor has. It allocates a slot for beta1 = 0.0 too,
    # since None is how T5X says that there is no momentum.
    momentum_slot: Annotated[
        bool, T5x("beta1", hint=float | None, default=None), Only(mtf=False)
    ] = False
    weight_decay_rate: Annotated[float | None, Range(at_least=0), Only(mtf=None)] = None
    # T5X treats an exponent or a threshold of 0 as none.
    weight_decay_rate_lr_exponent: Annotated[
        float | None, Range(), T5x(read=or_none), Only(mtf=None)
    ] = None
    global_norm_clip: Annotated[
        float | None,
        Range(above=0),
        T5x("global_norm_clip_threshold", read=or_none),
        Only(mtf=None),
    ] = None
    max_parameter_scale: Annotated[float | None, Range(above=0), Only(mtf=None)] = None
    skip_nan_updates: Annotated[bool, Only(mtf=False)] = False
    factor_map: Annotated[
        tuple[tuple[str, str], ...], T5x(hint=Any, default=None), Only(mtf=())
    ] = ()

    @property
    def has_momentum(self) -> bool:
        """Whether each parameter has a momentum."""
        return bool(self.beta1) or self.momentum_slot

    def slot_shapes(self, path: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """The shape of each slot that a parameter of this path and shape has.

        Raises:
          FactorRuleError: If there are factor rules, and none suits the parameter.
        """
        second_moment = factoring(path, shape, self).slot_shapes(shape)
        return second_moment | ({"m": shape} if self.has_momentum else {})


class _WholeSlots:
    """Optimizers whose slots all have their parameter's shape."""

    slots: ClassVar[tuple[str, ...]] = ()

    def slot_shapes(self, path: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """The shape of each slot that a parameter of this path and shape has."""
        del path
        return dict.fromkeys(self.slots, shape)


@arguments(mtf="optimize.AdamWeightDecayOptimizer")
@dataclasses.dataclass(frozen=True)
class AdamWeightDecayConfig(_WholeSlots):
    """Mesh TensorFlow's AdamWeightDecayOptimizer: Adam without bias correction, decoupled decay.

    Attributes:
      exclude_from_weight_decay: Paths of parameters that do not decay.
    """

    slots = naming.ADAM_SLOTS
    weight_decay_rate: Annotated[float, Range(at_least=0)]
    beta_1: Annotated[float, Range(at_least=0, below=1)]
    beta_2: Annotated[float, Range(at_least=0, below=1)]
    epsilon: Annotated[float, Range(at_least=0)]
    exclude_from_weight_decay: tuple[str, ...] = ()
    frozen: Annotated[tuple[str, ...], Mtf("utils.run.variable_filter")] = ()


@arguments(mtf="optimize.MomentumOptimizer")
@dataclasses.dataclass(frozen=True)
class MomentumConfig(_WholeSlots):
    """Mesh TensorFlow's MomentumOptimizer, which subtracts the velocity *before* its update."""

    slots = naming.MOMENTUM_SLOTS
    momentum: Annotated[float, Range(at_least=0, below=1)]
    frozen: Annotated[tuple[str, ...], Mtf("utils.run.variable_filter")] = ()


@arguments(mtf="optimize.SgdOptimizer")
@dataclasses.dataclass(frozen=True)
class SgdConfig(_WholeSlots):
    """Mesh TensorFlow's SgdOptimizer: subtracts the gradient times the learning rate."""

    frozen: Annotated[tuple[str, ...], Mtf("utils.run.variable_filter")] = ()


@dataclasses.dataclass(frozen=True)
class OptaxConfig:
    """Transformations of optax, applied in order, with their own learning rates.

    Attributes:
      transformations: Calls of optax: {"function": name, "arguments": {...}}, in which an argument
        may be such a call itself.
    """

    # Plain data instead of optax's objects, because a TrainRun is written as JSON and read back.
    transformations: tuple[Mapping[str, Any], ...]


@dataclasses.dataclass(frozen=True)
class OptimizerPart:
    """Parameters, by path, and the optimizer that trains them."""

    # T5X chooses them by a user's functions, which are available only while gin files are read.
    paths: tuple[str, ...]
    # T5X's MultiOptimizer cannot hold the state of a chain of optax either.
    optimizer: AdafactorConfig


@dataclasses.dataclass(frozen=True)
class MultiOptimizerConfig:
    """T5X's MultiOptimizer: assigns an optimizer to each of several sets of parameters.

    Parameters that no part names are not trained.
    """

    parts: tuple[OptimizerPart, ...]


# JSON is read as the first that has all of its names: SGD's are also among Adafactor's.
OptimizerConfig = (
    SgdConfig
    | MomentumConfig
    | AdamWeightDecayConfig
    | AdafactorConfig
    | OptaxConfig
    | MultiOptimizerConfig
)


_WARMUP = {"warmup_steps": Range(above=0)}
_BASE = {"base_learning_rate": Range(at_least=0)}
# Those that must be above 0 are divisors in the schedules' formulas.
SCHEDULE_RANGES = {
    "value": Range(at_least=0),
    "learning_rate": Range(at_least=0),
    "initial_lr": Range(at_least=0),
    "max_learning_rate": Range(at_least=0),
    "multiplier": Range(at_least=0),
    "steps_or_fraction": Range(above=0),
    "linear_decay_fraction": Range(at_least=0, at_most=1),
    "cut_fraction": Range(above=0, below=1),
    "ratio": Range(above=0),
    "start_step": Range(at_least=0),
    "offset": Range(),
    **_WARMUP,
    # T5X's factors, each with the arguments of the product that it reads; "" is the product.
    "factors": {
        "": {"min_learning_rate": Range(at_least=0)},
        "constant": _BASE,
        "linear_warmup": _WARMUP,
        "linear_decay": _BASE | _WARMUP | {"decay_factor": Range(at_least=0)},
        "rsqrt_decay": _WARMUP,
        "rsqrt_normalized_decay": _WARMUP,
        "decay_every": {"decay_factor": Range(at_least=0), "steps_per_decay": Range(above=0)},
        "cosine_decay": {"warmup_steps": Range(at_least=0), "steps_per_cycle": Range(above=0)},
    },
}


@arguments(t5x="utils.create_learning_rate_scheduler")
@dataclasses.dataclass(frozen=True)
class ScheduleConfig:
    """A function of mesh_tensorflow.transformer.learning_rate_schedules with its arguments.

    Attributes:
      name: The function's name there, for instance `constant_learning_rate`.
      arguments: Its keyword arguments with all defaults filled in. The `factors` of a product are
        numbers or {"name": ..., "arguments": ...}.
      total_train_steps: The value that `run` passes: total_run_steps, or else train_steps.
    """

    name: Annotated[str, Only(t5x="create_learning_rate_scheduler")]
    arguments: Annotated[Mapping[str, Any], SCHEDULE_RANGES, Only(t5x=RULE)]
    # A schedule may cover several runs, so this need not be where this one ends.
    total_train_steps: Annotated[int, Range(at_least=0, at_most=MOST_32), T5x("train.total_steps")]
