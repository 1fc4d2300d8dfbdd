"""assignment_map as T5X applies it."""

import pytest

from t0repro.converters.restoring import assign_names
from t0repro.errors import UserError

STORED = ["target/encoder/a", "target/encoder/b", "target/old_decoder/c", "target/extra"]
WANTED = ["target/encoder/a", "target/encoder/b", "target/decoder/c", "target/new"]


def test_without_rules_equal_names_match_and_others_are_left_out():
    assert assign_names(WANTED, STORED, ()) == {
        "target/encoder/a": "target/encoder/a",
        "target/encoder/b": "target/encoder/b",
    }


def test_a_group_is_carried_over_and_none_keeps_what_was_initialized():
    rules = [(r"target/decoder/(.*)", r"target/old_decoder/\1"), (r"target/encoder/b", None)]
    assert assign_names(WANTED, STORED, rules) == {
        "target/decoder/c": "target/old_decoder/c",
        "target/encoder/b": None,
        "target/encoder/a": "target/encoder/a",
    }


def test_two_names_may_share_an_entry_which_then_no_longer_fills_its_own():
    rules = [("target/(new|decoder/c)", "target/encoder/a")]
    assert assign_names(WANTED, STORED, rules) == {
        "target/decoder/c": "target/encoder/a",
        "target/new": "target/encoder/a",
        "target/encoder/b": "target/encoder/b",
    }


def test_the_first_rule_that_matches_decides():
    rules = [("target/new", "target/extra"), ("target/n.*", None)]
    with pytest.raises(UserError, match=r"No name of the model matches 'target/n\.\*'"):
        assign_names(WANTED, STORED, rules)


def test_a_pattern_has_to_match_a_whole_name_and_its_entry_has_to_be_there():
    with pytest.raises(UserError, match="No name of the model matches 'decoder/c'"):
        assign_names(WANTED, STORED, [("decoder/c", "target/extra")])
    with pytest.raises(UserError, match="The checkpoint has no target/old_decoder/d"):
        assign_names(WANTED, STORED, [("target/decoder/c", "target/old_decoder/d")])
