"""What the bench's pages say: the list, rows beside their examples, lengths, findings, files."""

import base64
import csv
import hashlib
import html
import json
import re
import sys

import pyarrow
import pyarrow.parquet
import pytest

from t0repro.browse.bench import make_bench, version
from t0repro.browse.draft import Draft, check_draft, find_faults, new_draft
from t0repro.browse.lengths import measure
from t0repro.browse.listing import list_datasets, list_prompts, options
from t0repro.browse.pages import Pages
from t0repro.browse.shown_rows import show_rows
from t0repro.browse.static_file import render_static
from t0repro.errors import UserError
from t0repro.tasks.catalog import t0_datasets
from t0repro.tasks.checking import Verdict, check_prompt
from t0repro.tasks.demo.datasets import VOCABULARY
from t0repro.tasks.modules import load_tasks
from t0repro.tasks.registry import task_descriptions
from t0repro.tasks.showing import show_task
from t0repro.tasks.template_files import read_template_file
from t0repro.tasks.template_registration import register_templates

from ..reports.suites import Page as ParsedPage
from ..reports.test_hostile_names import HOSTILE

ROWS = [
    {"text": "A quiet, lovely film.", "label": 1, "n": 3},
    {"text": "Two hours that I want back.", "label": 0, "n": 3},
    {"text": "No label.", "label": -1, "n": 3},
    {"text": "qz7 " * 3000, "label": 1, "n": 0},
]
JINJA = "{{text}}\nWas it good? ||| {{answer_choices[label]}}"


@pytest.fixture(scope="module", autouse=True)
def _described():
    """Registers T0's tasks and the demo's alone, whatever this process registered before."""
    modules = ["t0repro.tasks.t0", "t0repro.tasks.demo"]
    before = {name: sys.modules.pop(name, None) for name in modules}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("T0REPRO_VOCAB", str(VOCABULARY))
        patch.setattr("t0repro.tasks.registry._tasks", {})
        patch.setattr("t0repro.tasks.registry._mixtures", {})
        load_tasks(modules, into_seqio=False)
        yield
    for name, module in before.items():
        del sys.modules[name]
        if module is not None:
            sys.modules[name] = module


def write_rows(path, rows=ROWS):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0], delimiter="\t" if path.suffix == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
    return path


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A bench of one's own rows, and no other prompts."""
    monkeypatch.setenv("T0REPRO_VOCAB", str(VOCABULARY))
    bench = make_bench(
        [tmp_path / "mine.yaml"], [write_rows(tmp_path / "reviews.jsonl")], "demo_train"
    )
    bench.tasks = {}
    return bench


DATASET = ("reviews", None)


def test_the_list_has_all_of_t0s_names_and_each_filter_agrees_with_the_registry():
    bench = make_bench()
    datasets = {(each.dataset, each.subset) for each in t0_datasets()}
    bench.tasks = {
        name: task
        for name, task in bench.tasks.items()
        if (task.rows.dataset, task.rows.subset) in datasets
    }
    listed = list_prompts(bench)
    names = {each.name for each in listed} | {each.twin for each in listed if each.twin}
    assert len(names) == 971 and names <= task_descriptions().keys()
    by_name = {each.name: each for each in listed}
    held_out = {each.name for each in listed if "held out from T0" in each.uses}
    assert {"super_glue_rte_GPT_3_style", "anli_GPT_3_style_r2"} <= held_out
    assert "ag_news_classify" not in held_out
    assert by_name["super_glue_copa_choose"].choices == "per row"
    assert by_name["ag_news_classify"].choices == "4"
    assert by_name["common_gen_Given_concepts_type_1"].choices == "no"
    assert by_name["adversarial_qa_dbert_based_on"].random
    assert not by_name["ag_news_classify"].random
    for name, values in options(listed).items():
        for value in values:
            assert any(value in each.facts[name] for each in listed)
    datasets = {each.name: each for each in list_datasets(bench)}
    assert datasets["super_glue/rte"].prompts == 10
    assert sum(each.prompts for each in datasets.values()) == len(bench.tasks)


def test_rows_are_those_of_tasks_show_and_say_why_there_is_no_example(own, tmp_path, monkeypatch):
    task = own.save(DATASET, Draft("good", JINJA, "no ||| yes").template(), None)
    shown = show_rows(task, "reviews", 0, 10)
    assert [row.number for row in shown] == [0, 1, 2, 3]
    assert "label is hidden" in shown[2].reason and shown[2].example is None
    assert shown[3].cut and "tokens of the input beyond 1,024" in shown[3].cut[0]
    folder = tmp_path / "data"
    write_rows(folder / "reviews" / "default" / "reviews.jsonl")
    monkeypatch.setenv("T0REPRO_DATA_DIR", str(folder))
    register_templates(tmp_path / "mine.yaml")
    same = show_task("reviews_good", "reviews", 10)
    assert [row.example for row in shown if row.example] == same.examples
    text = Pages(own, None).prompt(task, None, 0)
    assert (
        html.escape("A quiet, lovely film.") in text and "No example: its label is hidden" in text
    )


def test_a_dataset_without_a_prompt_yet_says_how_many_rows_it_has(tmp_path):
    rows = write_rows(tmp_path / "reviews.csv")
    pages = Pages(make_bench([tmp_path / "mine.yaml"], [rows], "demo_train"), None)
    assert pages.row_counts(DATASET) == {"reviews": 4}
    shown = pages.dataset(DATASET)
    assert "reviews: 4 rows." in shown and "<table" not in shown
    assert "reviews 4" in pages.dataset_cells(DATASET)


def test_splits_stand_in_the_order_of_their_use(tmp_path):
    for split in ("test", "validation", "train"):
        write_rows(tmp_path / f"{split}.csv")
    files = [tmp_path / f"{split}.csv" for split in ("test", "validation", "train")]
    folder = tmp_path / "mine" / "default"
    folder.mkdir(parents=True)
    moved = [file.rename(folder / file.name) for file in files]
    pages = Pages(make_bench([], moved, "demo_train"), None)
    assert list(pages.row_counts(("mine", None))) == ["train", "validation", "test"]


def test_lengths_count_tokens_and_the_share_that_is_cut(own):
    task = own.save(DATASET, Draft("good", JINJA, "no ||| yes").template(), None)
    found = measure(task)
    assert (found.rows, found.examples) == (4, 3) and found.cut == pytest.approx(1 / 3)
    longest = max(
        row.example.input_tokens for row in show_rows(task, "reviews", 0, 4) if row.example
    )
    assert found.inputs is not None and found.inputs[1] == longest
    missing = measure(make_bench(dataset="trec").find("trec_pick_the_best_descriptor"))
    assert missing.error or missing.rows


ERRORS = [
    ("{{text}}\n{{ text ||| x", "no", "jinja", 2, "{{ text ||| x"),
    ("{{text}}\n{% if %} ||| x", "no", "jinja", 2, "{% if %} ||| x"),
    ("{{text}}\n\n{{ txet }} ||| x", "no", "jinja", 3, "{{ txet }} ||| x"),
    ("{{text}}\n{{ 1 // (n - 3) }} ||| x", "no", "jinja", 2, "{{ 1 // (n - 3) }} ||| x"),
    ("{{text}}\n{{ 'a' * 10**10 }} ||| x", "no", "jinja", 2, "{{ 'a' * 10**10 }} ||| x"),
    ("{{text}}\n||| x", "a |||\n{{ txet }}", "answer_choices", 2, "{{ txet }}"),
    ("{{text}} ||| x", "a |||\n{{ b", "answer_choices", 2, "{{ b"),
    ("{{text}} ||| {{answer_choices[label]}}", "only", "jinja", 1, None),
    ("{{text}}, no target", "", "jinja", None, ""),
]


@pytest.mark.parametrize(("jinja", "choices", "field", "line", "source"), ERRORS)
def test_an_error_has_its_place_in_the_template(own, jinja, choices, field, line, source):
    draft = Draft("a", jinja, choices)
    faults = find_faults(draft)
    if not faults:
        task = own.describe(DATASET, draft.template())
        faults = check_draft(draft, task, show_rows(task, "reviews", 0, 10))
    assert (faults[0].field, faults[0].line) == (field, line) and faults[0].tone == "bad"
    assert source is None or faults[0].source == source
    if "txet" in (source or "") and field == "jinja":
        assert faults[0].text.endswith("'txet' is undefined; nearest: 'text'")


def test_without_a_model_a_comparison_says_nothing_of_differences(own):
    task = own.save(DATASET, Draft("good", JINJA, "no ||| yes").template(), None)
    text = Pages(own, None).comparison((task, task), ("", ""), None, 0, 12, True)
    assert "differ" not in text and text.count("<article") == 4


def test_the_nearest_field_is_named_as_a_template_names_it(tmp_path):
    rows = write_rows(tmp_path / "mine.jsonl", [{"the-text": "a", "label": 1}])
    bench = make_bench([tmp_path / "mine.yaml"], [rows], "demo_train")
    draft = Draft("a", "{{ the_txt }} ||| x")
    (row,) = show_rows(bench.describe(("mine", None), draft.template()), "mine", 0, 1)
    assert row.reason.endswith("nearest: 'the_text'")
    rows = write_rows(tmp_path / "blanks.jsonl", [{"the text": "a", "label": 1}])
    bench = make_bench([tmp_path / "blanks.yaml"], [rows], "demo_train")
    (row,) = show_rows(bench.describe(("blanks", None), draft.template()), "blanks", 0, 1)
    assert row.reason.endswith(
        "'the text', which no template can name; rename the column in the rows"
    )


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".parquet"])
def test_the_first_template_of_a_new_dataset_is_one_that_passes_tasks_check(tmp_path, suffix):
    rows = [row for row in ROWS if row["label"] >= 0]
    file = write_rows(tmp_path / f"my reviews{suffix}", rows)
    bench = make_bench([tmp_path / "mine.yaml"], [file], "demo_train")
    dataset = ("my_reviews", None)
    assert bench.find_dataset("my_reviews") == dataset
    draft = new_draft(bench, dataset)
    task = bench.save(dataset, draft.template(), None)
    assert check_prompt(task).verdict is Verdict.OK
    assert [each.name for each in tmp_path.iterdir() if each.suffix == ".yaml"] == ["mine.yaml"]
    edited = Draft.of(task.rows.template, version(task))
    assert (edited.jinja, edited.base) == (draft.jinja, version(task))
    again = bench.save(dataset, edited.template(), edited.base)
    assert (
        version(again) == version(task)
        and len(read_template_file(tmp_path / "mine.yaml").templates) == 1
    )


def test_a_prompt_is_saved_in_the_file_that_it_is_from_or_nowhere(own, tmp_path):
    first = own.save(DATASET, Draft("one", JINJA, "no ||| yes").template(), None)
    own.files = [*own.files, tmp_path / "second.yaml"]
    assert own.file_of(("other", None)) == tmp_path / "second.yaml"
    (tmp_path / "second.yaml").write_text((tmp_path / "mine.yaml").read_text().replace(
        first.prompt.template_id, "2").replace("name: one", "name: two"))  # fmt: skip
    own.read_file(tmp_path / "second.yaml")
    other = Draft.of(own.find("reviews_two").rows.template, version(own.find("reviews_two")))
    own.save(DATASET, other.template(), other.base)
    assert len(read_template_file(tmp_path / "mine.yaml").templates) == 1
    with pytest.raises(UserError, match="No file was named"):
        own.save(("third", None), Draft("a", JINJA).template(), None)
    with pytest.raises(UserError, match="already"):
        own.save(DATASET, Draft("two", JINJA).template(), None)


def test_files_of_rows_that_are_none_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(UserError) as misspelt:
        make_bench((), [tmp_path / "emtpy.jsonl"])
    assert f"Nearest: {tmp_path / 'empty.jsonl'}" in misspelt.value.fix
    for name in ("a.txt", "none.csv", "empty.jsonl"):
        with pytest.raises(UserError) as error:
            make_bench((), [tmp_path / name])
        assert "--rows" in (error.value.where or "")


def hostile_bench(folder, text):
    """A bench in which every text of a file and of its rows is hostile."""
    rows = [{"text": text, "label": 1, "c": text}, {"text": text, "label": -1, "c": text}]
    file = write_rows(folder / "reviews.jsonl", rows)
    bench = make_bench([folder / "mine.yaml"], [file], "demo_train")
    bench.tasks = {}
    name = re.sub(r"[\x00-\x1f\x7f-\x9f{}]", "", text)[:100] or "x"
    jinja = f"{{{{text}}}} {{% raw %}}{text}{{% endraw %}} ||| {{{{answer_choices[label]}}}}"
    choices = "{{c}} ||| b{{c}}"
    if "{% raw %}" in text:
        jinja = "{{text}} ||| {{answer_choices[label]}}"
    task = bench.save(DATASET, Draft(name, jinja, choices, metrics=("Accuracy",)).template(), None)
    return bench, task


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_templates_and_rows_are_text_on_every_page(tmp_path, text):
    (tmp_path / "tame").mkdir()
    pages, tame = [], []
    # Short, or tokens would be cut off on the one page and not on the other.
    for folder, words, found in ((tmp_path, text[:100], pages), (tmp_path / "tame", "tame", tame)):
        bench, task = hostile_bench(folder, words)
        each = Pages(bench, None)
        names = (task, task)
        found += [
            each.prompts(),
            each.datasets(),
            each.dataset(DATASET),
            each.prompt(task, None, 0),
            each.new_prompt(DATASET, new_draft(bench, DATASET)),
            each.comparison(names, ("", ""), None, 0, 10, False),
            render_static(each, 2)[0],
        ]
    for one, other in zip(pages, tame, strict=True):
        assert ParsedPage(one).tags == ParsedPage(other).tags


def test_the_static_file_is_bounded_makes_no_request_and_says_what_it_has(own):
    assert "no prompt to show" in render_static(Pages(own, None), 2)[1]  # though there are rows
    for number in range(4):
        own.save(DATASET, Draft(f"good {number}", JINJA, "no ||| yes").template(), None)
    text, said = render_static(Pages(own, None), 2)
    assert "up to 2 rows of each of 4 prompts" in said and said in html.unescape(text)
    assert text.count("<article") == 8
    cut, said = render_static(Pages(own, None), 2, most_bytes=1)
    assert "3 prompts with rows have none here" in said and cut.count("<article") == 2
    assert not re.search(r"""(src|href)=["'](?!#|data:,)""", text) and "url(" not in text
    policy = html.unescape(re.search(r'Policy" content="([^"]*)"', text)[1])
    for tag in ("style", "script"):
        (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.S)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy and "unsafe" not in policy


def test_the_static_file_says_which_prompts_lack_rows_or_examples_and_why(own, tmp_path):
    own.save(DATASET, Draft("with_example", JINJA, "no ||| yes").template(), None)
    own.save(DATASET, Draft("typo", "{{txet}} ||| x").template(), None)
    text, said = render_static(Pages(own, None), 9)
    assert said.endswith(
        "; 1 prompt with rows that give no example, such as reviews_typo: row 0: 'txet' is"
        " undefined; nearest: 'text'"
    )
    assert Pages(own, None).row_faults() == [said.partition("such as ")[2]]  # for the console
    assert said in html.unescape(text)
    other = make_bench([tmp_path / "mine.yaml"], [write_rows(tmp_path / "films.csv")])
    other.tasks = {name: task for name, task in other.tasks.items() if name.startswith("reviews_")}
    assert render_static(Pages(other, None), 2)[1] == (
        "No prompt is for the rows given, of the dataset films: the prompts are for reviews."
        " A file's name, or DATASET/default/SPLIT.csv, gives the dataset of its rows"
    )
