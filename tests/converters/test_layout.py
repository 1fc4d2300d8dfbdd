from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from t0repro.converters.tensor_bundle import BundleReader
from t0repro.parameters import naming

SHAPES = st.lists(st.integers(1, 5), min_size=2, max_size=4).map(tuple)


@pytest.mark.mtf
@pytest.mark.parametrize("model", ["t5_1_1", "t5_1_0"])
def test_every_variable_that_mesh_tensorflow_writes_has_a_path_and_comes_back(
    mesh_checkpoints, model
):
    norm_names = "rms_norm" if model == "t5_1_1" else "layer_norm"
    names = set(BundleReader(mesh_checkpoints[model] / "model.ckpt-2").entries)
    parameters = {naming.split_mtf_slot(name)[0] for name in names - {"global_step"}}
    for name in parameters:
        path = naming.mtf_to_path(name)
        assert path is not None, name
        assert naming.path_to_mtf(path, norm_names) == name


@pytest.mark.parametrize(
    ("variable", "path"),
    [
        ("shared/embedding", "token_embedder/embedding"),
        ("encoder/block_000/layer_000/SelfAttention/q", "encoder/layers_0/attention/query/kernel"),
        (
            "decoder/block_011/layer_000/SelfAttention/o",
            "decoder/layers_11/self_attention/out/kernel",
        ),
        (
            "decoder/block_001/layer_001/EncDecAttention/v",
            "decoder/layers_1/encoder_decoder_attention/value/kernel",
        ),
        (
            "decoder/block_002/layer_002/DenseReluDense/wi_1/kernel",
            "decoder/layers_2/mlp/wi_1/kernel",
        ),
        ("encoder/block_001/layer_001/DenseReluDense/wi/kernel", "encoder/layers_1/mlp/wi/kernel"),
        (
            "decoder/block_000/layer_000/SelfAttention/relative_attention_bias",
            "decoder/relpos_bias/rel_embedding",
        ),
        (
            "decoder/block_003/layer_001/rms_norm/scale",
            "decoder/layers_3/pre_cross_attention_layer_norm/scale",
        ),
        ("encoder/rms_norm/scale", "encoder/encoder_norm/scale"),
        ("decoder/logits/kernel", "decoder/logits_dense/kernel"),
    ],
)
def test_names_are_those_of_t5x_s_importer(variable, path):
    assert naming.mtf_to_path(variable) == path
    assert naming.path_to_mtf(path) == variable


@pytest.mark.parametrize(
    "variable",
    [
        "encoder/block_00/layer_000/SelfAttention/q",
        "encoder/block_0001/layer_000/SelfAttention/q",
        "encoder/block_001/layer_000/SelfAttention/relative_attention_ak",
        "encoder/block_000/layer_001/EncDecAttention/q",
        "encoder/logits/kernel",
    ],
)
def test_a_name_that_no_t5_has_is_unknown(variable):
    assert naming.mtf_to_path(variable) is None


def test_norm_names_of_released_t5_1_0_checkpoints_are_read_and_written():
    for old, new in [
        ("encoder/final_layer_norm/scale", "encoder/rms_norm/scale"),
        (
            "decoder/block_000/layer_002/layer_norm/scale",
            "decoder/block_000/layer_002/rms_norm/scale",
        ),
    ]:
        path = naming.mtf_to_path(old)
        assert path == naming.mtf_to_path(new)
        assert path is not None
        assert naming.path_to_mtf(path, "layer_norm") == old
        assert naming.path_to_mtf(path) == new


@pytest.mark.parametrize(
    ("variable", "path"),
    [
        ("transformer/embedding", "decoder/token_embedder/embedding"),
        ("transformer/logits/kernel", "decoder/logits_dense/kernel"),
        (
            "transformer/block_001/layer_000/SelfAttention/k",
            "decoder/layers_1/self_attention/key/kernel",
        ),
        (
            "transformer/block_001/layer_001/DenseReluDense/wo/kernel",
            "decoder/layers_1/mlp/wo/kernel",
        ),
        (
            "transformer/block_012/layer_001/rms_norm/scale",
            "decoder/layers_12/pre_mlp_layer_norm/scale",
        ),
    ],
)
def test_a_decoder_only_model_has_a_table_of_its_own(variable, path):
    assert naming.mtf_to_path(variable) == path
    assert naming.path_to_mtf(path, decoder_only=True) == variable
    assert naming.path_to_mtf(path) != variable
    embedding = "target/decoder/token_embedder/embedding"
    assert naming.is_decoder_only([embedding]) and not naming.is_decoder_only(["target/x"])


def test_shared_towers_name_the_decoder_s_layers_by_kind():
    for number, layer in enumerate(("self_attention", "enc_dec_attention", "dense_relu_dense")):
        shared = f"decoder/block_002/{layer}/rms_norm/scale"
        path = naming.mtf_to_path(f"decoder/block_002/layer_{number:03d}/rms_norm/scale")
        assert path is not None and naming.mtf_to_path(shared) == path
        assert naming.path_to_mtf(path, shared_towers=True) == shared
        assert naming.names_shared_layer(shared)
        assert not naming.names_shared_layer(f"encoder/block_002/{layer}/rms_norm/scale")
    embedding = "target/token_embedder/embedding"
    assert naming.has_shared_towers([embedding, "target/decoder/decoder_norm/scale"])
    assert not naming.has_shared_towers([embedding, "target/encoder/encoder_norm/scale"])
    assert not naming.has_shared_towers(["target/decoder/decoder_norm/scale"])


def test_a_bias_is_the_first_layer_s_or_every_layer_s():
    mtf = "encoder/block_{}/layer_000/SelfAttention/relative_attention_bias"
    own = "encoder/layers_{}/relpos_bias/rel_embedding"
    shared = "encoder/relpos_bias/rel_embedding"
    assert naming.mtf_to_path(mtf.format("000")) == shared
    assert naming.mtf_to_path(mtf.format("000"), bias_per_layer=False) == shared
    assert naming.mtf_to_path(mtf.format("000"), bias_per_layer=True) == own.format(0)
    assert naming.mtf_to_path(mtf.format("003"), bias_per_layer=True) == own.format(3)
    assert naming.mtf_to_path(mtf.format("003"), bias_per_layer=False) is None
    assert naming.path_to_mtf(own.format(3)) == mtf.format("003")
    hf = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    assert naming.name_of(*naming.find_row(hf, "hf", bias_per_layer=False), "t5x") == shared
    norm = "encoder/layers_1/pre_mlp_layer_norm/scale"
    assert naming.has_bias_per_layer([None, own.format(1)])
    assert not naming.has_bias_per_layer([None, shared, norm])


def test_known_names_are_those_of_all_layers_once():
    names = naming.known_names("hf", [2])
    assert len(names) == len(set(names))
    bias = "encoder.block.{}.layer.0.SelfAttention.relative_attention_bias.weight"
    for name in ("shared.weight", "lm_head.weight", bias.format(0), bias.format(2)):
        assert name in names
    assert bias.format(1) not in names
    assert "transformer/embedding" in naming.known_names("mtf", [], decoder_only=True)
    assert "shared/embedding" not in naming.known_names("mtf", [], decoder_only=True)


@pytest.mark.parametrize(
    ("variable", "slot"),
    [
        *((f"a/b_slot_{slot}", slot) for slot in ("vr", "vc", "v", "m")),
        *((f"a/b/{slot}", slot) for slot in ("adam_m", "adam_v")),
        ("a/b_momentum_v", "momentum_v"),
    ],
)
def test_mesh_tensorflow_hangs_slots_on_a_parameter_s_name(variable, slot):
    assert naming.split_mtf_slot(variable) == ("a/b", slot)
    assert naming.join_mtf_slot("a/b", slot) == variable
    assert naming.split_mtf_slot("a/b") == ("a/b", None)


@pytest.mark.parametrize("slot", naming.SLOT_NAMES)
def test_keys_are_split_as_they_were_joined(slot):
    key = naming.slot_key("a/b", slot)
    assert key == f"state/param_states/a/b/{slot}"
    assert naming.split_key(key) == ("a/b", slot)
    assert naming.split_key("target/a/b") == ("a/b", None)
    moments = {"adam_m": "state/param_states/0/mu/a/b", "adam_v": "state/param_states/0/nu/a/b"}
    assert naming.to_optax(key) == moments.get(slot, key)
    assert naming.from_optax(naming.to_optax(key)) == key


@pytest.mark.parametrize(
    "key",
    ["state/step", "a/b/v", "state/param_states/v", "state/param_states/a/b", "other/a/b/v"],
)
def test_a_key_of_neither_parameter_nor_slot_is_refused(key):
    with pytest.raises(ValueError, match=f"'{key}' is neither a parameter nor a slot"):
        naming.split_key(key)


def test_optax_counts_steps_and_nests_its_states():
    assert naming.to_optax(naming.STEP) == naming.STEP
    assert naming.from_optax("state/param_states/0/count") is None
    assert naming.from_optax("state/param_states/1/0/count") is None
    assert naming.from_optax("state/param_states/1/0/nu/a/b") == "state/param_states/a/b/adam_v"
    assert naming.from_optax("target/a/b") == "target/a/b"


def test_only_the_factored_slots_of_square_matrices_are_exchanged():
    shapes = {"target/square": (4, 4), "target/oblong": (4, 6), "target/vector": (4,)}
    exchanged = {
        "state/param_states/square/v_row": "state/param_states/square/v_col",
        "state/param_states/square/v_col": "state/param_states/square/v_row",
    }
    slots = [f"state/param_states/{name}/{s}" for name in ("square", "oblong", "vector")
             for s in ("v_row", "v_col", "v", "m")]  # fmt: skip
    for key in [*slots, "target/square", "state/step", "state/param_states/unknown/v_row"]:
        assert naming.exchange_tied_slots(key, shapes) == exchanged.get(key, key)


@given(SHAPES, st.integers(0, 2**32 - 1))
def test_matched_slots_are_means_of_the_same_squares_over_the_same_axis(shape, seed):
    squares = np.random.default_rng(seed).random(shape)
    # mesh_tensorflow/optimize.py: sorted(dims, key=lambda d: -d.size)[:2]; vr lacks the first.
    first, second = np.argsort([-size for size in shape], kind="stable")[:2]
    mtf = {"vr": squares.mean(axis=first), "vc": squares.mean(axis=second)}
    # t5x/adafactor.py: np.argsort(shape)[-2:]; v_row lacks the last.
    before_last, last = np.argsort(shape, kind="stable")[-2:]
    t5x = {"v_row": squares.mean(axis=last), "v_col": squares.mean(axis=before_last)}
    if {first, second} != {before_last, last}:
        with pytest.raises(ValueError, match="no counterparts"):
            naming.factored_slots(shape)
        return
    for slot, value in mtf.items():
        np.testing.assert_array_equal(value, t5x[naming.slot_from_mtf(slot, shape)])
        assert naming.slot_to_mtf(naming.slot_from_mtf(slot, shape), shape) == slot
    for slot, value in t5x.items():
        assert value.shape == naming.slot_shape(slot, shape)


@given(st.tuples(st.integers(1, 9), st.integers(1, 9)))
def test_slots_of_a_matrix_change_places_exactly_when_it_is_square(shape):
    straight = {"vr": "v_row", "vc": "v_col"}
    assert (naming.factored_slots(shape) == straight) == (shape[0] != shape[1])
    for slot in ("v", "m"):
        assert naming.slot_from_mtf(slot, shape) == naming.slot_to_mtf(slot, shape) == slot
        assert naming.slot_shape(slot, shape) == shape


@given(SHAPES)
def test_dropped_axes_are_those_of_this_project_s_adafactor(shape):
    from t0repro.config.optimizer import AdafactorConfig
    from t0repro.parameters.shape import factoring

    config = AdafactorConfig(min_dim_size_to_factor=1)
    ours = naming.t5x_dropped_axes(shape)
    dropped = factoring("a/kernel", shape, config).dropped
    assert dropped == ((ours["v_row"],), (ours["v_col"],))


@pytest.mark.always
@pytest.mark.mtf
def test_slots_of_mesh_tensorflow_s_own_optimizer_are_t5x_s_and_the_straight_mapping_is_wrong(
    run_script, tmp_path
):
    names = ["128x128", "128x256", "256x128"]
    run_script("run_mesh_adafactor.py", str(tmp_path / "slots.npz"), *names)
    slots = np.load(tmp_path / "slots.npz")
    for name in names:
        squares = slots[f"gradient/{name}"] ** 2
        before_last, last = np.argsort(squares.shape, kind="stable")
        t5x = {"v_row": squares.mean(axis=last), "v_col": squares.mean(axis=before_last)}
        for slot in ("vr", "vc"):
            actual = slots[f"{slot}/{name}"]
            right = t5x[naming.slot_from_mtf(slot, squares.shape)]
            np.testing.assert_allclose(actual, right, rtol=1e-5)
            straight = t5x[{"vr": "v_row", "vc": "v_col"}[slot]]
            is_straight = actual.shape == straight.shape and np.allclose(actual, straight, rtol=0.1)
            assert is_straight == (name != "128x128")
