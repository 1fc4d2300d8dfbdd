"""Changes that make a training run fit are tried in turn, the cheapest first."""

import dataclasses

import pytest

from t0repro.config.model import Layout
from t0repro.partitioning.devices import choose
from t0repro.partitioning.topologies import devices_of
from t0repro.runs.fitting import suggest, variants

from ..helpers.tiny_models import BFLOAT16, model_config, run_config

pytestmark = pytest.mark.tpu

TRAINING = run_config(
    "unused",
    10,
    model=model_config(d_model=128, d_ff=256, num_heads=4, d_kv=32, vocab_size=1024),
    batch_size=16,
    num_microbatches=1,
    dtypes=BFLOAT16,
    layout=Layout(model=2),
    sequence_length={"inputs": 32, "targets": 16},
)


@pytest.fixture(scope="module")
def v3():
    return devices_of("v3-8")


def test_each_variant_has_the_changes_before_it(v3):
    partitioning = choose(TRAINING.layout, TRAINING.model, rows=16, devices=v3[0])
    found = list(variants(TRAINING, partitioning))
    assert [text for text, _ in found] == [
        "2 microbatches",
        "4 microbatches",
        "4 microbatches, recompute = 'minimal'",
        "4 microbatches, recompute = 'minimal', full sharding",
        "4 microbatches, recompute = 'full', full sharding",
        "4 microbatches, recompute = 'full', full sharding, model parallelism 4",
    ]
    _, last = found[-1]
    assert last.layout == Layout(2, 4, fully_sharded=True)
    assert last.num_microbatches == 4 and last.model.recompute == "full"


def test_the_search_ends_with_the_first_variant_that_fits(v3):
    devices, chip = v3
    assert list(suggest(TRAINING, devices, chip)) == ["as configured: fits"]
    small = dataclasses.replace(chip, memory=1)
    lines = list(suggest(dataclasses.replace(TRAINING, num_microbatches=4), devices, small))
    assert lines[0].startswith("recompute = 'minimal': does not fit")
    assert lines[-1] == "nothing that can be tried fits: use devices with more memory"
