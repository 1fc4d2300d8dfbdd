"""Rows on disk: both formats, and what is said when they are missing or broken."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from t0repro.errors import UserError
from t0repro.tasks import rows
from t0repro.tasks.user_files import data_folders


def test_parquet_and_json_lines_give_the_same_rows(rows_root):
    path = rows.rows_file(rows_root, "super_glue", "rte", "train")
    expected = list(rows.read_rows(path))
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(expected), path.with_name("other.parquet")
    )
    other = rows.rows_file(rows_root, "super_glue", "rte", "other")
    assert list(rows.read_rows(other)) == expected
    assert rows.number_of_rows(other) == rows.number_of_rows(path) == 3


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_ranges_of_rows_make_up_the_whole(tmp_path, suffix):
    path, expected = tmp_path / f"train{suffix}", [{"number": number} for number in range(1000)]
    if suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(expected), path, row_group_size=300)
    else:
        path.write_text("\n".join(f'{{"number": {row["number"]}}}\n' for row in expected))
    for start, stop in [(0, 1), (299, 301), (300, 600), (950, None), (0, None), (1000, 1005)]:
        assert list(rows.read_rows(path, start, stop)) == expected[start:stop]
    line = "line 15" if suffix == ".jsonl" else "row 8"
    assert rows.place_of_row(path, 7).endswith(line)


def test_a_dataset_without_subset_lies_in_default(tmp_path):
    assert rows.dataset_folder(tmp_path, "imdb", None) == tmp_path / "imdb" / "default"


def test_splits_are_found_by_their_file_names(rows_root):
    folder = rows.dataset_folder(rows_root, "super_glue", "rte")
    (folder / "notes.txt").touch()
    assert rows.splits_on_disk(folder) == ["train", "validation"]
    assert rows.splits_on_disk(rows_root / "absent") == []


def test_a_missing_file_is_named_with_what_is_there_and_how_to_get_it(rows_root):
    with pytest.raises(UserError) as error:
        rows.rows_file(rows_root, "super_glue", "rte", "test")
    text = str(error.value)
    assert str(rows_root / "super_glue" / "rte" / "test.jsonl") in text
    assert "train, validation" in text
    assert "one JSON object per line or as Parquet, CSV or TSV" in text


@pytest.mark.parametrize(
    "line",
    ['{"text": "cut', "[1, 2]", '{"text": "\\ud800"}', b"\xff\xfe", b'{"text": "caf\xe9"}'],
)
def test_a_broken_line_is_named_by_file_and_number(tmp_path, line):
    path = tmp_path / "train.jsonl"
    broken = line if isinstance(line, bytes) else line.encode()
    path.write_bytes(b'{"text": "fine"}\n\n' + broken + b"\n")
    with pytest.raises(UserError, match=r"train\.jsonl, line 3"):
        list(rows.read_rows(path))


def test_a_file_that_is_not_parquet_is_named(tmp_path):
    (tmp_path / "train.parquet").write_text("text")
    with pytest.raises(UserError, match=r"train\.parquet"):
        rows.number_of_rows(tmp_path / "train.parquet")


def test_a_changed_file_is_counted_again(rows_root):
    path = rows.rows_file(rows_root, "super_glue", "rte", "train")
    assert rows.number_of_rows(path) == 3
    path.write_text('{"premise": "one"}\n')
    assert rows.number_of_rows(path) == 1


def test_the_data_folder_must_be_named_and_exist(monkeypatch, tmp_path):
    monkeypatch.delenv("T0REPRO_DATA_DIR", raising=False)
    with pytest.raises(UserError, match="T0REPRO_DATA_DIR is not set"):
        data_folders()
    monkeypatch.setenv("T0REPRO_DATA_DIR", str(tmp_path / "absent"))
    with pytest.raises(UserError, match="absent"):
        data_folders()


def test_kept_rows_are_evenly_spaced_and_as_many_as_asked_for():
    kept = sorted(rows.kept_rows(1066, 100))
    gaps = {second - first for first, second in zip(kept, kept[1:], strict=False)}
    assert len(kept) == 100 and gaps <= {10, 11}
    assert list(rows.kept_rows(50, 100)) == list(range(50))


def test_a_seed_draws_the_rows_that_t_few_drew():
    # The first rows of data/few_shot/rte/32_shot/{0,42}_seed.jsonl in r-three/t-few, whose `idx` is
    # the number of the row among RTE's 2,490.
    assert {1057, 478, 976} <= set(rows.kept_rows(2490, 32, 42))
    assert len(rows.kept_rows(2490, 32, 42)) == 32
    assert rows.kept_rows(2490, 32, 0) != rows.kept_rows(2490, 32, 42)
    assert rows.kept_rows(2490, 32, 0) == rows.kept_rows(2490, 32, 0)


@pytest.mark.parametrize("depth", [101, 100_000])
@pytest.mark.parametrize(("start", "end"), [("[", "]"), ('{"a":', "}")])
def test_a_row_that_is_nested_too_deep_is_named(tmp_path, depth, start, end):
    inside = start * depth + "1" + end * depth
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n{"a": ' + inside + "}\n")
    with pytest.raises(UserError, match="more than 100 deep") as caught:
        list(rows.read_rows(path))
    assert caught.value.where == f"{path}, line 2"


def test_a_row_with_many_brackets_that_is_not_deep_is_read(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"a": [[1]] * 500, "text": "[" * 500}) + "\n")
    assert len(list(rows.read_rows(path))) == 1
