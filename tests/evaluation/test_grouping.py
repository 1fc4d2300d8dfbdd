import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from t0repro.evaluation import grouping, packing
from t0repro.evaluation.grouping import make_batching
from t0repro.evaluation.pairs import collect_pairs, concatenate_pairs

TOKENS = st.lists(st.integers(1, 5), max_size=40)
EXAMPLES = st.lists(
    st.builds(lambda inputs, targets: {"inputs": inputs, "targets": targets}, TOKENS, TOKENS),
    max_size=30,
)


def examples_of(*pairs):
    return [{"inputs": source, "targets": target} for source, target in pairs]


def test_equal_pairs_are_one_and_equal_inputs_are_one():
    pairs = collect_pairs(
        examples_of(([5, 6], [7, 1]), ([5, 6], [8, 1]), ([5, 6, 0, 0], [7, 1, 0]), ([5], [7, 1]))
    )
    assert (len(pairs.inputs), len(pairs)) == (2, 3)
    assert pairs.index.tolist() == [0, 1, 0, 2]
    assert pairs.input_of.tolist() == [0, 0, 1]
    assert pairs.expand_to_examples(np.array([0.5, 1.5, 2.5])).tolist() == [0.5, 1.5, 0.5, 2.5]


def test_tokens_beyond_the_sequence_lengths_are_cut_off_before_pairs_are_compared():
    pairs = collect_pairs(
        examples_of(([5, 6, 7], [8, 9, 1]), ([5, 6, 9], [8, 1, 1])), {"inputs": 2, "targets": 1}
    )
    assert len(pairs) == 1
    assert pairs.inputs[0].tolist() == [5, 6] and pairs.targets[0].tolist() == [8]


def test_a_digest_tells_input_from_target_and_outlives_the_process():
    pairs = collect_pairs(examples_of(([5, 6], [7]), ([5], [6, 7])))
    assert pairs.digest(0) != pairs.digest(1)
    assert pairs.digest(0).hex() == "77d162d3386221026900d18c1c940120"


def test_a_target_with_a_hole_is_refused():
    with pytest.raises(ValueError, match="Example 1: a target holds an id below 1"):
        collect_pairs(examples_of(([5], [7, 1]), ([5], [7, 0, 1])))


@given(EXAMPLES, st.integers(8, 200))
def test_every_pair_with_tokens_is_planned_once_in_bounded_shapes(examples, tokens):
    pairs = collect_pairs(examples)
    plan = make_batching(pairs, tokens)
    planned = [int(p) for batch in plan.batches for p in batch.pairs]
    assert sorted(planned) == [p for p in range(len(pairs)) if len(pairs.targets[p])]
    encoded = [number for batch in plan.batches for row in batch.rows for number in row.inputs]
    assert len(encoded) == len(set(encoded))  # each input is encoded once
    assert len(plan.shapes) <= grouping.MAX_INPUT_LEVELS * grouping.MAX_TARGET_LEVELS
    for batch in plan.batches:
        assert len(batch.rows) <= batch.size
        assert batch.size == 1 or batch.size * batch.inputs_length <= tokens


@given(EXAMPLES)
def test_arrays_hold_the_tokens_and_padding_is_counted_exactly(examples):
    pairs = collect_pairs(examples)
    plan = make_batching(pairs, 64)
    inputs = [batch.inputs(pairs)[0] for batch in plan.batches]
    rows = [rows for batch in plan.batches for rows in batch.decoder_rows(pairs)]
    entries = sum(x.size for x in inputs) + sum(r.targets.size for r in rows)
    tokens = sum((x > 0).sum() for x in inputs) + sum((r.targets > 0).sum() for r in rows)
    assert plan.padding == pytest.approx(1 - tokens / entries if entries else 0.0)
    for found in rows:
        for pair in set(found.pair[found.pair >= 0].tolist()):
            assert found.targets[found.pair == pair].tolist() == pairs.targets[pair].tolist()
            assert len(set(found.segments[found.pair == pair].tolist())) == 1
        assert ((found.segments > 0) == (found.pair >= 0)).all()


@given(EXAMPLES, st.integers(8, 200))
def test_every_choice_reads_its_own_input_and_no_other(examples, tokens):
    pairs = collect_pairs(examples)
    for batch in make_batching(pairs, tokens).batches:
        ids, segments = batch.inputs(pairs)
        for rows in batch.decoder_rows(pairs):
            for at, place in zip(*np.nonzero(rows.pair >= 0), strict=True):
                read = ids[at][segments[at] == rows.reads[at, place]]
                source = pairs.inputs[pairs.input_of[rows.pair[at, place]]]
                assert read.tolist() == source.tolist()
            for choices in (rows.segments, rows.reads):  # in one piece each, side by side
                steps = np.diff(choices, axis=1)
                assert ((steps >= 0) | (choices[:, 1:] == 0)).all()


def test_an_empty_input_shares_its_row_with_no_other():
    pairs = collect_pairs(examples_of(([], [7]), ([5], [7]), ([6], [7])))
    rows = [row.inputs for batch in make_batching(pairs, 64).batches for row in batch.rows]
    assert sorted(map(sorted, rows)) == [[0], [1, 2]]


def test_very_many_choices_take_further_rows_of_the_same_input(monkeypatch):
    monkeypatch.setattr(packing, "MAX_ROW", 10)
    pairs = collect_pairs(examples_of(*(([5, 6], [7] * n) for n in (4, 6, 5, 12))))
    (batch,) = make_batching(pairs, 1000).batches
    (row,) = batch.rows
    assert row.pieces == ((0, 1), (2,), (3,))
    assert [rows.pair.max() for rows in batch.decoder_rows(pairs)] == [1, 2, 3]


def test_batches_of_a_shape_are_full_but_for_the_last_which_has_one_of_few_sizes():
    def sizes(count):
        rows = [packing.Row((n,), ((n,),), 8, 1) for n in range(count)]
        return [(batch.size, len(batch.rows)) for batch in grouping._batches(rows, 1024, 64)]

    assert sizes(35) == [(16, 16), (16, 16), (3, 3)]
    assert sizes(21) == [(16, 16), (6, 5)]
    last = {sizes(16 + rest)[-1][0] for rest in range(1, 17)}
    assert last == {1, 2, 3, 4, 6, 8, 12, 16}


def test_a_part_of_a_window_has_the_batches_that_it_has_alone():
    random = np.random.default_rng(0)
    parts = [collect_pairs(list(lengths_of(random, 40))) for _ in range(3)]
    together = concatenate_pairs(parts)
    ends = np.cumsum([len(part) for part in parts])
    for part, end in zip(parts, ends, strict=True):
        alone = make_batching(part, 512)
        inside = make_batching(together, 512, np.arange(end - len(part), end))
        assert [b.digest(part) for b in alone.batches] == [
            b.digest(together) for b in inside.batches
        ]


def test_devices_side_by_side_compute_whole_batches_of_the_plan():
    pairs = collect_pairs(list(lengths_of(np.random.default_rng(0), 200)))
    plan = make_batching(pairs, 512)
    for together in grouping.side_by_side(plan.batches, 3):
        size, length, targets = together.shape
        ids, _ = together.inputs(pairs)
        for device in range(3):
            own = ids[device * size // 3 : (device + 1) * size // 3]
            planned = [b for b in plan.batches if b.shape == (size // 3, length, targets)]
            assert not own.any() or any((b.inputs(pairs)[0] == own).all() for b in planned)
    planned = np.concatenate([b.pairs for b in grouping.side_by_side(plan.batches, 3)])
    assert sorted(planned) == sorted(np.concatenate([b.pairs for b in plan.batches]))


def lengths_of(random, inputs):
    """Inputs and choices as T0's sets have them: most short, some long; few and many targets."""
    for number in range(inputs):
        source = np.append(random.integers(2, 99, int(random.gamma(3, 30)) + 8), number + 100)
        for _ in range(random.integers(2, 5)):
            yield {"inputs": source, "targets": random.integers(1, 99, random.integers(2, 9))}


def test_inputs_of_all_lengths_are_packed_into_few_shapes_with_little_padding():
    pairs = collect_pairs(list(lengths_of(np.random.default_rng(0), 1000)))
    plan = make_batching(pairs, 4096)
    # The last batch of each kind of row may have fewer rows.
    assert plan.padding < 0.12 and len({shape[1:] for shape in plan.shapes}) <= 4


def test_only_what_is_to_do_is_planned():
    pairs = collect_pairs(examples_of(([5], [7]), ([5], [8]), ([6], [7])))
    plan = make_batching(pairs, 64, np.array([1]))
    assert [batch.pairs.tolist() for batch in plan.batches] == [[1]]
    assert make_batching(pairs, 64, np.array([], np.int64)).batches == ()
    assert make_batching(pairs, 64, np.array([], np.int64)).padding == 0.0
