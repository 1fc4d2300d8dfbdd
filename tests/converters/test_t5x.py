from __future__ import annotations

import dataclasses
import functools
import json

import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st

from t0repro.converters.convert import convert
from t0repro.converters.finding import find_checkpoint
from t0repro.converters.sources import load_any
from t0repro.errors import UserError
from t0repro.parameters import naming
from t0repro.parameters.shape import ModelShape

from .checkpoint_files import assert_same_bits, read_variables
from .older_t5x import write_by_older_t5x
from .t5x_reader import restore_as_t5x


def restore_by_orbax(path) -> dict[str, np.ndarray]:
    """A tree as Orbax's own handler restores it."""
    import flax.traverse_util
    import jax
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        metadata = checkpointer.metadata(path).item_metadata.tree
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), metadata)
        nested = checkpointer.restore(path, restore_args=as_numpy)
    return flax.traverse_util.flatten_dict(nested, sep="/")


FAMILIES = st.builds(
    ModelShape,
    num_encoder_layers=st.integers(0, 2),
    num_decoder_layers=st.integers(1, 3),
    d_model=st.sampled_from([2, 4, 6, 8]),
    d_ff=st.sampled_from([2, 4, 8]),
    num_heads=st.sampled_from([1, 2]),
    d_kv=st.sampled_from([2, 4]),
    vocab_size=st.sampled_from([4, 8, 9]),
    relative_attention_num_buckets=st.sampled_from([2, 4]),
    wi_kernels=st.sampled_from([("wi",), ("wi_0", "wi_1")]),
    tied=st.booleans(),
)


@settings(max_examples=15)
@given(
    family=FAMILIES,
    dtype=st.sampled_from(["float32", "bfloat16"]),
    factor_at=st.sampled_from([2, 128]),
    momentum=st.booleans(),
    scan=st.booleans(),
    importer_slots=st.booleans(),
)
def test_any_t5_goes_mtf_t5x_jax_mtf_bit_for_bit(
    tmp_path_factory,
    mesh_variables,
    write_mesh_checkpoint,
    family,
    scan,
    importer_slots,
    **choices,
):
    variables = mesh_variables(family, **choices)
    root = tmp_path_factory.mktemp("round_trip")
    source = write_mesh_checkpoint(root / "source", variables)
    if family.decoder_only:
        (source / "operative_config.gin").write_text(
            "Unitransformer.input_full_attention = False\n"
        )
    flag = {"t5x_importer_slots": importer_slots}
    assert convert(source, root / "t5x", "t5x", scan=scan, **flag).family == family
    assert find_checkpoint(root / "t5x").format == "t5x"
    convert(root / "t5x", root / "jax", "jax", **flag)
    assert find_checkpoint(root / "jax").format == "jax"
    convert(root / "jax", root / "mtf", "mtf")
    result = read_variables(root / "mtf")
    if scan:  # what a scanned tree holds as means only is tested below
        lost = {name for name in variables if name not in result}
        assert all(name.endswith("/kernel_slot_v") or name[-7:-1] == "_slot_" for name in lost)
        result = {name: array for name, array in result.items() if name in variables}
        variables = {name: array for name, array in variables.items() if name in result}
    assert_same_bits(variables, result)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_orbax_restores_what_is_written(
    tiny_family, mesh_variables, write_mesh_checkpoint, tmp_path, dtype
):
    source = write_mesh_checkpoint(tmp_path / "source", mesh_variables(tiny_family, dtype=dtype))
    convert(source, tmp_path / "out", "jax")
    assert_same_bits(load_any(source), restore_by_orbax(tmp_path / "out" / "checkpoint_7"))


def test_an_orbax_checkpoint_in_either_layout_is_read(tiny_checkpoint, tmp_path):
    import flax.traverse_util
    import orbax.checkpoint as ocp

    tree = load_any(tiny_checkpoint)
    nested = flax.traverse_util.unflatten_dict(tree, sep="/")
    for use_ocdbt in (False, True):
        path = tmp_path / f"{use_ocdbt}" / "checkpoint_7"
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=use_ocdbt)) as checkpointer:
            checkpointer.save(path, nested)
        assert_same_bits(tree, load_any(path))


def test_what_the_trainer_saved_is_read_and_its_damage_told(tiny_checkpoint, tmp_path):
    from t0repro.training.checkpoints import save_tree

    tree = load_any(tiny_checkpoint)
    save_tree(tmp_path / "model" / "checkpoint_7", tree)
    assert_same_bits(tree, load_any(tmp_path / "model"))
    files = [path for path in (tmp_path / "model").rglob("d/*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    with pytest.raises(UserError, match="CRC-32 differs"):
        load_any(tmp_path / "model")


@pytest.mark.parametrize(("version", "dtype"), [(3, "float32"), (3, "bfloat16"), (2, "bfloat16")])
def test_the_older_layout_of_msgpack_and_zarr_is_read(
    tiny_family, mesh_variables, write_mesh_checkpoint, tmp_path, version, dtype
):
    source = write_mesh_checkpoint(tmp_path / "source", mesh_variables(tiny_family, dtype=dtype))
    write_by_older_t5x(tmp_path / "t5x" / "checkpoint_7", load_any(source), version)
    convert(tmp_path / "t5x", tmp_path / "mtf", "mtf")
    assert_same_bits(read_variables(source), read_variables(tmp_path / "mtf"))


def test_an_array_that_the_msgpack_names_and_that_is_gone_is_told(tiny_checkpoint, tmp_path):
    import shutil

    directory = tmp_path / "t5x" / "checkpoint_7"
    write_by_older_t5x(directory, load_any(tiny_checkpoint))
    gone = directory / "target.encoder.layers_0.mlp.wo.kernel"
    shutil.rmtree(gone)
    match = f"(?s)is missing: target/encoder/layers_0/mlp/wo/kernel.*{gone}"
    with pytest.raises(UserError, match=match):
        convert(directory, tmp_path / "out", "mtf")


def test_a_damaged_msgpack_is_told(tiny_checkpoint, tmp_path):
    convert(tiny_checkpoint, tmp_path / "t5x", "t5x")
    file = tmp_path / "t5x" / "checkpoint_7" / "checkpoint"
    (file.parent / "integrity.json").unlink()
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(UserError, match="(?s)damaged: it cannot be unpacked.*/checkpoint"):
        convert(tmp_path / "t5x", tmp_path / "out", "mtf")


def test_the_msgpack_s_specifications_open_as_t5x_opens_them(tiny_checkpoint, tmp_path):
    """T5X makes each a ts.Spec, drops chunks and compressor, and prepends the directory."""
    from flax import serialization

    convert(tiny_checkpoint, tmp_path / "t5x", "t5x")
    directory = tmp_path / "t5x" / "checkpoint_7"
    content = serialization.msgpack_restore((directory / "checkpoint").read_bytes())
    assert content["version"] == 3
    assert content["optimizer"]["state"]["step"] == 7
    leaf = content["optimizer"]["target"]["encoder"]["layers_0"]["attention"]["query"]["kernel"]
    spec = ts.Spec(leaf).to_json()
    del spec["metadata"]["chunks"], spec["metadata"]["compressor"]
    spec["kvstore"]["path"] = f"{directory}/{spec['kvstore']['path']}"
    array = ts.open(spec, open=True).result().read().result()
    expected = load_any(tiny_checkpoint)["target/encoder/layers_0/attention/query/kernel"]
    np.testing.assert_array_equal(array, expected)


# --- Scanned -------------------------------------------------------------------------------------


@pytest.fixture
def scanned(tiny_family, mesh_variables, write_mesh_checkpoint, tmp_path):
    """A scanned tree of two decoder layers as T5X reads it, and the tree that it was made from."""
    source = write_mesh_checkpoint(tmp_path / "source", mesh_variables(tiny_family))
    convert(source, tmp_path / "t5x", "t5x", scan=True)
    return restore_as_t5x(tmp_path / "t5x", 7), load_any(source)


def test_layers_are_stacked_on_axis_1_and_heads_have_their_own(scanned):
    """t5x/examples/scalable_t5: [embed, layers, heads, kv], and [heads, layers, kv, embed]."""
    tree, plain = scanned
    for name, shape in (
        ("mlp/wo/kernel", (16, 128)),
        ("self_attention/query/kernel", (128, 2, 64)),
        ("encoder_decoder_attention/value/kernel", (128, 2, 64)),
        ("self_attention/out/kernel", (2, 64, 128)),
        ("pre_mlp_layer_norm/scale", (128,)),
    ):
        stacked = tree[f"target/decoder/decoder/{name}"]
        layers = [plain[f"target/decoder/layers_{n}/{name}"].reshape(shape) for n in range(2)]
        np.testing.assert_array_equal(stacked, np.stack(layers, axis=1))
    bias = plain["target/decoder/relpos_bias/rel_embedding"]
    repeated = tree["target/decoder/decoder/relpos_bias/rel_embedding"]
    np.testing.assert_array_equal(repeated, np.stack([bias, bias], axis=1))


def test_factored_slots_of_a_scanned_tree_go_by_the_names_of_the_axes(scanned):
    """t5x/adafactor.py: v_row is the mean over the COLUMN axes, v_col over the ROW axis, embed."""
    tree, plain = scanned

    def layers(name, slot, shape):
        keys = [naming.slot_key(f"decoder/layers_{n}/{name}", slot) for n in range(2)]
        return [plain[key].reshape(shape) for key in keys]

    query = "self_attention/query/kernel"  # a square, in the plain tree [embed, joined_kv]
    key = naming.slot_key(f"decoder/decoder/{query}", "v_row")
    # In the plain tree the square's v_row is the mean over the last axis: over joined_kv.
    expected = np.stack(layers(query, "v_row", (128,)), axis=1)
    np.testing.assert_array_equal(tree[key], expected)  # [embed, layers]
    key = naming.slot_key(f"decoder/decoder/{query}", "v_col")
    expected = np.stack(layers(query, "v_col", (2, 64)), axis=0)
    np.testing.assert_array_equal(tree[key], expected)  # [layers, heads, kv]
    out = "self_attention/out/kernel"  # [joined_kv, embed]
    # There the mean over the last axis is over embed: the scanned tree's v_col.
    key = naming.slot_key(f"decoder/decoder/{out}", "v_col")
    expected = np.stack(layers(out, "v_row", (2, 64)), axis=1)
    np.testing.assert_array_equal(tree[key], expected)  # [heads, layers, kv]
    key = naming.slot_key(f"decoder/decoder/{out}", "v_row")
    expected = np.stack(layers(out, "v_col", (128,)), axis=0)
    np.testing.assert_array_equal(tree[key], expected)  # [layers, embed]


def test_a_scanned_tree_has_means_of_what_other_trees_keep_whole(scanned):
    """scalable_t5 factors every kernel of a layer; others only if both sides are 128 or more."""
    tree, plain = scanned
    whole = [plain[naming.slot_key(f"decoder/layers_{n}/mlp/wo/kernel", "v")] for n in range(2)]
    key = functools.partial(naming.slot_key, "decoder/decoder/mlp/wo/kernel")  # [d_ff, embed]
    assert tree[key("v")].shape == (1,)
    np.testing.assert_allclose(
        tree[key("v_row")], np.stack([v.mean(axis=0) for v in whole], axis=0), rtol=0, atol=1e-6
    )  # [layers, embed]
    np.testing.assert_allclose(
        tree[key("v_col")], np.stack([v.mean(axis=1) for v in whole], axis=1), rtol=0, atol=1e-6
    )  # [d_ff, layers]


def test_slots_that_only_means_are_left_of_are_counted(tiny_checkpoint, tmp_path):
    report = convert(tiny_checkpoint, tmp_path / "t5x", "t5x", scan=True)
    assert any("slots v of 9 kernels are averaged" in note for note in report.notes)
    no_slots = convert(tiny_checkpoint, tmp_path / "bare", "t5x", scan=True, slots=False)
    assert no_slots.notes == ()


def test_an_optimizer_that_factors_nothing_keeps_its_slots_whole_in_a_scanned_tree(
    tiny_family, mesh_variables, write_mesh_checkpoint, tmp_path
):
    variables = mesh_variables(tiny_family, factor_at=10_000)
    source = write_mesh_checkpoint(tmp_path / "source", variables)
    convert(source, tmp_path / "t5x", "t5x", scan=True)
    convert(tmp_path / "t5x", tmp_path / "mtf", "mtf")
    assert_same_bits(variables, read_variables(tmp_path / "mtf"))


def test_a_scanned_tree_with_heads_joined_with_kv_is_read_too(tiny_checkpoint, tmp_path):
    """As this project wrote scanned trees before it wrote scalable_t5's."""
    convert(tiny_checkpoint, tmp_path / "t5x", "t5x", scan=True, slots=False)
    tree = restore_as_t5x(tmp_path / "t5x", 7)
    for name, array in tree.items():
        if array.ndim == 4:
            heads_first = name.endswith("/out/kernel")
            joined = np.moveaxis(array, 1, 0 if heads_first else 1)
            if heads_first:  # [layers, heads, kv, embed]
                joined = np.moveaxis(joined.reshape(len(joined), -1, joined.shape[-1]), 0, 1)
            else:
                joined = joined.reshape(*array.shape[:2], -1)
            tree[name] = joined
    write_by_older_t5x(tmp_path / "joined" / "checkpoint_7", tree)
    convert(tmp_path / "joined", tmp_path / "mtf", "mtf")
    expected = {n: x for n, x in read_variables(tiny_checkpoint).items() if "_slot_" not in n}
    assert_same_bits(expected, read_variables(tmp_path / "mtf"))


def test_relative_biases_that_differ_between_layers_are_one_for_each(tiny_checkpoint, tmp_path):
    convert(tiny_checkpoint, tmp_path / "t5x", "t5x", scan=True)
    directory = tmp_path / "t5x" / "checkpoint_7"
    array = directory / "target.decoder.decoder.relpos_bias.rel_embedding" / "0.0.0"
    (directory / "integrity.json").unlink()
    (tmp_path / "t5x" / "conversion.json").unlink()
    content = bytearray(array.read_bytes())
    content[0] ^= 1
    array.write_bytes(content)
    report = convert(tmp_path / "t5x", tmp_path / "mtf", "mtf")
    assert report.family.position_bias_per_layer
    name = "decoder/block_{}/layer_000/SelfAttention/relative_attention_bias"
    before, after = read_variables(tiny_checkpoint), read_variables(tmp_path / "mtf")
    first, second = (after[name.format(block)] for block in ("000", "001"))
    np.testing.assert_array_equal(second, before[name.format("000")])
    assert (first != second).sum() == 1


def test_only_t5x_has_scanned_trees(tiny_checkpoint, tmp_path):
    with pytest.raises(UserError, match="--scan"):
        convert(tiny_checkpoint, tmp_path / "out", "jax", scan=True)


# --- Slots ---------------------------------------------------------------------------------------


def test_importer_slots_are_the_straight_mapping(tiny_checkpoint, tmp_path):
    convert(tiny_checkpoint, tmp_path / "t5x", "t5x", t5x_importer_slots=True)
    variables, tree = read_variables(tiny_checkpoint), load_any(tmp_path / "t5x")
    square = "encoder/layers_0/attention/query/kernel"
    name = naming.path_to_mtf(square)
    for ours, theirs in (("v_row", "vr"), ("v_col", "vc")):
        np.testing.assert_array_equal(
            tree[naming.slot_key(square, ours)], variables[f"{name}_slot_{theirs}"]
        )


def test_importer_slots_ask_for_a_t5x_side(tiny_checkpoint, tmp_path):
    with pytest.raises(UserError, match="neither side is one"):
        convert(tiny_checkpoint, tmp_path / "out", "mtf", t5x_importer_slots=True)


# --- Types and vocabularies ----------------------------------------------------------------------


def test_a_type_is_changed_only_where_it_is_asked_for_and_said(tiny_checkpoint, tmp_path):
    report = convert(tiny_checkpoint, tmp_path / "rounded", "mtf", dtype="bfloat16")
    assert any("rounded to bfloat16" in note for note in report.notes)
    rounded, original = read_variables(tmp_path / "rounded"), read_variables(tiny_checkpoint)
    for name, array in rounded.items():
        is_parameter = "_slot_" not in name and name != "global_step"
        assert array.dtype.name == ("bfloat16" if is_parameter else original[name].dtype.name)
    assert convert(tmp_path / "rounded", tmp_path / "wide", "t5x", dtype="float32").notes == ()


def test_float16_is_refused_until_a_type_is_asked_for(
    tiny_family, mesh_variables, write_mesh_checkpoint, tmp_path
):
    variables = mesh_variables(tiny_family, dtype="float16")
    source = write_mesh_checkpoint(tmp_path / "source", variables)
    with pytest.raises(UserError, match="float16; parameters are kept in float32 or bfloat16"):
        convert(source, tmp_path / "out", "jax")
    # Both have 16 bits, of which bfloat16 keeps fewer for the fraction.
    report = convert(source, tmp_path / "out", "jax", dtype="bfloat16", dry_run=True)
    assert any("parameters are rounded to bfloat16" in note for note in report.notes)
    assert convert(source, tmp_path / "out", "jax", dtype="float32").notes == ()
    wide = load_any(tmp_path / "out")["target/token_embedder/embedding"]
    np.testing.assert_array_equal(wide, variables["shared/embedding"].astype(np.float32))


@pytest.mark.parametrize("size", [100, 256])
def test_a_vocabulary_is_cut_or_padded_slots_too_and_that_is_said(tiny_checkpoint, tmp_path, size):
    # 128 rows and 128 columns tie; below 128 the order of the axes would change, slots stay out.
    report = convert(tiny_checkpoint, tmp_path / "out", "mtf", vocab_size=size, slots=False)
    assert f"from 128 to {size}" in " ".join(report.notes)
    assert report.family.vocab_size == size
    before, after = read_variables(tiny_checkpoint), read_variables(tmp_path / "out")
    kept = min(size, 128)
    embedding, kernel = after["shared/embedding"], after["decoder/logits/kernel"]
    np.testing.assert_array_equal(embedding[:kept], before["shared/embedding"][:kept])
    np.testing.assert_array_equal(kernel[:, :kept], before["decoder/logits/kernel"][:, :kept])
    assert not embedding[kept:].any()
    assert not kernel[:, kept:].any()


def test_the_runs_gin_file_follows_a_vocabulary_that_is_padded(tiny_checkpoint, tmp_path):
    convert(tiny_checkpoint, tmp_path / "t5x", "t5x", slots=False)
    config = tmp_path / "t5x" / "config.gin"
    config.write_text("network.T5Config:\n  vocab_size = 128  # rows\n  emb_dim = 128\n")
    convert(tmp_path / "t5x", tmp_path / "out", "t5x", vocab_size=256)
    written = (tmp_path / "out" / "config.gin").read_text()
    assert written == config.read_text().replace("size = 128", "size = 256")
    config.write_text("network.T5Config.vocab_size = 256\n")  # another model's
    with pytest.raises(UserError, match="whose vocab_size is 128"):
        convert(tmp_path / "t5x", tmp_path / "other", "t5x", vocab_size=256)


def test_slots_follow_a_vocabulary_that_is_padded(
    tiny_family, mesh_variables, write_mesh_checkpoint, tmp_path
):
    family = dataclasses.replace(tiny_family, vocab_size=200)
    variables = mesh_variables(family)
    source = write_mesh_checkpoint(tmp_path / "source", variables)
    convert(source, tmp_path / "out", "mtf", vocab_size=256)
    after = read_variables(tmp_path / "out")
    # The embedding [vocab, d_model]: vr is the mean over vocab, vc over d_model.
    np.testing.assert_array_equal(
        after["shared/embedding_slot_vr"], variables["shared/embedding_slot_vr"]
    )
    means = after["shared/embedding_slot_vc"]
    np.testing.assert_array_equal(means[:200], variables["shared/embedding_slot_vc"])
    assert means.shape == (256,)


def test_a_hugging_face_vocabulary_is_padded_to_a_multiple_of_128(
    tiny_family, mesh_variables, write_mesh_checkpoint, tmp_path
):
    family = dataclasses.replace(tiny_family, vocab_size=200)
    source = write_mesh_checkpoint(tmp_path / "source", mesh_variables(family))
    convert(source, tmp_path / "hf", "hf", slots=False)
    report = convert(tmp_path / "hf", tmp_path / "t5x", "t5x")
    assert "The vocabulary is padded with zeros from 200 to 256." in report.notes


# --- Decoder-only --------------------------------------------------------------------------------


def test_a_decoder_only_model_has_t5x_s_decoder_and_mesh_tensorflow_s_transformer(
    mesh_variables, write_mesh_checkpoint, tmp_path
):
    family = ModelShape(0, 2, 4, 8, 2, 2, 16, 4, ("wi_0", "wi_1"), False)
    variables = mesh_variables(family)
    assert "transformer/block_001/layer_001/DenseReluDense/wi_0/kernel" in variables
    assert "transformer/embedding" in variables
    source = write_mesh_checkpoint(tmp_path / "source", variables)
    (source / "operative_config.gin").write_text("Unitransformer.input_full_attention = False\n")
    report = convert(source, tmp_path / "t5x", "t5x")
    assert report.family.name == "T5, decoder only"
    tree = load_any(tmp_path / "t5x")
    assert "target/decoder/token_embedder/embedding" in tree
    assert "target/decoder/layers_1/pre_mlp_layer_norm/scale" in tree
    assert not any("encoder" in key for key in tree)
    convert(tmp_path / "t5x", tmp_path / "mtf", "mtf")
    assert_same_bits(variables, read_variables(tmp_path / "mtf"))


def test_the_operative_config_goes_along(tiny_checkpoint, tmp_path):
    (tiny_checkpoint / "operative_config.gin").write_text("d_model = 128\n")
    convert(tiny_checkpoint, tmp_path / "t5x", "t5x")
    convert(tmp_path / "t5x", tmp_path / "mtf", "mtf")
    assert (tmp_path / "mtf" / "operative_config.gin").read_text() == "d_model = 128\n"
    (tmp_path / "own.gin").write_text("DenseReluDense.activation = ['silu', 'linear']\n")
    convert(tmp_path / "t5x", tmp_path / "hf", "hf", gin_file=tmp_path / "own.gin")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["feed_forward_proj"] == "gated-silu"
