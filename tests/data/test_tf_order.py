"""The order of tf.data that numpy reproduces is tf.data's own, number by number."""

import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from t0repro import compat
from t0repro.data.tf_order import ShuffleSeeds, _log, draws, shuffle_like_tf

SEEDS = st.integers(0, 2**31)  # of all that a run may draw


@pytest.fixture(scope="module")
def tf():
    compat.quiet_logs()
    import tensorflow

    return tensorflow


@given(st.integers(0, 300), st.integers(1, 400), SEEDS)
@example(2500, 1000, 2**31 - 1)  # the seed is taken modulo this number
@example(50, 50, 0)
@settings(max_examples=30)
def test_shuffled_items_have_tf_datas_order_in_every_epoch(tf, count, buffer_size, seed):
    dataset = tf.data.Dataset.range(count).shuffle(buffer_size, seed=seed)
    seeds = ShuffleSeeds(seed)
    for _ in range(3):
        ours = list(shuffle_like_tf(iter(range(count)), buffer_size, seeds))
        assert ours == [int(item) for item in dataset.as_numpy_iterator()]


@given(st.lists(st.floats(1e-3, 1e6), min_size=2, max_size=40), SEEDS)
@settings(max_examples=8)
def test_tasks_are_drawn_as_tf_data_draws_them(tf, weights, seed):
    datasets = [tf.data.Dataset.from_tensors(index).repeat() for index in range(len(weights))]
    sampled = tf.data.Dataset.sample_from_datasets(datasets, weights, seed=seed).take(2000)
    theirs = [int(index) for index in sampled.as_numpy_iterator()]
    assert list(itertools.islice(draws(weights, seed), 2000)) == theirs


def test_logarithms_are_tensorflows_to_the_last_bit(tf):
    """For rates as T0's mixtures have them, and for any; eight at a time, and what is left."""
    generator = np.random.default_rng(0)
    for count in (*range(1, 40), 1000, 1003):
        rates = generator.integers(1, 600_000, count).astype(np.float32)
        others = (10 ** generator.uniform(-6, 8, count)).astype(np.float32)
        for x in (rates, others):
            np.testing.assert_array_equal(_log(x), tf.math.log(tf.constant(x)).numpy())
