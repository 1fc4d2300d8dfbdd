"""Rows on disk: both formats, and what is said when they are missing or broken."""

import bz2
import datetime
import gzip
import json
import lzma
from pathlib import Path

import pyarrow
import pyarrow.feather
import pyarrow.ipc
import pyarrow.parquet
import pytest

from t0repro.errors import UserError
from t0repro.tasks import rows
from t0repro.tasks.readers import find_reader
from t0repro.tasks.row_codec import decode_row, encode_row
from t0repro.tasks.user_files import data_folders


def test_parquet_and_json_lines_give_the_same_rows(rows_root):
    path = rows_root / "super_glue" / "rte" / "train.jsonl"
    expected = list(rows.read_rows(path))
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(expected), path.with_name("other.parquet")
    )
    other = rows_root / "super_glue" / "rte" / "other.parquet"
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
        find_reader(rows_root, "super_glue", "rte", "test")
    text = str(error.value)
    assert str(rows_root / "super_glue" / "rte" / "test.jsonl") in text
    assert "train, validation" in text
    assert "one JSON object per line or as Parquet, Arrow, CSV or TSV" in text


def test_files_that_hold_no_split_are_named(tmp_path):
    folder = tmp_path / "super_glue" / "rte"
    folder.mkdir(parents=True)
    (folder / "validation.jsonl.zst").touch()
    with pytest.raises(UserError, match=r"its folder holds validation\.jsonl\.zst"):
        find_reader(tmp_path, "super_glue", "rte", "validation")


@pytest.mark.parametrize("name", ["validation.ndjson", "validation.feather", "validation.jsonl"])
def test_what_may_be_the_split_is_named_with_what_to_do(tmp_path, name):
    folder = tmp_path / "super_glue" / "rte"
    folder.mkdir(parents=True)
    (folder / name).symlink_to("nothing")
    with pytest.raises(UserError, match=f"If {name} is the split, .*If it is a link, put"):
        find_reader(tmp_path, "super_glue", "rte", "validation")


ROWS = [{"text": f"number {number}", "label": number % 2} for number in range(7)]


def write_rows(path, rows):
    """Writes rows in the format that a file's name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    table = pyarrow.Table.from_pylist(rows)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=2)
    elif path.suffix == ".arrow":
        with (
            pyarrow.OSFile(str(path), "wb") as file,
            pyarrow.ipc.new_stream(file, table.schema) as writer,
        ):
            writer.write_table(table, max_chunksize=2)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines.encode()))
    else:
        path.write_text(lines)


# Copies of the hub's repositories, of its branch of Parquet files, and what `save_to_disk` writes.
@pytest.mark.parametrize(
    ("subset", "names"),
    [
        ("rte", ["rte/train-00000-of-00002.parquet", "rte/train-00001-of-00002.parquet"]),
        ("rte", ["rte/train/0000.parquet", "rte/train/0001.parquet"]),
        ("rte", ["rte/train/data-00000-of-00002.arrow", "rte/train/data-00001-of-00002.arrow"]),
        ("rte", ["rte/train-00000-of-00002.jsonl.gz", "rte/train-00001-of-00002.jsonl.gz"]),
        ("rte", ["rte/data/train-00000-of-00001.parquet"]),
        (None, ["data/train-00000-of-00001.parquet"]),
        (None, ["plain_text/train-00000-of-00001.parquet"]),
        (None, ["train/data-00000-of-00001.arrow"]),
        (None, ["default/train.parquet/part-00000-1c0e.snappy.parquet"]),  # Spark's
        (None, ["default/train-00000-of-00001-a09b74b3ef9c3b56.parquet"]),  # the hub's, once
        (None, ["default/train.json"]),
        (None, ["default/train.json.gz"]),
    ],
)
def test_a_split_is_read_as_others_laid_it_out(tmp_path, subset, names):
    folder = tmp_path / "super_glue"
    per_file = -(-len(ROWS) // len(names))
    for at, name in enumerate(names):
        write_rows(folder / name, ROWS[at * per_file : (at + 1) * per_file])
    if names[0].startswith("train/"):
        (folder / "dataset_dict.json").write_text('{"splits": ["train"]}')
        (folder / "train" / "dataset_info.json").write_text("{}")
        state = {"_data_files": [{"filename": Path(name).name} for name in names]}
        (folder / "train" / "state.json").write_text(json.dumps(state))
        # What `map` leaves in the folder that it read.
        write_rows(folder / "train" / "cache-0a1b2c3d4e5f6071.arrow", ROWS[:1])
    for name in names:  # what macOS leaves beside a file that it copies
        (folder / name).with_name(f"._{Path(name).name}").write_bytes(b"\0\5\x16\7")
    assert rows.splits_on_disk(rows.dataset_folder(tmp_path, "super_glue", subset)) == ["train"]
    reader = find_reader(tmp_path, "super_glue", subset, "train")
    assert reader.count() == len(ROWS)
    for start, stop in [(0, None), (0, 4), (3, 5), (4, 7), (6, None), (7, 9)]:
        assert list(reader.read(start, stop)) == ROWS[start:stop]
    assert names[-1] in reader.place(len(ROWS) - 1)
    before = reader.origin()["sha256"]
    write_rows(folder / names[-1], ROWS[:1])
    assert find_reader(tmp_path, "super_glue", subset, "train").origin()["sha256"] != before


def test_a_missing_file_of_a_split_is_an_error(tmp_path):
    write_rows(tmp_path / "super_glue/rte/train-00000-of-00002.parquet", ROWS)
    with pytest.raises(UserError, match="has 1 of the 2 files of split 'train'"):
        find_reader(tmp_path, "super_glue", "rte", "train")


@pytest.mark.parametrize(
    "names",
    [
        ["train-00000-of-00002", "train-00000-of-00002 (1)"],
        ["train-00000-of-00001-a09b74b3ef9c3b56", "train-00000-of-00001-ffff74b3ef9c3b56"],
        ["train-00000-of-00001", "train-00001-of-00002"],
        ["train/data-00000-of-00001", "train/filtered"],
    ],
)
def test_files_of_two_copies_of_a_split_are_refused(tmp_path, names):
    for name in names:
        write_rows(tmp_path / f"super_glue/rte/{name}.parquet", ROWS)
    with pytest.raises(UserError, match="not of one copy of it"):
        find_reader(tmp_path, "super_glue", "rte", "train")


def test_a_folder_of_save_to_disk_whose_list_of_files_is_damaged_is_named(tmp_path):
    write_rows(tmp_path / "super_glue/rte/train/data-00000-of-00001.arrow", ROWS)
    state = tmp_path / "super_glue/rte/train/state.json"
    for content in ("{}", "[]", "cut", '{"_data_files": null}'):
        state.write_text(content)
        with pytest.raises(UserError, match="does not list") as caught:
            find_reader(tmp_path, "super_glue", "rte", "train")
        assert caught.value.where == str(state)
    state.write_text(
        '{"_data_files": [{"filename": "data-00000-of-00001.arrow"}, {"filename": 1}]}'
    )
    with pytest.raises(UserError, match="The folder lacks 1, of the 2 files"):
        find_reader(tmp_path, "super_glue", "rte", "train")
    indices = {"_data_files": [], "_indices_data_files": [{"filename": "indices.arrow"}]}
    state.write_text(json.dumps(indices))
    with pytest.raises(UserError, match="a selection of the rows"):
        find_reader(tmp_path, "super_glue", "rte", "train")


@pytest.mark.parametrize("name", ["train.json", "train.jsonl"])
def test_a_list_of_rows_is_read_and_its_broken_row_named(tmp_path, name):
    path = tmp_path / name
    path.write_text(json.dumps(ROWS, indent=1))
    assert list(rows.read_rows(path, 2, 4)) == ROWS[2:4]
    assert rows.number_of_rows(path) == len(ROWS)
    assert rows.place_of_row(path, 2) == f"{path}, row 3"
    path.write_text(json.dumps([*ROWS[:2], "text"]))
    with pytest.raises(UserError) as caught:
        list(rows.read_rows(path))
    assert caught.value.where == f"{path}, row 3"
    path.write_text("[{]")
    with pytest.raises(UserError, match="not a list of rows"):
        list(rows.read_rows(path))


@pytest.mark.parametrize(
    "columns",
    [
        {"text": {"0": "a", "1": "b"}, "label": {"0": 1, "1": 0}},
        {"text": ["a", "b"], "label": [1, 0]},
    ],
)
def test_columns_are_no_row(tmp_path, columns):
    path = tmp_path / "train.json"
    path.write_text(json.dumps(columns))
    with pytest.raises(UserError, match="(?s)object of columns, not rows.*orient="):
        list(rows.read_rows(path))
    path.rename(path := tmp_path / "train.jsonl")
    assert list(rows.read_rows(path)) == [columns]


def test_a_byte_order_mark_and_carriage_returns_are_no_part_of_rows(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(json.dumps(row).encode() for row in ROWS))
    assert list(rows.read_rows(path)) == ROWS


@pytest.mark.parametrize("name", ["train.jsonl", "train.json"])
def test_a_packed_file_without_the_ending_is_read(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, ROWS)).encode()))
    assert list(rows.read_rows(path)) == ROWS
    assert rows.number_of_rows(path) == len(ROWS)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le"])
@pytest.mark.parametrize("name", ["train.jsonl", "train.json"])
def test_utf_16_is_named(tmp_path, name, encoding):
    path = tmp_path / name
    path.write_bytes("".join(json.dumps(row) + "\n" for row in ROWS).encode(encoding))
    with pytest.raises(UserError, match="the file is UTF-16"):
        list(rows.read_rows(path))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("train.jsonl", '{"text": "a", "label": 0, "label": 1}'),
        ("train.jsonl", '{"text": {"label": 0, "label": 1}}'),
        ("train.json", '[{"text": "a", "label": 0, "label": 1}]'),
    ],
)
def test_a_key_that_is_given_twice_is_named(tmp_path, name, content):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(UserError, match="'label' is given twice"):
        list(rows.read_rows(path))


def test_a_file_that_cannot_be_unpacked_is_named(tmp_path):
    lines, listed = (ending.join([b'{"text": "cut"}'] * 9000) for ending in (b"\n", b",\n"))
    packed = gzip.compress(lines)
    for name, damaged in (
        ("train.jsonl.gz", packed[:40]),
        ("train.json.gz", gzip.compress(b"[" + listed + b"]")[:-12]),
        ("train.jsonl.gz", packed[:20] + b"\xff" * 9 + packed[29:]),
        ("train.jsonl.gz", lines),
    ):
        path = tmp_path / name
        path.write_bytes(damaged)
        with pytest.raises(UserError, match="cannot be unpacked") as caught:
            list(rows.read_rows(path))
        assert caught.value.where == str(path)


def test_saved_files_are_read_in_the_order_of_their_list(tmp_path):
    # As versions 1 of `datasets` copied the files of datasets that were put together.
    for name, part in (("b", ROWS[:3]), ("a", ROWS[3:])):
        write_rows(tmp_path / f"imdb/default/train/{name}.arrow", part)
    state = {"_data_files": [{"filename": "b.arrow"}, {"filename": "a.arrow"}]}
    (tmp_path / "imdb/default/train/state.json").write_text(json.dumps(state))
    assert list(find_reader(tmp_path, "imdb", None, "train").read()) == ROWS


@pytest.mark.parametrize("place", ["imdb", "imdb/default"])
def test_a_split_that_save_to_disk_wrote_without_its_folder_is_named(tmp_path, place):
    write_rows(tmp_path / place / "data-00000-of-00001.arrow", ROWS)
    (tmp_path / place / "state.json").write_text("{}")
    with pytest.raises(UserError, match="as save_to_disk wrote it") as caught:
        find_reader(tmp_path, "imdb", None, "train")
    assert str(tmp_path / "imdb/default/train") in caught.value.fix


def write_classes(path, names):
    """Writes rows whose column `label` has classes of these names."""
    features = {"label": {"names": names, "_type": "ClassLabel"}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.Table.from_pylist(ROWS).replace_schema_metadata(metadata)
    pyarrow.parquet.write_table(table, path)


def test_files_of_a_split_that_name_other_classes_are_refused(tmp_path):
    for at, names in enumerate([["no", "yes"], ["yes", "no"]]):
        write_classes(tmp_path / f"imdb/default/train-0000{at}-of-00002.parquet", names)
    with pytest.raises(UserError, match="The classes of 'label' are"):
        find_reader(tmp_path, "imdb", None, "train").class_names()
    write_classes(tmp_path / "imdb/default/train-00000-of-00002.parquet", ["yes", "no"])
    reader = find_reader(tmp_path, "imdb", None, "train")
    assert reader.class_names() == {"label": ["yes", "no"]}


def test_class_names_of_saved_arrow_files_are_read(tmp_path):
    features = {"label": {"names": ["no", "yes"], "_type": "ClassLabel"}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    table = pyarrow.Table.from_pylist(ROWS).replace_schema_metadata(metadata)
    path = tmp_path / "train.arrow"
    with (
        pyarrow.OSFile(str(path), "wb") as file,
        pyarrow.ipc.new_stream(file, table.schema) as writer,
    ):
        writer.write_table(table)
    assert rows.class_names(path) == {"label": ["no", "yes"]}


@pytest.mark.parametrize(
    "info",
    [{}, {"features": None}, {"features": {"label": {"num_classes": 2, "_type": "ClassLabel"}}}],
)
def test_metadata_without_class_names_names_none(tmp_path, info):
    path = tmp_path / "train.parquet"
    for metadata in ({"huggingface": json.dumps({"info": info})}, {"huggingface": "{}"}):
        table = pyarrow.Table.from_pylist(ROWS).replace_schema_metadata(metadata)
        pyarrow.parquet.write_table(table, path)
        assert rows.class_names(path) == {}
    pyarrow.parquet.write_table(table.replace_schema_metadata({"huggingface": "cut"}), path)
    with pytest.raises(UserError, match="huggingface"):
        rows.class_names(path)


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


def test_nanoseconds_are_read_as_microseconds(tmp_path):
    instant = pyarrow.array([1_577_934_245_000_001_999], pyarrow.timestamp("ns", "UTC"))
    span = pyarrow.array([3_000_000_001], pyarrow.duration("ns"))
    path = tmp_path / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"], "at": instant, "took": span}), path)
    (row,) = rows.read_rows(path)
    assert type(row["at"]) is datetime.datetime
    assert row["at"].isoformat() == "2020-01-02T03:04:05.000001+00:00"
    assert row["took"] == datetime.timedelta(seconds=3)
    assert decode_row(encode_row(row)) == row


def test_nanoseconds_inside_records_and_lists_are_read_as_microseconds(tmp_path):
    instant = pyarrow.array([1_577_934_245_000_001_999], pyarrow.timestamp("ns"))
    hour = pyarrow.array([3_000_000_001], pyarrow.time64("ns"))
    record = pyarrow.StructArray.from_arrays([instant, hour], ["at", "hour"])
    listed = pyarrow.ListArray.from_arrays([0, 1], record)
    path = tmp_path / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"meta": record, "times": listed}), path)
    (row,) = rows.read_rows(path)
    expected = {
        "at": datetime.datetime(2020, 1, 2, 3, 4, 5, 1),
        "hour": datetime.time(0, 0, 3),
    }
    assert row == {"meta": expected, "times": [expected]}
    assert type(row["meta"]["at"]) is datetime.datetime
    assert decode_row(encode_row(row)) == row


def test_arrow_files_are_read_as_well_as_streams(tmp_path):
    table = pyarrow.table({"text": ["a", "b", "c"], "label": [1, 0, 1]})
    path = tmp_path / "train.arrow"
    with pyarrow.ipc.new_file(path, table.schema) as file:
        for batch in table.to_batches(max_chunksize=2):
            file.write_batch(batch)
    assert list(rows.read_rows(path)) == table.to_pylist()
    assert list(rows.read_rows(path, 1, 3)) == table.to_pylist()[1:]
    assert rows.number_of_rows(path) == 3
    assert rows.class_names(path) == {}


def test_two_columns_of_one_name_are_refused(tmp_path):
    path = tmp_path / "train.parquet"
    columns = [pyarrow.array(["a"]), pyarrow.array(["b"])]
    pyarrow.parquet.write_table(pyarrow.Table.from_arrays(columns, ["text", "text"]), path)
    with pytest.raises(UserError, match="two columns 'text'"):
        list(rows.read_rows(path))


@pytest.mark.parametrize(
    "values",
    [
        pyarrow.array([10**8], pyarrow.date32()),
        pyarrow.array([10**15], pyarrow.timestamp("ms")),
        pyarrow.array([0], pyarrow.timestamp("ms", "Nowhere/None")),
        pyarrow.array([b"\xff"]).view(pyarrow.string()),
    ],
    ids=["date", "time", "zone", "text"],
)
@pytest.mark.parametrize("name", ["train.parquet", "train.arrow"])
def test_a_column_whose_values_python_lacks_is_named(tmp_path, values, name):
    table = pyarrow.table({"text": ["a"], "of": values})
    write = pyarrow.parquet.write_table if "parquet" in name else pyarrow.feather.write_feather
    write(table, str(tmp_path / name))
    with pytest.raises(UserError, match="Column 'of' has") as error:
        list(rows.read_rows(tmp_path / name))
    assert error.value.where == f"{tmp_path / name}, rows 1 to 1"


def test_parquet_with_a_damaged_page_is_named(tmp_path):
    path = tmp_path / "train.parquet"
    table = pyarrow.table({"text": [str(number) for number in range(100)]})
    pyarrow.parquet.write_table(table, path, compression="none", use_dictionary=False)
    content = path.read_bytes()
    path.write_bytes(content[:10] + b"\xff" * 50 + content[60:])
    with pytest.raises(UserError, match="The file is damaged") as error:
        list(rows.read_rows(path))
    assert error.value.where == str(path)


def test_a_split_in_two_formats_with_other_rows_is_refused(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    (tmp_path / "train.csv").write_text("text\na\nb\n")
    assert rows.find_rows_files(tmp_path, "train") == (tmp_path / "train.jsonl",)
    (tmp_path / "train.csv").write_text("text\na\nb\nc\n")
    words = r"'train' has 2 rows in train\.jsonl, but 3 in train\.csv"
    with pytest.raises(UserError, match=words):
        rows.find_rows_files(tmp_path, "train")
    # What holds no rows contradicts nothing.
    (tmp_path / "train.csv").write_text("")
    assert rows.find_rows_files(tmp_path, "train") == (tmp_path / "train.jsonl",)


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"PK\3\4\x14\0xl/workbook.xml", "a zip archive or a workbook"),
        (b"\x28\xb5\x2f\xfd\4\0", "packed with zstd"),
        (lzma.compress(b"{}"), "packed with xz"),
        (bz2.compress(b"{}"), "packed with bzip2"),
        (b"PAR1\x15\4", "Parquet"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 2\n", "Git LFS"),
    ],
)
@pytest.mark.parametrize("name", ["train.jsonl", "train.json", "train.csv", "train.tsv"])
def test_a_file_that_is_no_text_is_named_as_what_it_is(tmp_path, name, content, kind):
    (tmp_path / name).write_bytes(content)
    for read in (rows.number_of_rows, lambda path: list(rows.read_rows(path))):
        with pytest.raises(UserError, match=kind):
            read(tmp_path / name)


def test_a_gzipped_csv_file_is_named(tmp_path):
    (tmp_path / "train.csv").write_bytes(gzip.compress(b"text\na\n"))
    with pytest.raises(UserError, match="packed with gzip"):
        rows.number_of_rows(tmp_path / "train.csv")


def test_a_file_that_is_not_parquet_is_named(tmp_path):
    (tmp_path / "train.parquet").write_text("text")
    with pytest.raises(UserError, match=r"train\.parquet"):
        rows.number_of_rows(tmp_path / "train.parquet")


def test_a_changed_file_is_counted_again(rows_root):
    path = rows_root / "super_glue" / "rte" / "train.jsonl"
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
    kept = sorted(rows.choose_rows(1066, 100))
    gaps = {second - first for first, second in zip(kept, kept[1:], strict=False)}
    assert len(kept) == 100 and gaps <= {10, 11}
    assert list(rows.choose_rows(50, 100)) == list(range(50))


def test_a_seed_draws_the_rows_that_t_few_drew():
    # The first rows of data/few_shot/rte/32_shot/{0,42}_seed.jsonl in r-three/t-few, whose `idx` is
    # the number of the row among RTE's 2,490.
    assert {1057, 478, 976} <= set(rows.choose_rows(2490, 32, 42))
    assert len(rows.choose_rows(2490, 32, 42)) == 32
    assert rows.choose_rows(2490, 32, 0) != rows.choose_rows(2490, 32, 42)
    assert rows.choose_rows(2490, 32, 0) == rows.choose_rows(2490, 32, 0)


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
