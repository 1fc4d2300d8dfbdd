from __future__ import annotations

import pytest

from t0repro.words import columns, counted, sized


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (1_540, "1.54 KB"),
        (3_100_000, "3.10 MB"),
        (11_400_000_000, "11.40 GB"),
        (1_200_000_000_000, "1.20 TB"),
    ],
)
def test_sizes_come_in_the_largest_unit_that_they_fill(number, words):
    assert sized(number) == words


def test_counts_agree_with_their_nouns():
    assert [counted(number, "example") for number in (0, 1, 2000)] == [
        "0 examples",
        "1 example",
        "2,000 examples",
    ]
    assert counted(2, "entry", "entries") == "2 entries"


def test_a_tables_columns_are_as_wide_as_their_longest_cell():
    rows = [("name", "shape"), ("embedding", "32128x512"), ("step", "")]
    assert columns(rows) == ["name       shape", "embedding  32128x512", "step"]
    assert columns([]) == []
