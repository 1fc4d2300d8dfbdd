"""Mesh TensorFlow's Adafactor, with its slots in T5X's convention.

The update is that of mesh_tensorflow.optimize.AdafactorOptimizer (Shazeer and Stern 2018,
https://arxiv.org/abs/1804.04235), driven by the *global* step: a run that continues a checkpoint at
step 1,100,000 keeps that checkpoint's long memory.

A parameter is factored when its two largest axes are both at least `min_dim_size_to_factor` long.
Its second moment is then stored as two means of the squared gradient, each over one of these axes:

    argsort(shape), ascending and stable, ends with (..., d1, d0)
    v_row is the mean over d0: its shape is the parameter's without axis d0
    v_col is the mean over d1: its shape is the parameter's without axis d1

    shape        d0  d1   v_row       v_col
    [128, 2048]   1   0   [128]       [2048]
    [2048, 128]   0   1   [128]       [2048]
    [128, 128]    1   0   [axis 0]    [axis 1]

Mesh TensorFlow sorts in descending order, also stable, and keeps vr (without the first axis) and vc
(without the second). For unequal lengths vr is v_row and vc is v_col. For equal lengths, as in
every attention kernel of a model with d_model = heads * d_kv, Mesh TensorFlow's first axis is 0
while T5X's d0 is 1, so vr is v_col and vc is v_row. The update is the same either way, up to
rounding, since v_row and v_col have the same mean.

T5X's rules for parameters with more than two axes are in t0repro.parameters.shape.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from t0repro.config.optimizer import AdafactorConfig
from t0repro.parameters.shape import Factoring, factoring
from t0repro.training.formulas import Gradient, Slots


def decay_rate(step: jax.Array, config: AdafactorConfig) -> jax.Array | float:
    """Decay of the second moment at a global step: 1 - (step - offset + 1)**-exponent.

    A fixed `decay_rate` in the configuration takes precedence, as a Python number, so that 1 minus
    it is rounded only once: in float32, 1 - 0.999 is 1.3e-5 off, and with it every slot.
    """
    if config.decay_rate is not None:
        return config.decay_rate
    # Subtract while both are integers, before the conversion to float32 can round either.
    count = (step - int(config.decay_offset)).astype(jnp.float32)
    return 1.0 - jnp.power(count + 1.0, -config.decay_exponent)


def update(gradient: Gradient, config: AdafactorConfig) -> tuple[jax.Array, Slots]:
    """Returns the change to one parameter and its new slots (AdafactorOptimizer.apply_grad)."""
    scale, path = gradient.learning_rate, gradient.path
    axes = factoring(path, gradient.parameter.shape, config)
    if config.multiply_by_parameter_scale and path not in config.exclude_from_parameter_scale:
        size = jnp.maximum(_rms(gradient.parameter, axes.scaled), config.epsilon2)
        if config.max_parameter_scale is not None:
            size = jnp.minimum(size, config.max_parameter_scale)
        scale = scale * size
    decay = decay_rate(gradient.step, config)
    direction, second_moment = _normalize(gradient.value, gradient.slots, decay, config, axes)
    if config.clipping_threshold is not None:
        size = _rms(direction, axes.scaled)
        direction = direction / jnp.maximum(1.0, size / config.clipping_threshold)
    change = direction * scale
    momentum = None
    if config.has_momentum:
        assert gradient.slots.m is not None, "there is momentum, so the slots have m"
        momentum = change = gradient.slots.m * config.beta1 + change * (1.0 - config.beta1)
    slots = second_moment.replace(m=momentum)
    # Weight decay uses the bare learning rate, not the one scaled by the parameter's size.
    decay = _weight_decay(gradient.learning_rate, config)
    if decay is not None:
        change = change + decay * gradient.parameter
    if config.skip_nan_updates:
        change, slots = _drop_nan_updates(change, slots, gradient.slots)
    return -change, slots


def _weight_decay(learning_rate: jax.Array, config: AdafactorConfig) -> jax.Array | float | None:
    """The fraction of a parameter that weight decay removes in an update; None for no decay."""
    if config.weight_decay_rate_lr_exponent:
        power = learning_rate**config.weight_decay_rate_lr_exponent
        # With an exponent and no rate, the rate is 1, as in T5X.
        return (config.weight_decay_rate or 1.0) * power
    return config.weight_decay_rate


def _drop_nan_updates(change: jax.Array, slots: Slots, before: Slots) -> tuple[jax.Array, Slots]:
    """Leaves entries of a parameter and of its slots as they were where they would become NaN."""
    kept = jax.tree.map(lambda new, old: jnp.where(jnp.isnan(new), old, new), slots, before)
    return jnp.where(jnp.isnan(change), 0.0, change), kept


def _normalize(
    gradient: jax.Array,
    slots: Slots,
    decay: jax.Array | float,
    config: AdafactorConfig,
    axes: Factoring,
) -> tuple[jax.Array, Slots]:
    """The gradient over the root of its second moment, and the new second moment."""
    # Mesh TensorFlow adds epsilon1 to the square, before the means, and not to the root.
    squared = jnp.square(gradient) + config.epsilon1
    mixing = 1.0 - decay
    if axes.dropped is None:
        assert slots.v is not None, "a parameter that is not factored has v"
        v = slots.v * decay + squared * mixing
        return gradient * jax.lax.rsqrt(v), Slots(v=v)
    assert slots.v_row is not None and slots.v_col is not None, "a factored parameter has both"
    columns, rows = axes.dropped
    v_row = slots.v_row * decay + jnp.mean(squared, axis=columns) * mixing
    v_col = slots.v_col * decay + jnp.mean(squared, axis=rows) * mixing
    # v_row lacks the columns, so the parameter's rows may have moved down.
    reduced = tuple(row - sum(column < row for column in columns) for row in rows)
    # Divided by its mean, v_row says only how rows differ; the scale is in v_col.
    mean = jnp.mean(v_row, axis=reduced, keepdims=True)
    by_row = jnp.expand_dims(jax.lax.rsqrt(v_row / mean), columns)
    by_column = jnp.expand_dims(jax.lax.rsqrt(v_col), rows)
    return gradient * by_row * by_column, Slots(v_row=v_row, v_col=v_col)


def _rms(x: jax.Array, axes: tuple[int, ...] | None = None) -> jax.Array:
    """Root mean square over `axes`, kept with length 1, or over all entries as a scalar."""
    return jnp.sqrt(jnp.mean(jnp.square(x), axis=axes, keepdims=axes is not None))
