"""Builds a run's model and trainer: this project's, or the user's classes that the run names."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax

from t0repro.config.decoding import DecodingPlan
from t0repro.config.run_config import RunConfig
from t0repro.config.training_plan import UserClass
from t0repro.model.t5 import T5
from t0repro.model.t5x_decoding import beam_search, temperature_sample
from t0repro.partitioning.devices import Partitioning
from t0repro.training.metrics import SplitMetrics
from t0repro.training.models import DecoderParams, T5Model, own_model
from t0repro.training.optimizers import Optimizer
from t0repro.training.partitioner import Partitioner
from t0repro.training.train_state import TrainState
from t0repro.training.trainer import BaseTrainer, LearningRateCallable, Trainer
from t0repro.training.user_classes import made, made_or, replaced
from t0repro.training.weight_metrics import WeightMetricsComputer


def trainer_of(
    config: RunConfig,
    model: T5Model,
    state: TrainState,
    partitioning: Partitioning,
    rng: jax.Array,
    schedule: LearningRateCallable,
    *,
    eval_names: Sequence[str] = (),
    files: SplitMetrics | None = None,
    hold_if_not_finite: bool = False,
) -> BaseTrainer:
    """The trainer of a training run: the user's, or `Trainer`.

    Args:
      config: the run.
      model: the model to train.
      state: where it starts.
      partitioning: the devices.
      rng: PRNG key, into which each step is folded.
      schedule: maps the global step before an update to its learning rate.
      eval_names: names of the evaluations.
      files: where metrics are written.
      hold_if_not_finite: see Trainer; a user's train step decides that itself.
    """
    every = config.weight_metrics_every
    partitioner = made_or(Partitioner, config, "partitioner", {"partitioning": partitioning})
    weights = (
        made_or(WeightMetricsComputer, config, "weight_metrics_computer", {"every": every})
        if every
        else None
    )
    arguments = {
        "model": model,
        "train_state": state,
        "partitioner": partitioner,
        "eval_names": eval_names,
        "summary_dir": None,
        "train_state_axes": None,
        "rng": rng,
        "learning_rate_fn": schedule,
        "num_microbatches": config.num_microbatches,
        "weight_metrics_computer": weights,
    }
    trainer: BaseTrainer = made_or(Trainer, config, "trainer", arguments)
    # Set after construction: T5X's constructors do not take these arguments, so a user's class
    # cannot pass them on.
    if files is not None:
        trainer.write_to(files)
    if isinstance(trainer, Trainer):
        trainer.hold_if_not_finite = hold_if_not_finite
    return trainer


def model_of(
    config: RunConfig,
    module: T5,
    optimizer: Optimizer | None = None,
    *,
    vocabularies: tuple[Any, Any] = (None, None),
    decoding: DecodingPlan | None = None,
) -> T5Model:
    """The model of a training run: the user's, or T5 with its own loss.

    Args:
      config: the run.
      module: the network.
      optimizer: the optimizer.
      vocabularies: SeqIO's of inputs and targets, which a user's model may read.
      decoding: how a user's model generates unless it says otherwise.
    """
    user_class, where = replaced(config, "model")
    if user_class is None:
        return own_model(module, optimizer)
    return user_model(user_class, module, optimizer, vocabularies, decoding, where)


def user_model(
    user_class: UserClass,
    module: T5,
    optimizer: Optimizer | None,
    vocabularies: tuple[Any, Any],
    decoding: DecodingPlan | None,
    where: str | None = None,
) -> T5Model:
    """A user's subclass of EncoderDecoderModel with T5X's arguments; see `model_of`."""
    plan, loss = decoding or DecodingPlan(), module.config
    options = plan.function_options()
    function = beam_search if plan.method == "beam_search" else temperature_sample
    # EncoderDecoderModel supplies these itself.
    given = {name: x for name, x in options.items() if name not in ("eos_id", "num_decodes")}
    supplied = {
        "module": module,
        "input_vocabulary": vocabularies[0],
        "output_vocabulary": vocabularies[1],
        "optimizer_def": optimizer,
        "decode_fn": functools.partial(function, **given),
        "label_smoothing": loss.label_smoothing,
        "z_loss": loss.z_loss,
        "loss_normalizing_factor": loss.loss_denominator or "NUM_TOTAL_TARGET_TOKENS",
        "default_decoder_params": DecoderParams(
            plan.return_all_decodes, plan.num_decodes, plan.prompt_with_targets
        ),
    }
    return made(user_class, supplied, where)
