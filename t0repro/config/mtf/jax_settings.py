"""Settings of the JAX stack that no gin file of Mesh TensorFlow has.

The model's settings exist in transformers' T5, so models from there may need them. Importing this
module registers them with gin; Mesh TensorFlow refuses them all by name.
"""

from __future__ import annotations

import gin
from t0repro import adapters
from t0repro.config.choices import ChoiceLoss


# Importing this module registers it; the parser does so before it reads a file.
@gin.configurable(module="t0repro")  # pyright: ignore[reportCallIssue]
def jax_model(
    relative_attention_max_distance: int = 128,
    exact_gelu: bool = False,
    scale_tied_logits: bool = True,
    recompute: str | None = None,
) -> None:
    """Settings of the model, whose values gin holds; nothing calls this.

    Args:
      relative_attention_max_distance: As in `ModelConfig`.
      exact_gelu: Whether `gelu` is the one with the error function and not its tanh approximation.
      scale_tied_logits: As in `ModelConfig`.
      recompute: As in `ModelConfig`; None for `full` if `LayerStack.recompute_grads` is True.
    """


@gin.configurable(module="t0repro")  # pyright: ignore[reportCallIssue]
def jax_training(
    weight_metrics_every: int = 0,
    data_shards: int = 1,
    adapter: adapters.Adapter | None = None,
    init_adapter: str | None = None,
    choice_loss: ChoiceLoss | None = None,
) -> None:
    """Settings of a training run, whose values gin holds; nothing calls this.

    Args:
      weight_metrics_every: As in `TrainRun`.
      data_shards: `TrainDataConfig.num_shards`.
      adapter: What is trained in place of the model's own parameters: `@adapters.lora()` or
        `@adapters.ia3()`.
      init_adapter: `RestoreConfig.adapter`.
      choice_loss: Losses over an example's answer choices: `@t0repro.ChoiceLoss()`.
    """


for _function in (adapters.lora, adapters.ia3):
    gin.external_configurable(_function, module="t0repro.adapters")
gin.external_configurable(ChoiceLoss, module="t0repro")
