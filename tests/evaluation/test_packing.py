"""Rows of packed inputs: nothing is lost, everything fits, and the best fit comes first."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from t0repro.evaluation.packing import Item, pack

LENGTH, TARGETS = 100, 10
LENGTHS, COUNTS = st.integers(1, LENGTH), st.integers(1, TARGETS)


def item(number, length, targets, alone=False):
    return Item(number, length, ((number,),), targets, alone)


def share(one):
    """How much of a row an item takes, in the dimension where it takes most."""
    return max(one.length / LENGTH, one.targets / TARGETS)


@given(
    st.lists(st.tuples(LENGTHS, COUNTS, st.booleans()), max_size=20),
    st.lists(st.tuples(LENGTHS, COUNTS), max_size=20),
)
def test_items_are_packed_once_largest_first_until_nothing_more_fits(own, fillers):
    own = [item(number, *size) for number, size in enumerate(own)]
    fillers = [item(len(own) + number, *size) for number, size in enumerate(fillers)]
    items = own + fillers
    rows, left = pack(own, fillers, LENGTH, TARGETS)
    packed = [number for row in rows for number in row.inputs]
    assert sorted(packed + [one.number for one in left]) == list(range(len(items)))
    assert {one.number for one in own} <= set(packed)
    waiting = {one.number for one in own if not one.alone}
    for row in rows:
        members = [items[number] for number in row.inputs]
        assert row.length == sum(one.length for one in members) <= LENGTH
        assert row.targets == sum(one.targets for one in members) <= TARGETS
        assert row.pieces == (row.inputs,)  # an item's only pair has the item's number
        if members[0].alone:
            assert len(members) == 1
            continue
        # The first is never a filler, and none of the others that wait is larger.
        assert row.inputs[0] in waiting
        assert share(members[0]) == max(share(items[number]) for number in waiting)
        waiting -= set(row.inputs)
        room, targets_room = LENGTH - row.length, TARGETS - row.targets
        over = left + [items[number] for number in waiting]
        assert not any(one.length <= room and one.targets <= targets_room for one in over)


@pytest.mark.parametrize(
    ("long", "many", "taken"),
    [((40, 1), (10, 5), "many"), ((50, 1), (10, 4), "long")],
)
def test_both_dimensions_of_the_free_room_decide_what_fits_best(long, many, taken):
    """In a row that is half full either way: 0.4 + 0.1 of a row against 0.1 + 0.5, and so on."""
    rows, _ = pack([item(0, 50, 5)], [item(1, *long), item(2, *many)], LENGTH, TARGETS)
    assert rows[0].inputs[:2] == (0, {"long": 1, "many": 2}[taken])
