"""T5X's partitioner is a layout, with warnings; or an error with the place to correct."""

import functools
import re

import pytest

from t0repro.config.model import Layout
from t0repro.config.t5x.calls import Call, call_with_defaults
from t0repro.config.t5x.layout import list_differences, read_layout
from t0repro.errors import UserError

PLACES = {
    "num_partitions": "pretrain.gin:3",
    "model_parallel_submesh": "mine.gin:2",
    "activation_partitioning_dims": "mine.gin:4",
    "additional_rules": "mine.gin:5",
    "logical_axis_rules": "mine.gin:6",
    "ici_mesh_shape": "mine.gin:7",
}


def called(name, **options):
    call = call_with_defaults(f"partitioning.{name}", **options)
    call.places.update(PLACES)
    return call


AxisRules = functools.partial(called, "standard_logical_axis_rules")
PjitPartitioner = functools.partial(called, "PjitPartitioner")


def partitioner_differences(partitioner):
    return list_differences(Call("infer", {"partitioner": partitioner}))


@pytest.mark.parametrize(
    ("options", "layout"),
    [
        ({}, Layout()),
        ({"num_partitions": 2}, Layout(model=2)),
        ({"model_parallel_submesh": (2, 2, 1, 2)}, Layout(model=8)),
        ({"model_parallel_submesh": (1, 2)}, Layout(model=2)),  # hosts and devices of a host
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
    assert read_layout(PjitPartitioner(**options)) == layout
    assert list(partitioner_differences(PjitPartitioner(**options))) == []


MESHES = {"ici_mesh_shape": {"data": 4, "model": 2}, "dcn_mesh_shape": {"replica": 3}}


@pytest.mark.parametrize(
    ("options", "layout", "loses"),
    [
        ({"num_partitions": 1, "model_parallel_submesh": (1, 2, 1, 1)}, Layout(model=2), True),
        ({"num_partitions": 1, **MESHES}, Layout(data=12, model=2), True),
        # T5X reads a mesh within slices only together with one across them.
        ({"num_partitions": 1, "ici_mesh_shape": {"model": 2}}, Layout(), False),
    ],
)
def test_of_two_sizes_the_one_that_t5x_reads_wins_with_a_warning(options, layout, loses):
    partitioner = PjitPartitioner(**options)
    assert read_layout(partitioner) == layout
    (line,) = partitioner_differences(partitioner)
    loser = "num_partitions" if loses else "ici_mesh_shape"
    assert line.startswith("pretrain.gin:3" if loses else "mine.gin:7")
    assert f"PjitPartitioner.{loser} = " in line


@pytest.mark.parametrize(
    ("rules", "line"),
    [
        (AxisRules(activation_partitioning_dims=2), "mine.gin:4: [^:]*activation_[^:]* = 2: not d"),
        (AxisRules(additional_rules=[("embed", "model")]), "mine.gin:5: .*'embed', 'model'"),
        ([("embed", "model"), ("batch", ("data",))], "mine.gin:6: .*'embed', 'model'"),
    ],
)
def test_what_changes_memory_and_speed_alone_is_a_warning_with_its_place(rules, line):
    partitioner = PjitPartitioner(logical_axis_rules=rules)
    assert read_layout(partitioner) == Layout()
    (told,) = partitioner_differences(partitioner)
    assert re.match(line, told)


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"model_parallel_submesh": (1, 1, 2)}, "mine.gin:2"),
        ({"ici_mesh_shape": {"modle": 2}}, "mine.gin:7"),
        ({"logical_axis_rules": [("embed", "modle")]}, "mine.gin:6"),
        ({"logical_axis_rules": AxisRules(activation_partitioning_dims=3)}, "mine.gin:4"),
    ],
)
def test_what_t5x_would_refuse_too_is_refused_with_its_place(options, where):
    with pytest.raises(UserError) as error:
        read_layout(PjitPartitioner(**options))
    assert error.value.where == where
