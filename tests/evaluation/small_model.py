"""A T5 of one layer, small enough to compile many shapes of it in a test."""

import jax

from t0repro.config.run_config import DTypePolicy, ModelConfig
from t0repro.model.t5 import T5, initial_parameters

CONFIG = ModelConfig(
    num_encoder_layers=1,
    num_decoder_layers=2,
    d_model=8,
    d_ff=12,
    num_heads=2,
    d_kv=4,
    vocab_size=128,
    activations=("gelu", "linear"),
    logits_from_embedding=False,
    relative_attention_num_buckets=8,
    dropout_rate=0.5,
    label_smoothing=0.1,
    z_loss=0.1,
    loss_denominator=None,
)
MODEL = T5(CONFIG, DTypePolicy("float32", "float32", "float32"))


def small_parameters():
    return initial_parameters(MODEL, jax.random.key(0))
