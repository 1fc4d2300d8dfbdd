"""T5X's rules for restoring: assignment_map, strict, fallback_to_scratch and dtype."""

import numpy as np
import pytest

from t0repro.config.checkpoints import RestoreConfig
from t0repro.converters.restoring import apply_rules
from t0repro.errors import UserError
from t0repro.progress import heard_by

FRESH = {
    "target/a/kernel": np.zeros((2, 2), np.float32),
    "target/b/kernel": np.zeros((2, 2), np.float32),
    "state/step": np.int32(0),
    "state/param_states/a/kernel/v": np.zeros((2, 2), np.float32),
    "state/param_states/b/kernel/v": np.zeros((2, 2), np.float32),
}
TREE = {name: value + 1 for name, value in FRESH.items()}


def rules(*assignment_map, strict=True, fallback=False, dtype=None):
    return RestoreConfig("x", "specific", dtype, assignment_map, strict, fallback)


def test_without_rules_the_checkpoint_is_taken_as_it_is():
    result = apply_rules(TREE, FRESH, rules())
    assert result.keys() == TREE.keys() and result["state/step"] == 1


def test_names_are_mapped_as_a_whole_and_two_may_share_one():
    tree = {name: value for name, value in TREE.items() if "/b/" not in name}
    rule = (r"(target|state/param_states)/b/(.*)", r"\1/a/\2")
    result = apply_rules(tree, FRESH, rules(rule, strict=False))
    np.testing.assert_array_equal(result["target/b/kernel"], TREE["target/a/kernel"])
    assert "target/a/kernel" not in result  # as in T5X: what a rule takes is taken away
    shared = rules((r"target/[ab]/kernel", "target/a/kernel"))
    assert apply_rules(TREE, FRESH, shared)["target/a/kernel"][0, 0] == 1


def test_a_replacement_of_none_keeps_what_was_initialized():
    result = apply_rules(TREE, FRESH, rules((r"target/b/kernel", None)))
    assert result["target/b/kernel"].sum() == 0 and result["target/a/kernel"].sum() == 4


def test_what_is_missing_falls_back_to_scratch_only_if_it_may():
    tree = {"target/a/kernel": TREE["target/a/kernel"], "state/step": np.int32(7)}
    assert apply_rules(tree, FRESH, rules(fallback=True))["target/b/kernel"].sum() == 0
    assert "target/b/kernel" not in apply_rules(tree, FRESH, rules())


def test_what_is_not_restored_is_listed_on_both_sides():
    def said(tree, config):
        lines = []
        with heard_by(lines.append):
            apply_rules(tree, FRESH, config)
        return lines

    assert said(TREE, rules()) == []
    assert said(TREE, rules((r".*/b/kernel.*", None))) == [
        "restore: 1 parameter and 1 slot initialized, not restored: target/b/kernel",
        "restore: 1 parameter and 1 slot in the checkpoint, not used: target/b/kernel",
    ]
    # Without any slots in the checkpoint there is nothing to say about them.
    tree = {"target/a/kernel": np.ones((2, 2)), "target/z/kernel": np.ones((2, 2))}
    assert said(tree, rules(fallback=True)) == [
        "restore: 1 parameter and 0 slots initialized, not restored: target/b/kernel",
        "restore: 1 parameter and 0 slots in the checkpoint, not used: target/z/kernel",
    ]


def test_strict_refuses_some_missing_slots_but_not_a_checkpoint_without_any():
    some = {name: value for name, value in TREE.items() if "states/b" not in name}
    with pytest.raises(UserError, match="lacks 1 of 2 slots"):
        apply_rules(some, FRESH, rules())
    assert "state/param_states/b/kernel/v" not in apply_rules(some, FRESH, rules(strict=False))
    none = {name: value for name, value in TREE.items() if "param_states" not in name}
    assert apply_rules(none, FRESH, rules()).keys() == none.keys()


def test_parameters_are_rounded_to_the_rules_type():
    tree = {name: np.asarray(value) * 1.001 for name, value in TREE.items()}
    result = apply_rules(tree, FRESH, rules(dtype="bfloat16"))
    assert result["target/a/kernel"].dtype.name == "bfloat16"
    assert result["state/param_states/a/kernel/v"].dtype != result["target/a/kernel"].dtype
