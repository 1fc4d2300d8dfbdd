"""Eight virtual CPU devices compute what one does, whatever the layout, in their own process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).with_name("eight_devices.py")
LAYOUTS = [
    "data 8",
    "data 4, model 2",
    "data 2, model 4",
    "data 8, fully sharded",
    "data 4, model 2, fully sharded",
]


def on_eight_devices(case):
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8"
    env = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, SCRIPT, case], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def result():
    return on_eight_devices("every_layout")


def assert_same_training(one, other):
    np.testing.assert_allclose(other["losses"], one["losses"], rtol=0, atol=1e-5)
    assert other["size"] == pytest.approx(one["size"], rel=1e-5)
    assert len(set(one["losses"])) == 10, "it trains"


def test_each_device_draws_its_part_of_the_same_parameters(result):
    assert result["drawn"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_microbatches_train_to_the_same_losses(result, layout):
    assert_same_training(result["layouts"]["one"], result["layouts"][layout])


@pytest.mark.parametrize("optimizer", ["adafactor, not factored, with momentum", "adam"])
def test_each_optimizer_trains_to_the_same_losses(result, optimizer):
    assert_same_training(*result["optimizers"][optimizer])


@pytest.mark.parametrize("case", ["dropout", "one batch, not packed"])
def test_each_case_trains_to_the_same_losses(result, case):
    assert_same_training(*result[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", ["scanned", "in_blocks"])
def test_scanned_layers_and_attention_in_blocks_train_to_the_same_losses(case):
    one, *others = on_eight_devices(case).values()
    for other in others:
        assert_same_training(one, other)


@pytest.mark.slow
def test_every_layout_with_every_optimizer_microbatches_and_rows_trains_and_scores_the_same():
    found = on_eight_devices("combinations")
    for one, *others in (list(case.values()) for case in found["trained"].values()):
        assert len(others) == len(LAYOUTS)
        for other in others:
            assert_same_training(one, other)
    for layout in LAYOUTS:
        assert_same_evaluation(found["evaluated"]["one"], found["evaluated"][layout])


@pytest.mark.parametrize("layout", ["data 8", "data 2, model 4"])
def test_scores_texts_and_metrics_are_the_same(result, layout):
    assert_same_evaluation(result["evaluated"]["one"], result["evaluated"][layout])


def assert_same_evaluation(one, other):
    np.testing.assert_allclose(other["scores"], one["scores"], rtol=0, atol=1e-4)
    assert other["texts"] == one["texts"]
    assert other["metrics"] == pytest.approx(one["metrics"], abs=1e-4)
    assert any(one["texts"]["greedy"])


@pytest.mark.parametrize("of", ["greedy", "sampled", "t5x", "scores"])
def test_outputs_and_scores_have_the_same_bits_where_tokens_tie_but_for_rounding(result, of):
    assert result["tied"]["data 8"][of] == result["tied"]["one"][of]


def test_the_train_steps_collectives_are_these(result):
    # Tensor parallelism gathers no parameter; what is in its loop adds up activations. Data
    # parallelism exchanges nothing before the last microbatch is done.
    found = {name: result["layouts"][name]["collectives"] for name in ["one", *LAYOUTS]}
    assert found == {
        "one": {},
        "data 8": {"all-reduce": 1},
        "data 4, model 2": {"all-reduce": 22, "all-reduce in loop": 14},
        "data 2, model 4": {"all-reduce": 22, "all-reduce in loop": 14},
        # Gathers each parameter once, and adds up gradients into a sharded sum in the loop.
        "data 8, fully sharded": {"all-gather": 20, "all-reduce": 21, "all-reduce in loop": 1},
        "data 4, model 2, fully sharded": {
            "all-gather": 20,
            "all-reduce": 44,
            "all-reduce in loop": 15,
        },
    }


def test_a_run_goes_on_in_another_layout(result):
    changed, same = result["resumed"]["changed"], result["resumed"]["same"]
    assert changed["size"] == pytest.approx(same["size"], rel=1e-5)
    lines = [line for line in changed["lines"] if line.startswith("devices")]
    assert lines == [
        "devices: 8 x cpu, data 4, model 2",
        "devices: 8 x cpu, data 2, model 4, fully sharded",
    ]


def test_a_layout_of_a_tpu_slice_follows_the_devices_and_the_batch(result):
    # Two microbatches of four rows: eight devices cannot divide them, four can.
    lines = [line for line in result["resumed"]["same"]["lines"] if line.startswith("devices")]
    assert (
        lines
        == [
            "devices: 4 of 8 x cpu, data 4, model 1 (rows of a microbatch = 4 must divide evenly"
            " across data)"
        ]
        * 2
    )
