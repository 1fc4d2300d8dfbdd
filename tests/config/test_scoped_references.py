"""Scopes of references such as `@a/linear_decay`: read as gin and Mesh TensorFlow read them."""

import functools

import numpy as np
import pytest

from t0repro.errors import UserError
from t0repro.training.schedules import make_schedule

from .test_mtf_gin import load

pytestmark = pytest.mark.mtf

SCHEDULES = "learning_rate_schedules"
PRODUCT = f"{SCHEDULES}.product_learning_rate"


def mesh_tensorflows_rates(steps: list[int], total: int) -> list[float]:
    """What the schedule that gin holds gives, called as Mesh TensorFlow's `run` calls it."""
    import tensorflow.compat.v1 as tf
    from mesh_tensorflow.transformer import learning_rate_schedules

    import gin

    schedule = gin.get_bindings("mesh_tensorflow.transformer.utils.run")["learning_rate_schedule"]
    if isinstance(schedule, list):
        product = learning_rate_schedules.product_learning_rate
        schedule = functools.partial(product, factors=schedule)
    with tf.Graph().as_default(), tf.Session() as session:
        rates = [schedule(tf.constant(step), total_train_steps=total) for step in steps]
        return session.run([tf.cast(rate, tf.float32) for rate in rates])


@pytest.mark.parametrize(
    "bindings",
    [
        # A factor without a scope is called in its product's, and one with a scope in that alone.
        (
            f"run.learning_rate_schedule = @a/{PRODUCT}",
            f"a/{PRODUCT}.factors = [@{SCHEDULES}.linear_warmup, @b/{SCHEDULES}.linear_decay]",
            f"{SCHEDULES}.linear_warmup.steps_or_fraction = 100",
            f"a/{SCHEDULES}.linear_warmup.steps_or_fraction = 40",
            f"a/{SCHEDULES}.linear_decay.steps_or_fraction = 0.1",
            f"b/{SCHEDULES}.linear_decay.steps_or_fraction = 0.5",
        ),
        # A scope within a scope takes the bindings of both.
        (
            f"run.learning_rate_schedule = [0.5, @a/b/{SCHEDULES}.linear_warmup]",
            f"a/{SCHEDULES}.linear_warmup.steps_or_fraction = 40",
        ),
        # A list is a product all the same, whose offset may be bound.
        (
            f"run.learning_rate_schedule = [@{SCHEDULES}.linear_warmup]",
            f"{SCHEDULES}.linear_warmup.steps_or_fraction = 100",
            f"{PRODUCT}.offset = 30",
        ),
    ],
)
def test_factors_of_a_product_are_read_in_the_scopes_in_which_mesh_tensorflow_calls_them(bindings):
    schedule = load(*bindings, "run.total_run_steps = 200", with_packages=True).schedule
    assert schedule is not None
    steps = [30, 35, 60, 120, 180, 199]
    ours = [float(make_schedule(schedule)(np.int32(step))) for step in steps]
    np.testing.assert_allclose(ours, mesh_tensorflows_rates(steps, 200), rtol=1e-6)


def test_a_dataset_function_is_read_in_the_scope_of_its_reference():
    config = load(
        "run.train_dataset_fn = @a/b/mesh_train_dataset_fn",
        "mesh_train_dataset_fn.seed = 3",
        "a/mesh_train_dataset_fn.seed = 4",
    )
    assert config.plan.train_data.seed == 4
    assert "a/mesh_train_dataset_fn.seed = 4" in config.provenance["plan.train_data.seed"]


@pytest.mark.parametrize(
    ("mode", "bindings"),
    [
        (
            "score_from_strings.gin",
            ("score_from_strings.score_postprocess_fn = @a/save_scores",
             "a/save_scores.scores_filename = 'other'"),
        ),
        (
            "infer.gin",
            ("infer_model.decode_fn = @a/decode_from_file", "a/decode_from_file.repeats = 2"),
        ),
        (
            "infer.gin",
            ("infer_model.decode_fn = @a/decode_from_file", "a/Bitransformer.decode.beam_size = 3"),
        ),
        (
            None,
            ("decoder/LayerStack.sublayers_final = [@a/transformer.sublayer_rms_norm,"
             " @transformer.sublayer_dropout]",
             "a/sublayer_rms_norm.epsilon = 0.1"),
        ),
    ],
)  # fmt: skip
def test_what_is_read_in_no_scope_is_refused_in_that_of_a_reference(mode, bindings):
    with pytest.raises(UserError, match="outside of the scope 'a'") as error:
        load(*bindings)
    assert bindings[-1] in str(error.value.where) and "--backend=mtf" in str(error.value.fix)
