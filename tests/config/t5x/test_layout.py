"""T5X's partitioner is a layout, or an error that says what is not divided here."""

import pytest

from t0repro.config.run_config import Layout
from t0repro.config.t5x.layout import layout_of
from t0repro.config.t5x.records import AxisRules, PjitPartitioner
from t0repro.errors import UserError


@pytest.mark.parametrize(
    ("options", "layout"),
    [
        ({}, Layout()),
        ({"num_partitions": 2}, Layout(model=2)),
        ({"model_parallel_submesh": (2, 2, 1, 2)}, Layout(model=8)),
        ({"ici_mesh_shape": {"data": 4, "model": 2}}, Layout(data=4, model=2)),
        (
            {"ici_mesh_shape": {"data": 4, "model": 2}, "dcn_mesh_shape": {"replica": 3}},
            Layout(data=12, model=2),
        ),
        ({"logical_axis_rules": AxisRules()}, Layout()),
        (
            {"logical_axis_rules": AxisRules(parameter_partitioning_dims=2)},
            Layout(fully_sharded=True),
        ),
        (
            {"logical_axis_rules": AxisRules(additional_rules=[("embed", "data")])},
            Layout(fully_sharded=True),
        ),
        ({"logical_axis_rules": [("batch", "data"), ("embed", None)]}, Layout()),
    ],
)
def test_the_layout_of_a_partitioner(options, layout):
    assert layout_of(PjitPartitioner(**options)) == layout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"num_partitions": 2, "model_parallel_submesh": (1, 1, 1, 2)},
            "num_partitions and model_parallel_submesh",
        ),
        ({"logical_axis_rules": [("length", "model")]}, "'length', 'model'"),
        (
            {"logical_axis_rules": AxisRules(activation_partitioning_dims=2)},
            "activation_partitioning_dims is 2",
        ),
    ],
)
def test_what_is_not_divided_here_is_refused(options, message):
    with pytest.raises(UserError, match=message) as error:
        layout_of(PjitPartitioner(**options), "mine.gin:4")
    assert error.value.where == "mine.gin:4"
