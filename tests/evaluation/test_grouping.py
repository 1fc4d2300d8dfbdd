import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from t0repro.evaluation import grouping
from t0repro.evaluation.grouping import levels, make_plan
from t0repro.evaluation.pairs import distinct_pairs

TOKENS = st.lists(st.integers(1, 5), max_size=40)
EXAMPLES = st.lists(
    st.builds(lambda inputs, targets: {"inputs": inputs, "targets": targets}, TOKENS, TOKENS),
    max_size=30,
)


def examples_of(*pairs):
    return [{"inputs": source, "targets": target} for source, target in pairs]


def test_equal_pairs_are_one_and_equal_inputs_are_one():
    pairs = distinct_pairs(
        examples_of(([5, 6], [7, 1]), ([5, 6], [8, 1]), ([5, 6, 0, 0], [7, 1, 0]), ([5], [7, 1]))
    )
    assert (len(pairs.inputs), len(pairs)) == (2, 3)
    assert pairs.index.tolist() == [0, 1, 0, 2]
    assert pairs.input_of.tolist() == [0, 0, 1]
    assert pairs.of_examples(np.array([0.5, 1.5, 2.5])).tolist() == [0.5, 1.5, 0.5, 2.5]


def test_tokens_beyond_the_sequence_lengths_are_cut_off_before_pairs_are_compared():
    pairs = distinct_pairs(
        examples_of(([5, 6, 7], [8, 9, 1]), ([5, 6, 9], [8, 1, 1])), {"inputs": 2, "targets": 1}
    )
    assert len(pairs) == 1
    assert pairs.inputs[0].tolist() == [5, 6] and pairs.targets[0].tolist() == [8]


def test_a_digest_tells_input_from_target_and_outlives_the_process():
    pairs = distinct_pairs(examples_of(([5, 6], [7]), ([5], [6, 7])))
    assert pairs.digest(0) != pairs.digest(1)
    assert pairs.digest(0).hex() == "77d162d3386221026900d18c1c940120"


def test_a_target_with_a_hole_is_refused():
    with pytest.raises(ValueError, match="Example 1: a target holds an id below 1"):
        distinct_pairs(examples_of(([5], [7, 1]), ([5], [7, 0, 1])))


@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(1, 3), st.integers(0, 20))
def test_levels_are_the_best_that_any_choice_of_levels_gives(lengths, most, per_level):
    def cost(chosen):
        return sum(min(x for x in chosen if x >= n) for n in lengths) + per_level * len(chosen)

    values = sorted(set(lengths))
    best = min(
        cost([*some, values[-1]])
        for count in range(min(most, len(values)))
        for some in itertools.combinations(values[:-1], count)
    )
    found = levels(np.array(lengths), most, per_level).tolist()
    assert found == sorted(found) and len(found) <= most
    assert cost(found) == best


@given(EXAMPLES, st.integers(8, 200))
def test_every_pair_with_tokens_is_planned_once_in_bounded_shapes(examples, tokens):
    pairs = distinct_pairs(examples)
    plan = make_plan(pairs, tokens)
    planned = [int(p) for batch in plan.batches for p in batch.pairs]
    assert sorted(planned) == [p for p in range(len(pairs)) if len(pairs.targets[p])]
    encoded = [number for batch in plan.batches for number, _ in batch.rows]
    assert len(encoded) == len(set(encoded))  # each input is encoded once
    assert len(plan.shapes) <= grouping.MAX_INPUT_LEVELS * grouping.MAX_TARGET_LEVELS
    for batch in plan.batches:
        assert len(batch.rows) <= batch.size
        assert batch.size == 1 or batch.size * batch.inputs_length <= tokens


@given(EXAMPLES)
def test_arrays_hold_the_tokens_and_padding_is_counted_exactly(examples):
    pairs = distinct_pairs(examples)
    plan = make_plan(pairs, 64)
    inputs = [batch.inputs(pairs) for batch in plan.batches]
    rows = [rows for batch in plan.batches for rows in batch.decoder_rows(pairs)]
    entries = sum(x.size for x in inputs) + sum(r.targets.size for r in rows)
    tokens = sum((x > 0).sum() for x in inputs) + sum((r.targets > 0).sum() for r in rows)
    assert plan.padding == pytest.approx(1 - tokens / entries if entries else 0.0)
    for found in rows:
        for pair in set(found.pair[found.pair >= 0].tolist()):
            assert found.targets[found.pair == pair].tolist() == pairs.targets[pair].tolist()
            assert len(set(found.segments[found.pair == pair].tolist())) == 1
        assert ((found.segments > 0) == (found.pair >= 0)).all()


def test_very_many_choices_take_further_rows_of_the_same_input(monkeypatch):
    monkeypatch.setattr(grouping, "MAX_ROW", 10)
    pairs = distinct_pairs(examples_of(*(([5, 6], [7] * n) for n in (4, 5, 6, 12))))
    (batch,) = make_plan(pairs, 1000).batches
    assert batch.rows == ((0, ((0, 1), (2,), (3,))),)
    assert [rows.pair.max() for rows in batch.decoder_rows(pairs)] == [1, 2, 3]


def test_batches_of_a_group_are_of_one_size_with_fewer_empty_rows_than_batches():
    pairs = distinct_pairs(examples_of(*(([n] * 8, [7]) for n in range(1, 12))))
    plan = make_plan(pairs, 64)
    assert [(batch.size, len(batch.rows)) for batch in plan.batches] == [(4, 4), (4, 4), (4, 3)]
    assert len(plan.shapes) == 1


def test_only_what_is_to_do_is_planned():
    pairs = distinct_pairs(examples_of(([5], [7]), ([5], [8]), ([6], [7])))
    plan = make_plan(pairs, 64, np.array([1]))
    assert [batch.pairs.tolist() for batch in plan.batches] == [[1]]
    assert make_plan(pairs, 64, np.array([], np.int64)).batches == ()
    assert make_plan(pairs, 64, np.array([], np.int64)).padding == 0.0
