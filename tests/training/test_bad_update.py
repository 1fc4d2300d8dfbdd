"""An update that is NaN or Inf is not done, is explained, and can be recomputed."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from t0repro.config.run import TerminateOnNanConfig
from t0repro.errors import UserError
from t0repro.training.bad_update import find_bad_tensor, replay
from t0repro.training.checkpoints import list_checkpoints, load_tree
from t0repro.training.hooks.evaluate import Evaluations
from t0repro.training.metric_classes import AveragePerStep
from t0repro.training.run_state import read_run_state
from t0repro.training.t5_model import BaseModel, T5Model
from t0repro.training.train_state import TrainState, to_flat_tree
from t0repro.training.train_step import train_with_lr

from ..helpers import tiny_models as tiny
from .test_planned import planned

STOP = {"TRAIN": (TerminateOnNanConfig("train", "loss"),)}


def exploding_tree():
    """Finite parameters whose encoder's feed-forward layer overflows float32."""
    tree = {name: np.array(x) for name, x in to_flat_tree(tiny.new_state()).items()}
    tree["target/encoder/layers_0/mlp/wi_0/kernel"][:] = 1e38
    return tree


def test_the_first_bad_tensor_is_named_the_state_kept_and_the_update_replayed(tmp_path):
    state = planned(tmp_path, 7, restore_from=exploding_tree(), actions=STOP)
    assert int(state.step) == 0 and list_checkpoints(tmp_path) == [0]
    kept = load_tree(tmp_path / "checkpoint_0")
    assert all(np.array_equal(kept[name], x) for name, x in exploding_tree().items())
    bad = replay(tmp_path / "bad_update_1")
    assert (bad.kind, bad.microbatch) == ("activation", 0)
    assert bad.name.startswith("encoder/layers_0/mlp")
    run = read_run_state(tmp_path)
    assert run.state == "stopped" and str(bad) in run.reason
    # The batch in the folder is the one of the step, with what the model reads.
    with np.load(tmp_path / "bad_update_1/batch.npz") as batch:
        assert np.array_equal(batch["inputs"], tiny.batches(1)[0]["inputs"])


def test_without_an_action_the_error_says_which_names_the_tensor(tmp_path):
    with pytest.raises(UserError, match=r"step 1 is nan(.|\n)*if there is one.*TerminateOnNan"):
        planned(tmp_path, 7, restore_from=exploding_tree())


@pytest.mark.parametrize("saves", [True, False])
def test_between_two_saves_the_state_is_saved_once_with_what_goes_with_it(tmp_path, saves):
    def spoil(loop):
        params = jax.tree.map(lambda x: x * jnp.nan, loop.train_state.params)
        loop.trainer.train_state = loop.train_state.replace(params=params)
        return {}

    save = tiny.PLAN.save if saves else None
    inputs = Evaluations(infer_eval=spoil)
    state = planned(tmp_path, 7, inputs=inputs, eval_period=4, save=save, actions=STOP)
    assert int(state.step) == 4
    assert list_checkpoints(tmp_path) == ([0, 3, 4] if saves else [4])
    assert (tmp_path / "checkpoint_4/progress.json").exists() == saves
    assert replay(tmp_path / "bad_update_5").kind == "parameter"


def test_parameters_are_looked_at_first_and_a_finite_update_has_nothing_bad():
    params = tiny.new_state().params
    (batch,) = tiny.batches(1)
    find = lambda p: find_bad_tensor(T5Model(tiny.model()), p, batch, jax.random.key(0), 2)  # noqa: E731
    assert find(params) is None
    params["decoder"]["decoder_norm"]["scale"] = params["decoder"]["decoder_norm"]["scale"] * np.nan
    assert str(find(params)) == ("the parameter decoder/decoder_norm/scale: 8 of 8 are NaN or Inf")


@jax.custom_vjp
def spoiling(parameter):
    """Adds nothing to a loss, and NaN to the parameter's gradient."""
    return jnp.zeros((), parameter.dtype)


spoiling.defvjp(
    lambda parameter: (spoiling(parameter), parameter),
    lambda parameter, _: (jnp.full_like(parameter, jnp.nan),),
)


class Steep(BaseModel):
    """A loss whose gradient has large finite entries, the sum of which is NaN or Inf."""

    def get_initial_variables(self, rng, input_shapes, input_types=None):
        return {"params": {"w": jnp.zeros(128)}}

    def loss_fn(self, params, batch, dropout_rng, flax_mutables=None):
        loss = jnp.sum(params["w"]) * 1e38
        return loss, {"loss": AveragePerStep.from_model_output(loss)}


@pytest.mark.parametrize(("rate", "held"), [(1e-38, False), (1e5, True)])
def test_an_update_is_held_for_what_is_not_finite_and_not_for_a_sum_that_overflows(rate, held):
    model = Steep(optax.sgd(rate))
    variables = model.get_initial_variables(jax.random.key(0), {})
    state = TrainState.create(model.optimizer_def, variables)
    after, metrics = train_with_lr(
        state,
        {"inputs": jnp.ones((1, 1))},
        jnp.float32(0.0),
        None,
        model,
        None,
        hold_if_not_finite=True,
    )
    assert bool(metrics["update_held"].compute()) == held
    # With the larger rate the optimizer's own product overflows.
    assert int(after.step) == (not held) and np.isfinite(after.params["w"]).all()


class Spoiled(T5Model):
    def whole_batch(self, batch):
        batch, loss_fn = super().whole_batch(batch)

        def spoiled(params, *rest):
            loss, metrics = loss_fn(params, *rest)
            deep = params["encoder"]["layers_0"]["mlp"]["wo"]["kernel"]
            embedding = params["token_embedder"]["embedding"]
            return loss + spoiling(embedding) + spoiling(deep), metrics

        return batch, spoiled


def test_of_bad_gradients_the_one_is_named_that_the_backward_pass_finishes_first():
    (batch,) = tiny.batches(1)
    model, params = Spoiled(tiny.model()), tiny.new_state().params
    bad = find_bad_tensor(model, params, batch, jax.random.key(0), 1)
    assert (bad.kind, bad.name) == ("gradient", "encoder/layers_0/mlp/wo/kernel")


def test_another_folder_is_refused(tmp_path):
    (tmp_path / "bad_update_3").mkdir()
    with pytest.raises(UserError, match="not a bad_update folder(?s:.*)Name .*/bad_update_3,"):
        replay(tmp_path)
    with pytest.raises(UserError, match="There is no such folder"):
        replay(tmp_path / "bad*")
    (tmp_path / "update.json").write_text(json.dumps({}))
    with pytest.raises(UserError, match="not a bad_update folder"):
        replay(tmp_path)
