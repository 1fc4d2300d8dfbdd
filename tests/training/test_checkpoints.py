import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from t0repro.config.checkpoints import SaveConfig
from t0repro.converters import sources
from t0repro.converters.witnesses import INTEGRITY
from t0repro.errors import UserError
from t0repro.training import checkpoint_commit, checkpoints
from t0repro.training.checkpoint_retention import remove_interrupted_saves, remove_superfluous
from t0repro.training.train_state import from_flat_tree, parameters_from_flat_tree, to_flat_tree

from ..helpers import tiny_models as tiny


@pytest.fixture(scope="module")
def state():
    """A state whose step and slots are not zero."""
    fresh = tiny.new_state()
    slots = jax.tree.map(
        lambda x: x + jnp.arange(x.size, dtype=x.dtype).reshape(x.shape), fresh.slots
    )
    return fresh.replace(step=jnp.int32(7), slots=slots)


@pytest.fixture(scope="module")
def saved(tmp_path_factory, state):
    return checkpoints.save_checkpoint(tmp_path_factory.mktemp("model"), state)


@pytest.fixture
def copy(saved, tmp_path):
    """A checkpoint to do harm to."""
    return shutil.copytree(saved, tmp_path / saved.name)


def assert_equal_trees(ours, expected):
    assert sorted(ours) == sorted(expected)
    for name, x in expected.items():
        np.testing.assert_array_equal(ours[name], x, err_msg=name)
        assert ours[name].dtype == x.dtype


def test_a_state_is_restored_as_it_was_saved(saved, state):
    # A state's structure names its optimizer, which is compared by identity.
    other = tiny.new_state(1).replace(optimizer=state.optimizer)
    restored = from_flat_tree(checkpoints.load_tree(saved), other)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert_equal_trees(to_flat_tree(restored), to_flat_tree(state))


def test_a_checkpoint_is_read_without_a_model(saved, state):
    tree = checkpoints.load_tree(saved)
    assert_equal_trees(tree, to_flat_tree(state))
    assert all(isinstance(x, np.ndarray) for x in tree.values())


def test_the_tree_is_t5xs_with_zeros_for_slots_that_are_not_used(saved):
    tree = checkpoints.load_tree(saved)
    assert tree["state/step"].dtype == np.int32 and tree["state/step"].shape == ()
    slots = "state/param_states/encoder/layers_0/mlp/wi_0/kernel"
    shapes = {name: tree[f"{slots}/{name}"].shape for name in ("v_row", "v_col", "v", "m")}
    assert shapes == {"v_row": (8,), "v_col": (12,), "v": (1,), "m": (1,)}
    assert not tree[f"{slots}/v"].any()
    slots = "state/param_states/encoder/encoder_norm/scale"
    assert [tree[f"{slots}/{name}"].shape for name in ("v_row", "v_col", "v")] == [(1,), (1,), (8,)]


def test_any_flat_tree_is_saved_and_loaded(tmp_path):
    tree = {
        "target/a/b": np.arange(6, dtype=np.float32).reshape(2, 3),
        "target/half": np.asarray(jnp.ones((2, 2), jnp.bfloat16)),
        "state/step": np.int32(3),
    }
    checkpoints.save_tree(tmp_path / "new" / "checkpoint_3", tree)
    assert_equal_trees(
        checkpoints.load_tree(tmp_path / "new" / "checkpoint_3"),
        {name: np.asarray(x) for name, x in tree.items()},
    )


def test_an_orbax_checkpoint_of_someone_elses_is_read(tmp_path):
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "checkpoint_5", {"target": {"w": jnp.ones((2, 3))}})
    assert checkpoints.list_checkpoints(tmp_path) == [5]
    tree = checkpoints.load_tree(tmp_path / "checkpoint_5")
    np.testing.assert_array_equal(tree["target/w"], np.ones((2, 3)))


@pytest.mark.parametrize("name", ["a%20b", "a#b", "a?b", "a|b", "a*b", "é =,"])
def test_folders_may_have_names_that_addresses_and_patterns_read_otherwise(tmp_path, state, name):
    path = checkpoints.save_checkpoint(tmp_path / name, state)
    # By Orbax, as a training run reads it, and as conversion and evaluation do.
    for read in (checkpoints.load_tree, sources.load_any):
        assert_equal_trees(read(path), to_flat_tree(state))
    assert [folder.name for folder in tmp_path.iterdir()] == [name]


def test_a_folder_in_which_orbax_would_leave_parts_alone_is_refused(tmp_path, state):
    with pytest.raises(UserError, match="name has brackets"):
        checkpoints.save_checkpoint(tmp_path / "a[1]", state)
    assert not (tmp_path / "a[1]").exists()


def test_no_checkpoint_is_written_over(saved, state):
    with pytest.raises(UserError, match="checkpoint_7"):
        checkpoints.save_checkpoint(saved.parent, state)
    assert_equal_trees(checkpoints.load_tree(saved), to_flat_tree(state))


def test_an_interrupted_save_is_not_listed_and_leaves_the_one_before(tmp_path, monkeypatch, state):
    checkpoints.save_checkpoint(tmp_path, state)

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint_commit, "describe_files", interrupt)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save_checkpoint(tmp_path, state.replace(step=jnp.int32(8)))
    assert checkpoints.list_checkpoints(tmp_path) == [7]
    assert checkpoints.latest_step(tmp_path) == 7
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint_7"]


def test_what_a_killed_save_leaves_is_not_listed_and_is_removed(tmp_path, saved):
    killed = tmp_path / ".checkpoint_9.0a1b2c3d.tmp"
    shutil.copytree(saved, killed)
    (tmp_path / "checkpoint_10").mkdir()
    assert checkpoints.list_checkpoints(tmp_path) == []
    remove_interrupted_saves(tmp_path)
    assert not killed.exists()


def test_a_missing_file_is_named(copy):
    victim = next(path for path in (copy / "ocdbt.process_0" / "d").iterdir())
    victim.unlink()
    with pytest.raises(UserError, match=victim.name) as error:
        checkpoints.load_tree(copy)
    assert error.value.fix


@pytest.mark.parametrize("harm", ["cut", "changed"])
def test_a_damaged_file_is_named(copy, harm):
    victim = max((copy / "ocdbt.process_0" / "d").iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(victim.read_bytes())
    if harm == "cut":
        del content[-1]
    else:
        content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    with pytest.raises(UserError, match=victim.name):
        checkpoints.load_tree(copy)


def test_damage_to_someone_elses_checkpoint_is_a_user_error(copy):
    (copy / INTEGRITY).unlink()
    shutil.rmtree(copy / "ocdbt.process_0")
    with pytest.raises(UserError, match="checkpoint_7"):
        checkpoints.load_tree(copy)


@pytest.mark.parametrize("make", [False, True], ids=["absent", "empty"])
def test_a_directory_that_is_no_checkpoint_is_a_user_error(tmp_path, make):
    path = tmp_path / "checkpoint_1"
    if make:
        path.mkdir()
    with pytest.raises(UserError, match="no complete JAX checkpoint"):
        checkpoints.load_tree(path)


def test_only_the_latest_are_kept(tmp_path, state):
    rule = SaveConfig(None, (), 2, None, False, None, None)
    for step in (2, 10, 30):
        checkpoints.save_checkpoint(tmp_path, state.replace(step=jnp.int32(step)))
        remove_superfluous(tmp_path, rule, {})
    assert checkpoints.list_checkpoints(tmp_path) == [10, 30]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint_10", "checkpoint_30"]


def test_nothing_is_listed_where_there_is_no_directory(tmp_path):
    assert checkpoints.list_checkpoints(tmp_path / "none") == []
    assert checkpoints.latest_step(tmp_path / "none") is None


def test_integrity_lists_every_other_file(saved):
    listed = json.loads((saved / INTEGRITY).read_text())["files"]
    files = {p.relative_to(saved).as_posix() for p in saved.rglob("*") if p.is_file()}
    assert set(listed) == files - {INTEGRITY}


def test_a_vocabulary_of_another_size_is_named_as_such(state):
    with pytest.raises(UserError, match="vocabulary") as error:
        from_flat_tree(to_flat_tree(state), tiny.new_state(vocab_size=256))
    assert "128" in str(error.value) and "256" in str(error.value)


def test_a_parameter_that_the_checkpoint_lacks_is_named(state):
    tree = to_flat_tree(state)
    del tree["target/decoder/logits_dense/kernel"]
    with pytest.raises(UserError, match="decoder/logits_dense/kernel"):
        from_flat_tree(tree, tiny.new_state())
    with pytest.raises(UserError, match="decoder/logits_dense/kernel"):
        parameters_from_flat_tree(tree, tiny.new_state().params)


def test_a_deeper_models_checkpoint_is_taken_with_a_warning(capsys):
    deep = tiny.new_state(num_encoder_layers=2, num_decoder_layers=2)
    tree, shallow = to_flat_tree(deep), tiny.new_state(num_encoder_layers=2, num_decoder_layers=1)
    for read, like in ((from_flat_tree, shallow), (parameters_from_flat_tree, shallow.params)):
        restored = read(tree, like, where="big/checkpoint_1")
        assert jax.tree.structure(restored) == jax.tree.structure(like)
        warning = capsys.readouterr().err
        assert "warning: big/checkpoint_1 has 14 parameters that the model lacks" in warning
        assert "decoder/layers_1/" in warning
    from_flat_tree(tree, deep)
    assert not capsys.readouterr().err


def test_slots_that_a_checkpoint_lacks_are_zero_and_its_step_too(state):
    tree = {name: x for name, x in to_flat_tree(state).items() if name.startswith("target/")}
    restored = from_flat_tree(tree, tiny.new_state())
    assert int(restored.step) == 0
    assert not any(x.any() for x in jax.tree.leaves(restored.slots))
    np.testing.assert_array_equal(
        restored.params["token_embedder"]["embedding"], tree["target/token_embedder/embedding"]
    )


def test_momentum_is_saved_and_restored(tmp_path):
    optimizer = dataclasses.replace(tiny.ADAFACTOR, beta1=0.9)
    state = tiny.new_state(optimizer=optimizer)
    state = state.replace(slots=jax.tree.map(lambda x: x + 1, state.slots))
    path = checkpoints.save_checkpoint(tmp_path, state)
    restored = from_flat_tree(checkpoints.load_tree(path), tiny.new_state(1, optimizer))
    assert_equal_trees(to_flat_tree(restored), to_flat_tree(state))


def test_slots_of_another_optimizer_are_refused(state):
    other = dataclasses.replace(tiny.ADAFACTOR, min_dim_size_to_factor=12)
    tree = to_flat_tree(state)
    tree["state/param_states/encoder/encoder_norm/scale/v"] = np.zeros(5, np.float32)
    with pytest.raises(UserError, match="slot v of encoder/encoder_norm/scale"):
        from_flat_tree(tree, tiny.new_state(optimizer=other))
