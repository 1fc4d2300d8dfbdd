"""What a checkpoint's tensors do not tell of its model, read from beside them."""

from __future__ import annotations

import dataclasses
import json
import re

import numpy as np
import pytest

from t0repro.converters.convert import convert
from t0repro.converters.finding import find_checkpoint
from t0repro.converters.model_files import check_configured, open_configured
from t0repro.converters.sources import load_any, open_any
from t0repro.errors import UserError
from t0repro.evaluation.opened import open_checkpoint


def computed(directory):
    """The model that rank evaluation makes of a checkpoint."""
    return open_checkpoint(str(directory), None, "float32").model.config


def test_without_a_gin_file_it_is_t5_1_1_s(tiny_checkpoint):
    config = computed(tiny_checkpoint)
    assert config.activations == ("gelu", "linear")
    assert config.rms_norm_epsilon == 1e-6


def test_the_operative_config_beside_a_checkpoint_counts(tiny_checkpoint):
    text = """
        DenseReluDense.activation = ['gelu', 'linear']
        sublayer_rms_norm.epsilon = 0.01
        t0repro.jax_model.exact_gelu = True
        t0repro.jax_model.relative_attention_max_distance = 64
    """
    (tiny_checkpoint / "operative_config.gin").write_text(text)
    config = computed(tiny_checkpoint)
    assert config.activations == ("gelu_exact", "linear")
    assert config.rms_norm_epsilon == 0.01
    assert config.relative_attention_max_distance == 64


def test_an_activation_that_the_jax_stack_lacks_is_told(tiny_checkpoint):
    text = "DenseReluDense.activation = ['softplus', 'linear']\n"
    (tiny_checkpoint / "operative_config.gin").write_text(text)
    with pytest.raises(UserError, match="activation 'softplus'"):
        computed(tiny_checkpoint)


@pytest.mark.parametrize("unscoped", ["", "DenseReluDense.activation = 'relu'"])
def test_the_activation_of_each_tower_in_mesh_tensorflow_s_own_config_counts(
    tiny_checkpoint, tmp_path, unscoped
):
    # gin.operative_config_str names each layer's arguments in the scopes that it was made in.
    text = f"""
        encoder/DenseReluDense.activation = ['swish', 'linear']
        decoder/DenseReluDense.activation = ['swish', 'linear']
        {unscoped}
    """
    convert(tiny_checkpoint, tmp_path / "mtf", "mtf")
    (tmp_path / "mtf" / "operative_config.gin").write_text(text)
    assert computed(tmp_path / "mtf").activations == ("swish", "linear")
    convert(tmp_path / "mtf", tmp_path / "hf", "hf")
    assert computed(tmp_path / "hf").activations == ("swish", "linear")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (
            "encoder/DenseReluDense.activation = ['swish', 'linear']\n"
            "DenseReluDense.activation = ['gelu', 'linear']",
            "have one activation",
        ),
        ("decoder/Unitransformer.sinusoid_positional_embedding = True", "not supported"),
        ("encoder/SelfAttention.fold_scaling_into_initializer = False", "not supported"),
        ("unit_scaling_convention.value = True", "not supported"),
        ("DenseReluDense.activation = @relu", "activation None"),
    ],
)
def test_arithmetic_that_no_t5_here_has_is_refused_with_its_line(tiny_checkpoint, text, complaint):
    (tiny_checkpoint / "operative_config.gin").write_text(text)
    with pytest.raises(UserError, match=complaint):
        computed(tiny_checkpoint)


def test_queries_that_a_t5x_run_scaled_are_scaled_in_scoring_and_lost_in_no_conversion(
    tiny_checkpoint, tmp_path
):
    convert(tiny_checkpoint, tmp_path / "t5x", "t5x")
    plain = computed(tmp_path / "t5x")
    text = "from __gin__ import dynamic_registration\nfrom t5x.contrib.gpu import network\n"
    text += "network.T5Config.scale_attn_logits = %SCALE\nSCALE = True\n"
    (tmp_path / "t5x" / "config.gin").write_text(text)
    assert computed(tmp_path / "t5x") == dataclasses.replace(plain, scale_queries=True)
    for to in ("mtf", "hf"):
        with pytest.raises(UserError, match="scale_attn_logits"):
            convert(tmp_path / "t5x", tmp_path / "out", to)
        assert not (tmp_path / "out").exists()
    for to in ("jax", "t5x"):
        convert(tmp_path / "t5x", tmp_path / to / "out", to)
        assert computed(tmp_path / to / "out") == computed(tmp_path / "t5x")
    for to in ("mtf", "hf", "jax", "t5x"):
        (tmp_path / "t5x" / "config.gin").write_text(text.replace("True", "False"))
        convert(tmp_path / "t5x", tmp_path / "plain" / to, to, slots=False)
        carried = (tmp_path / "plain" / to / "config.gin").read_text()
        assert carried == text.replace("True", "False")


def test_the_activation_in_t5x_s_config_counts(tiny_checkpoint, tmp_path):
    convert(tiny_checkpoint, tmp_path / "t5x", "t5x")
    text = "network.T5Config.mlp_activations = ('silu', 'linear')\n"
    (tmp_path / "t5x" / "config.gin").write_text(text)
    assert computed(tmp_path / "t5x").activations == ("swish", "linear")
    convert(tmp_path / "t5x", tmp_path / "hf", "hf")
    assert computed(tmp_path / "hf").activations == ("swish", "linear")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("feed_forward_proj", "gated-silu"),
        ("relative_attention_max_distance", 64),
        ("layer_norm_epsilon", 1e-5),
    ],
)
def test_a_run_on_a_transformers_directory_must_compute_as_its_config_says(
    tiny_checkpoint, tmp_path, field, value
):
    convert(tiny_checkpoint, tmp_path / "hf", "hf")
    plain = computed(tmp_path / "hf")
    check_configured(find_checkpoint(tmp_path / "hf"), plain)
    file = tmp_path / "hf" / "config.json"
    config = json.loads(file.read_text())
    config.pop("dense_act_fn")
    file.write_text(json.dumps(config | {field: value}))
    check_configured(find_checkpoint(tmp_path / "hf"), computed(tmp_path / "hf"))
    with pytest.raises(UserError) as caught:
        check_configured(find_checkpoint(tmp_path / "hf"), plain)
    assert caught.value.where == f"{file}, {field}"
    check_configured(find_checkpoint(tiny_checkpoint), plain)


@pytest.mark.parametrize("to", ["mtf", "t5x", "jax"])
@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("operative_config.gin", "encoder/DenseReluDense.activation = ['swish', 'linear']"),
        ("operative_config.gin", "sublayer_rms_norm.epsilon = 0.01"),
        ("operative_config.gin", "t0repro.jax_model.relative_attention_max_distance = 64"),
        ("config.gin", "network.T5Config.mlp_activations = ('silu', 'linear')"),
    ],
)
def test_a_run_on_any_checkpoint_must_compute_as_the_gin_file_beside_it_says(
    tiny_checkpoint, tmp_path, to, name, line
):
    convert(tiny_checkpoint, tmp_path / to, to)
    ref, plain = find_checkpoint(tmp_path / to), computed(tmp_path / to)
    check_configured(ref, plain)
    (tmp_path / to / name).write_text(f"# As it was trained.\n{line}\n")
    check_configured(ref, computed(tmp_path / to))
    with pytest.raises(UserError, match=re.escape(line)) as caught:
        check_configured(ref, plain)
    assert caught.value.where == f"{tmp_path / to / name}:2"


SCALES = "from t5x.contrib.gpu.t5 import network\nnetwork.T5Config.scale_attn_logits = {}\n"
SIZES = "network.T5Config.emb_dim = {}\n"
MESH = "Unitransformer.d_model = {}\n"


@pytest.mark.parametrize(
    ("name", "text", "scaled"),
    [
        ("config.gin", SCALES.format(True), True),
        ("operative_config.gin", SCALES.format("%S") + "S = True\n", True),
        ("config.gin", SCALES.format(False), False),
        ("config.gin", SIZES, False),  # T5X's default
        ("operative_config.gin", MESH, False),  # which cannot scale them
    ],
)
def test_query_kernels_of_the_other_scale_are_refused_with_the_file_that_says_so(
    tiny_checkpoint, tmp_path, name, text, scaled
):
    convert(tiny_checkpoint, tmp_path / "t5x", "t5x")
    plain = computed(tmp_path / "t5x")
    (tmp_path / "t5x" / name).write_text(text.format(plain.d_model))
    ref = find_checkpoint(tmp_path / "t5x")
    check_configured(ref, dataclasses.replace(plain, scale_queries=scaled))
    for read in (check_configured, open_configured):
        with pytest.raises(UserError, match="root of head_dim") as caught:
            read(ref, dataclasses.replace(plain, scale_queries=not scaled))
        assert f"{tmp_path}/t5x/{name}" in str(caught.value.where)
        assert f"scale_attn_logits = {scaled}" in str(caught.value.fix)


@pytest.mark.parametrize("to", ["mtf", "hf"])
def test_no_run_scales_the_queries_of_a_checkpoint_whose_library_cannot(
    tiny_checkpoint, tmp_path, to
):
    convert(tiny_checkpoint, tmp_path / "out", to, slots=False)
    scaled = dataclasses.replace(computed(tmp_path / "out"), scale_queries=True)
    with pytest.raises(UserError, match=r"(?s)trained without.*its format is"):
        check_configured(find_checkpoint(tmp_path / "out"), scaled)


def test_where_no_file_says_how_queries_are_scaled_the_run_decides(tiny_checkpoint, tmp_path):
    convert(tiny_checkpoint, tmp_path / "t5x", "t5x")
    (tmp_path / "t5x" / "config.gin").write_text("TRAIN_STEPS = 3\n")
    model = computed(tmp_path / "t5x")
    for scaled in (False, True):
        ref = find_checkpoint(tmp_path / "t5x")
        check_configured(ref, dataclasses.replace(model, scale_queries=scaled))


def test_a_position_bias_that_layers_share_is_each_layer_s_first_one(tiny_checkpoint):
    model = computed(tiny_checkpoint)
    ref, tree = find_checkpoint(tiny_checkpoint), load_any(tiny_checkpoint)
    assert open_configured(ref, model).keys() == open_any(tiny_checkpoint).keys()
    each = dataclasses.replace(model, position_bias_per_layer=True)
    found = open_configured(ref, each)
    parameters = {key.removeprefix("target/") for key in found if key.startswith("target/")}
    assert parameters == set(each.shape.parameters())
    for prefix, slot in (("target", ""), ("state/param_states", "/v")):
        shared = tree[f"{prefix}/decoder/relpos_bias/rel_embedding{slot}"]
        for layer in range(2):
            path = f"{prefix}/decoder/layers_{layer}/relpos_bias/rel_embedding{slot}"
            np.testing.assert_array_equal(found[path], shared)
