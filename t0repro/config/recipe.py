"""A training run in Python, without gin: T0's recipe, with your sizes and lengths.

The values are those of T0's gin files and Mesh TensorFlow's defaults; a test compares them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from t0repro.config.model import DType, DTypePolicy, ModelConfig
from t0repro.config.optimizer import AdafactorConfig, ScheduleConfig
from t0repro.config.run import TrainRun, mesh_transformer_plan
from t0repro.config.settings import check_settings
from t0repro.errors import UserError

# Rows of T5's embedding: 32,000 pieces and 100 sentinels, padded to a multiple of 128.
VOCABULARY_ROWS = 32128


def t5_1_1(
    *,
    num_layers: int,
    d_model: int,
    d_ff: int,
    num_heads: int,
    d_kv: int = 64,
    vocab_size: int = VOCABULARY_ROWS,
    **changes: Any,
) -> ModelConfig:
    """A T5 1.1: gated GELU, separate kernel for the logits, no dropout.

    Args:
      num_layers: Layers of each tower.
      d_model: Width of the residual stream.
      d_ff: Width of the feed-forward layer.
      num_heads: Attention heads.
      d_kv: Width of a head.
      vocab_size: Rows of the embedding.
      **changes: Other fields of `ModelConfig`, for instance dropout_rate.
    """
    fields: dict[str, Any] = {
        "num_encoder_layers": num_layers,
        "num_decoder_layers": num_layers,
        "d_model": d_model,
        "d_ff": d_ff,
        "num_heads": num_heads,
        "d_kv": d_kv,
        "vocab_size": vocab_size,
        "activations": ("gelu", "linear"),
        "logits_from_embedding": False,
        "relative_attention_num_buckets": 32,
        "dropout_rate": 0.0,
        "label_smoothing": 0.0,
        "z_loss": 1e-4,
        "loss_denominator": None,
    }
    return ModelConfig(**{**fields, **changes})


def training_config(
    model_dir: str,
    model: ModelConfig,
    *,
    train_steps: int,
    batch_size: int,
    sequence_length: Mapping[str, int],
    learning_rate: float = 1e-3,
    activation: DType = "float32",
    save_checkpoints_steps: int = 5000,
    keep_checkpoint_max: int | None = None,
    **changes: Any,
) -> TrainRun:
    """The configuration of a training run like T0's: Adafactor with a constant learning rate.

    Args:
      model_dir: The folder of checkpoints and metrics.
      model: The model to train.
      train_steps: The global step to train to, including the steps of the initial checkpoint.
      batch_size: Rows in a batch.
      sequence_length: Tokens per row of `inputs` and of `targets`.
      learning_rate: The rate of every step.
      activation: Dtype of the computation; parameters and slots are float32.
      save_checkpoints_steps: Steps between checkpoints.
      keep_checkpoint_max: How many of the latest checkpoints to keep; None keeps all.
      **changes: Other fields of `TrainRun`, for instance num_microbatches.

    Raises:
      UserError: If a number is outside its field's range, or lengths are of other features.
    """
    lengths = sequence_length if isinstance(sequence_length, Mapping) else {}
    if not {"targets"} <= lengths.keys() <= {"inputs", "targets"}:
        raise UserError(
            f"sequence_length is {sequence_length!r}; it must be the tokens per row of 'inputs' and"
            " 'targets', or of 'targets' alone.",
            where="sequence_length",
            fix="Give {'inputs': 512, 'targets': 128}, for instance.",
        )
    schedule = {"learning_rate": learning_rate}
    fields: dict[str, Any] = {
        "mode": "train",
        "model_dir": str(model_dir),
        "model": model,
        "dtypes": DTypePolicy("float32", "float32", activation),
        "optimizer": AdafactorConfig(),
        "schedule": ScheduleConfig("constant_learning_rate", schedule, train_steps),
        "sequence_length": dict(lengths),
        "batch_size": batch_size,
        "num_microbatches": 1,
        "train_steps": train_steps,
        "plan": mesh_transformer_plan(
            save_checkpoints_steps=save_checkpoints_steps,
            keep_checkpoint_max=keep_checkpoint_max,
        ),
    }
    config = TrainRun(**{**fields, **changes})
    # Its arguments, where a field has another name.
    places = {"plan.save.period": "save_checkpoints_steps", "plan.save.keep": "keep_checkpoint_max"}
    check_settings(config, places)
    # The ranges look at one number at a time, and these two must fit together.
    config.model.check_position_buckets("model")
    return config
