"""One compiled body for all layers of a tower computes what a body for each layer does."""

import dataclasses

import jax
import numpy as np
import pytest

from t0repro.model.t5 import T5, initial_parameters
from t0repro.training.token_losses import training_loss
from t0repro.training.train_step import loss_and_gradients

from ..helpers import tiny_models as tiny

DEEP = {"num_encoder_layers": 2, "num_decoder_layers": 2}
VARIANTS = {
    "shared position bias": {},
    "shared position bias, partly recomputed": {"recompute": "minimal"},
    "position bias per layer, recomputed": {"position_bias_per_layer": True, "recompute": "full"},
    "shared towers": {"shared_towers": True},
    "language model": {"model_type": "delimited_lm", "num_encoder_layers": 0},
}
# Each compiles two steps; the first has all that a usual model has.
CASES = [
    pytest.param(changes, id=name, marks=[pytest.mark.slow] if number else [])
    for number, (name, changes) in enumerate(VARIANTS.items())
]


def models(dtypes=tiny.FLOAT32, **changes):
    """The same model with a body for each layer, and with one for all."""
    config = dataclasses.replace(tiny.MODEL, **{**DEEP, **changes})
    return [T5(dataclasses.replace(config, scan_layers=scan), dtypes) for scan in (False, True)]


def gradients(model, params, parts, key):
    (batch,) = tiny.batches(1)
    function = jax.jit(
        lambda p: loss_and_gradients(model, p, batch, num_microbatches=parts, dropout_key=key)
    )
    return function(params)


@pytest.mark.always
@pytest.mark.parametrize("changes", CASES)
def test_losses_are_equal_to_the_last_bit_and_gradients_to_rounding(changes):
    """With dropout: each layer's masks are those that it has on its own."""
    each, all_at_once = models(dropout_rate=0.2, **changes)
    params = initial_parameters(each, jax.random.key(0))
    ours, theirs = (gradients(m, params, 2, jax.random.key(3)) for m in (all_at_once, each))
    # XLA fuses a loop's body by itself, and unrolled layers across their borders, which may round
    # the last bit otherwise.
    np.testing.assert_array_max_ulp(ours[0], theirs[0], maxulp=1)
    compare = lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)  # noqa: E731
    jax.tree.map(compare, ours[1], theirs[1])


@pytest.mark.slow
def test_bfloat16_losses_differ_by_its_rounding_alone():
    models_ = models(tiny.BFLOAT16, dropout_rate=0.2, shared_towers=True)
    params = initial_parameters(models_[0], jax.random.key(0))
    one, other = (gradients(m, params, 1, jax.random.key(3))[0] for m in models_)
    np.testing.assert_allclose(one, other, rtol=2e-3)


def test_new_parameters_are_the_same():
    one, other = (initial_parameters(m, jax.random.key(0)) for m in models())
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_the_program_does_not_grow_with_depth():
    """Its loops have as many operations for eight layers as for two."""
    sizes = {}
    for layers in (2, 8):
        config = {"num_encoder_layers": layers, "num_decoder_layers": layers}
        _, model = models(dropout_rate=0.1, **config)
        params = jax.eval_shape(lambda m=model: initial_parameters(m, jax.random.key(0)))
        (batch,) = tiny.batches(1)

        def loss(p, model=model, batch=batch):
            return training_loss(model, p, batch, denominator=1.0, dropout_key=jax.random.key(0))

        text = jax.jit(jax.grad(loss)).lower(params).as_text()
        # Stacking the parameters, and taking their gradients apart, is a line for each.
        stacking = ("reshape", "broadcast_in_dim", "slice", "squeeze", "parameter", "return")
        lines = [line for line in text.splitlines() if not any(x in line for x in stacking)]
        sizes[layers] = len(lines)
    assert sizes[8] <= 1.1 * sizes[2]


@pytest.mark.parametrize(("depth", "loops"), [(11, 0), (12, 1)])
def test_towers_of_twelve_layers_are_scanned_unless_told_otherwise(depth, loops):
    config = dataclasses.replace(tiny.MODEL, num_encoder_layers=depth)
    (batch,) = tiny.batches(1)
    for scan, expected in ((None, loops), (False, 0)):
        model = T5(dataclasses.replace(config, scan_layers=scan), tiny.FLOAT32)
        params = jax.eval_shape(lambda m=model: initial_parameters(m, jax.random.key(0)))
        traced = jax.make_jaxpr(lambda p, m=model: m.apply({"params": p}, batch))(params)
        assert str(traced).count(" scan[") == expected
