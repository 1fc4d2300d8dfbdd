"""What transformers' config.json says of a T5's arithmetic: carried out, or refused by its name."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from t0repro.converters.convert import convert
from t0repro.converters.hf_config import (
    Computation,
    arithmetic_of,
    check_field_types,
    describe_assumed_activation,
    feed_forward_proj,
    logits_of,
)
from t0repro.errors import UserError
from t0repro.evaluation.opened import open_checkpoint
from t0repro.parameters.shape import ModelShape

from .checkpoint_files import read_variables


def t5(**fields):
    return {"model_type": "t5", **fields}


@pytest.mark.parametrize(
    ("config", "activations"),
    [
        (t5(), ("relu",)),
        (t5(feed_forward_proj="relu"), ("relu",)),
        (t5(feed_forward_proj="gated-gelu"), ("gelu", "linear")),
        # transformers 4 saves what it makes of feed_forward_proj too.
        (
            t5(feed_forward_proj="gated-gelu", dense_act_fn="gelu_new", is_gated_act=True),
            ("gelu", "linear"),
        ),
        (t5(feed_forward_proj="gated-gelu", dense_act_fn="gelu"), ("gelu_exact", "linear")),
        (t5(feed_forward_proj="gelu"), ("gelu_exact",)),
        (t5(feed_forward_proj="gelu_new"), ("gelu",)),
        (t5(feed_forward_proj="gated-silu"), ("swish", "linear")),
        (t5(feed_forward_proj="gated-relu"), ("relu", "linear")),
        ({"model_type": "mt5"}, ("gelu", "linear")),
    ],
)
def test_the_activation_is_the_one_that_transformers_takes(config, activations):
    assert arithmetic_of(config, "config.json").activations == activations


@pytest.mark.parametrize(
    ("config", "taken"),
    [
        ({"model_type": "mt5"}, "gated-gelu, as transformers takes for a mt5"),
        (
            {"model_type": "umt5", "is_gated_act": True},
            "gated-gelu, as transformers takes for a umt5",
        ),
        (t5(is_gated_act=True), "relu, as transformers takes for a t5"),
        (t5(), None),
        (t5(feed_forward_proj="gated-gelu"), None),
        ({"model_type": "mt5", "dense_act_fn": "gelu_new"}, None),
    ],
)
def test_a_gated_model_s_activation_that_is_only_assumed_is_said(config, taken):
    assert describe_assumed_activation(config) == taken


def test_a_model_without_a_type_is_not_of_type_none():
    with pytest.raises(UserError, match="it has no model_type"):
        arithmetic_of({"d_model": 8}, "config.json")


def test_distance_and_epsilon_are_read():
    config = t5(relative_attention_max_distance=64, layer_norm_epsilon=1e-5)
    assert arithmetic_of(config, "config.json") == Computation(("relu",), 64, 1e-5)


@pytest.mark.parametrize(
    ("field", "config"),
    [
        ("feed_forward_proj", t5(feed_forward_proj="gated-mish")),
        ("feed_forward_proj", t5(feed_forward_proj="quick_gelu")),
        ("decoder_start_token_id", t5(decoder_start_token_id=259)),
        ("quantization_config", t5(quantization_config={"load_in_8bit": True})),
        ("pruned_heads", t5(pruned_heads={"0": [1]})),
        ("model_type", {"model_type": "longt5"}),
        ("model_type", {"model_type": "t5gemma"}),
        ("auto_map", t5(auto_map={"AutoModel": "modeling_own.OwnModel"})),
        ("architectures", t5(architectures=["T5ForTokenClassification"])),
        ("model_type", {}),
    ],
)
def test_what_no_t5_here_computes_is_refused_by_its_field(field, config):
    with pytest.raises(UserError) as caught:
        arithmetic_of(config, "some/config.json")
    assert caught.value.where == f"some/config.json, {field}"


OLD, NEW = {"transformers_version": "4.57.1"}, {"transformers_version": "5.23.0"}


@pytest.mark.parametrize(
    ("config", "with_kernel", "without"),
    [
        # transformers 4: tied or not, by one field.
        (t5(**OLD), "scaled embedding", "scaled embedding"),
        (t5(tie_word_embeddings=True, **OLD), "scaled embedding", "scaled embedding"),
        (t5(tie_word_embeddings=False, **OLD), "kernel", None),
        # transformers 5: always tied, and scaled by another.
        (
            t5(tie_word_embeddings=True, scale_decoder_outputs=True, **NEW),
            "scaled embedding",
            "scaled embedding",
        ),
        (t5(scale_decoder_outputs=False, **NEW), "kernel", "embedding"),
        # An mT5: transformers 5 never scales.
        ({"model_type": "mt5", **OLD}, "kernel", None),
        ({"model_type": "mt5", "tie_word_embeddings": False}, "kernel", None),
        (
            {"model_type": "mt5", "tie_word_embeddings": True, **OLD},
            "scaled embedding",
            "scaled embedding",
        ),
        ({"model_type": "mt5", "tie_word_embeddings": True, **NEW}, "kernel", "embedding"),
        ({"model_type": "mt5", **NEW}, "kernel", "embedding"),
        # A umT5: both scale a tied one, and 5 says of each that it is tied.
        ({"model_type": "umt5", **OLD}, "scaled embedding", "scaled embedding"),
        ({"model_type": "umt5", "tie_word_embeddings": False, **OLD}, "kernel", None),
        (
            {"model_type": "umt5", "tie_word_embeddings": True, **NEW},
            "scaled embedding",
            "scaled embedding",
        ),
        # From 5.24 on, as a T5.
        ({"model_type": "umt5", "scale_decoder_outputs": False, **NEW}, "kernel", "embedding"),
        (
            {"model_type": "umt5", "scale_decoder_outputs": True, **NEW},
            "scaled embedding",
            "scaled embedding",
        ),
    ],
)
def test_the_logits_come_from_where_the_transformers_that_saved_the_model_takes_them(
    config, with_kernel, without
):
    assert logits_of(config, True, "config.json") == with_kernel
    if without is not None:
        assert logits_of(config, False, "config.json") == without
        return
    with pytest.raises(UserError, match=r"not tied .* lm_head\.weight is missing"):
        logits_of(config, False, "config.json")


def test_a_tied_mt5_of_an_unknown_transformers_is_refused():
    config = {"model_type": "mt5", "tie_word_embeddings": True}
    with pytest.raises(UserError, match="which transformers wrote it"):
        logits_of(config, True, "config.json")


@pytest.mark.parametrize("gate", [(), ("linear",)])
@pytest.mark.parametrize("name", ["relu", "gelu", "gelu_exact", "swish", "tanh", "sigmoid"])
def test_a_written_activation_is_read_as_the_same(name, gate):
    arithmetic = Computation((name, *gate))
    assert arithmetic_of(t5(**feed_forward_proj(arithmetic)), "config.json") == arithmetic


# --- Through a conversion ------------------------------------------------------------------------


@pytest.fixture
def hf_directory(tiny_checkpoint, tmp_path):
    convert(tiny_checkpoint, tmp_path / "hf", "hf", slots=False)
    return tmp_path / "hf"


def change_config(directory, **changes) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | changes))


SILU = {"feed_forward_proj": "gated-silu", "dense_act_fn": "silu", "layer_norm_epsilon": 1e-5}


@pytest.mark.parametrize("to", ["mtf", "jax", "t5x"])
def test_the_gin_file_beside_the_target_binds_what_the_configuration_says(
    hf_directory, tmp_path, to
):
    fields = SILU | {"layer_norm_epsilon": 1e-6 if to == "t5x" else 1e-5}  # T5X's is 1e-6
    change_config(hf_directory, **fields)
    report = convert(hf_directory, tmp_path / "out", to)
    assert any("operative_config.gin" in note for note in report.notes)
    lines = (tmp_path / "out" / "operative_config.gin").read_text().splitlines()
    assert "DenseReluDense.activation = ['swish', 'linear']" in lines
    epsilon = fields["layer_norm_epsilon"]
    assert f"transformer.sublayer_rms_norm.epsilon = {epsilon!r}" in lines
    convert(tmp_path / "out", tmp_path / "back", "hf")
    back = json.loads((tmp_path / "back" / "config.json").read_text())
    assert fields.items() <= back.items()


def test_hugging_face_to_hugging_face_keeps_even_what_no_gin_file_can_say(hf_directory, tmp_path):
    change_config(
        hf_directory, relative_attention_max_distance=64, dense_act_fn="gelu", is_gated_act=True
    )
    convert(hf_directory, tmp_path / "out", "hf", dtype="bfloat16")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["relative_attention_max_distance"] == 64
    assert config["dense_act_fn"] == "gelu"


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("relative_attention_max_distance", {"relative_attention_max_distance": 64}),
        ("feed_forward_proj", {"feed_forward_proj": "gated-gelu", "dense_act_fn": "gelu"}),
    ],
)
@pytest.mark.parametrize("to", ["mtf", "t5x"])
def test_what_a_target_cannot_compute_is_refused_by_its_field(
    hf_directory, tmp_path, to, field, changes
):
    change_config(hf_directory, **changes)
    for source, where in ((hf_directory, "/config.json"), (tmp_path / "jax", "")):
        with pytest.raises(UserError, match=rf"{where}, {field}"):
            convert(source, tmp_path / "out", to)
        assert not (tmp_path / "out").exists()
        convert(hf_directory, tmp_path / "jax", "jax", force=True)


def test_t5x_has_one_epsilon(hf_directory, tmp_path):
    change_config(hf_directory, layer_norm_epsilon=1e-5)
    with pytest.raises(UserError, match=r"config\.json, layer_norm_epsilon"):
        convert(hf_directory, tmp_path / "out", "t5x")


def test_what_only_the_jax_stack_computes_survives_the_way_there_and_back(hf_directory, tmp_path):
    change_config(
        hf_directory,
        relative_attention_max_distance=64,
        feed_forward_proj="gated-gelu",
        dense_act_fn="gelu",
        is_gated_act=True,
    )
    convert(hf_directory, tmp_path / "jax", "jax")
    text = (tmp_path / "jax" / "operative_config.gin").read_text()
    assert "t0repro.jax_model.relative_attention_max_distance = 64\n" in text
    assert "t0repro.jax_model.exact_gelu = True\n" in text
    model = open_checkpoint(str(tmp_path / "jax"), None, "float32").model.config
    assert model.relative_attention_max_distance == 64
    assert model.activations == ("gelu_exact", "linear")
    convert(tmp_path / "jax", tmp_path / "back", "hf")
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["relative_attention_max_distance"] == 64
    assert config["dense_act_fn"] == "gelu"


@pytest.mark.parametrize("to", ["mtf", "t5x", "hf"])
def test_unscaled_ties_stay_on_the_jax_stack(mesh_variables, write_mesh_checkpoint, tmp_path, to):
    shape = ModelShape(1, 1, 8, 16, 2, 4, 16, 4, ("wi",), True)
    source = write_mesh_checkpoint(tmp_path / "source", mesh_variables(shape))
    (tmp_path / "own.gin").write_text("t0repro.jax_model.scale_tied_logits = False\n")
    convert(source, tmp_path / "jax", "jax", gin_file=tmp_path / "own.gin")
    model = open_checkpoint(str(tmp_path / "jax"), None, "float32").model.config
    assert model.scale_tied_logits is False
    with pytest.raises(UserError, match=", scale_tied_logits"):
        convert(tmp_path / "jax", tmp_path / "out", to)


@pytest.mark.parametrize(
    "changes", [{"layer_norm_epsilon": 1e-5}, {"relative_attention_max_distance": 64}]
)
def test_a_gin_file_that_leaves_out_what_the_model_needs_is_refused(
    hf_directory, tmp_path, changes
):
    change_config(hf_directory, **changes)
    (tmp_path / "own.gin").write_text("DenseReluDense.activation = ['gelu', 'linear']\n")
    with pytest.raises(UserError, match=r"leaves the (epsilon|max_distance) at"):
        convert(hf_directory, tmp_path / "out", "jax", gin_file=tmp_path / "own.gin")


def test_rank_evaluation_refuses_position_buckets_that_hold_no_distance(hf_directory):
    change_config(hf_directory, relative_attention_max_distance=1)
    with pytest.raises(UserError, match="relative_attention_max_distance = 1"):
        open_checkpoint(str(hf_directory), None, "float32")


def test_rank_evaluation_computes_as_config_json_says(hf_directory):
    """Not with the activation and the epsilon that most models of its shape have."""
    change_config(hf_directory, **SILU)
    model = open_checkpoint(str(hf_directory), None, "float32").model.config
    assert (model.activations, model.rms_norm_epsilon) == (("swish", "linear"), 1e-5)


@pytest.mark.parametrize(
    "line",
    [
        "DenseReluDense.activation = ['gelu', 'linear']",
        "transformer.sublayer_rms_norm.epsilon = 1e-6",
    ],
)
def test_a_gin_file_that_says_otherwise_is_refused_with_its_line(hf_directory, tmp_path, line):
    change_config(hf_directory, **SILU)
    (tmp_path / "own.gin").write_text(f"# mine\n{line}\n")
    with pytest.raises(UserError) as caught:
        convert(hf_directory, tmp_path / "out", "jax", gin_file=tmp_path / "own.gin")
    assert line in caught.value.what
    assert caught.value.where == f"{tmp_path}/own.gin:2"


def test_a_tied_mt5_of_transformers_5_gets_a_kernel_that_is_its_embedding(hf_directory, tmp_path):
    import safetensors.numpy

    weights = hf_directory / "model.safetensors"
    tensors = safetensors.numpy.load_file(weights)
    del tensors["lm_head.weight"]
    safetensors.numpy.save_file(tensors, weights)
    (hf_directory / "conversion.json").unlink()
    change_config(hf_directory, model_type="mt5", tie_word_embeddings=True, **NEW)
    convert(hf_directory, tmp_path / "new", "mtf")
    variables = read_variables(tmp_path / "new")
    np.testing.assert_array_equal(
        variables["decoder/logits/kernel"], variables["shared/embedding"].T
    )
    change_config(hf_directory, **OLD)
    convert(hf_directory, tmp_path / "old", "mtf")
    assert "decoder/logits/kernel" not in read_variables(tmp_path / "old")


@pytest.mark.parametrize("field", ["tie_word_embeddings", "is_gated_act", "scale_decoder_outputs"])
@pytest.mark.parametrize("value", ["false", "true", "", 0, 1, 1.0, [], {}])
def test_text_or_a_number_is_no_truth_value(field, value):
    with pytest.raises(UserError, match=f"{field} is {re.escape(repr(value))}, not true or false"):
        check_field_types({"model_type": "t5", field: value}, "config.json")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("feed_forward_proj", ["relu"]),
        ("dense_act_fn", 1),
        ("architectures", "T5EncoderModel"),
        ("architectures", {"T5": 1}),
        ("pad_token_id", "1"),
        ("pad_token_id", True),
    ],
)
def test_a_value_of_another_type_is_refused_by_its_field(field, value):
    with pytest.raises(UserError, match=field):
        check_field_types({"model_type": "t5", field: value}, "config.json")
    check_field_types({"model_type": "t5", field: None}, "config.json")
