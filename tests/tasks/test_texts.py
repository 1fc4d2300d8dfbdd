"""Pretraining objectives over one's own texts: what is hidden, what is kept, what is refused."""

import gzip
import json

import numpy as np
import pyarrow.parquet
import pytest

from t0repro import compat
from t0repro.config.data import SeqioDataConfig
from t0repro.data.train_data import runs_python, seqio_dataset
from t0repro.errors import UserError
from t0repro.tasks.texts import add_described, add_text_task

compat.install()
import seqio  # noqa: E402

WORDS = [f"word{number} and then" for number in range(400)]
LENGTHS = {"inputs": 60, "targets": 60}
# Bytes are 3 to 258; sentinels follow, the first one last.
BYTES = seqio.ByteVocabulary(extra_ids=100)
SENTINELS = range(259, 359)


@pytest.fixture
def files(tmp_path):
    """The same texts as two text files and as rows."""
    (tmp_path / "a.txt").write_text("\n".join(WORDS[:200]) + "\n\n")
    (tmp_path / "b.txt").write_text("\n".join(WORDS[200:]) + "\n")
    rows = [json.dumps({"story": text}) for text in WORDS]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows) + "\n")
    # As C4's files on the hub.
    packed = gzip.compress((tmp_path / "rows.jsonl").read_bytes())
    (tmp_path / "c4-train.00000-of-00001.json.gz").write_bytes(packed)
    table = pyarrow.Table.from_pylist([{"story": text} for text in WORDS])
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    (tmp_path / "all.txt.gz").write_bytes(gzip.compress("\n".join(WORDS).encode()))
    yield tmp_path
    for name in [*seqio.TaskRegistry.names()]:
        if name.startswith("texts_"):
            seqio.TaskRegistry.remove(name)


def examples(name, count=8, seed=1):
    data = SeqioDataConfig(
        mixture_or_task_name=name, sequence_length=LENGTHS, split="train", batch_size=1,
        shuffle=False, seed=None,
    )  # fmt: skip
    rows = seqio_dataset(data, seed=seed, num_epochs=None).take(count).as_numpy_iterator()
    keys = ("encoder_input_tokens", "decoder_target_tokens")
    return [tuple(np.trim_zeros(row[key][0]).tolist() for key in keys) for row in rows]


def filled_in(inputs, targets):
    """The inputs with each sentinel replaced by the span that the targets give for it."""
    spans, now = {}, None
    for token in targets[:-1]:
        if token in SENTINELS:
            now = spans.setdefault(token, [])
        else:
            now.append(token)
    whole = []
    for token in inputs[:-1]:
        whole += spans.pop(token) if token in SENTINELS else [token]
    assert not spans
    return whole


@pytest.mark.parametrize(
    ("pattern", "field"),
    [
        ("*.txt", "text"),
        ("all.txt.gz", "text"),
        ("rows.jsonl", "story"),
        ("c4-train*.json.gz", "story"),
        ("rows.parquet", "story"),
    ],
)
def test_span_corruption_hides_a_seventh_of_consecutive_text(files, pattern, field):
    add_text_task("texts_span", {"train": str(files / pattern)}, field=field, vocabulary=BYTES)
    text = BYTES.encode("".join(WORDS))
    at = 0
    for inputs, targets in examples("texts_span"):
        assert inputs[-1] == targets[-1] == BYTES.eos_id
        whole = filled_in(inputs, targets)
        hidden = sum(token not in SENTINELS for token in targets[:-1])
        assert whole == text[at : at + len(whole)] and 0.1 < hidden / len(whole) < 0.2
        assert len(inputs) == LENGTHS["inputs"]
        at += len(whole)


def test_prefix_lm_continues_a_text_from_a_random_place(files):
    add_text_task(
        "texts_prefix", {"train": str(files / "a.txt")}, objective="prefix_lm", vocabulary=BYTES
    )
    shares = set()
    for number, (inputs, targets) in enumerate(examples("texts_prefix")):
        assert inputs[-1] == targets[-1] == BYTES.eos_id
        assert inputs[:-1] + targets[:-1] == BYTES.encode(WORDS[number])
        shares.add(len(inputs) / (len(inputs) + len(targets)))
    assert len(shares) > 3


def test_what_is_hidden_follows_the_seed(files):
    add_text_task("texts_seeded", {"train": str(files / "a.txt")}, vocabulary=BYTES)
    assert examples("texts_seeded") == examples("texts_seeded") != examples("texts_seeded", seed=2)


def test_text_files_need_no_python_while_they_are_read(files):
    add_text_task("texts_plain", {"train": str(files / "*.txt")}, vocabulary=BYTES)
    add_text_task(
        "texts_rows", {"train": str(files / "rows.jsonl")}, field="story", vocabulary=BYTES
    )

    def pipeline(name):
        data = SeqioDataConfig(name, LENGTHS, "train", 2, shuffle=True, seed=1)
        return seqio_dataset(data, seed=1, num_epochs=None)

    assert not runs_python(pipeline("texts_plain")) and runs_python(pipeline("texts_rows"))


def test_a_description_registers_tasks_with_their_splits(files):
    described = f"span:texts_one={files}/a.txt; span:texts_one[validation]={files}/b.txt;"
    assert add_described(f"{described} prefix:texts_two={files}/*.txt") == [
        "texts_one",
        "texts_two",
    ]
    assert set(seqio.TaskRegistry.get("texts_one").splits) == {"train", "validation"}


def test_faults_are_named(files):
    with pytest.raises(UserError, match="'spam' is not an objective .nearest: 'span'"):
        add_described(f"spam:texts_x={files}/a.txt")
    with pytest.raises(UserError, match="No file of the task 'texts_x' is there"):
        add_text_task("texts_x", {"train": str(files / "none*.txt")})
    (files / "empty.jsonl").touch()
    with pytest.raises(UserError, match=r"'texts_x' has no text: 1 empty file(.|\n)*empty.jsonl"):
        add_text_task("texts_x", {"train": str(files / "empty.jsonl")})
    for name, content, words in (
        ("c4.json.zst", b"\x28\xb5\x2f\xfd\4\0", "packed with zstd"),
        ("c4.txt", gzip.compress(b"a text"), "packed with gzip"),
        ("windows.txt", "a text".encode("utf-16"), "UTF-16"),
    ):
        (files / name).write_bytes(content)
        with pytest.raises(UserError, match=words) as caught:
            add_text_task("texts_x", {"train": str(files / name)})
        assert caught.value.where == str(files / name)
    with pytest.raises(UserError, match="no objective 'denoising'"):
        add_text_task("texts_x", {"train": str(files / "a.txt")}, objective="denoising")
    add_text_task("texts_x", {"train": str(files / "rows.jsonl")}, vocabulary=BYTES)
    with pytest.raises(UserError, match="already"):
        add_text_task("texts_x", {"train": str(files / "a.txt")}, vocabulary=BYTES)
    with pytest.raises(Exception, match=r"(?s)The row has no text 'text'.*rows.jsonl, line 1"):
        examples("texts_x")
