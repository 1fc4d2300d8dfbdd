"""Slices by Google's names: their number of devices, and what libtpu says of them."""

import math
from types import SimpleNamespace

import jax
import pytest

from t0repro.errors import UserError
from t0repro.partitioning.topologies import devices_of, find_chip, memory_of, torus


@pytest.mark.parametrize(
    ("chips", "axes", "shape"),
    [
        (256, 2, (16, 16)),  # v3-512
        (128, 2, (8, 16)),
        (8, 2, (2, 4)),
        (64, 3, (4, 4, 4)),  # v4-128
        (128, 3, (4, 4, 8)),
        (4, 3, (2, 2, 1)),  # v4-8
        (1, 2, (1, 1)),
    ],
)
def test_chips_are_arranged_as_a_torus(chips, axes, shape):
    assert tuple(torus(chips, axes)) == shape
    assert math.prod(shape) == chips


@pytest.mark.parametrize("name", ["v3", "v3-500", "v9-8", "v3-1", "gpu-8"])
def test_an_unknown_slice_says_which_there_are(name):
    with pytest.raises(UserError, match="no topology") as error:
        devices_of(name)
    assert "v5e" in str(error.value.fix)


@pytest.mark.parametrize(
    ("kind", "flops"),
    [
        ("TPU v3", 61.5e12),  # a core
        ("TPU v4", 275e12),
        ("TPU v5 lite", 197e12),
        ("TPU v5p", 459e12),
        ("TPU v6 lite", 918e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
    ],
)
def test_a_device_at_hand_has_the_published_peak_of_its_kind(kind, flops):
    chip = find_chip(kind)
    assert chip is not None and chip.flops == flops


@pytest.mark.parametrize("kind", ["cpu", "TPU v4 lite", "TPU v99", "NVIDIA A100-SXM4-40GB"])
def test_of_another_kind_nothing_is_guessed(kind):
    assert find_chip(kind) is None


def test_a_devices_memory_is_what_it_says_that_programs_may_take():
    gpu = SimpleNamespace(
        device_kind="NVIDIA H100 80GB HBM3", memory_stats=lambda: {"bytes_limit": 60 << 30}
    )
    assert memory_of(gpu) == 60 << 30
    assert memory_of(jax.devices("cpu")[0]) is None, "a CPU has no statistics and no limit"


@pytest.mark.tpu
@pytest.mark.parametrize(
    ("name", "count", "kind"),
    [("v3-512", 512, "TPU v3"), ("v4-128", 64, "TPU v4"), ("v5e-256", 256, "TPU v5 lite")],
)
def test_libtpu_has_these_devices(name, count, kind):
    devices, chip = devices_of(name)
    assert (len(devices), devices[0].device_kind) == (count, kind)
    assert chip.flops > 1e12
    assert memory_of(devices[0]) == chip.memory, "it is only described, so it has no statistics"


def test_without_libtpu_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="libtpu") as error:
        devices_of("v3-8")
    assert "EXTRAS=tpu" in str(error.value.fix)
