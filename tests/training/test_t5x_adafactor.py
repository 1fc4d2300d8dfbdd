"""The options that only T5X's Adafactor has, against its formulas in float64 numpy."""

import dataclasses

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tests.helpers.tiny_models as tiny
from t0repro.config.optimizer import OptaxConfig
from t0repro.errors import UserError
from t0repro.training.optimizers import make_optimizer
from t0repro.training.train_state import (
    from_flat_tree,
    new_train_state,
    to_flat_tree,
)

RATE, STEP = 0.3, 7


def parameters():
    generator = np.random.default_rng(0)
    return {
        "matrix": generator.normal(size=(8, 9)).astype(np.float32) * 3,
        "vector": generator.normal(size=(4,)).astype(np.float32),
    }


def gradients(seed=1):
    generator = np.random.default_rng(seed)
    return {name: generator.normal(size=x.shape) * 2 for name, x in parameters().items()}


def by_hand(
    config, parameter, gradient, moment, *, v=None, v_row=None, v_col=None
) -> tuple[np.ndarray, np.ndarray | None]:
    """One update of a matrix [8, 9], factored, or of a vector, with T5X's formulas in float64."""
    decay = 1 - (STEP - config.decay_offset + 1.0) ** -config.decay_exponent
    squared = gradient**2 + config.epsilon1
    if parameter.ndim == 2:
        row = decay * v_row + (1 - decay) * squared.mean(1)
        column = decay * v_col + (1 - decay) * squared.mean(0)
        direction = gradient * ((row / row.mean()) ** -0.5)[:, None] * (column**-0.5)[None]
    else:
        direction = gradient * (decay * v + (1 - decay) * squared) ** -0.5
    direction = direction / max(1.0, np.sqrt((direction**2).mean()) / config.clipping_threshold)
    size = max(np.sqrt((parameter**2).mean()), config.epsilon2)
    if config.max_parameter_scale is not None:
        size = min(size, config.max_parameter_scale)
    change = RATE * size * direction
    if moment is not None:
        moment = change = config.beta1 * moment + (1 - config.beta1) * change
    decayed = config.weight_decay_rate or 0.0
    if config.weight_decay_rate_lr_exponent:
        decayed = (config.weight_decay_rate or 1.0) * RATE**config.weight_decay_rate_lr_exponent
    return (1 - decayed) * parameter - change, moment


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"decay_offset": 5},
        {"max_parameter_scale": 0.5},
        {"weight_decay_rate": 0.01},
        {"weight_decay_rate_lr_exponent": 2.0},
        {"weight_decay_rate": 0.1, "weight_decay_rate_lr_exponent": 1.0},
        {"global_norm_clip": 1.5},
        {"global_norm_clip": 1e6},
        {"beta1": 0.9, "momentum_slot": True},
        {"momentum_slot": True},
        {"skip_nan_updates": True},
    ],
)
def test_two_updates_are_as_by_hand(options):
    config = dataclasses.replace(tiny.ADAFACTOR, clipping_threshold=0.7, **options)
    optimizer, ours = make_optimizer(config), jax.tree.map(jnp.asarray, parameters())
    slots, rate = optimizer.init(ours), jnp.float32(RATE)
    hand = {name: x.astype(np.float64) for name, x in parameters().items()}
    moments = {
        name: np.zeros_like(x) if slots[name].m is not None else None for name, x in hand.items()
    }
    for seed in (1, 2):
        given, step = gradients(seed), jnp.int32(STEP)
        before = jax.device_get(slots)
        changes, slots = optimizer.update(
            jax.tree.map(jnp.float32, given), slots, ours, step=step, learning_rate=rate
        )
        ours = optax.apply_updates(ours, changes)
        norm = np.sqrt(sum((g**2).sum() for g in given.values()))
        limit = config.global_norm_clip
        scale = 1.0 if limit is None else min(1.0, limit / norm)
        for name, gradient in given.items():
            kept = {
                key: np.asarray(getattr(before[name], key), np.float64)
                for key in ("v", "v_row", "v_col")
                if getattr(before[name], key) is not None
            }
            hand[name], moments[name] = by_hand(
                config, hand[name], gradient * scale, moments[name], **kept
            )
            np.testing.assert_allclose(ours[name], hand[name], rtol=2e-5, atol=2e-6)


def test_a_momentum_slot_with_a_decay_of_zero_exists_and_changes_nothing():
    plain, slotted = (
        make_optimizer(dataclasses.replace(tiny.ADAFACTOR, momentum_slot=slot))
        for slot in (False, True)
    )
    assert plain.init(parameters())["matrix"].m is None
    assert slotted.init(parameters())["matrix"].m.shape == (8, 9)


def test_entries_that_would_become_nan_stay_as_they_are():
    config = dataclasses.replace(
        tiny.ADAFACTOR, factored=False, skip_nan_updates=True, clipping_threshold=None
    )
    optimizer, ours = make_optimizer(config), jax.tree.map(jnp.asarray, parameters())
    given = jax.tree.map(jnp.float32, gradients())
    given["vector"] = given["vector"].at[1].set(jnp.nan)
    changes, slots = optimizer.update(
        given, optimizer.init(ours), ours, step=jnp.int32(0), learning_rate=jnp.float32(0.1)
    )
    new = optax.apply_updates(ours, changes)
    assert new["vector"][1] == ours["vector"][1] and slots["vector"].v[1] == 0
    assert (np.asarray(new["vector"])[[0, 2, 3]] != np.asarray(ours["vector"])[[0, 2, 3]]).all()


# ---- Chains of optax ----------------------------------------------------------------------------

ADAMW = OptaxConfig(
    (
        {"function": "clip", "arguments": {"max_delta": 0.5}},
        {
            "function": "adamw",
            "arguments": {
                "learning_rate": {
                    "function": "linear_schedule",
                    "arguments": {"init_value": 0.0, "end_value": 0.1, "transition_steps": 4},
                },
                "weight_decay": 0.01,
            },
        },
    )
)


def test_a_chain_does_what_optax_does_whatever_the_runs_learning_rate():
    chain = optax.chain(
        optax.clip(0.5), optax.adamw(optax.linear_schedule(0.0, 0.1, 4), weight_decay=0.01)
    )
    optimizer = make_optimizer(ADAMW)
    ours = theirs = jax.tree.map(jnp.asarray, parameters())
    state, expected = optimizer.init(ours), chain.init(theirs)
    for seed in range(3):
        given = jax.tree.map(jnp.float32, gradients(seed))
        change, state = optimizer.update(
            given, state, ours, step=jnp.int32(99), learning_rate=jnp.float32(7.0)
        )
        ours = optax.apply_updates(ours, change)
        change, expected = chain.update(given, expected, theirs)
        theirs = optax.apply_updates(theirs, change)
    for name in ours:
        np.testing.assert_array_equal(ours[name], theirs[name])


def test_the_state_of_a_chain_is_kept_in_a_checkpoint_and_restored_to_the_bit():
    optimizer, params = make_optimizer(ADAMW), tiny.new_state().params
    state = new_train_state(params, optimizer, step=3)
    change, slots = optimizer.update(
        params, state.slots, params, step=state.step, learning_rate=jnp.float32(0)
    )
    del change
    state = state.replace(slots=slots)
    tree = to_flat_tree(state)
    path = next(iter(flax.traverse_util.flatten_dict(params, sep="/")))
    assert f"state/param_states/1/0/mu/{path}" in tree
    shapes = jax.eval_shape(lambda: new_train_state(params, optimizer))
    restored = from_flat_tree(tree, shapes)
    for one, other in zip(jax.tree.leaves(state), jax.tree.leaves(restored), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_call_that_optax_does_not_take_is_named():
    with pytest.raises(UserError, match="optax.sgd cannot be called"):
        make_optimizer(OptaxConfig(({"function": "sgd", "arguments": {"speed": 1}},)))
