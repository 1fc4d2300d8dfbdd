"""Trainings from T5X's gin files have one device's losses in whatever layout they are divided."""

import json
import os

import pytest

from t0repro.converters.sources import load_any

from ..cli.test_train import train
from ..converters.checkpoint_files import assert_same_bits

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    """Losses by step on one device."""
    folder = tmp_path_factory.mktemp("one")
    code, _, said = train(folder, 4)
    assert code == 0 and "devices: 1 x" in said, said
    return losses(folder)


def losses(folder):
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["loss"] for row in rows if row["split"] == "train"}


def have_devices(count, monkeypatch):
    flags = os.environ.get("XLA_FLAGS", "")
    monkeypatch.setenv("XLA_FLAGS", f"{flags} --xla_force_host_platform_device_count={count}")


@pytest.mark.parametrize("devices", [1, 8])
def test_a_deterministic_training_that_was_stopped_ends_in_the_same_bits(
    tmp_path, monkeypatch, devices
):
    """With the three bindings of T5X's page on pretraining, and with dropout."""
    have_devices(devices, monkeypatch)
    for folder, stops in (("whole", [3]), ("stopped", [1, 3])):
        for steps in stops:
            code, _, said = train(tmp_path / folder, steps)
            assert code == 0 and f"devices: {devices} x" in said, said
    whole, stopped = (load_any(tmp_path / each / "checkpoint_3") for each in ("whole", "stopped"))
    assert_same_bits(whole, stopped)


@pytest.mark.parametrize(
    ("binding", "layout"),
    [
        ("partitioning.PjitPartitioner.num_partitions = 1", "data 8, model 1"),
        ("partitioning.PjitPartitioner.num_partitions = 2", "data 4, model 2"),
        (
            "partitioning.standard_logical_axis_rules.parameter_partitioning_dims = 2",
            "data 8, model 1",
        ),
    ],
)
def test_on_eight_devices(tmp_path, monkeypatch, one_device, binding, layout):
    have_devices(8, monkeypatch)
    code, _, said = train(tmp_path, 4, f"--gin_bindings={binding}")
    assert code == 0 and f"devices: 8 x cpu, {layout}" in said, said
    found = losses(tmp_path)
    assert found.keys() == one_device.keys()
    for step, loss in one_device.items():
        assert found[step] == pytest.approx(loss, rel=1e-5)
