from __future__ import annotations

import dataclasses

import pytest

from t0repro.config.model import ModelConfig
from t0repro.errors import UserError
from t0repro.parameters import naming
from t0repro.parameters.shape import ModelShape, check_parameters, recognize

T5_1_1_XL = ModelShape(24, 24, 2048, 5120, 32, 64, 32128, 32, ("wi_0", "wi_1"), False)
T5_1_0_11B = ModelShape(24, 24, 1024, 65536, 128, 128, 32128, 32, ("wi",), True)


def model_config(family: ModelShape) -> ModelConfig:
    return ModelConfig(
        num_encoder_layers=family.num_encoder_layers,
        num_decoder_layers=family.num_decoder_layers,
        d_model=family.d_model,
        d_ff=family.d_ff,
        num_heads=family.num_heads,
        d_kv=family.d_kv,
        vocab_size=family.vocab_size,
        activations=("gelu", "linear") if family.gated else ("relu",),
        logits_from_embedding=family.tied,
        relative_attention_num_buckets=family.relative_attention_num_buckets,
        dropout_rate=0.0,
        label_smoothing=0.0,
        z_loss=1e-4,
        loss_denominator=None,
        model_type="lm" if family.decoder_only else "bitransformer",
        shared_towers=family.shared_towers,
    )


@pytest.mark.parametrize(
    ("family", "name", "count"),
    # Parameter counts: T5 1.1 XL's 2.85e9, T5 11B's 11.3e9 (the T5 repository's README).
    [(T5_1_1_XL, "T5 1.1 XL", 2_849_757_184), (T5_1_0_11B, "T5 1.0 11B", 11_307_321_344)],
)
@pytest.mark.parametrize("names", ["mtf", "keys", "paths"])
def test_a_published_size_is_recognized_by_any_format_s_names(family, name, count, names):
    spell = {
        "mtf": naming.path_to_mtf,
        "keys": lambda path: naming.PARAMETERS + path,
        "paths": lambda path: path,
    }[names]
    shapes = {str(spell(path)): shape for path, shape in family.parameters().items()}
    assert recognize(shapes) == family
    assert family.name == name
    assert family.parameter_count() == count


@pytest.mark.mtf
@pytest.mark.parametrize(("model", "gated"), [("t5_1_1", True), ("t5_1_0", False)])
def test_what_mesh_tensorflow_trained_is_recognized(mesh_checkpoints, model, gated):
    from t0repro.converters.tensor_bundle import BundleReader

    entries = BundleReader(mesh_checkpoints[model] / "model.ckpt-2").entries
    family = recognize({name: entry.shape for name, entry in entries.items()})
    wi_kernels = ("wi_0", "wi_1") if gated else ("wi",)
    assert family == ModelShape(2, 2, 128, 256, 2, 64, 256, 32, wi_kernels, tied=not gated)


def test_shapes_that_fit_no_family_are_refused_with_the_two_that_disagree(tiny_family):
    shapes = tiny_family.parameters()
    shapes["encoder/relpos_bias/rel_embedding"] = (3, 32)
    with pytest.raises(UserError, match="128 wide, which is not a multiple of the 3 heads"):
        recognize(shapes)


def test_a_model_that_is_no_encoder_decoder_is_refused():
    with pytest.raises(UserError, match="not a T5 encoder-decoder"):
        recognize({"transformer/block_000/layer_000/SelfAttention/q": (8, 8)})


def test_a_vocabulary_that_differs_between_embedding_and_logits_is_said(tiny_family):
    shapes = tiny_family.parameters()
    shapes["decoder/logits_dense/kernel"] = (128, 256)
    with pytest.raises(UserError, match=r"\(128, 256\).*vocabularies of the embedding"):
        check_parameters(shapes, "here")


def test_a_checkpoint_s_missing_layer_in_the_middle_is_named(tiny_family):
    shapes = tiny_family.parameters()
    kept = {path: shape for path, shape in shapes.items() if "decoder/layers_0/mlp" not in path}
    with pytest.raises(UserError, match="3 variables.*decoder/layers_0/mlp/wi_0/kernel"):
        check_parameters(kept, "here")


@pytest.mark.parametrize(
    "shape",
    [
        T5_1_1_XL,
        T5_1_0_11B,
        dataclasses.replace(T5_1_0_11B, shared_towers=True),
        dataclasses.replace(T5_1_1_XL, num_encoder_layers=0),
    ],
    ids=lambda shape: shape.name,
)
def test_what_is_told_from_parameters_is_what_the_model_s_configuration_says(shape):
    assert recognize(shape.parameters()) == shape == model_config(shape).shape
