"""Settings of the JAX stack that no gin file of Mesh TensorFlow has, as bindings of t0repro's own.

Those of the model are transformers' T5's, so models that come from there may need them. Mesh
TensorFlow refuses them all by name.
"""

from __future__ import annotations

import inspect
from typing import Any, get_args

import gin
from t0repro.config.run_config import Recompute
from t0repro.errors import UserError

SELECTOR = "t0repro.jax_model"
TRAINING = "t0repro.jax_training"


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
            f"There is no way to recompute {recompute!r}.",
            where=f"{SELECTOR}.recompute",
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
    for selector, function in ((SELECTOR, jax_model), (TRAINING, jax_training)):
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
