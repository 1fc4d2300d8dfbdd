import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from t0repro.evaluation.grouping import (
    Sizes,
    choice_class,
    input_class,
    make_plan,
    memory_class,
)
from t0repro.evaluation.pairs import collect_pairs

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


def test_lengths_are_padded_to_few_classes():
    inputs, choices = (sorted({f(n) for n in range(300)}) for f in (input_class, choice_class))
    assert inputs == [32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320]
    assert choices == [2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384]
    assert all(n <= input_class(n) and n <= choice_class(n) for n in range(300))
    assert [memory_class(n) for n in (32, 64, 80, 128, 160)] == [64, 64, 128, 128, 256]


@given(EXAMPLES, st.integers(1, 4), st.sampled_from([Sizes(32, 256), Sizes(64, 2048), Sizes()]))
def test_every_pair_with_tokens_is_planned_once_in_a_row_of_its_own(examples, parts, sizes):
    pairs = collect_pairs(examples)
    plan = make_plan(pairs, sizes, parts)
    planned = [int(pair) for batch in plan.batches for pair in batch.pairs.flat if pair >= 0]
    assert sorted(planned) == [n for n in range(len(pairs)) if len(pairs.targets[n])]
    microbatches = {each for batch in plan.batches for each in batch.microbatches}
    encoded = [int(n) for each in microbatches for n in each.inputs.flat if n >= 0]
    assert len(encoded) == len(set(encoded))  # each input is encoded once
    for batch in plan.batches:
        assert len(batch.pairs) == parts
        assert batch.shape == (
            sizes.choice_rows(batch.length, batch.memory),
            batch.length,
            batch.memory,
        )


@given(EXAMPLES, st.integers(1, 4), st.sampled_from([Sizes(32, 256), Sizes(64, 2048), Sizes()]))
def test_every_choice_reads_its_own_input_and_an_empty_one_zeros(examples, parts, sizes):
    """Of what is kept on each device, which later microbatches overwrite."""
    pairs, encoded = collect_pairs(examples), set()
    plan = make_plan(pairs, sizes, parts)
    rooms: dict[int, np.ndarray] = {}
    for batch in plan.batches:
        zeros = np.zeros((parts, batch.kept + batch.memory), int)
        pool = rooms.setdefault(batch.memory, zeros)
        for each in batch.microbatches:
            if each not in encoded:
                ids = each.arrays(pairs)[0].reshape(parts, -1)
                pool[:, each.start : each.start + ids.shape[1]] = ids
                encoded.add(each)
        targets, starts, lengths = batch.arrays(pairs)
        for (part, row), pair in np.ndenumerate(batch.pairs):
            if pair < 0:
                assert not targets[part, row].any() and not lengths[part, row]
                continue
            read = pool[part, starts[part, row] :][: batch.memory]
            source = pairs.inputs[pairs.input_of[pair]]
            assert len(read) == batch.memory and lengths[part, row] == len(source)
            assert read[: len(source)].tolist() == source.tolist()
            assert len(source) or not read.any()
            target = pairs.targets[pair]
            assert targets[part, row, : len(target)].tolist() == target.tolist()
            assert not targets[part, row, len(target) :].any()


@given(EXAMPLES, st.booleans())
def test_padding_is_counted_exactly(examples, decoder_only):
    pairs = collect_pairs(examples)
    plan = make_plan(pairs, Sizes(64, 2048), decoder_only=decoder_only)
    microbatches = {each for batch in plan.batches for each in batch.microbatches}
    arrays = [each.arrays(pairs)[0] for each in (*microbatches, *plan.batches)]
    entries = sum(ids.size for ids in arrays)
    tokens = sum((ids > 0).sum() for ids in arrays)
    assert plan.padding == pytest.approx(1 - tokens / entries if entries else 0.0)


def lengths_of(random, inputs):
    """Inputs and choices as T0's sets have them: most short, some long; few and many targets."""
    for number in range(inputs):
        source = np.append(random.integers(2, 99, int(random.gamma(3, 30)) + 8), number + 100)
        for _ in range(random.integers(2, 5)):
            yield {"inputs": source, "targets": random.integers(1, 99, random.integers(2, 9))}


def test_inputs_of_all_lengths_take_few_programs_and_batches_are_mostly_full():
    pairs = collect_pairs(list(lengths_of(np.random.default_rng(0), 1000)))
    plan = make_plan(pairs, Sizes())
    assert len(plan.programs) <= 25 and plan.padding < 0.2
    rows = np.concatenate([batch.pairs.ravel() for batch in plan.batches])
    assert (rows >= 0).mean() > 0.8


def test_choices_that_come_rarely_wait_until_their_inputs_would_be_overwritten():
    """One choice of 40 tokens in every fourth input, which is in a microbatch of its own."""
    examples = [
        {"inputs": [7] * 400 + [n] * (n % 4 == 0), "targets": [n] * (40 if n % 4 == 0 else 2)}
        for n in range(1, 61)
    ]
    plan = make_plan(collect_pairs(examples), Sizes())
    longest = [batch for batch in plan.batches if batch.length == 48]
    assert len(longest) == 3 and sum((batch.pairs >= 0).sum() for batch in longest) == 15


def test_only_what_is_to_do_is_planned():
    pairs = collect_pairs(examples_of(([5], [7]), ([5], [8]), ([6], [7])))
    (batch,) = make_plan(pairs, Sizes(), todo=np.array([1])).batches
    assert batch.pairs[batch.pairs >= 0].tolist() == [1]
    nothing = make_plan(pairs, Sizes(), todo=np.array([], np.int64))
    assert nothing.batches == () and nothing.padding == 0.0
