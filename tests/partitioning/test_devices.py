"""A layout that cannot be is an error that names what does not divide."""

import dataclasses

import jax
import pytest

from t0repro.config.model import Layout
from t0repro.errors import UserError
from t0repro.partitioning.devices import choose, describe_devices

from ..helpers.tiny_models import MODEL, model_config

EIGHT = jax.devices()[:1] * 8  # only counted: every layout here is refused


@pytest.mark.parametrize(
    ("layout", "rows", "message"),
    [
        (Layout(1, 8), None, "num_heads = 2 does not divide evenly across model 8"),
        (Layout(model=3), None, "8 devices do not divide into groups of 3"),
        (Layout(64, 16, topology="v3-1024"), None, "8 devices do not divide into groups of 16"),
        (Layout(4, 4), None, "takes 16 devices; there are 8"),
        (Layout(8, 1), 12, "rows of a microbatch = 12 does not divide evenly across data 8"),
        (Layout(8, 1, fully_sharded=True), 8, "d_model = 12 does not divide evenly across data 8"),
    ],
)
def test_a_layout_that_cannot_be_names_the_dimension(layout, rows, message):
    config = dataclasses.replace(MODEL, d_model=12)
    with pytest.raises(UserError) as error:
        choose(layout, config, rows=rows, devices=EIGHT, where="my.gin:3")
    assert message in error.value.what
    assert error.value.where == "my.gin:3"


def test_d_ff_and_the_vocabulary_are_named_too():
    for config, name in (
        (model_config(num_heads=4, d_ff=30), "d_ff = 30"),
        (model_config(num_heads=4, vocab_size=130), "vocab_size = 130"),
    ):
        with pytest.raises(UserError, match=name):
            choose(Layout(2, 4), config, devices=EIGHT)


def test_one_device_is_one_device_whatever_the_layout():
    layout = Layout(64, 8, topology="v3-512")
    partitioning = choose(layout, MODEL, devices=jax.devices()[:1])
    assert partitioning.mesh.size == 1
    line = describe_devices(partitioning, layout)
    assert line == "devices: 1 x cpu (data 64, model 8 is for 512 devices)"
    assert describe_devices(partitioning, Layout()) == "devices: 1 x cpu"
