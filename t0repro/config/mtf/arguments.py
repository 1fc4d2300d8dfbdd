"""The arguments that gin's configuration amounts to, those of t0repro's own jax_model included."""

from __future__ import annotations

import importlib
import inspect
from typing import Any, NoReturn, get_args

import gin
from t0repro.config import gin_door
from t0repro.config.configuration import NotOnJax
from t0repro.config.gin_door import Bindings
from t0repro.config.mtf.parser import MESH_TRANSFORMER, UTILS
from t0repro.config.run_config import Recompute
from t0repro.errors import UserError


class RunArguments:
    """The arguments of `utils.run` and of what it calls.

    Attributes:
      bindings: gin's bindings and their places.
      run: The arguments of `utils.run`.
      provenance: Field of the RunConfig -> where its value was set; filled by `note`.
      utils, mesh_transformer: Mesh TensorFlow's and t5's modules of these names.
    """

    def __init__(self, bindings: Bindings):
        self.bindings = bindings
        self.provenance: dict[str, str] = {}
        self.utils = importlib.import_module(UTILS)
        self.mesh_transformer = importlib.import_module(MESH_TRANSFORMER)
        self.run = self._run_arguments()

    def _run_arguments(self) -> dict[str, Any]:
        """The arguments of `utils.run`, with what gin calls for them, as for its mesh_shape."""
        try:
            return self.arguments(f"{UTILS}.run", self.utils.run)
        # gin calls @tpu_mesh_shape() for its value, which fails if no topology is bound.
        except RuntimeError as error:
            if "tpu_mesh_shape" not in str(error):
                raise
            raise UserError(
                f"{str(error).splitlines()[0]}.",
                where=self.bindings.find((), f"{UTILS}.run", "mesh_shape"),
                fix='Add --gin_param="utils.run.mesh_shape = []"; or, to count a TPU\'s replicas,'
                " --gin_param=\"utils.tpu_mesh_shape.tpu_topology = 'v3-8'\".",
            ) from error

    def arguments(self, selector: str, function: Any, scope: str = "") -> dict[str, Any]:
        """A configurable's arguments as a call in a scope gets them: defaults, then bindings."""
        signature = inspect.signature(function)
        defaults = {
            name: parameter.default
            for name, parameter in signature.parameters.items()
            if parameter.default is not parameter.empty
        }
        # Bindings win over defaults, as in a call through gin.
        return {**defaults, **gin_door.resolved(scope, selector)}

    def argument(self, selector: str, name: str) -> Any:
        """What an argument is bound to, or None; noted as the field of the same name."""
        self.note(name, selector, name)
        return gin_door.resolved("", selector).get(name)

    def note(self, field: str, selector: str, argument: str, scopes: tuple[str, ...] = ()) -> None:
        """Notes that a field of the RunConfig has its value from an argument."""
        self.provenance[field] = self.bindings.source(scopes, selector, argument)

    def refuse(
        self, argument: str, what: str, selector: str = f"{UTILS}.run", scope: str = "decoder"
    ) -> NoReturn:
        """Raises NotOnJax, naming what is not supported and the place that asks for it."""
        raise NotOnJax(
            f"The JAX stack does not support {what} ({selector.rpartition('.')[2]}.{argument}).",
            # The decoder's scope wins over a binding without one.
            where=self.bindings.source((scope,), selector, argument),
            fix="Remove the binding, or run with --backend=mtf.",
        )

    def place_of_run(self, argument: str) -> str | None:
        """Where an argument of `utils.run` is bound; None if it is not."""
        return self.bindings.find((), f"{UTILS}.run", argument)


# ---- Settings of the JAX stack that no gin file of Mesh TensorFlow has ---------------------------

# Those of the model are transformers' T5's, so models that come from there may need them. Mesh
# TensorFlow refuses them all by name.


JAX_MODEL = "t0repro.jax_model"
JAX_TRAINING = "t0repro.jax_training"


# Registered by importing this module, which the parser does before it reads a file.
@gin.configurable(module="t0repro")  # pyright: ignore[reportCallIssue]
def jax_model(
    relative_attention_max_distance: int = 128,
    exact_gelu: bool = False,
    scale_tied_logits: bool = True,
    recompute: str | None = None,
) -> dict[str, Any]:
    """The settings that gin binds, by name.

    Args:
      relative_attention_max_distance: As in `ModelConfig`.
      exact_gelu: Whether `gelu` is the one with the error function and not its tanh approximation.
      scale_tied_logits: As in `ModelConfig`.
      recompute: As in `ModelConfig`; None for `full` if `LayerStack.recompute_grads` says so.

    Raises:
      UserError: If there is no such way to recompute.
    """
    if recompute is not None and recompute not in (ways := get_args(Recompute)):
        raise UserError(
            f"{recompute!r} does not name what to recompute.",
            where=f"{JAX_MODEL}.recompute",
            fix=f"Bind one of {', '.join(ways)}.",
        )
    return {
        "relative_attention_max_distance": relative_attention_max_distance,
        "exact_gelu": exact_gelu,
        "scale_tied_logits": scale_tied_logits,
        "recompute": recompute,
    }


@gin.configurable(module="t0repro")  # pyright: ignore[reportCallIssue]
def jax_training(weight_metrics_every: int = 0, data_shards: int = 1) -> dict[str, int]:
    """The settings of a training run that gin binds, by name.

    Args:
      weight_metrics_every: As in `RunConfig`.
      data_shards: `TrainDataConfig.num_shards`.
    """
    return {"weight_metrics_every": weight_metrics_every, "data_shards": data_shards}


def refuse_on_mesh_tensorflow() -> None:
    """Raises UserError if gin's configuration binds a setting to what Mesh TensorFlow cannot do."""
    for selector, function in ((JAX_MODEL, jax_model), (JAX_TRAINING, jax_training)):
        parameters = inspect.signature(function).parameters
        for name, value in gin.get_bindings(selector).items():
            # A setting that is bound to its default asks for nothing.
            if value != parameters[name].default:
                raise UserError(
                    f"{selector}.{name} is {value!r}; Mesh TensorFlow computes"
                    f" {parameters[name].default!r} alone.",
                    where=f"{selector}.{name}",
                    fix="Run with --backend=jax, or leave the binding out.",
                )
