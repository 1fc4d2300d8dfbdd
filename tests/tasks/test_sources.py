"""Sources: rows from a local folder, from the hub, from their authors; and rows that do not fit."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from t0repro.errors import UserError
from t0repro.tasks import rows, story_cloze
from t0repro.tasks.catalog import catalog
from t0repro.tasks.seqio_tasks import PromptedSource, batch_examples
from t0repro.tasks.source import PromptedRows, Split
from t0repro.tasks.templates import load_template, template_names

RTE = {"premise": "It rains.", "hypothesis": "It is wet.", "label": 0, "idx": 0}


def source_of(dataset, subset, split="train", root=None, max_rows=None):
    """A source of a dataset's first template."""
    template = load_template(dataset, subset, template_names(dataset, subset)[0])
    splits = {split: Split(split, max_rows)}
    return PromptedSource(PromptedRows("task", dataset, subset, template, splits, root))


@pytest.fixture
def rte(tmp_path):
    """Writes lines as super_glue/rte's training split, and returns its source."""

    def write(*lines):
        folder = tmp_path / "super_glue" / "rte"
        folder.mkdir(parents=True, exist_ok=True)
        content = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
        (folder / "train.jsonl").write_bytes(b"\n".join(content) + b"\n")
        return source_of("super_glue", "rte", root=tmp_path)

    return write


def test_blocks_hold_the_examples_in_order_and_equally_many_choices_each():
    def example(number, choices):
        return {"inputs": str(number), "answer_choices": ["choice"] * choices}

    examples = [example(n, choices) for n, choices in enumerate([2] * 70 + [3] + [2] * 2)]
    blocks = list(batch_examples(examples))
    assert [len(block["inputs"]) for block in blocks] == [64, 6, 1, 2]
    values = [zip(*block.values(), strict=True) for block in blocks]
    assert [
        dict(zip(blocks[0], each, strict=True)) for block in values for each in block
    ] == examples
    assert list(batch_examples([])) == []


def test_tasks_give_single_examples_whatever_block_they_were_in(rte):
    source = rte(*[{**RTE, "idx": n, "premise": f"Row {n}."} for n in range(70)])
    read = list(source.get_dataset("train", shuffle=False).as_numpy_iterator())
    assert [row["inputs"].decode() for row in read] == [
        example["inputs"] for example in source.examples("train")
    ]
    assert {row["answer_choices"].shape for row in read} == {(2,)}


# Rows -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({**RTE, "premise": None}, "'premise': it is null where text is wanted"),
        ({**RTE, "label": 7}, "'label': it is 7; its classes are 0 to 1"),
        ({**RTE, "label": "maybe"}, "'label': it is 'maybe', which is none of its classes"),
        ({**RTE, "premise": 3}, r"'premise': it is 3 \(int\), not text"),
        (
            {"premise": "a", "label": 0, "idx": 1},
            "'hypothesis': it is missing; the row has 'premise', 'label', 'idx'",
        ),
        (b'{"premise": "It rai', "not a row in JSON"),
        (b'{"premise": "caf\xe9"}', "not a row in JSON: 'utf-8' codec"),
    ],
)
def test_a_bad_row_is_named_by_column_file_and_line_before_any_example_is_made(rte, row, what):
    source = rte(RTE, b"", row, RTE)
    with pytest.raises(UserError, match=what) as error:
        source.num_input_examples("train")
    assert "train.jsonl, line 3" in str(error.value)
    with pytest.raises(UserError, match=what):
        source.get_dataset("train", shuffle=False)
    with pytest.raises(UserError, match=what):
        list(source.examples("train"))


def test_hidden_labels_are_rows_like_others(rte):
    source = rte({**RTE, "label": -1})
    assert [row["label"] for _, row in source.rows("train")] == [-1]
    assert next(source.examples("train"))["targets"] == "<NO LABEL>"


def test_names_of_classes_and_columns_of_no_template_are_brought_to_the_schema(rte):
    source = rte({**RTE, "label": "not_entailment", "comment": "more"}, {**RTE, "idx": None})
    assert [row for _, row in source.rows("train")] == [{**RTE, "label": 1}, {**RTE, "idx": None}]


def test_ranges_of_rows_make_up_the_split_with_the_numbers_of_the_data(rte, tmp_path):
    rte(*({**RTE, "idx": number} for number in range(50)))
    source = source_of("super_glue", "rte", root=tmp_path, max_rows=20)
    whole = list(source.rows("train"))
    assert len(whole) == 20 and all(index == row["idx"] for index, row in whole)
    bounds = [0, 7, 8, 30, source.row_count("train")]
    parts = [
        pair
        for start, stop in zip(bounds, bounds[1:], strict=False)
        for pair in source.rows("train", start, stop)
    ]
    assert parts == whole


def test_the_origin_of_a_file_is_its_path_size_time_and_checksum(rte):
    source = rte(RTE)
    origin = source.origin("train")
    content = Path(origin["path"]).read_bytes()
    assert origin["source"] == "local" and origin["bytes"] == len(content)
    assert origin["sha256"] == hashlib.sha256(content).hexdigest()
    rte(RTE, RTE)
    assert source.origin("train")["sha256"] != origin["sha256"]
    assert source.num_input_examples("train") == 2


def test_all_rows_at_hand_fit_the_schemas(shared_data):
    read = 0
    for dataset, subset in catalog():
        held = rows.splits_on_disk(rows.dataset_folder(shared_data, dataset, subset))
        for split in held:
            source = source_of(dataset, subset, split, shared_data)
            for (_, row), raw in zip(source.rows(split), source.reader(split).read(), strict=True):
                assert row == raw
                read += 1
    assert read > 1000


# Ways to get rows ---------------------------------------------------------------------------------


def test_missing_rows_say_both_ways_to_get_them(monkeypatch, tmp_path):
    monkeypatch.delenv("T0REPRO_DATA_HUB", raising=False)
    monkeypatch.setenv("T0REPRO_DATA_DIR", str(tmp_path))
    with pytest.raises(UserError) as error:
        source_of("super_glue", "rte").num_input_examples("train")
    text = str(error.value)
    assert str(tmp_path / "super_glue" / "rte" / "train.jsonl") in text
    assert "T0REPRO_DATA_HUB=1" in text and "datasets/aps/super_glue" in text
    monkeypatch.delenv("T0REPRO_DATA_DIR")
    with pytest.raises(UserError, match="T0REPRO_DATA_DIR is not set"):
        source_of("super_glue", "rte").num_input_examples("train")
    monkeypatch.setenv("T0REPRO_DATA_HUB", "yes")
    with pytest.raises(UserError, match="Set T0REPRO_DATA_HUB=1"):
        source_of("super_glue", "rte").num_input_examples("train")


STORY = (
    "InputStoryid,InputSentence1,InputSentence2,InputSentence3,InputSentence4,"
    "RandomFifthSentenceQuiz1,RandomFifthSentenceQuiz2,AnswerRightEnding\r\n"
)


def test_story_cloze_says_where_to_ask_and_is_read_as_it_is_sent(monkeypatch, tmp_path):
    monkeypatch.setenv("T0REPRO_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("T0REPRO_DATA_HUB", "1")  # it is on no hub
    source = source_of("story_cloze", "2016", "validation")
    with pytest.raises(UserError) as error:
        source.num_input_examples("validation")
    folder = tmp_path / "story_cloze" / "2016"
    assert story_cloze.STORY_CLOZE_FORM in str(error.value)
    file = folder / "cloze_test_val__spring2016 - cloze_test_ALL_val.csv"
    assert str(file) in str(error.value)
    folder.mkdir(parents=True)
    row = '7,"Ann, who was tired, sat.",Two.,Three.,Four.,She slept.,She flew.,1\r\n'
    file.write_text(STORY + row, newline="")
    assert list(source.rows("validation"))[0][1] == {
        "story_id": "7",
        "input_sentence_1": "Ann, who was tired, sat.",
        "input_sentence_2": "Two.",
        "input_sentence_3": "Three.",
        "input_sentence_4": "Four.",
        "sentence_quiz1": "She slept.",
        "sentence_quiz2": "She flew.",
        "answer_right_ending": 1,
    }
    assert source.available_splits() == ["validation"]
    assert source.origin("validation")["source"] == "manual"
    assert source.num_input_examples("validation") == 1
    assert next(source.examples("validation"))["targets"] == "She slept."
    file.write_text(STORY + row + "8,One.,Two.", newline="")
    with pytest.raises(UserError, match="line 3"):
        list(source.rows("validation"))


# The hub ------------------------------------------------------------------------------------------

TREC = {
    "text": ["What is DNA ?", "Who is Ann ?"],
    "coarse_label": [0, 3],
    "fine_label": [0, 1],
}

ASK = """
import contextlib, json, os
from t0repro.tasks.catalog import catalog
from t0repro.tasks.hub_rows import bytes_to_fetch
from t0repro.errors import UserError
from t0repro.tasks.readers import find_reader
from t0repro.tasks.schema import schema_of
found = []
for dataset, subset, split in (
    ("trec", None, "train"), ("super_glue", "cb", "train"), ("anli", None, "dev_r1"),
    ("glue", "mrpc", "train"), ("story_cloze", "2016", "validation"),
):
    try:
        reader = find_reader(None, dataset, subset, split)
    except UserError as error:
        found.append({"error": str(error)})
        continue
    names = tuple((column, tuple(names)) for column, names in reader.class_names().items())
    schema = schema_of(dataset, subset, frozenset(), names)
    rows = [schema.bring(row) for row in reader.read()]
    assert list(reader.read(1)) == list(reader.read())[1:] and reader.count() == len(rows)
    found.append({"rows": rows, "origin": reader.origin()})
trec, cache = catalog()["trec", None], os.environ["HF_HOME"]
there = bytes_to_fetch(trec, "train")
os.rename(cache, cache + ".moved")
with contextlib.suppress(UserError):  # without a hub
    assert there == 0 < bytes_to_fetch(trec, "train")
os.rename(cache + ".moved", cache)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def hub_folder(tmp_path_factory):
    """A hub's datasets as they lie there today.

    TREC has renamed columns, and other classes in another order. TREC's and ANLI's only subsets are
    called `default`. MRPC's repository is gated here.
    """
    import datasets

    folder = tmp_path_factory.mktemp("hub")
    anli = dict.fromkeys(("uid", "premise", "hypothesis", "reason"), ["Rain fell."])
    for name, columns in (
        ("facebook/anli/default/dev_r1", {**anli, "label": [2]}),
        ("nyu-mll/glue/mrpc/train", {"sentence1": ["a"]}),
    ):
        (folder / name).mkdir(parents=True)
        datasets.Dataset.from_dict(columns).to_parquet(str(folder / name / "0000.parquet"))
    (folder / "nyu-mll" / "glue" / "gated").touch()
    features = datasets.Features(
        {
            "text": datasets.Value("string"),
            "coarse_label": datasets.ClassLabel(names=["ABBR", "ENTY", "DESC", "HUM"]),
            "fine_label": datasets.ClassLabel(names=["ABBR:abb", "HUM:ind"]),
        }
    )
    path = folder / "CogComp" / "trec" / "default" / "train" / "0000.parquet"
    path.parent.mkdir(parents=True)
    datasets.Dataset.from_dict(TREC, features=features).to_parquet(str(path))
    return folder


@pytest.fixture(scope="module")
def ask_hub(hub_folder, tmp_path_factory):
    """Asks for rows in a process that knows no hub but a local one, or none."""
    cache = tmp_path_factory.mktemp("cache")
    server = subprocess.Popen(
        [sys.executable, Path(__file__).parent / "hub_server.py", hub_folder],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    address = server.stdout.readline().strip()

    def ask(up=True):
        environment = {
            **os.environ,
            "HF_ENDPOINT": address if up else "http://127.0.0.1:9",
            "HF_HOME": str(cache / "huggingface"),
            "XDG_CACHE_HOME": str(cache),
            "HF_HUB_DISABLE_XET": "1",
            "T0REPRO_DATA_HUB": "1",
        }
        environment.pop("T0REPRO_DATA_DIR", None)
        done = subprocess.run(
            [sys.executable, "-P", "-c", ASK], capture_output=True, text=True, env=environment
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout), done.stderr

    yield ask
    server.terminate()
    server.communicate()


def test_rows_of_the_hub_are_brought_to_the_schema_of_t0s_time_and_stay_when_it_is_gone(ask_hub):
    (trec, cb, anli, mrpc, story_cloze), log = ask_hub()
    labels = catalog()["trec", None]
    assert labels.hub is not None and labels.hub.repository == trec["origin"]["repository"]
    # ABBR is class 2 of T0's coarse labels and abb class 34 of the fine ones; HUM 3, ind 4.
    assert trec["rows"] == [
        {"label-coarse": 2, "label-fine": 34, "text": "What is DNA ?"},
        {"label-coarse": 3, "label-fine": 4, "text": "Who is Ann ?"},
    ]
    assert trec["origin"]["commit"].startswith("c0ffee")
    assert "has 2 rows on the hub today; T0's had 5452" in log
    assert "aps/super_glue" in cb["error"] and "cb/train.jsonl" in cb["error"]
    assert anli["origin"]["repository"] == "facebook/anli" and anli["rows"][0]["label"] == 2
    assert "accept them at https://huggingface.co/datasets/nyu-mll/glue" in mrpc["error"]
    assert "HF_TOKEN" in mrpc["error"] and "glue/mrpc/train.jsonl" in mrpc["error"]
    assert "form at https://cs.rochester.edu" in story_cloze["error"]
    assert "spring2016 - cloze_test_ALL_val.csv" in story_cloze["error"]
    (again, cb, *_), _ = ask_hub(up=False)
    assert again["rows"] == trec["rows"] and again["origin"] == trec["origin"]
    assert "cannot be read from the hub" in cb["error"]
