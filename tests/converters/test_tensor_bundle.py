from __future__ import annotations

import shutil

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from t0repro.converters import tensor_bundle
from t0repro.converters.tensor_bundle import BundleReader, BundleWriter, table_of
from t0repro.errors import UserError

from . import tensorflow_tables as tables

DTYPES = [np.float32, np.float64, np.int32, np.int64, np.float16]


def write(prefix, tensors) -> None:
    writer = BundleWriter(prefix)
    for name, array in tensors.items():
        writer.add(name, array)
    writer.close()


@settings(max_examples=50)
@given(
    st.dictionaries(
        st.text(st.sampled_from("ab/_0"), min_size=1, max_size=12),
        st.sampled_from(DTYPES).flatmap(
            lambda dtype: hnp.arrays(
                dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
            )
        ),
        max_size=60,
    )
)
def test_what_is_written_is_read_bit_for_bit(tmp_path_factory, tensors):
    prefix = tmp_path_factory.mktemp("bundle") / "model.ckpt-1"
    write(prefix, tensors)
    reader = BundleReader(prefix)
    assert reader.entries.keys() == tensors.keys()
    for name, array in tensors.items():
        read = reader.read(name)
        assert (read.dtype, read.shape) == (array.dtype, array.shape)
        assert read.tobytes() == array.tobytes()


@pytest.mark.mtf
@pytest.mark.parametrize("model", ["t5_1_1", "t5_1_0"])
def test_tensorflow_reads_the_same_from_its_own_file_and_from_ours(
    mesh_checkpoints, model, tmp_path
):
    import tensorflow as tf

    source = BundleReader(mesh_checkpoints[model] / "model.ckpt-2")
    write(tmp_path / "ours", {name: source.read(name) for name in source.entries})
    theirs = tf.train.load_checkpoint(str(mesh_checkpoints[model] / "model.ckpt-2"))
    ours = tf.train.load_checkpoint(str(tmp_path / "ours"))
    names = theirs.get_variable_to_shape_map()
    assert names.keys() == source.entries.keys() == ours.get_variable_to_shape_map().keys()
    for name in names:
        expected = theirs.get_tensor(name)
        for actual in (source.read(name), ours.get_tensor(name)):
            assert np.asarray(actual).dtype == np.asarray(expected).dtype
            assert np.asarray(actual).tobytes() == np.asarray(expected).tobytes()


@pytest.fixture
def bundle(tmp_path):
    prefix = tmp_path / "model.ckpt-5"
    write(
        prefix,
        {
            "a": np.arange(1000, dtype=np.float32),
            "b": np.ones((3, 5), ml_dtypes.bfloat16),
        },
    )
    return prefix


def data_file(prefix):
    return prefix.with_name(prefix.name + ".data-00000-of-00001")


def index_file(prefix):
    return prefix.with_name(prefix.name + ".index")


def test_a_missing_data_file_is_named(bundle):
    data_file(bundle).unlink()
    with pytest.raises(UserError, match=r"missing.*\n.*model\.ckpt-5\.data-00000-of-00001"):
        BundleReader(bundle)


@pytest.mark.mtf
def test_a_missing_shard_of_several_is_named(mesh_checkpoints, tmp_path):
    for file in mesh_checkpoints["t5_1_1"].glob("model.ckpt-2.*"):
        if "data-00001-of-00002" not in file.name:
            shutil.copy(file, tmp_path)
    with pytest.raises(UserError, match=r"model\.ckpt-2\.data-00001-of-00002"):
        BundleReader(tmp_path / "model.ckpt-2")


@pytest.mark.parametrize("kept", [0, 1, 4000, 4029])
def test_a_cut_data_file_is_named_before_anything_is_read(bundle, kept):
    data_file(bundle).write_bytes(data_file(bundle).read_bytes()[:kept])
    with pytest.raises(UserError, match=rf"{kept} bytes, but .* 4030\.\n.*data-00000-of-00001"):
        BundleReader(bundle)


def test_a_changed_byte_is_told_by_the_tensor_s_checksum(bundle):
    content = bytearray(data_file(bundle).read_bytes())
    content[10] ^= 1
    data_file(bundle).write_bytes(content)
    with pytest.raises(UserError, match="checksum of a is wrong"):
        BundleReader(bundle).read("a")
    np.testing.assert_array_equal(BundleReader(bundle).read("b"), np.ones((3, 5)))


@pytest.mark.parametrize("position", range(0, 200, 7))
def test_a_changed_byte_of_the_index_is_told(bundle, position):
    content = bytearray(index_file(bundle).read_bytes())
    # The footer's padding carries nothing; everything before it does.
    content[position % (len(content) - 48)] ^= 0xFF
    index_file(bundle).write_bytes(content)
    with pytest.raises(UserError, match=r"damaged: .*\n.*model\.ckpt-5\.index"):
        BundleReader(bundle)


def test_numbers_that_tensorflow_leaves_out_of_an_entry_are_zeros():
    # float32 of the shape [0]: TensorFlow writes no field whose number is 0.
    entry = tensor_bundle._parse_entry(b"\x08\x01\x12\x02\x12\x00")
    assert (entry.dtype, entry.shape) == (np.float32, (0,))
    assert (entry.shard, entry.offset, entry.size, entry.masked_crc32c) == (0, 0, 0, 0)


def test_a_bundle_of_a_big_endian_machine_is_refused(bundle, monkeypatch):
    monkeypatch.setattr(tensor_bundle, "table_of", lambda path: {b"": b"\x08\x01\x10\x01"})
    with pytest.raises(UserError, match="damaged: it was written on a big-endian machine"):
        BundleReader(bundle)


def many_tensors() -> dict[str, np.ndarray]:
    """Enough names for an index of several blocks, as T5s spell them."""
    names = (f"encoder/block_{n:03d}/layer_000/SelfAttention/q" for n in range(9000))
    return {name: np.float32(number) for number, name in enumerate(names)}


@pytest.fixture(scope="module")
def tensorflow_bundle(tmp_path_factory):
    """A checkpoint of `many_tensors` that TensorFlow wrote."""
    import tensorflow as tf

    prefix = tmp_path_factory.mktemp("tensorflow") / "model.ckpt-3"
    tensors = many_tensors()
    tf.raw_ops.SaveV2(
        prefix=str(prefix),
        tensor_names=list(tensors),
        shape_and_slices=[""] * len(tensors),
        tensors=list(tensors.values()),
    )
    return prefix


@pytest.mark.mtf
def test_the_tests_tables_are_those_that_tensorflow_writes_byte_for_byte(tensorflow_bundle):
    index = index_file(tensorflow_bundle)
    assert tables.table(table_of(str(index))) == index.read_bytes()


@pytest.mark.mtf
def test_a_compressed_index_is_read_as_tensorflow_reads_it(tensorflow_bundle, tmp_path):
    import tensorflow as tf

    prefix = tmp_path / "model.ckpt-3"
    for file in tensorflow_bundle.parent.glob("model.ckpt-3.*"):
        shutil.copy(file, tmp_path)
    tables.compress_index(prefix)
    assert index_file(prefix).stat().st_size < index_file(tensorflow_bundle).stat().st_size // 2
    ours, theirs = BundleReader(prefix), tf.train.load_checkpoint(str(prefix))
    assert ours.entries.keys() == theirs.get_variable_to_shape_map().keys()
    for name, value in list(many_tensors().items())[::500]:
        assert ours.read(name) == theirs.get_tensor(name) == value


@pytest.fixture
def compressed_bundle(tmp_path):
    prefix = tmp_path / "model.ckpt-5"
    write(prefix, {f"decoder/block_{n:03d}/q": np.float32(n) for n in range(200)})
    tables.compress_index(prefix)
    return prefix


@pytest.mark.parametrize("position", range(0, 1400, 47))
def test_a_changed_byte_of_a_compressed_index_is_told(compressed_bundle, position):
    content = bytearray(index_file(compressed_bundle).read_bytes())
    content[position % (len(content) - 48)] ^= 0xFF
    index_file(compressed_bundle).write_bytes(content)
    with pytest.raises(UserError, match=r"checksum of a block is wrong.*\n.*model\.ckpt-5\.index"):
        BundleReader(compressed_bundle)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(1, "a compressed block cannot be decompressed"), (7, "no compression of type 7")],
)
def test_a_block_that_is_not_compressed_as_its_type_says_is_told(bundle, kind, reason):
    index = index_file(bundle)
    index.write_bytes(tables.table(table_of(str(index)), lambda block: (block, kind)))
    with pytest.raises(UserError, match=rf"damaged: .*{reason}"):
        BundleReader(bundle)


@pytest.mark.parametrize("content", [b"", b"x" * 100])
def test_an_index_of_another_kind_is_told_by_its_magic(bundle, content):
    index_file(bundle).write_bytes(content)
    with pytest.raises(UserError, match="does not end as an index file does"):
        BundleReader(bundle)


def test_without_close_there_is_no_index(tmp_path):
    writer = BundleWriter(tmp_path / "model.ckpt-1")
    writer.add("a", np.ones(3, np.float32))
    writer.abandon()
    assert not index_file(tmp_path / "model.ckpt-1").exists()
