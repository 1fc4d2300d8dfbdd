"""Small model configurations that tests share; each test changes the fields that it is about."""

from __future__ import annotations

import dataclasses
from typing import Any

from t0repro.config.run_config import DTypePolicy, ModelConfig

FLOAT32 = DTypePolicy("float32", "float32", "float32")
BFLOAT16 = DTypePolicy("float32", "float32", "bfloat16")

T5_1_1 = ModelConfig(
    num_encoder_layers=1,
    num_decoder_layers=1,
    d_model=16,
    d_ff=24,
    num_heads=2,
    d_kv=4,
    vocab_size=128,
    activations=("gelu", "linear"),
    logits_from_embedding=False,
    relative_attention_num_buckets=8,
    dropout_rate=0.0,
    label_smoothing=0.0,
    z_loss=0.0,
    loss_denominator=None,
)
T5_1_0 = dataclasses.replace(T5_1_1, activations=("relu",), logits_from_embedding=True)
# Every field that sets transformers' umT5 and its relatives apart from T5 1.1, at once.
UMT5 = dataclasses.replace(
    T5_1_1,
    activations=("silu", "linear"),
    logits_from_embedding=True,
    scale_tied_logits=False,
    position_bias_per_layer=True,
    relative_attention_max_distance=20,
    rms_norm_epsilon=1e-3,
)


def model_config(**changes: Any) -> ModelConfig:
    """T5_1_1 with other values in some fields."""
    return dataclasses.replace(T5_1_1, **changes)
