"""A training in the words of the other dialect, and the values that it cannot express."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

from t0repro.config.run_config import AdafactorConfig, Arithmetic, RunConfig, TrainDataConfig
from t0repro.config.training_plan import DatasetConfig

Dialect = Literal["mtf", "t5x"]


@dataclasses.dataclass(frozen=True)
class Translation:
    """Bindings of a gin file, one per line, and what they leave out.

    Attributes:
      missing: Values that the dialect cannot express, in words.
    """

    bindings: tuple[str, ...]
    missing: tuple[str, ...]


# Field of ModelConfig -> binding.
_MODEL: dict[Dialect, dict[str, str]] = {
    "t5x": {
        "num_encoder_layers": "network.T5Config.num_encoder_layers",
        "num_decoder_layers": "network.T5Config.num_decoder_layers",
        "d_model": "network.T5Config.emb_dim",
        "d_ff": "network.T5Config.mlp_dim",
        "num_heads": "network.T5Config.num_heads",
        "d_kv": "network.T5Config.head_dim",
        "vocab_size": "network.T5Config.vocab_size",
        "activations": "network.T5Config.mlp_activations",
        "logits_from_embedding": "network.T5Config.logits_via_embedding",
        "dropout_rate": "network.T5Config.dropout_rate",
        "label_smoothing": "models.EncoderDecoderModel.label_smoothing",
        "z_loss": "models.EncoderDecoderModel.z_loss",
    },
    "mtf": {
        "d_model": "d_model",
        "d_ff": "d_ff",
        "num_heads": "num_heads",
        "d_kv": "d_kv",
        "dropout_rate": "dropout_rate",
        "num_encoder_layers": "encoder/transformer.make_layer_stack.num_layers",
        "num_decoder_layers": "decoder/transformer.make_layer_stack.num_layers",
        "activations": "transformer_layers.DenseReluDense.activation",
        "label_smoothing": "transformer.Unitransformer.label_smoothing",
        "z_loss": "transformer.Unitransformer.z_loss",
    },
}
_ADAFACTOR: dict[Dialect, dict[str, str]] = {
    "t5x": {
        "multiply_by_parameter_scale": "adafactor.Adafactor.multiply_by_parameter_scale",
        "decay_exponent": "adafactor.Adafactor.decay_rate",
        "decay_offset": "adafactor.Adafactor.step_offset",
        "clipping_threshold": "adafactor.Adafactor.clipping_threshold",
        "factored": "adafactor.Adafactor.factored",
        "epsilon1": "adafactor.Adafactor.epsilon1",
        "epsilon2": "adafactor.Adafactor.epsilon2",
        "min_dim_size_to_factor": "adafactor.Adafactor.min_dim_size_to_factor",
    },
    "mtf": {
        "multiply_by_parameter_scale": "optimize.AdafactorOptimizer.multiply_by_parameter_scale",
        "decay_exponent": "optimize.adafactor_decay_rate_pow.exponent",
        "decay_offset": "optimize.adafactor_decay_rate_pow.offset",
        "beta1": "optimize.AdafactorOptimizer.beta1",
        "clipping_threshold": "optimize.AdafactorOptimizer.clipping_threshold",
        "factored": "optimize.AdafactorOptimizer.factored",
        "epsilon1": "optimize.AdafactorOptimizer.epsilon1",
        "epsilon2": "optimize.AdafactorOptimizer.epsilon2",
        "min_dim_size_to_factor": "optimize.AdafactorOptimizer.min_dim_size_to_factor",
    },
}
# What a dialect always computes; a value that differs from it cannot be expressed there.
_ARITHMETIC: dict[Dialect, Arithmetic] = {"mtf": Arithmetic(), "t5x": Arithmetic(True, *[True] * 7)}


def translated(config: RunConfig, dialect: Dialect) -> Translation:
    """A training's values as bindings of a dialect, whichever dialect they came from."""
    bindings: list[str] = []
    missing: list[str] = []
    for part in (_model, _optimizer, _schedule, _data, _run):
        for name, value in part(config, dialect):
            if value is _NOT_EXPRESSED:
                missing.append(name)
            else:
                bindings.append(f"{name} = {value!r}")
    return Translation(tuple(bindings), tuple(missing))


_NOT_EXPRESSED = object()
_Items = Iterator[tuple[str, Any]]


def _model(config: RunConfig, dialect: Dialect) -> _Items:
    model = config.model
    for field, binding in _MODEL[dialect].items():
        value = getattr(model, field)
        if dialect == "mtf" and field == "activations":
            # gin lists the gated form's activations and names a single one.
            value = list(value) if len(value) > 1 else value[0]
        yield binding, value
    denominator = model.loss_denominator
    if dialect == "t5x":
        # T5X's default is the plain sum (1); Mesh TensorFlow's, all targets of the batch.
        names = {None: "NUM_TOTAL_TARGET_TOKENS", 1.0: None}
        factor = names.get(denominator, denominator)  # pyright: ignore[reportCallIssue, reportArgumentType]
        yield "models.EncoderDecoderModel.loss_normalizing_factor", factor
        yield "network.T5Config.dtype", config.dtypes.activation
    elif isinstance(denominator, str):
        yield f"model.loss_denominator = {denominator}", _NOT_EXPRESSED
    elif denominator is not None:
        yield "transformer.Unitransformer.loss_denominator", denominator
    if dialect == "t5x" and model.model_type != "bitransformer":
        yield f"model.model_type = {model.model_type}", _NOT_EXPRESSED
    for field in ("shared_towers", "position_bias_per_layer"):
        if getattr(model, field) and dialect == "t5x":
            yield f"model.{field} = True", _NOT_EXPRESSED
    yield from _arithmetic(model.arithmetic, dialect, model.label_smoothing > 0)


def _arithmetic(arithmetic: Arithmetic, dialect: Dialect, smoothed: bool) -> _Items:
    for field in dataclasses.fields(arithmetic):
        value = getattr(arithmetic, field.name)
        if field.name == "float32_attention_logits":
            if dialect == "t5x":
                yield "network.T5Config.float32_attention_logits", value
            elif not value:
                yield "attention.attention.float32_logits", value
        elif field.name == "smoothing_spares_target" and not smoothed:
            continue  # there is nothing to smooth
        elif value != getattr(_ARITHMETIC[dialect], field.name):
            yield f"model.arithmetic.{field.name} = {value}", _NOT_EXPRESSED


def _optimizer(config: RunConfig, dialect: Dialect) -> _Items:
    optimizer = config.optimizer
    if not isinstance(optimizer, AdafactorConfig):
        yield f"optimizer = {type(optimizer).__name__}", _NOT_EXPRESSED
        return
    for field, binding in _ADAFACTOR[dialect].items():
        yield binding, getattr(optimizer, field)
    if dialect == "t5x":
        # None there is no momentum; 0.0 would keep a slot.
        has_slot = optimizer.beta1 or optimizer.momentum_slot
        yield "adafactor.Adafactor.beta1", optimizer.beta1 if has_slot else None
        ours = ("decay_rate", "exclude_from_parameter_scale", "frozen")
    else:
        ours = ("weight_decay_rate", "weight_decay_rate_lr_exponent", "global_norm_clip")
        ours += ("max_parameter_scale", "skip_nan_updates", "momentum_slot")
    for field in ours:
        if value := getattr(optimizer, field):
            yield f"optimizer.{field} = {value}", _NOT_EXPRESSED


def _schedule(config: RunConfig, dialect: Dialect) -> _Items:
    schedule = config.schedule
    if schedule is None:
        return
    arguments, t5x = schedule.arguments, schedule.name == "create_learning_rate_scheduler"
    if dialect == "t5x" and t5x:
        for name, value in arguments.items():
            yield f"utils.create_learning_rate_scheduler.{name}", value
    elif dialect == "t5x" and schedule.name == "constant_learning_rate":
        yield "utils.create_learning_rate_scheduler.factors", "constant"
        rate = arguments["learning_rate"]
        yield "utils.create_learning_rate_scheduler.base_learning_rate", rate
    elif dialect == "mtf" and t5x and arguments.get("factors", "").strip() == "constant":
        rate = arguments["base_learning_rate"]
        yield "learning_rate_schedules.constant_learning_rate.learning_rate", rate
    elif dialect == "mtf" and not t5x:
        for name, value in arguments.items():
            yield f"learning_rate_schedules.{schedule.name}.{name}", value
    else:
        yield f"schedule = {schedule.name}({dict(arguments)})", _NOT_EXPRESSED


def _data(config: RunConfig, dialect: Dialect) -> _Items:
    data: TrainDataConfig | DatasetConfig | None = config.train_data
    if config.plan is not None:
        data = config.plan.train_data
    if data is None:
        return
    prefix = "train/utils.DatasetConfig" if dialect == "t5x" else "mesh_train_dataset_fn"
    for field in ("mixture_or_task_name", "use_cached", "pack", "shuffle", "seed"):
        yield f"{prefix}.{field}", getattr(data, field)
    yield (
        ("train/utils.DatasetConfig.split" if dialect == "t5x" else "run.dataset_split"),
        data.split,
    )


def _run(config: RunConfig, dialect: Dialect) -> _Items:
    lengths = config.sequence_length
    if dialect == "t5x":
        yield "train/utils.DatasetConfig.task_feature_lengths", lengths
        yield "train/utils.DatasetConfig.batch_size", config.batch_size
        yield "trainer.Trainer.num_microbatches", config.num_microbatches
        yield "train_script.train.total_steps", config.train_steps
        yield "utils.SaveCheckpointConfig.period", config.save_checkpoints_steps
        # Mesh TensorFlow's 0 keeps all checkpoints, as T5X's None does.
        yield "utils.SaveCheckpointConfig.keep", config.keep_checkpoint_max or None
        yield "utils.RestoreCheckpointConfig.path", config.init_checkpoint or []
        if config.init_variable_filter:
            yield f"init_variable_filter = {config.init_variable_filter!r}", _NOT_EXPRESSED
        return
    yield "run.sequence_length", lengths
    # As a pair: a plain number would be taken for tokens or sequences by other settings.
    yield "run.batch_size", ("sequences_per_batch", config.batch_size)
    if config.num_microbatches > 1:
        yield "serialize_num_microbatches.microbatches_per_step", config.num_microbatches
    yield "run.train_steps", config.train_steps
    yield "run.save_checkpoints_steps", config.save_checkpoints_steps
    yield "run.keep_checkpoint_max", config.keep_checkpoint_max
    yield "run.init_checkpoint", config.init_checkpoint
    plan = config.plan
    if plan is None:
        return
    for field in ("train_eval_data", "infer_eval_data", "relative_steps", "actions"):
        if getattr(plan, field):
            yield (
                f"plan.{field}: training itself evaluates nothing and stops for nothing",
                (_NOT_EXPRESSED),
            )
    if plan.save is not None and plan.save.best is not None:
        yield "plan.save.best", _NOT_EXPRESSED
