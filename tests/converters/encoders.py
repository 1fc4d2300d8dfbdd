"""Encoders alone as transformers saves them, without transformers: weights are numbered sines."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

VOCABULARY, WIDTH, HEADS, HEAD_DIM, HIDDEN, LAYERS = 40, 8, 2, 4, 12, 2
FAMILIES = {
    "t5": {"feed_forward_proj": "relu", "architectures": ["T5EncoderModel"]},
    "t5_1_1": {"feed_forward_proj": "gated-gelu", "architectures": ["T5EncoderModel"]},
    "mt5": {"feed_forward_proj": "gated-gelu", "architectures": ["MT5EncoderModel"]},
    "umt5": {"feed_forward_proj": "gated-gelu", "architectures": ["UMT5EncoderModel"]},
}
# Two rows as transformers' outputs are recorded for them; 0 is padding.
IDS = np.array([[7, 3, 31, 9, 1], [12, 5, 1, 0, 0]])


def config(family: str, rows: int = VOCABULARY) -> dict:
    """The content of config.json."""
    return {
        "model_type": "t5" if family.startswith("t5") else family,
        "vocab_size": rows,
        "d_model": WIDTH,
        "d_kv": HEAD_DIM,
        "d_ff": HIDDEN,
        "num_layers": LAYERS,
        "num_decoder_layers": LAYERS,
        "num_heads": HEADS,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 20,
        "is_encoder_decoder": False,
        "tie_word_embeddings": True,
        "transformers_version": "5.23.0",
        **FAMILIES[family],
    }


def weights(family: str, rows: int = VOCABULARY) -> dict[str, np.ndarray]:
    """The encoder's tensors, by transformers' names."""
    inner = HEADS * HEAD_DIM
    wi = ("wi",) if family == "t5" else ("wi_0", "wi_1")
    shapes = {"shared.weight": (rows, WIDTH), "encoder.final_layer_norm.weight": (WIDTH,)}
    for layer in range(LAYERS):
        block = f"encoder.block.{layer}.layer"
        for letter in "qkvo":
            shape = (WIDTH, inner) if letter == "o" else (inner, WIDTH)
            shapes[f"{block}.0.SelfAttention.{letter}.weight"] = shape
        if layer == 0 or family == "umt5":
            bias = f"{block}.0.SelfAttention.relative_attention_bias.weight"
            shapes[bias] = (8, HEADS)
        for name in wi:
            shapes[f"{block}.1.DenseReluDense.{name}.weight"] = (HIDDEN, WIDTH)
        shapes[f"{block}.1.DenseReluDense.wo.weight"] = (WIDTH, HIDDEN)
        for sublayer in (0, 1):
            shapes[f"{block}.{sublayer}.layer_norm.weight"] = (WIDTH,)
    return {
        name: (np.sin(np.arange(np.prod(shape)) * 0.7 + at) + (len(shape) == 1))
        .reshape(shape)
        .astype(np.float32)
        for at, (name, shape) in enumerate(sorted(shapes.items()))
    }


def save_encoder(
    folder: Path, family: str = "t5", rows: int = VOCABULARY, **changes: object
) -> Path:
    """Writes a folder as transformers does; `changes` replace fields of config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights(family, rows), folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config(family, rows) | changes))
    return folder
