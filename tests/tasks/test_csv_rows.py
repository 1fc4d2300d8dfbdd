"""Rows from CSV and TSV have the values that `datasets` gives them, and errors name the line."""

import pandas
import pyarrow
import pytest

from t0repro.errors import UserError
from t0repro.tasks import rows

# Read as `datasets` reads them: by pandas, then as an Arrow table.
TEXTS = [
    "text,label\nhello,1\nworld,0\n",
    '\ufefftext,label\n"a, b",1\n"line\nbreak",0\n',
    "a,b,c\n1,2.5,True\n,3,False\n",
    "a,b\n1,x\nNA,y\n",
    "a,b\nTrue,1\n,2\n",
    "a,b\nTrue,1\nyes,2\n",
    "a\n007\n1\n",
    "a\n1e3\n2\n",
    "a\ninf\n1\n",
    "a,b\n18446744073709551615,1\n3,2\n",
    "a,b\n-5,+3\n 4,5 \n",
    "a,b\n,\n,\n",
    "a,b\n2020-01-01,x\n2020-01-02,y\n",
    "a,b\n1_000,x\n2,y\n",
    "a,b\n0x10,x\n2,y\n",
    "a,b\n1.,x\n.5,y\n",
    "a,b\nnan,x\nnull,None\n",
    "a,b\ntrue,FALSE\nfalse,TRUE\n",
    ",b\n0,x\n1,y\n",
    "a,b\n1,x\n\n2,y\r\n",
    'a,b\n"say ""hi""",2\n\'q\',3\n',
    "a\n\u0661\n2\n",
    "a\nTrue\n1\n",
    # An index that pandas wrote, read and wrote again.
    ",Unnamed: 0,a\n0,0,x\n",
    ",Unnamed: 0.1,Unnamed: 0,a\n0,0,0,x\n",
    "\n\na,b\n1,x\n",
    # No type of whole numbers has both.
    "a\n-1\n9223372036854775808\n",
    "a\n1.5\n9223372036854775808\n",
    "a\ntRUE\nFalse\n",
    "a\nNAN\n1\n",
    "a\n nan\n1\n",
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
def test_values_are_those_of_datasets(tmp_path, text, suffix):
    if suffix == ".tsv":
        text = text.replace("a, b", "a\t b").replace(",", "\t")
    path = tmp_path / f"train{suffix}"
    path.write_text(text, encoding="utf-8", newline="")
    frame = pandas.read_csv(path, sep="\t" if suffix == ".tsv" else ",")
    expected = pyarrow.Table.from_pandas(frame, preserve_index=False).to_pylist()
    read = list(rows.read_rows(path))
    assert repr(read) == repr(expected)
    assert rows.number_of_rows(path) == len(read)
    assert list(rows.read_rows(path, 1, 2)) == read[1:2]


def test_a_number_that_a_float_would_cut_is_text(tmp_path):
    (tmp_path / "train.csv").write_text("id\n99999999999999999999999\n1\n")
    assert next(rows.read_rows(tmp_path / "train.csv")) == {"id": "99999999999999999999999"}
    (tmp_path / "train.csv").write_text("id,n\n9223372036854775809,1\nNA,2\n")
    assert [row["id"] for row in rows.read_rows(tmp_path / "train.csv")] == [
        "9223372036854775809",
        None,
    ]


def test_a_row_is_found_by_the_line_it_ends_on(tmp_path):
    path = tmp_path / "train.csv"
    path.write_text('text,label\n"two\nlines",1\n\nlast,0\n')
    assert [rows.place_of_row(path, index) for index in (0, 1)] == [
        f"{path}, line 3",
        f"{path}, line 5",
    ]


@pytest.mark.parametrize(
    ("content", "line", "what"),
    [
        (b"a,b\n1,2\n3\n", 3, "it has 1 fields, and the header has 2"),
        (b"a,b\n1,2,3\n", 2, "it has 3 fields, and the header has 2"),
        (b"a,a\n1,2\n", 1, "the header has 'a' twice"),
        (b"", 1, "the file has no header"),
        (b'a,b\n"open,2\nx,3\n', 2, "the quotation mark of a field is not closed"),
        (b'a,b\n1,x\n2,"y" z\n3,x\n', 3, "',' expected after"),
        (b"a;b\n1;2\n", 1, "the header is one field, 'a;b', which ';' separates"),
        (b"a,b\nx,1\n\xff,2\n", 3, "it is not UTF-8"),
        ("a,b\nx,1\n".encode("utf-16"), 1, "the file is UTF-16; save it as UTF-8"),
    ],
)
def test_a_broken_line_is_named(tmp_path, content, line, what):
    path = tmp_path / "train.csv"
    path.write_bytes(content)
    with pytest.raises(UserError, match=what) as error:
        list(rows.read_rows(path))
    assert error.value.where == f"{path}, line {line}"


def test_a_folder_of_csv_files_is_a_dataset(tmp_path):
    for name in ("train.csv", "test.tsv", "cloze_test_val__spring2016 - cloze_test_ALL_val.csv"):
        (tmp_path / name).write_text("a\n1\n")
    assert rows.splits_on_disk(tmp_path) == ["test", "train"]
