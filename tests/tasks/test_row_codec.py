"""Rows go through their encoding unchanged, types included."""

import datetime
import decimal
import errno
import json
import math
import resource

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from t0repro.tasks import row_codec
from t0repro.tasks.prompt_cache.spool import write_spool
from t0repro.tasks.rows import read_rows

LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(),
    st.binary(),
    st.datetimes(),
    st.dates(),
    st.times(),
    st.timedeltas(),
    st.decimals(allow_nan=False),
)
KEYS = st.one_of(st.text(), st.just("\0t0repro"))
ROWS = st.dictionaries(
    KEYS,
    st.recursive(
        LEAVES,
        lambda inner: st.one_of(
            st.lists(inner),
            st.lists(inner).map(tuple),
            st.dictionaries(KEYS, inner),
            st.dictionaries(st.integers(), inner),
        ),
        max_leaves=8,
    ),
)


def kinds(value):
    """The value's types, its items' included."""
    if isinstance(value, dict):
        return [(type(key), kinds(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [type(value), *map(kinds, value)]
    return type(value)


@given(ROWS)
def test_any_row_comes_back_equal_in_value_and_type(row):
    encoded = row_codec.encode_row(row)
    assert b"\n" not in encoded and encoded.isascii()
    back = row_codec.decode_row(encoded)
    assert back == row and kinds(back) == kinds(row)


def test_numbers_that_are_none_come_back():
    back = row_codec.decode_row(row_codec.encode_row({"a": math.nan, "b": math.inf}))
    assert math.isnan(back["a"]) and back["b"] == math.inf


def test_what_no_row_holds_is_refused():
    with pytest.raises(TypeError, match="Path"):
        row_codec.encode_row({"a": __import__("pathlib").Path()})


def test_rows_of_every_type_that_parquet_has_go_through_a_spool(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    when = datetime.datetime(2021, 10, 15, 12, 30, 1, 5, tzinfo=datetime.UTC)
    table = pa.table(
        {
            "text": ["a", None],
            "bytes": [b"\0\xff", b""],
            "when": pa.array([when, None], pa.timestamp("us", "UTC")),
            "day": [datetime.date(1, 1, 1), datetime.date(9999, 12, 31)],
            "time": [datetime.time(1, 2, 3, 4), None],
            "span": [datetime.timedelta(days=-1, microseconds=7), None],
            "price": [decimal.Decimal("1.10"), decimal.Decimal("-2.00")],
            "pairs": pa.array([[("k", 1)], []], pa.map_(pa.string(), pa.int64())),
            "nested": [{"x": [1.5, None]}, None],
        }
    )
    pq.write_table(table, tmp_path / "rows.parquet")
    rows = list(read_rows(tmp_path / "rows.parquet"))
    spool = write_spool(enumerate(rows), tmp_path / "spool")
    with spool.open() as reader:
        back = [row for _, _, row in reader.rows(np.arange(2))]
    assert back == rows and [kinds(row) for row in back] == [kinds(row) for row in rows]


def test_a_spool_that_holds_a_pickle_is_not_read_as_one(tmp_path):
    import pickle

    class Runs:
        def __reduce__(self):
            return (open, (str(tmp_path / "made"), "w"))

    spool = write_spool([(0, {"a": 1})], tmp_path / "spool")
    data = pickle.dumps(Runs())
    (tmp_path / "spool.rows").write_bytes(data)
    np.save(tmp_path / "spool.offsets.npy", np.array([0, len(data)], np.uint64))
    with spool.open() as reader, pytest.raises((json.JSONDecodeError, UnicodeDecodeError)):
        list(reader.rows(np.arange(1)))
    assert not (tmp_path / "made").exists()


def test_arrays_beside_a_spool_cannot_hold_objects(tmp_path):
    spool = write_spool([(0, {"a": 1})], tmp_path / "spool")
    np.save(tmp_path / "spool.offsets.npy", np.array([{}], object), allow_pickle=True)
    with pytest.raises(ValueError, match="Python objects"), spool.open():
        pass


def test_no_room_for_the_arrays_beside_a_spool_is_the_systems_own_error(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        # Room for the rows, but not for the eight bytes of each one's offset.
        resource.setrlimit(resource.RLIMIT_FSIZE, (1200, limits[1]))
        with pytest.raises(OSError) as error:
            write_spool(((number, {}) for number in range(200)), tmp_path / "spool")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "spool.rows").stat().st_size < 1200
    assert error.value.errno == errno.EFBIG
