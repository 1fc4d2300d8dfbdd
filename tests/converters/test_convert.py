from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from t0repro.converters import layout, mtf
from t0repro.converters.convert import convert
from t0repro.converters.family import Family
from t0repro.converters.sources import find_checkpoint
from t0repro.converters.tensor_bundle import BundleReader
from t0repro.errors import UserError


def read_variables(directory) -> dict[str, np.ndarray]:
    reader = BundleReader(find_checkpoint(directory).path)
    return {name: reader.read(name) for name in reader.entries}


def assert_same_bits(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> None:
    assert left.keys() == right.keys()
    for name, array in left.items():
        assert (array.dtype, array.shape) == (right[name].dtype, right[name].shape), name
        assert array.tobytes() == right[name].tobytes(), name


# --- Round trips ---------------------------------------------------------------------------------


@pytest.mark.mtf
@pytest.mark.parametrize("model", ["t5_1_1", "t5_1_0"])
def test_mesh_tensorflow_s_checkpoint_comes_back_from_jax_bit_for_bit(
    mesh_checkpoints, model, tmp_path
):
    report = convert(mesh_checkpoints[model], tmp_path / "jax", "jax")
    convert(tmp_path / "jax", tmp_path / "mtf", "mtf")
    original = read_variables(mesh_checkpoints[model])
    assert_same_bits(original, read_variables(tmp_path / "mtf"))
    assert report.slots == "kept"
    assert report.tensors == len(original)
    assert any(np.any(array) for name, array in original.items() if "_slot_" in name)


FAMILIES = st.builds(
    Family,
    num_encoder_layers=st.integers(1, 2),
    num_decoder_layers=st.integers(1, 2),
    d_model=st.sampled_from([1, 4, 6, 8]),
    d_ff=st.sampled_from([1, 4, 8]),
    num_heads=st.sampled_from([1, 2]),
    d_kv=st.sampled_from([1, 2, 4]),
    vocab_size=st.sampled_from([4, 8, 9]),
    relative_attention_num_buckets=st.sampled_from([1, 2, 4]),
    wi_kernels=st.sampled_from([("wi",), ("wi_0", "wi_1")]),
    tied=st.booleans(),
)


@settings(max_examples=12, deadline=None)
@given(
    family=FAMILIES,
    step=st.integers(0, 2**31 - 1),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    factor_at=st.sampled_from([1, 4, 128]),
    momentum=st.booleans(),
    norm_names=st.sampled_from(["rms_norm", "layer_norm"]),
)
def test_any_t5_comes_back_from_jax_bit_for_bit(
    tmp_path_factory, mesh_variables, write_mesh_checkpoint, family, step, **choices
):
    variables = mesh_variables(family, step=step, **choices)
    root = tmp_path_factory.mktemp("round_trip")
    write_mesh_checkpoint(root / "source", variables)
    assert convert(root / "source", root / "jax", "jax").family == family
    convert(root / "jax", root / "mtf", "mtf")
    assert_same_bits(variables, read_variables(root / "mtf"))


@pytest.mark.mtf
def test_mesh_tensorflow_continues_a_converted_checkpoint_as_it_does_its_own(
    mesh_checkpoints, train_mesh_tensorflow, tmp_path
):
    shutil.copytree(mesh_checkpoints["t5_1_1"], tmp_path / "own")
    convert(tmp_path / "own", tmp_path / "jax", "jax")
    convert(tmp_path / "jax", tmp_path / "converted", "mtf")
    models = ("own", "converted")
    train_mesh_tensorflow(
        [
            {"model_dir": tmp_path / name, "model": "t5.1.1.small", "train_steps": 5}
            for name in models
        ]
    )
    losses = [json.loads((tmp_path / name / "losses.json").read_text()) for name in models]
    assert len(losses[0]) == 3
    assert losses[0] == losses[1]
    # The slots are alive: they entered the updates, and agree after them too.
    assert_same_bits(*(read_variables(tmp_path / name) for name in models))


def test_slots_of_square_matrices_change_names_and_others_keep_them(tiny_checkpoint, tmp_path):
    from t0repro.training.checkpoints import load_tree

    convert(tiny_checkpoint, tmp_path / "jax", "jax")
    variables = read_variables(tiny_checkpoint)
    tree = load_tree(tmp_path / "jax" / "checkpoint_7")
    square = "encoder/layers_0/attention/query/kernel"
    name = layout.path_to_mtf(square)
    v_row, v_col = (tree[layout.slot_key(square, slot)] for slot in ("v_row", "v_col"))
    np.testing.assert_array_equal(v_row, variables[f"{name}_slot_vc"])
    np.testing.assert_array_equal(v_col, variables[f"{name}_slot_vr"])
    # The straight mapping, T5X's importer's, would give these.
    assert not np.array_equal(v_row, variables[f"{name}_slot_vr"])
    unfactored = "encoder/layers_0/mlp/wo/kernel"
    np.testing.assert_array_equal(
        tree[layout.slot_key(unfactored, "v")],
        variables[f"{layout.path_to_mtf(unfactored)}_slot_v"],
    )


def test_without_slots_parameters_and_step_are_left(tiny_checkpoint, tiny_family, tmp_path):
    report = convert(tiny_checkpoint, tmp_path / "out", "mtf", slots=False)
    assert report.slots == "dropped"
    assert len(read_variables(tmp_path / "out")) == len(tiny_family.parameters()) + 1
    assert convert(tmp_path / "out", tmp_path / "again", "jax").slots == "none"


def test_norm_names_can_be_chosen(tiny_checkpoint, tmp_path):
    convert(tiny_checkpoint, tmp_path / "old", "mtf", norm_names="layer_norm")
    names = read_variables(tmp_path / "old").keys()
    assert "encoder/final_layer_norm/scale" in names
    assert not any("rms_norm" in name for name in names)


# --- What is written -----------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["mtf", "jax"])
def test_the_manifest_describes_every_tensor_of_the_target(tiny_checkpoint, tmp_path, to):
    convert(tiny_checkpoint, tmp_path / "out", to)
    manifest = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert manifest["source"]["format"] == "mtf"
    assert manifest["source"]["path"] == str(tiny_checkpoint / "model.ckpt-7")
    assert manifest["target"] == {"format": to, "step": 7}
    assert manifest["versions"]["numpy"] == np.__version__
    if to == "mtf":
        tensors = read_variables(tmp_path / "out")
        assert manifest["tensors"].keys() == tensors.keys()
    else:
        from t0repro.training.checkpoints import load_tree

        tensors = load_tree(tmp_path / "out" / "checkpoint_7")
        assert manifest["tensors"].keys() <= tensors.keys()
    for name, entry in manifest["tensors"].items():
        array = tensors[name]
        assert entry["shape"] == list(array.shape)
        assert entry["dtype"] == array.dtype.name
        assert entry["sha256"] == hashlib.sha256(array.tobytes()).hexdigest()


def test_a_dry_run_reports_the_same_and_writes_nothing(tiny_checkpoint, tmp_path):
    dry = convert(tiny_checkpoint, tmp_path / "out", "jax", dry_run=True)
    assert not (tmp_path / "out").exists()
    wet = convert(tiny_checkpoint, tmp_path / "out", "jax")
    assert dry.dry_run
    assert not wet.dry_run
    assert (dry.target, dry.tensors, dry.bytes) == (wet.target, wet.tensors, wet.bytes)


@pytest.mark.parametrize("to", ["mtf", "jax"])
def test_a_destination_that_is_there_is_an_error_without_force(tiny_checkpoint, tmp_path, to):
    convert(tiny_checkpoint, tmp_path / "out", to)
    with pytest.raises(UserError, match="there already"):
        convert(tiny_checkpoint, tmp_path / "out", to)


@pytest.mark.parametrize("to", ["mtf", "jax"])
def test_force_replaces_the_checkpoint_and_keeps_other_files(
    tiny_family, mesh_variables, write_mesh_checkpoint, tmp_path, to
):
    for seed in (0, 1):
        write_mesh_checkpoint(tmp_path / f"source_{seed}", mesh_variables(tiny_family, seed=seed))
    convert(tmp_path / "source_0", tmp_path / "out", to)
    (tmp_path / "out" / "notes.txt").write_text("mine")
    before = sorted(os.listdir(tmp_path / "out"))
    convert(tmp_path / "source_1", tmp_path / "out", to, force=True)
    assert sorted(os.listdir(tmp_path / "out")) == before
    convert(tmp_path / "out", tmp_path / "back", "mtf")
    assert_same_bits(read_variables(tmp_path / "source_1"), read_variables(tmp_path / "back"))


def test_an_empty_directory_and_a_new_step_of_a_model_dir_are_written_to(
    tiny_family, mesh_variables, write_mesh_checkpoint, tmp_path
):
    (tmp_path / "out").mkdir()
    for step in (7, 9, 8):
        variables = mesh_variables(tiny_family, step=step)
        source = write_mesh_checkpoint(tmp_path / f"step_{step}", variables)
        convert(source, tmp_path / "out", "mtf", force=step != 7)
    assert mtf.mtf_steps(tmp_path / "out") == [7, 8, 9]
    assert find_checkpoint(tmp_path / "out").step == 9


# --- Interruption --------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["mtf", "jax", "t5x", "hf"])
@pytest.mark.parametrize("there", [False, True])
def test_an_exception_in_the_middle_leaves_nothing_that_looks_whole_and_is_gone_on_from(
    tiny_checkpoint, tmp_path, monkeypatch, to, there
):
    out = tmp_path / "out"
    if there:
        out.mkdir()
    read, count = mtf.MtfReader.read, 0

    def failing_read(self, key):
        nonlocal count
        count += 1
        if count == 21:
            raise KeyboardInterrupt
        return read(self, key)

    monkeypatch.setattr(mtf.MtfReader, "read", failing_read)
    with pytest.raises(KeyboardInterrupt):
        convert(tiny_checkpoint, out, to)
    # What is there is hidden: no checkpoint is found.
    visible = [name for name in os.listdir(out if there else tmp_path) if not name.startswith(".")]
    assert visible == ([] if there else ["source"])
    with pytest.raises(UserError):
        find_checkpoint(out)

    report = convert(tiny_checkpoint, out, to)
    assert report.resumed == 19  # the step was read once before, to be checked
    assert not [name for name in os.listdir(tmp_path) + os.listdir(out) if name.startswith(".")]
    convert(out, tmp_path / "back", "mtf")
    assert_same_bits(read_variables(tiny_checkpoint), read_variables(tmp_path / "back"))


def test_another_conversion_does_not_go_on_from_an_interrupted_one(
    tiny_family, mesh_variables, write_mesh_checkpoint, tmp_path, monkeypatch
):
    for seed in (0, 1):
        write_mesh_checkpoint(tmp_path / f"source_{seed}", mesh_variables(tiny_family, seed=seed))
    with monkeypatch.context() as patch:
        patch.setattr(mtf.MtfWriter, "close", lambda self: (_ for _ in ()).throw(OSError))
        with pytest.raises(OSError):
            convert(tmp_path / "source_0", tmp_path / "out", "mtf")
    report = convert(tmp_path / "source_1", tmp_path / "out", "mtf")
    assert report.resumed == 0
    assert_same_bits(read_variables(tmp_path / "source_1"), read_variables(tmp_path / "out"))


# Forks a conversion for each moment and kills it there: before the n-th of the calls that change
# names on the disk, at one in 100 of those that sync, at one tensor in 20. Ends with the first that
# comes through.
KILLED = """
import os, shutil, signal, sys
from t0repro.converters import convert, staging
source, base, to = sys.argv[1:]
def converts_until(moment, out):
    calls = 0
    def count(weight):
        nonlocal calls
        calls += weight
        if calls >= moment:
            os.kill(os.getpid(), signal.SIGKILL)
    def killing(original, weight):
        def call(*arguments, **keywords):
            # With dir_fd it is rmtree, of what nobody looks at any more.
            count(weight / 50 if "dir_fd" in keywords else weight)
            return original(*arguments, **keywords)
        return call
    for name, weight in {"replace": 1, "rename": 1, "unlink": 1, "fsync": 0.01}.items():
        setattr(os, name, killing(getattr(os, name), weight))
    staging.describe = killing(staging.describe, 0.05)
    convert.convert(source, out, to, force=True)
for moment in range(1, 1000):
    out = f"{base}_{moment}"
    if os.path.isdir(base):
        shutil.copytree(base, out)
    child = os.fork()
    if child == 0:
        try:
            converts_until(moment, out)
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == 0:
        break
    assert status == -signal.SIGKILL, status
print(moment)
"""


# T5X's writer is JAX's with one more file.
KILLED_FORMATS = ["mtf", "jax", "hf", pytest.param("t5x", marks=pytest.mark.slow)]


REPLACED_FORMATS = [
    "mtf",
    "hf",
    *(pytest.param(to, marks=pytest.mark.slow) for to in ("jax", "t5x")),
]


def killed_at_many_moments(source, base, to) -> int:
    """Converts to base_1, base_2, ..., each killed later than the last; returns their number."""
    arguments = [sys.executable, "-c", KILLED, str(source), str(base), to]
    process = subprocess.run(arguments, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return int(process.stdout)


def content(directory, root):
    """The tensors that are found in a directory, as Mesh TensorFlow's variables; None if none."""
    try:
        shutil.rmtree(root / "read", ignore_errors=True)
        convert(directory, root / "read", "mtf")
    except UserError:
        return None
    return read_variables(root / "read")


@pytest.mark.parametrize("to", KILLED_FORMATS)
def test_killed_at_any_moment_a_new_destination_is_absent_or_whole_and_can_be_finished(
    tiny_checkpoint, tmp_path, to
):
    expected = read_variables(tiny_checkpoint)
    count = killed_at_many_moments(tiny_checkpoint, tmp_path / "out", to)
    assert count > 5
    resumed = 0
    for moment in range(1, count):
        out = tmp_path / f"out_{moment}"
        if out.exists():
            assert (out / "conversion.json").exists()
        else:
            resumed = max(resumed, convert(tiny_checkpoint, out, to).resumed)
        if moment % 4 == 0:
            assert_same_bits(expected, content(out, tmp_path))
        assert not list(tmp_path.glob(f".out_{moment}.*")) or (out / "conversion.json").exists()
    assert resumed > 0


@pytest.mark.parametrize("to", REPLACED_FORMATS)
def test_killed_at_any_moment_a_checkpoint_that_is_replaced_is_the_old_the_new_or_an_error(
    tiny_family, mesh_variables, write_mesh_checkpoint, tmp_path, to
):
    for seed in (0, 1):
        write_mesh_checkpoint(tmp_path / f"source_{seed}", mesh_variables(tiny_family, seed=seed))
    convert(tmp_path / "source_0", tmp_path / "out", to)
    count = killed_at_many_moments(tmp_path / "source_1", tmp_path / "out", to)
    sources = [read_variables(tmp_path / f"source_{seed}") for seed in (0, 1)]
    for moment in range(1, count + 1):
        out = tmp_path / f"out_{moment}"
        found = content(out, tmp_path)
        if found is not None:
            name = "shared/embedding"
            old = np.array_equal(found[name], sources[0][name])
            assert_same_bits(found, sources[0 if old else 1])
        if moment % 4 == 0:
            convert(tmp_path / "source_1", out, to, force=True)
            assert_same_bits(content(out, tmp_path), sources[1])


# --- Bad input -----------------------------------------------------------------------------------


def convert_changed(tmp_path, variables, write_mesh_checkpoint):
    """Converts a checkpoint of these variables and checks that nothing is written if that fails."""
    source = write_mesh_checkpoint(tmp_path / "changed", variables)
    try:
        return convert(source, tmp_path / "out", "jax")
    finally:
        assert not (tmp_path / "out").exists()


def test_an_unknown_variable_is_named_with_the_nearest(
    tiny_family, mesh_variables, write_mesh_checkpoint, tmp_path
):
    variables = mesh_variables(tiny_family)
    variables["encoder/block_000/layer_000/SelfAttention/kk"] = np.zeros((2, 2), np.float32)
    with pytest.raises(UserError) as caught:
        convert_changed(tmp_path, variables, write_mesh_checkpoint)
    assert "'encoder/block_000/layer_000/SelfAttention/kk'" in caught.value.what
    assert "nearest: 'encoder/block_000/layer_000/SelfAttention/k'" in caught.value.what


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("decoder/block_001/layer_001/EncDecAttention/o", "missing: .*EncDecAttention/o"),
        ("decoder/logits/kernel_slot_vc", "slot is missing: decoder/logits/kernel_slot_v"),
        ("encoder/rms_norm/scale_slot_v", "slot is missing: encoder/rms_norm/scale_slot_v"),
        ("global_step", "missing: global_step"),
    ],
)
def test_a_missing_variable_is_named_as_mesh_tensorflow_does(
    tiny_family, mesh_variables, write_mesh_checkpoint, tmp_path, name, message
):
    variables = mesh_variables(tiny_family)
    for missing in [name] if "_slot_" in name else [n for n in variables if n.startswith(name)]:
        del variables[missing]
    with pytest.raises(UserError, match=message):
        convert_changed(tmp_path, variables, write_mesh_checkpoint)


def test_a_slot_without_its_variable_is_named(
    tiny_family, mesh_variables, write_mesh_checkpoint, tmp_path
):
    variables = mesh_variables(tiny_family)
    del variables["encoder/block_000/layer_001/DenseReluDense/wo/kernel"]
    with pytest.raises(UserError, match="DenseReluDense/wo/kernel_slot_v"):
        convert_changed(tmp_path, variables, write_mesh_checkpoint)


def test_a_slot_of_another_shape_is_named(
    tiny_family, mesh_variables, write_mesh_checkpoint, tmp_path
):
    variables = mesh_variables(tiny_family)
    name = "encoder/block_000/layer_000/rms_norm/scale_slot_v"
    variables[name] = np.zeros(3, np.float32)
    with pytest.raises(UserError, match=rf"{name} has the shape \(3,\) where \(128,\)"):
        convert_changed(tmp_path, variables, write_mesh_checkpoint)


def test_a_variable_of_another_shape_is_named_with_both(
    tiny_family, mesh_variables, write_mesh_checkpoint, tmp_path
):
    variables = mesh_variables(tiny_family)
    name = "decoder/block_001/layer_002/DenseReluDense/wi_0/kernel"
    variables[name] = np.zeros((128, 17), np.float32)
    with pytest.raises(UserError, match=rf"{name} has the shape \(128, 17\).*\(128, 16\)"):
        convert_changed(tmp_path, variables, write_mesh_checkpoint)


@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_a_missing_or_cut_data_file_is_named_and_nothing_written(tiny_checkpoint, tmp_path, damage):
    data = tiny_checkpoint / "model.ckpt-7.data-00000-of-00001"
    if damage == "missing":
        data.unlink()
    else:
        data.write_bytes(data.read_bytes()[:-1])
    message = {"missing": "is missing", "cut": "damaged"}[damage]
    with pytest.raises(UserError, match=rf"(?s){message}.*{data}"):
        convert(tiny_checkpoint, tmp_path / "out", "jax")
    assert not (tmp_path / "out").exists()


def test_a_damaged_jax_checkpoint_is_told_and_nothing_written(tiny_checkpoint, tmp_path):
    convert(tiny_checkpoint, tmp_path / "jax", "jax")
    largest = max(
        (p for p in (tmp_path / "jax" / "checkpoint_7").rglob("*") if p.is_file()),
        key=lambda p: p.stat().st_size,
    )
    largest.write_bytes(largest.read_bytes()[:-1])
    with pytest.raises(UserError):
        convert(tmp_path / "jax", tmp_path / "out", "mtf")
    assert not (tmp_path / "out").exists()


def test_an_index_with_another_magic_number_is_told(tiny_checkpoint, tmp_path):
    index = tiny_checkpoint / "model.ckpt-7.index"
    index.write_bytes(index.read_bytes()[:-8] + bytes(8))
    with pytest.raises(UserError, match=rf"(?s)does not end as an index file does.*{index}"):
        convert(tiny_checkpoint, tmp_path / "out", "jax")


def test_a_source_that_is_written_to_meanwhile_is_told(tiny_checkpoint, tmp_path, monkeypatch):
    read = mtf.MtfReader.read

    def read_while_another_writes(self, key):
        data = tiny_checkpoint / "model.ckpt-7.data-00000-of-00001"
        os.utime(data, ns=(0, 0))
        return read(self, key)

    monkeypatch.setattr(mtf.MtfReader, "read", read_while_another_writes)
    with pytest.raises(UserError, match="was written to while it was read"):
        convert(tiny_checkpoint, tmp_path / "out", "jax")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "name", ["model.ckpt-7.data-00000-of-00001.tempstate1", "checkpoint_9.orbax-checkpoint-tmp-1"]
)
def test_a_checkpoint_that_is_not_finished_is_told(tmp_path, name):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / name).mkdir()
    with pytest.raises(UserError, match="is being written, or its writing was interrupted"):
        convert(tmp_path / "model", tmp_path / "out", "jax")


def test_another_conversion_to_the_same_destination_is_told(tiny_checkpoint, tmp_path):
    import fcntl

    (tmp_path / ".out.conversion").mkdir()
    with open(tmp_path / ".out.conversion" / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="Another conversion to this destination"):
            convert(tiny_checkpoint, tmp_path / "out", "jax")


def test_no_space_left_in_the_middle_is_told_and_the_conversion_can_go_on(
    tiny_checkpoint, tmp_path, monkeypatch
):
    import errno

    add, count = mtf.MtfWriter.add, 0

    def add_until_full(self, output, array):
        nonlocal count
        count += 1
        if count > 10:
            raise OSError(errno.ENOSPC, "No space left on device")
        add(self, output, array)

    with monkeypatch.context() as patch:
        patch.setattr(mtf.MtfWriter, "add", add_until_full)
        with pytest.raises(UserError, match="(?s)No space left.*goes on where it stopped"):
            convert(tiny_checkpoint, tmp_path / "out", "mtf")
    assert convert(tiny_checkpoint, tmp_path / "out", "mtf").resumed == 10
    assert_same_bits(read_variables(tiny_checkpoint), read_variables(tmp_path / "out"))


def test_a_source_may_be_at_an_address_that_fsspec_opens(tiny_checkpoint, tmp_path):
    import fsspec

    system = fsspec.filesystem("memory")
    system.put(str(tiny_checkpoint), "/bucket/mtf", recursive=True)
    convert(tiny_checkpoint, tmp_path / "hf", "hf")
    system.put(str(tmp_path / "hf"), "/bucket/hf", recursive=True)
    try:
        for number, name in enumerate(("mtf", "mtf/model.ckpt-7", "hf")):
            convert(f"memory://bucket/{name}", tmp_path / f"out_{number}", "mtf")
            assert_same_bits(
                read_variables(tiny_checkpoint), read_variables(tmp_path / f"out_{number}")
            )
    finally:
        system.rm("/bucket", recursive=True)


def test_a_name_that_says_another_step_than_the_checkpoint_is_told(tiny_checkpoint, tmp_path):
    for file in list(tiny_checkpoint.glob("model.ckpt-7.*")):
        file.rename(file.with_name(file.name.replace("ckpt-7", "ckpt-8")))
    with pytest.raises(UserError, match="says step 8, but the checkpoint's own step is 7"):
        convert(tiny_checkpoint / "model.ckpt-8", tmp_path / "out", "jax")


def test_a_step_beyond_int32_is_refused(
    tiny_family, mesh_variables, write_mesh_checkpoint, tmp_path
):
    with pytest.raises(UserError, match="does not fit T5X's int32"):
        convert_changed(tmp_path, mesh_variables(tiny_family, step=2**31), write_mesh_checkpoint)


def test_too_little_free_space_is_told_before_the_first_byte(
    tiny_checkpoint, tmp_path, monkeypatch
):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(UserError, match=r"GB are free"):
        convert(tiny_checkpoint, tmp_path / "out", "jax")
    assert not (tmp_path / "out").exists()


def test_an_unknown_format_is_told_with_those_that_there_are(tiny_checkpoint, tmp_path):
    with pytest.raises(UserError, match="no format 'onnx'; there are mtf, t5x, jax, hf"):
        convert(tiny_checkpoint, tmp_path / "out", "onnx")
