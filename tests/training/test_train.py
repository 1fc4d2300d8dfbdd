import json

import numpy as np
import pytest

from t0repro.config.model import Layout
from t0repro.errors import UserError
from t0repro.partitioning.devices import choose
from t0repro.progress import heard_by
from t0repro.runs.train import train
from t0repro.training.checkpoints import checkpoint_path, list_checkpoints, load_tree
from t0repro.training.feed import Feed
from t0repro.training.start import Start
from t0repro.training.t5_model import T5Model
from t0repro.training.train_state import to_flat_tree

from ..helpers import tiny_models as tiny


def run(model_dir, train_steps, batches, **options):
    said = []
    config = tiny.run_config(model_dir, train_steps, **options.pop("config", {}))
    with heard_by(said.append):
        state = train(config, batches, **options)
    return state, said


def rows(model_dir):
    return [json.loads(line) for line in (model_dir / "metrics.jsonl").read_text().splitlines()]


def losses(model_dir):
    return {row["step"]: row["loss"] for row in rows(model_dir)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of six steps without a break."""
    model_dir = tmp_path_factory.mktemp("whole")
    state, said = run(model_dir, 6, tiny.batches(6))
    return model_dir, to_flat_tree(state), said


def test_a_run_leaves_checkpoints_and_metrics(whole):
    model_dir, tree, said = whole
    assert list_checkpoints(model_dir) == [3, 6]
    assert [row["step"] for row in rows(model_dir)] == [1, 2, 3, 4, 5, 6]
    saved = load_tree(checkpoint_path(model_dir, 6))
    assert all(np.array_equal(saved[name], x) for name, x in tree.items())
    assert said[0].startswith("model: 3,") and "float32" in said[0]
    assert said[-1] == f"checkpoint: {checkpoint_path(model_dir, 6)}"


@pytest.mark.always
def test_a_run_that_was_interrupted_continues_with_the_same_losses(whole, tmp_path):
    batches = tiny.batches(6)

    def interrupted():
        yield from batches[:4]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, 6, interrupted())
    assert list_checkpoints(tmp_path) == [3]
    state, said = run(tmp_path, 6, batches[3:])
    assert "start: step 3" in said[2]
    assert losses(tmp_path) == losses(whole[0])
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4, 5, 6]
    restored = to_flat_tree(state)
    assert all(np.array_equal(restored[name], x) for name, x in whole[1].items())


@pytest.mark.always
def test_a_token_beyond_the_vocabulary_is_an_error_and_not_the_last_one(tmp_path):
    first, second = tiny.batches(2)
    size = tiny.run_config(tmp_path, 2).model.vocab_size
    second = {**second, "targets": second["targets"].copy()}
    second["targets"][0, 0] = size
    with pytest.raises(UserError, match=f"the token {size}, but .* vocabulary is {size}"):
        run(tmp_path, 2, [first, second])


@pytest.mark.parametrize(
    ("name", "token", "why"),
    [
        ("targets", -900, "the token 900, but"),
        ("decoder_inputs", 900, "the token 900, but"),
        ("decoder_inputs", -1, "the token -1, which"),
    ],
)
def test_what_a_decoder_reads_is_checked_against_the_vocabulary(name, token, why):
    batches, model = [{name: np.array([[3, token]])}], T5Model(tiny.model())
    feed = Feed(batches, 1, model, choose(Layout(), tiny.MODEL))
    with pytest.raises(UserError, match=why) as refused:
        list(feed.open(Start(tiny.new_state(), 0)))
    assert refused.value.where == name


def test_batches_of_another_size_than_the_runs_are_refused(tmp_path):
    batches = [{name: array[:1] for name, array in batch.items()} for batch in tiny.batches(1)]
    with pytest.raises(UserError, match="A batch has 1 row, but the run's batch_size is 4"):
        train(tiny.run_config(tmp_path, 1), batches)


def test_batches_without_targets_are_refused_by_name(tmp_path):
    batches = [{"inputs": batch["inputs"]} for batch in tiny.batches(1)]
    with pytest.raises(UserError, match="A batch has no targets; it has inputs"):
        train(tiny.run_config(tmp_path, 1), batches)


@pytest.mark.always
def test_a_run_starts_from_a_flat_tree_with_its_step_and_slots(whole, tmp_path):
    tree = load_tree(checkpoint_path(whole[0], 3))
    run(tmp_path, 6, tiny.batches(6)[3:], restore_from=tree)
    assert losses(tmp_path) == {step: losses(whole[0])[step] for step in (4, 5, 6)}


def test_a_run_starts_from_the_path_of_a_checkpoint(whole, tmp_path):
    path = checkpoint_path(whole[0], 3)
    _, said = run(tmp_path, 4, tiny.batches(6)[3:], restore_from=path)
    assert said[2] == f"start: step 3 of {path}"


def test_a_checkpoint_in_model_dir_comes_before_restore_from(whole, tmp_path):
    tree = load_tree(checkpoint_path(whole[0], 6))
    run(tmp_path, 2, tiny.batches(2))
    _, said = run(tmp_path, 3, tiny.batches(1), restore_from=tree)
    assert "start: step 2" in said[2]


def test_nothing_is_opened_or_written_when_train_steps_is_reached(whole):
    model_dir = whole[0]
    before = sorted(path.name for path in model_dir.iterdir())

    def no_batches():
        raise AssertionError("batches were opened")

    _, said = run(model_dir, 6, no_batches)
    assert said[-1] == (
        "nothing to train: step 6, train_steps 6, which includes the steps of the checkpoint. To"
        " train on, bind more."
    )
    assert sorted(path.name for path in model_dir.iterdir()) == before


def test_the_seed_decides_the_first_parameters(tmp_path):
    def first(name, seed):
        run(tmp_path / name, 1, tiny.batches(1), seed=seed)
        return losses(tmp_path / name)

    assert first("a", 1) == first("b", 1) != first("c", 2)
    with pytest.raises(UserError, match="seed is 9223372036854775808; it must"):
        first("d", 2**63)


def test_old_checkpoints_are_removed(tmp_path):
    config = {"plan": tiny.mesh_plan(save_checkpoints_steps=1, keep_checkpoint_max=2)}
    run(tmp_path, 4, tiny.batches(4), config=config)
    assert list_checkpoints(tmp_path) == [3, 4]


def test_a_checkpoint_of_another_vocabulary_is_refused_and_nothing_is_written(whole, tmp_path):
    tree = load_tree(checkpoint_path(whole[0], 3))
    config = {"model": tiny.model(vocab_size=256).config}
    with pytest.raises(UserError, match="vocabulary"):
        run(tmp_path / "new", 6, tiny.batches(1), restore_from=tree, config=config)
    assert not (tmp_path / "new").exists()


def test_a_configuration_without_an_optimizer_is_refused(tmp_path):
    with pytest.raises(UserError, match="optimizer"):
        run(tmp_path, 1, tiny.batches(1), config={"optimizer": None})
