"""Which variables of an init_checkpoint a run takes, and training on with other optimizers."""

import dataclasses
import shutil

import jax
import numpy as np
import pytest

from t0repro.config.optimizer import AdamWeightDecayConfig, MomentumConfig, SgdConfig
from t0repro.converters.restoring import keep_matching
from t0repro.converters.sources import load_any
from t0repro.errors import UserError
from t0repro.progress import heard_by
from t0repro.runs.train import train
from t0repro.training.train_state import to_flat_tree

from ..helpers import tiny_models as tiny


def new_tree():
    return to_flat_tree(tiny.new_state())


def checkpoint():
    state = tiny.new_state(seed=5)
    slots = jax.tree.map(lambda x: x + 1.0, state.slots)
    return to_flat_tree(dataclasses.replace(state, step=state.step + 30, slots=slots))


def test_without_a_pattern_everything_is_taken(tmp_path):
    tree = checkpoint()
    kept = keep_matching(tree, "", tiny.MODEL.mesh_variables(), new_tree)
    assert kept == tree or all(np.array_equal(kept[key], x) for key, x in tree.items())


def test_what_the_pattern_leaves_out_begins_anew(tmp_path):
    tree = checkpoint()
    pattern = "^shared/|^encoder/.*SelfAttention"
    said = []
    with heard_by(said.append):
        kept = keep_matching(tree, pattern, tiny.MODEL.mesh_variables(), new_tree)
    fresh = to_flat_tree(tiny.new_state(seed=0))
    query = "target/encoder/layers_0/attention/query/kernel"
    out = "target/decoder/layers_0/mlp/wo/kernel"
    assert np.array_equal(kept[query], tree[query])
    assert np.array_equal(kept[out], fresh[out]) and not np.array_equal(kept[out], tree[out])
    (line,) = said
    assert out in line and query not in line and "initialized, not restored" in line
    assert "state/step" not in kept  # it is called global_step
    assert any("encoder/layers_0/attention" in key for key in kept if "param_states" in key)
    assert not any("decoder" in key for key in kept if "param_states" in key)
    state = train(tiny.run_config(tmp_path, 0), [], restore_from=kept)
    assert int(state.step) == 0


def test_a_pattern_that_matches_nothing_is_an_error_with_examples(tmp_path):
    with pytest.raises(UserError, match="matches no variable") as error:
        keep_matching(checkpoint(), "^bert/", tiny.MODEL.mesh_variables(), new_tree)
    assert "shared/embedding" in str(error.value.fix)


@pytest.mark.always
@pytest.mark.parametrize(
    "optimizer",
    [
        AdamWeightDecayConfig(0.01, 0.9, 0.99, 1e-6),
        MomentumConfig(0.9),
        SgdConfig(),
        dataclasses.replace(tiny.ADAFACTOR, frozen=("token_embedder/embedding",)),
    ],
    ids=lambda config: type(config).__name__,
)
def test_training_resumed_with_any_optimizer_is_training_at_one_go_and_converters_read_it(
    tmp_path, optimizer
):
    batches = tiny.batches(4)
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    at_one_go = train(tiny.run_config(whole, 4, optimizer=optimizer), batches)
    shutil.copytree(whole / "checkpoint_3", stopped / "checkpoint_3")
    resumed = train(tiny.run_config(stopped, 4, optimizer=optimizer), batches[3:])
    ours, theirs = to_flat_tree(resumed), to_flat_tree(at_one_go)
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        np.testing.assert_array_equal(ours[key], value, err_msg=key)
    tree, query = load_any(whole), "target/encoder/layers_0/attention/query/kernel"
    assert int(tree["state/step"]) == 4
    np.testing.assert_array_equal(tree[query], theirs[query])
