"""Checks of a run's inputs: what they say and which checkpoints they look at."""

import pytest

from t0repro.config.gin.errors import configuration_errors
from t0repro.converters import restoring as checks
from t0repro.converters.convert import convert
from t0repro.errors import UserError

pytestmark = pytest.mark.mtf


@pytest.fixture(scope="module")
def tf():
    import tensorflow

    return tensorflow


@pytest.fixture
def checkpoint(tf, tmp_path) -> str:
    """The prefix of a checkpoint with an embedding of 128 rows, in two shards as on CPU."""
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        v1.get_variable("shared/embedding", [128, 4], initializer=v1.zeros_initializer())
        v1.get_variable("global_step", [], dtype=tf.int64, initializer=v1.zeros_initializer())
        session.run(v1.global_variables_initializer())
        saver = v1.train.Saver(sharded=True, save_relative_paths=True)
        return saver.save(session, str(tmp_path / "model.ckpt"), global_step=7)


class Vocabulary:
    """A vocabulary of so many pieces."""

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size


def test_a_whole_checkpoint_passes(checkpoint):
    checks.open_bundle(checkpoint)


def test_one_byte_less_is_found(checkpoint, tmp_path):
    (shard,) = tmp_path.glob("model.ckpt-7.data-*")
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(UserError, match="2055 bytes, but the index calls for 2056"):
        checks.open_bundle(checkpoint)


def test_a_checkpoint_without_any_data_or_index_is_found(checkpoint, tmp_path):
    (shard,) = tmp_path.glob("model.ckpt-7.data-*")
    shard.unlink()
    with pytest.raises(UserError, match="A data file of the checkpoint is missing"):
        checks.open_bundle(checkpoint)
    with pytest.raises(UserError, match="Checkpoint not found"):
        checks.open_bundle(str(tmp_path / "model.ckpt-8"))


def test_a_garbled_index_is_found(checkpoint, tmp_path):
    (tmp_path / "model.ckpt-7.index").write_bytes(b"garbled")
    with pytest.raises(UserError, match="index file"):
        checks.open_bundle(checkpoint)


@pytest.mark.parametrize("pieces", [1, 127, 128])
def test_a_vocabulary_padded_to_the_embeddings_rows_passes(checkpoint, pieces):
    checks.check_vocabulary(checkpoint, Vocabulary(pieces), divisor=128)
    checks.check_vocabulary(checkpoint, (Vocabulary(pieces), Vocabulary(pieces)), divisor=128)


def test_a_vocabulary_of_one_piece_too_many_is_found(checkpoint):
    with pytest.raises(UserError, match="has 128 rows, and 129 pieces are padded to 256"):
        checks.check_vocabulary(checkpoint, Vocabulary(129), divisor=128)


def test_configuration_errors_keep_the_words_and_the_cause():
    original = ValueError("No configurable matching 'x'.")
    with pytest.raises(UserError, match="No configurable matching 'x'") as raised:
        with configuration_errors():
            raise original
    assert raised.value.__cause__ is original


def test_configuration_errors_let_a_user_error_through():
    original = UserError("Mine.", where="here", fix="So.")
    with pytest.raises(UserError) as raised, configuration_errors():
        raise original
    assert raised.value is original


def test_an_empty_folder_is_nothing_to_evaluate_unless_jax_checkpoints_are_there(mesh, tmp_path):
    with pytest.raises(UserError, match="No checkpoint to evaluate"):
        checks.checkpoints_to_evaluate(str(tmp_path), "all", jax=True)
    (tmp_path / "checkpoint_10").mkdir()
    (tmp_path / "checkpoint_10" / "_METADATA").touch()
    assert checks.checkpoints_to_evaluate(str(tmp_path), "all", jax=True) == []
    with pytest.raises(UserError, match="No checkpoint to evaluate"):
        checks.checkpoints_to_evaluate(str(tmp_path), "all", jax=False)


def test_continuous_evaluation_may_start_before_the_first_checkpoint(mesh, tmp_path):
    assert checks.checkpoints_to_evaluate(str(tmp_path), None, jax=False) == []


def test_the_latest_checkpoint_must_be_known(mesh, checkpoint, tmp_path):
    assert checks.checkpoints_to_evaluate(str(tmp_path), -1, jax=False) == [checkpoint]
    (tmp_path / "checkpoint").unlink()
    assert checks.checkpoints_to_evaluate(str(tmp_path), 7, jax=False) == [checkpoint]
    with pytest.raises(UserError, match="latest checkpoint of .* is not known"):
        checks.checkpoints_to_evaluate(str(tmp_path), -1, jax=False)


@pytest.fixture(scope="module")
def mesh():
    """Mesh TensorFlow, importable."""
    from t0repro import compat

    compat.install()


# --- What Mesh TensorFlow cannot restore ---------------------------------------------------------


class Inputs:
    """What a run says of the checkpoints that it reads."""

    eval_checkpoint_step, vocabularies, vocab_divisor = None, None, 128

    def __init__(self, model_dir, init_checkpoint=None, master_dtype="float32", mode="train"):
        self.model_dir = str(model_dir)
        self.init_checkpoint = init_checkpoint and str(init_checkpoint)
        self.master_dtype, self.mode = master_dtype, mode
        self.provenance = {"master_dtype": "train.gin:7"}


def test_masters_of_another_type_are_named_with_what_to_bind_before_training(
    tiny_checkpoint, tmp_path
):
    prefix = f"{tiny_checkpoint}/model.ckpt-7"
    for inputs in (
        Inputs(tiny_checkpoint, master_dtype="bfloat16"),
        Inputs(tmp_path / "new", prefix, "bfloat16"),
        Inputs(tmp_path / "new", tiny_checkpoint, "bfloat16"),
    ):
        with pytest.raises(UserError, match="are float32; .* masters in bfloat16") as error:
            checks.check_checkpoints(inputs, jax=False)
        assert "master_dtype = 'float32'" in error.value.fix
        assert f"{prefix} OUT --to mtf --master_dtype bfloat16" in error.value.fix
        assert "train.gin:7" in error.value.where
    checks.check_checkpoints(Inputs(tiny_checkpoint), jax=False)
    checks.check_checkpoints(Inputs(tiny_checkpoint, master_dtype="bfloat16"), jax=True)


@pytest.mark.parametrize("to", ["jax", "t5x"])
def test_another_format_s_checkpoint_is_named_to_mesh_tensorflow_with_the_convert_command(
    tiny_checkpoint, tmp_path, to
):
    convert(tiny_checkpoint, tmp_path / "model", to)
    for inputs, name in (
        (Inputs(tmp_path / "new", tmp_path / "model"), "init_checkpoint"),
        (Inputs(tmp_path / "new", tmp_path / "model" / "checkpoint_7"), "init_checkpoint"),
        (Inputs(tmp_path / "model"), "latest of model_dir"),
        (Inputs(tmp_path / "model", mode="score_eval"), "latest of model_dir"),
    ):
        with pytest.raises(UserError, match=f"{name} is a checkpoint of the format {to}") as error:
            checks.check_checkpoints(inputs, jax=False)
        assert "t0repro convert" in error.value.fix
        assert "checkpoint_7 OUT --to mtf --master_dtype float32" in error.value.fix
    checks.check_checkpoints(Inputs(tmp_path / "new", tmp_path / "model"), jax=True)
