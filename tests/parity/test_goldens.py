"""The JAX stack against golden files of Mesh TensorFlow, and the files against the real one."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from . import golden

pytestmark = pytest.mark.always
GOLDENS = Path(__file__).parent / "goldens"
EXACT = [case for case in golden.CASES if not case.dropout and case.dtype == "float32"]
FIRST_LOSS, LOSSES, NORM, LAST_NORM = 1e-5, 1e-4, 1e-5, 1e-4  # relative
# What bfloat16 loses is not the same on both stacks: RMS norms and logits are float32 on one.
BFLOAT16 = 0.01


def case_named(name):
    (case,) = [case for case in golden.CASES if case.name == name]
    return case


def file_of(case):
    return json.loads((GOLDENS / f"{case.name}.json").read_text())


def assert_norms_agree(ours, theirs, tolerance):
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        np.testing.assert_allclose(ours[name], expected, rtol=tolerance, atol=1e-12, err_msg=name)


def assert_exact(ours, theirs):
    """Losses, rates and norms within what the stacks promise each other."""
    np.testing.assert_allclose(ours["losses"][0], theirs["losses"][0], rtol=FIRST_LOSS)
    np.testing.assert_allclose(ours["losses"], theirs["losses"], rtol=LOSSES)
    np.testing.assert_allclose(ours["learning_rates"], theirs["learning_rates"], rtol=1e-6)
    assert_norms_agree(ours["gradient_norms"], theirs["gradient_norms"], NORM)
    assert_norms_agree(ours["first_norms"], theirs["first_norms"], NORM)
    assert_norms_agree(ours["last_norms"], theirs["last_norms"], LAST_NORM)


def assert_same_statistics(ours, theirs):
    """Means within four standard errors, deviations within a third."""
    error = math.hypot(ours["standard_error"], theirs["standard_error"])
    assert abs(ours["mean"] - theirs["mean"]) <= 4 * error, (ours, theirs)
    assert 0.75 <= ours["deviation"] / theirs["deviation"] <= 1.33, (ours, theirs)


def test_there_is_a_golden_file_for_each_case_and_no_other():
    assert {path.stem for path in GOLDENS.glob("*.json")} == {c.name for c in golden.CASES}
    for case in golden.CASES:
        assert file_of(case)["bindings"] == [f"include {case.model}", *case.size, *case.params]


@pytest.mark.parametrize("case", EXACT, ids=lambda case: case.name)
def test_jax_computes_what_mesh_tensorflow_computed(case):
    assert_exact(golden.run_on_jax(case), file_of(case))


def test_losses_in_bfloat16_are_within_a_hundredth():
    case = case_named("bfloat16")
    ours, theirs = golden.run_on_jax(case), file_of(case)
    np.testing.assert_allclose(ours["losses"], theirs["losses"], rtol=BFLOAT16)
    assert ours["gradient_norms"].keys() == theirs["gradient_norms"].keys()


def test_dropout_has_the_same_mean_and_spread_over_200_steps():
    case = case_named("dropout")
    assert case.steps == 200
    assert_same_statistics(golden.run_on_jax(case), file_of(case))


@pytest.mark.slow
@pytest.mark.mtf
def test_mesh_tensorflow_still_computes_what_the_files_say(tmp_path):
    for case, again in zip(golden.CASES, golden.run_on_mesh(golden.CASES, tmp_path), strict=True):
        if case.dropout:
            assert_same_statistics(again, file_of(case))
        elif case.dtype == "bfloat16":
            np.testing.assert_allclose(again["losses"], file_of(case)["losses"], rtol=1e-3)
        else:
            assert_exact(again, file_of(case))
