"""Mesh TensorFlow's variable names of a model, which its filters and exceptions are written in."""

from __future__ import annotations

from t0repro.config.run_config import ModelConfig
from t0repro.converters.family import Family
from t0repro.parameters import layout

# bi_v1_shared names its layers by kind, so that encoder and decoder layers of a kind are the same
# variables; other models number them.
SHARED_LAYERS = ("self_attention", "enc_dec_attention", "dense_relu_dense")


def mesh_variables(model: ModelConfig) -> dict[str, str]:
    """Path in T5X's tree -> name in Mesh TensorFlow, of every parameter of the model."""
    names = {}
    for path in family(model).parameters():
        if model.shared_towers and path.startswith("encoder/"):
            continue
        name = layout.path_to_mtf(path, model.norm_names, model.decoder_only)
        assert name is not None, path
        if model.shared_towers:
            for number, layer in enumerate(SHARED_LAYERS):
                name = name.replace(f"/layer_{number:03d}/", f"/{layer}/")
        names[path] = name
    return names


def family(model: ModelConfig) -> Family:
    """The model's shape as the converters know it; a shared encoder counts as one of its own."""
    gated = len(model.activations) > 1
    return Family(
        num_encoder_layers=model.num_encoder_layers,
        num_decoder_layers=model.num_decoder_layers,
        d_model=model.d_model,
        d_ff=model.d_ff,
        num_heads=model.num_heads,
        d_kv=model.d_kv,
        vocab_size=model.vocab_size,
        relative_attention_num_buckets=model.relative_attention_num_buckets,
        wi_kernels=tuple(f"wi_{n}" for n in range(len(model.activations))) if gated else ("wi",),
        tied=model.logits_from_embedding,
    )
