"""The train step is compiled while the first batch is made, once."""

import threading

import jax
import numpy as np
import pytest

from t0repro.runs.train import train

from ..helpers import tiny_models as tiny


class Source:
    """Batches of which the first comes when the train step has been compiled."""

    def __init__(self, batches, compiled):
        self._batches, self._compiled, self.in_time = batches, compiled, False

    def open(self, step, saved):
        del step, saved
        self.in_time = self._compiled.wait(timeout=60)
        yield from self._batches

    def save(self, folder):
        del folder


@pytest.fixture
def compilations():
    """The train steps compiled so far, and an event that is set with the first."""
    names, first = [], threading.Event()

    def note(event, seconds, fun_name="", **_):
        del seconds
        if event.endswith("backend_compile_duration") and "train_step" in fun_name:
            names.append(fun_name)
            first.set()

    jax.monitoring.register_event_duration_secs_listener(note)
    yield names, first
    jax.monitoring.unregister_event_duration_listener(note)


def test_the_step_is_there_before_the_first_batch(tmp_path, compilations):
    names, first = compilations
    batches = tiny.batches(2)
    source = Source(batches, first)
    ahead = train(tiny.run_config(tmp_path / "ahead", 2), source)
    assert source.in_time and len(names) == 1
    plain = train(tiny.run_config(tmp_path / "plain", 2), batches)
    for one, other in zip(jax.tree.leaves(ahead), jax.tree.leaves(plain), strict=True):
        np.testing.assert_array_equal(one, other)


def test_batches_of_other_shapes_than_configured_are_trained_on(tmp_path, compilations):
    names, first = compilations
    shorter = [{name: x[:, :4] for name, x in batch.items()} for batch in tiny.batches(1)]
    state = train(tiny.run_config(tmp_path, 1), Source(shorter, first))
    assert int(state.step) == 1 and len(names) == 2
