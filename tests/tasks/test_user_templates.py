"""Your own prompts: what a file registers, and the errors of a broken one."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import seqio

from t0repro.errors import UserError
from t0repro.tasks import prompted_tasks
from t0repro.tasks.checking import Verdict, check_tasks
from t0repro.tasks.modules import load_tasks
from t0repro.tasks.printing import print_checks
from t0repro.tasks.readers import find_reader
from t0repro.tasks.registry import find_named_tasks, prompted_mixtures, task_descriptions
from t0repro.tasks.template_files import read_template_file
from t0repro.tasks.template_registration import register_templates
from t0repro.tasks.templates import Drop
from t0repro.tasks.user_files import data_folders, template_files

from ..helpers import commands
from ..runs.tiny_gin import MODEL, SIZES
from .prompt_caches import make

VOCABULARY = Path(__file__).resolve().parents[2] / "tasks" / "demo" / "sentencepiece.model"

REVIEWS = [
    {"text": "A fine soup.", "label": 1},
    {"text": "Cold tea ||| and no cake.", "label": 0},
    {"text": "We waited for an hour.", "label": 0},
    {"text": "The best bread in town.", "label": 1},
]
HEAD = "dataset: my_reviews\ntemplates:\n"
GOOD = """\
  11111111-0000-0000-0000-000000000001: !Template
    answer_choices: no ||| yes
    id: 11111111-0000-0000-0000-000000000001
    jinja: "{{text}}\\nWas it good? ||| {{answer_choices[label]}}"
    metadata: !TemplateMetadata
      choices_in_prompt: false
      metrics:
      - Accuracy
      original_task: true
    name: was it good?
    reference: ''
"""
OPEN_ENDED = """\
  two: !Template
    name: write one
    jinja: 'Write a {{ ["bad", "good"][label] }} review. ||| {{text}}'
"""


@pytest.fixture
def data(tmp_path, monkeypatch) -> Path:
    """A data folder with four reviews of a dataset that nobody else has."""
    root = tmp_path / "rows"
    for split in ("train", "validation"):
        file = root / "my_reviews" / "default" / f"{split}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(row) + "\n" for row in REVIEWS))
    monkeypatch.setenv("T0REPRO_DATA_DIR", str(root))
    monkeypatch.setenv("T0REPRO_VOCAB", str(VOCABULARY))
    return root


def write(folder: Path, text: str) -> Path:
    path = folder / "my.yaml"
    path.write_text(text)
    return path


@pytest.fixture
def forget():
    """Takes the registered tasks of my_reviews back, so that tests do not meet."""
    yield
    from t0repro.tasks import registry

    for name in {"my_outer", "my_mixture", "m"} & set(seqio.MixtureRegistry.names()):
        seqio.MixtureRegistry.remove(name)
        registry._mixtures.pop(name, None)
    for name in [name for name in prompted_tasks() if name.startswith("my_reviews")]:
        seqio.TaskRegistry.remove(name)
        registry._tasks.pop(name)


def test_a_file_registers_tasks_and_twins_by_t0s_names(data, tmp_path, forget):
    tasks = register_templates(write(tmp_path, HEAD + GOOD + OPEN_ENDED))
    assert [task.name for task in tasks] == ["my_reviews_was_it_good_", "my_reviews_write_one"]
    assert tasks[0].fixed_choices == ("no", "yes") and tasks[0].original_task
    assert tasks[1].template_id == "two" and not tasks[1].has_answer_choices
    names = [name for name in seqio.TaskRegistry.names() if name.startswith("my_reviews")]
    assert sorted(names) == [
        "my_reviews_was_it_good_",
        "my_reviews_was_it_good__score_eval",
        "my_reviews_write_one",
    ]
    task = seqio.TaskRegistry.get("my_reviews_was_it_good_")
    assert sorted(task.splits) == ["train", "validation"]
    examples = list(task.source.examples("train"))
    assert examples[1]["inputs"] == "Cold tea ||| and no cake.\nWas it good?"
    assert [example["targets"] for example in examples] == ["yes", "no", "no", "yes"]


def test_the_same_file_twice_is_once_and_another_prompt_of_the_name_is_refused(
    data, tmp_path, forget
):
    path = write(tmp_path, HEAD + GOOD)
    assert register_templates(path) == register_templates(path)
    write(tmp_path, HEAD + GOOD.replace("Was it good?", "Good?"))
    with pytest.raises(UserError, match="already, of another template"):
        register_templates(path)


def test_promptsources_own_files_are_read_as_promptsource_reads_them():
    from t0repro.tasks import templates

    for dataset, subset in (("ag_news", None), ("super_glue", "copa"), ("trec", None)):
        path = Path(templates._templates_folder()) / dataset / (subset or "") / "templates.yaml"
        content = read_template_file(path)
        assert (content.dataset, content.subset) == (dataset, subset)
        for mine in content.templates:
            theirs = templates.load_template(dataset, subset, mine.name)
            assert vars(mine.metadata) == vars(theirs.metadata)
            for field in ("id", "name", "jinja", "answer_choices", "reference"):
                assert getattr(mine, field) == getattr(theirs, field)


def test_every_file_of_promptsource_is_a_file_that_one_may_give():
    from t0repro.tasks import templates

    files = sorted(Path(templates._templates_folder()).rglob("templates.yaml"))
    counts = [len(read_template_file(path).templates) for path in files]
    assert len(counts) == 272 and sum(counts) == 1966


BROKEN = [
    ("cut YAML", HEAD + "  one: !Template\n    name: 'never closed\n", r"my\.yaml, line 5"),
    ("tab", HEAD + "\tone: x\n", r"line 3"),
    ("no keys", "- a\n- b\n", "no keys"),
    ("nothing", "", "no keys"),
    ("no dataset", "templates: {}\n", "'dataset' is missing"),
    ("no templates", "dataset: my_reviews\n", "'templates' is missing"),
    ("empty templates", "dataset: my_reviews\ntemplates: {}\n", "no templates(.|\n)*line 2"),
    (
        "dataset is a number",
        "dataset: 7\n" + HEAD.split("\n", 1)[1] + GOOD,
        "dataset is 7(.|\n)*line 1",
    ),
    (
        "mistyped key",
        HEAD + GOOD.replace("jinja:", "jinjja:"),
        "'jinjja'; nearest: 'jinja'(.|\n)*line 6",
    ),
    ("no jinja", HEAD + "  one: !Template\n    name: x\n", "'jinja' is missing(.|\n)*line 3"),
    ("untagged", HEAD + GOOD.replace("!Template\n", "\n"), "Tag it !Template"),
    (
        "name is not text",
        HEAD + GOOD.replace("name: was it good?", "name: no"),
        "name is False(.|\n)*line 12",
    ),
    (
        "syntax",
        HEAD + GOOD.replace("{{text}}", "{{text"),
        "Jinja(.|\n)*line 6, template 'was it good",
    ),
    (
        "later line",
        HEAD + GOOD.replace("{{text}}", "{% if text %}{{text}}"),
        "its line 2(.|\n)*line 6",
    ),
    ("filter", HEAD + GOOD.replace("{{text}}", "{{text | shout}}"), "shout"),
    (
        "choices",
        HEAD + GOOD.replace("no ||| yes", "'{{no ||| yes'"),
        "answer_choices is not a Jinja",
    ),
    ("no target", HEAD + GOOD.replace("||| {{", "{{"), "no target"),
    ("metric", HEAD + GOOD.replace("- Accuracy", "- Beauty"), "Beauty(.|\n)*my.yaml"),
    ("metrics", HEAD + GOOD.replace("\n      - Accuracy", " Accuracy"), "metrics is 'Accuracy'"),
    (
        "original_task",
        HEAD + GOOD.replace("original_task: true", "original_task: 'so'"),
        "original_task is 'so'",
    ),
    (
        "long name",
        HEAD + GOOD.replace("was it good?", "w" * 300),
        "a task whose name has 311 bytes",
    ),
    ("a way out", "dataset: ../../etc\ntemplates:\n" + GOOD, "leads out(.|\n)*line 1"),
    ("deep", "dataset: " + "[" * 9000, "nested too deeply"),
    (
        "empty mixtures",
        HEAD + GOOD + "mixtures: {}\n",
        "not a table of names and tasks(.|\n)*line 14",
    ),
    ("rate", HEAD + GOOD + "mixtures:\n  m:\n    a: 0\n", "rate of a(.|\n)*line 16"),
    (
        "task of a mixture",
        HEAD + GOOD + "mixtures: {m: {my_reviews_was_it_god_: 1}}\n",
        "no task or mixture 'my_reviews_was_it_god_'(.|\n)*'my_reviews_was_it_good_'",
    ),
    ("key twice", HEAD + GOOD + GOOD, "twice(.|\n)*line 14"),
    (
        "name twice",
        HEAD + GOOD + GOOD.replace("01:", "02:"),
        "line 3(.|\n)*would both be(.|\n)*line 14",
    ),
    (
        "names that become one",
        HEAD + OPEN_ENDED + OPEN_ENDED.replace("two", "three").replace("write one", "write, one"),
        "would both be",
    ),
    (
        "no rows",
        HEAD.replace("my_reviews", "my_reveiws") + GOOD,
        "no rows(.|\n)*'my_reviews/default'",
    ),
]


@pytest.mark.parametrize(
    ("text", "message"), [case[1:] for case in BROKEN], ids=[c[0] for c in BROKEN]
)
def test_a_broken_file_is_told_what_and_where(data, tmp_path, forget, text, message):
    with pytest.raises(UserError, match=message) as raised:
        register_templates(write(tmp_path, text))
    assert raised.value.fix


@pytest.mark.parametrize(
    "tag", ["!!python/object/apply:os.system", "!!python/name:os.system", "!Other"]
)
def test_a_file_makes_no_python_object(data, tmp_path, tag):
    made = tmp_path / "made"
    text = HEAD + f"  one: {tag}\n    - touch {made}\n"
    with pytest.raises(UserError, match=r"tag(.|\n)*line 3"):
        register_templates(write(tmp_path, text))
    assert not made.exists()


def test_a_missing_file_and_a_binary_one_are_named(tmp_path):
    with pytest.raises(UserError, match=r"absent\.yaml") as missing:
        read_template_file(tmp_path / "absent.yaml")
    assert "T0REPRO_TEMPLATES" in missing.value.fix and os.getcwd() in missing.value.fix
    assert "Nearest" not in missing.value.fix
    (tmp_path / "my.yaml").write_bytes(b"dataset: \xff\xfe")
    with pytest.raises(UserError, match="cannot be read"):
        read_template_file(tmp_path / "my.yaml")


MIXED = """\
mixtures:
  my_mixture:
    my_reviews_was_it_good_: 30
    my_reviews_write_one: 10
"""


def test_a_file_can_mix_its_tasks_with_rates(data, tmp_path, forget):
    path = write(tmp_path, HEAD + GOOD + OPEN_ENDED + MIXED)
    register_templates(path), register_templates(path)
    mixture = seqio.MixtureRegistry.get("my_mixture")
    rates = {task.name: mixture.get_rate(task) for task in mixture.tasks}
    assert rates == {"my_reviews_was_it_good_": 30.0, "my_reviews_write_one": 10.0}
    assert prompted_mixtures()["my_mixture"].rate("my_reviews_write_one") == 10.0
    write(tmp_path, HEAD + GOOD + OPEN_ENDED + MIXED.replace("30", "31"))
    with pytest.raises(UserError, match="mixture 'my_mixture' already"):
        register_templates(path)
    (alone := tmp_path / "alone.yaml").write_text(MIXED.replace("my_mixture", "of_others"))
    assert register_templates(alone) == []
    assert prompted_mixtures()["of_others"].rate("my_reviews_write_one") == 10.0


# Prompts that are broken although they are valid -----------------------------------------------

TYPO = GOOD.replace("{{text}}", "{{txet}}")
TYPO_IN_A_BRANCH = GOOD.replace("{{text}}", "{{text}}{% if label == 1 %}{{txet}}{% endif %}")
NO_TARGET = OPEN_ENDED.replace("{{text}}'", "{{text[:0]}}'")


def checked(path: Path):
    """What `tasks check` says of a file's one prompt."""
    (task,) = register_templates(path)
    (found,) = check_tasks([task.name], lambda count: None)
    return found


@pytest.mark.parametrize(("text", "rows"), [(TYPO, 4), (TYPO_IN_A_BRANCH, 2)])
def test_check_names_a_variable_that_rows_lack_and_counts_them(data, tmp_path, forget, text, rows):
    found = checked(write(tmp_path, HEAD + text))
    assert found.verdict is Verdict.BROKEN
    assert "'txet' is undefined; nearest: 'text'." in found.reason
    assert "train.jsonl, line" in found.reason and f"{rows} give no example" in found.reason
    assert found.no_example == {"the row lacks a variable, 'txet' is undefined": 2 * rows}


@pytest.mark.parametrize("below", ["my_reviews", "my_reviews/default"])
def test_a_data_folder_named_too_deep_is_answered_with_the_right_one(
    data, below, tmp_path, monkeypatch
):
    path = write(tmp_path, HEAD + GOOD)
    monkeypatch.setenv("T0REPRO_DATA_DIR", str(data / below))
    with pytest.raises(UserError, match=f"Or set T0REPRO_DATA_DIR to {data}, which holds them"):
        register_templates(path)
    monkeypatch.setenv("T0REPRO_DATA_DIR", str(data / "my_reviews/default/train.jsonl"))
    with pytest.raises(UserError, match="The data folder is a file"):
        register_templates(path)


def test_a_misspelt_file_of_templates_is_answered_with_the_nearest(data, tmp_path):
    write(tmp_path, HEAD + GOOD)
    with pytest.raises(UserError, match=r"no such file of templates(.|\n)*Nearest: .*/my\.yaml"):
        register_templates(tmp_path / "my.yml")


def test_a_file_that_is_no_split_is_named_where_rows_are_missing(data, tmp_path):
    folder, path = data / "my_reviews" / "default", write(tmp_path, HEAD + GOOD)
    for split in ("train", "validation"):
        (folder / f"{split}.jsonl").unlink()
    (data / "other" / "default").mkdir(parents=True)
    (data / "other" / "default" / "train.csv").write_text("text\n")
    with pytest.raises(UserError) as error:
        register_templates(path)
    assert error.value.fix and error.value.fix.endswith("nearest: 'other/default'.")
    (folder.parent / "rows.csv").write_text("text\n")
    with pytest.raises(UserError) as error:
        register_templates(path)
    assert error.value.fix and error.value.fix.endswith(f"Move {folder.parent / 'rows.csv'} there.")
    (folder / "train.CSV").write_text("text\n")
    with pytest.raises(UserError) as error:
        register_templates(path)
    assert error.value.fix and error.value.fix.endswith(f"{folder / 'train.CSV'} is no such file.")
    (folder.parent / "state.json").write_text("{}")  # as save_to_disk leaves one split
    with pytest.raises(UserError) as error:
        register_templates(path)
    assert error.value.fix and error.value.fix.endswith(f"one split, to {folder}/<split>.")


def test_a_file_of_the_datasets_name_in_the_data_folder_is_to_be_moved(data, tmp_path, forget):
    shutil.rmtree(data / "my_reviews")
    (data / "my_reviews.csv").write_text("text,label\nSoup.,1\n")
    with pytest.raises(UserError) as error:
        register_templates(write(tmp_path, HEAD + GOOD))
    assert error.value.fix.endswith(f"Move {data}/my_reviews.csv there.")


def test_check_counts_rows_without_a_label_and_targets_without_text(data, tmp_path, forget):
    file = data / "my_reviews" / "default" / "train.jsonl"
    hidden = [{"text": "Soup.", "label": -1}, {"text": "Tea.", "label": None}]
    file.write_text("".join(json.dumps(row) + "\n" for row in [*REVIEWS, *hidden]))
    found = checked(write(tmp_path, HEAD + GOOD))
    assert found.verdict is Verdict.SUSPECT and found.examples == 8
    assert found.reason == (
        "of 10 rows looked at, 2 give no example: its label is hidden (-1 or empty) or null"
    )


@pytest.mark.parametrize(
    ("write_rows", "reason"),
    [
        ("label", "label is -2, but there are 2 choices"),
        ("nan", "its column 'text' is nan"),
        ("binary", "its column 'text' is binary"),
    ],
)
def test_check_and_the_cache_name_row_and_column_of_a_value_that_is_none(
    data, tmp_path, forget, write_rows, reason
):
    folder = data / "my_reviews" / "default"
    if write_rows == "binary":
        table = pa.table({"text": [b"Soup.", b"Tea."], "label": [0, 1]})
        pq.write_table(table, folder / "train.parquet")
        (folder / "train.jsonl").unlink()
        place = r"train\.parquet, row 1"
    else:
        row = {"text": "Soup.", "label": -2} if write_rows == "label" else {"text": float("nan")}
        rows = [*REVIEWS, {"label": 0, **row}]
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        place = r"train\.jsonl, line 5"
    found = checked(write(tmp_path, HEAD + GOOD))
    assert found.verdict is Verdict.BROKEN and reason in found.reason
    assert re.search(place, found.reason)
    with pytest.raises(UserError, match=rf"{reason}(.|\n)*{place}"):
        make(tmp_path / "cache", "my_reviews_*", splits=("train",))


def test_check_counts_inputs_that_lose_tokens_at_t0s_length(data, tmp_path, forget, capsys):
    file = data / "my_reviews" / "default" / "train.jsonl"
    long = {"text": "soup", "words": ["soup"] * 2000, "label": 1}
    rows = [{"words": ["soup"], **row} for row in REVIEWS]
    file.write_text("".join(json.dumps(row) + "\n" for row in [*rows, long]))
    (data / "my_reviews" / "default" / "validation.jsonl").unlink()
    listed = GOOD.replace("{{text}}", "{% for word in words %}{{word}} {% endfor %}")
    found = checked(write(tmp_path, HEAD + listed))
    assert found.verdict is Verdict.OK and found.cut == {"inputs": 1, "targets": 0}
    print_checks([found])
    line = "inputs of more than 1,024 tokens (T0's length) lose their end: 20% of my_reviews"
    assert line in capsys.readouterr().out


def test_check_calls_a_prompt_broken_that_never_has_a_target(data, tmp_path, forget):
    found = checked(write(tmp_path, HEAD + NO_TARGET))
    assert found.verdict is Verdict.BROKEN
    assert found.reason.endswith("8 give no example: its target is empty")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TYPO, r"'txet' is undefined(.|\n)*train\.jsonl, line 1"),
        (TYPO_IN_A_BRANCH, r"'txet' is undefined(.|\n)*train\.jsonl, line [14]"),
        (NO_TARGET, "no example of the 4 rows of split 'train'.*4: its target is empty"),
    ],
)
def test_the_cache_refuses_a_prompt_that_is_broken(data, tmp_path, forget, text, message):
    register_templates(write(tmp_path, HEAD + text))
    with pytest.raises(UserError, match=message):
        make(tmp_path / "cache", "my_reviews_*", splits=("train",))
    assert not list((tmp_path / "cache").glob("[!.]*"))


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_a_file_without_rows_is_named_by_check_and_refused_by_the_cache(
    data, tmp_path, forget, content
):
    (data / "my_reviews" / "default" / "train.jsonl").write_text(content)
    found = checked(write(tmp_path, HEAD + GOOD))
    assert found.verdict is Verdict.BROKEN and "my_reviews has no rows" in found.reason
    with pytest.raises(UserError, match=r"my_reviews has no rows(.|\n)*train\.jsonl"):
        make(tmp_path / "cache", "my_reviews_*", splits=("train",))
    assert not (tmp_path / "cache").exists()


def test_the_cache_counts_by_reason_the_rows_that_it_leaves_out(data, tmp_path, forget):
    file = data / "my_reviews" / "default" / "train.jsonl"
    hidden = {"text": "Soup.", "label": -1}
    file.write_text("".join(json.dumps(row) + "\n" for row in [*REVIEWS, hidden]))
    register_templates(write(tmp_path, HEAD + GOOD))
    summary = make(tmp_path / "cache", "my_reviews_was_it_good_", splits=("train",))
    assert summary.examples == 4 and summary.dropped == {Drop.NO_LABEL.value: 1}


def test_training_and_evaluation_refuse_a_variable_that_rows_lack(data, tmp_path, forget):
    (task,) = register_templates(write(tmp_path, HEAD + TYPO))
    rows = task_descriptions()[task.name].rows
    with pytest.raises(UserError, match=r"'txet' is undefined(.|\n)*line 1(.|\n)*'text', 'label'"):
        list(rows.examples("train"))


# As a module of tasks ----------------------------------------------------------------------------


def test_the_module_without_its_variable_says_which(data):
    ended = subprocess.run(
        [sys.executable, "-P", "-c", "import t0repro.tasks.user_templates"],
        capture_output=True,
        text=True,
        env={key: value for key, value in os.environ.items() if key != "T0REPRO_TEMPLATES"},
    )
    assert ended.returncode != 0 and "T0REPRO_TEMPLATES is not set" in ended.stderr


def command(name: str, *arguments: str, cwd: Path, templates: Path) -> str:
    """Runs an installed command with T0REPRO_TEMPLATES set; its output."""
    done = subprocess.run(
        [str(Path(sys.executable).with_name(name)), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "T0REPRO_TEMPLATES": str(templates)},
        cwd=cwd,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


def test_seqio_caches_ones_own_prompts_and_both_read_the_cache_as_it_renders(
    data, tmp_path, forget, monkeypatch
):
    path = write(tmp_path, HEAD + GOOD + OPEN_ENDED + MIXED)
    module = "--module_import=t0repro.tasks.user_templates"
    command(
        "seqio_cache_tasks",
        module,
        "--tasks=my_reviews_was_it_good_.*",
        f"--output_cache_dir={tmp_path / 'cache'}",
        "--pipeline_options=--runner=FnApiRunner",
        cwd=tmp_path,
        templates=path,
    )
    name = "my_reviews_was_it_good__score_eval"
    register_templates(path)
    task = seqio.TaskRegistry.get(name)
    monkeypatch.setattr(task, "_cache_dir", str(tmp_path / "cache" / name))

    def examples(use_cached: bool) -> list:
        dataset = task.get_dataset(None, "train", use_cached=use_cached, shuffle=False)
        return sorted(
            [(key, np.asarray(value).tolist()) for key, value in sorted(example.items())]
            for example in dataset.as_numpy_iterator()
        )

    assert examples(True) == examples(False)
    assert len(examples(True)) == 2 * len(REVIEWS)

    shutil.rmtree(data / "my_reviews" / "default")  # training reads the cache alone
    (data / "my_reviews" / "default").mkdir()
    (data / "my_reviews" / "default" / "train.jsonl").touch()
    printed = command(
        "t5_mesh_transformer",
        module,
        "--backend=jax",
        "--model_dir=model",
        f"--additional_task_cache_dirs={tmp_path / 'cache'}",
        "--gin_file=dataset.gin",
        "--skip_missing",  # the other task of the mixture is not cached
        "--gin_param=MIXTURE_NAME = 'my_mixture'",
        "--gin_file=demo/t5.1.1.demo.gin",
        "--gin_file=learning_rate_schedules/constant_0_001.gin",
        "--gin_param=run.train_steps = 2",
        "--gin_param=run.batch_size = ('tokens_per_batch', 64)",
        "--gin_param=run.sequence_length = {'inputs': 32, 'targets': 8}",
        "--gin_param=mesh_train_dataset_fn.use_cached = True",
        "--gin_param=pack_dataset.use_custom_ops = False",
        "--gin_param=utils.run.mesh_shape = []",
        cwd=tmp_path,
        templates=path,
    )
    assert "my_mixture: 1 of 2 tasks" in printed
    assert "Left out: my_reviews_write_one (not cached)" in printed
    assert "examples of my_reviews_was_it_good_ were compared with their text" in printed
    assert "step 2 of 2" in printed and (tmp_path / "model" / "checkpoint_2").is_dir()


def test_of_several_data_folders_the_first_that_has_a_split_is_read(
    data, tmp_path, monkeypatch, forget
):
    mine = tmp_path / "mine" / "my_reviews" / "default"
    mine.mkdir(parents=True)
    (mine / "train.csv").write_text("text,label\nMy own soup.,1\n")
    (mine / "test.jsonl").write_text(json.dumps(REVIEWS[0]) + "\n")
    monkeypatch.setenv("T0REPRO_DATA_DIR", f"{tmp_path / 'mine'}:{data}")
    task = register_templates(write(tmp_path, HEAD + GOOD))[0]
    rows = task_descriptions()[task.name].rows
    assert sorted(rows.files_of_splits) == ["test", "train", "validation"]
    assert [row["text"] for row in rows.reader("train").read()] == ["My own soup."]
    assert rows.reader("validation").count() == len(REVIEWS)
    with pytest.raises(UserError, match="its folder holds test, train, validation") as error:
        find_reader(None, "my_reviews", None, "dev")
    assert str(mine) in error.value.where and str(data) in error.value.where
    monkeypatch.setenv("T0REPRO_DATA_DIR", f"{data}:{tmp_path / 'nowhere'}")
    with pytest.raises(UserError, match="nowhere does not exist"):
        find_reader(None, "my_reviews", None, "train")


@pytest.mark.parametrize(
    ("variable", "read"),
    [("T0REPRO_DATA_DIR", data_folders), ("T0REPRO_TEMPLATES", template_files)],
)
def test_a_home_and_commas_in_a_variable_are_answered_with_what_to_write(
    variable, read, tmp_path, monkeypatch
):
    paths = [str(tmp_path / name) for name in ("a", "b")]
    for path in paths:
        Path(path).mkdir()
    monkeypatch.setenv(variable, ",".join(paths))
    with pytest.raises(UserError, match=f"colons(.|\n)*{variable}={':'.join(paths)}"):
        read()
    monkeypatch.setenv(variable, f"{paths[0]}:~/my_data")
    with pytest.raises(UserError, match=f"expand the ~ of '~/my_data'(.|\n)*{variable}"):
        read()
    monkeypatch.setenv(variable, ":".join(paths))
    assert [*map(str, read())] == paths


def test_a_mixture_inside_a_mixture_has_seqios_rates(data, tmp_path, forget):
    """In any order of the file, with SeqIO and without."""
    text = (
        HEAD
        + GOOD
        + OPEN_ENDED
        + """\
mixtures:
  my_outer: {my_mixture: 10, my_reviews_write_one: 0.7}
  my_mixture: {my_reviews_was_it_good_: 3, my_reviews_write_one: 4}
"""
    )
    path = write(tmp_path, text)
    register_templates(path)
    expected = seqio.MixtureRegistry.get("my_outer")
    outer = prompted_mixtures()["my_outer"]
    rates = {task.name: expected.get_rate(task) for task in expected.tasks}
    assert {name: outer.rate(name) for name in outer.tasks} == rates
    assert rates == {"my_reviews_was_it_good_": 30 / 7, "my_reviews_write_one": 40 / 7 + 0.7}
    register_templates(path)  # again, which changes nothing
    code = f"""
import sys
from t0repro.tasks.modules import load_tasks
from t0repro.tasks.registry import find_tasks, prompted_mixtures
load_tasks([], [{str(path)!r}], into_seqio=False)
outer = prompted_mixtures()["my_outer"]
assert "seqio" not in sys.modules
print({{task.name: outer.rate(task.name) for task in find_tasks("my_outer")}})
load_tasks(["t0repro.tasks.demo"], into_seqio=True)
import seqio
outer = seqio.MixtureRegistry.get("my_outer")
print({{task.name: outer.get_rate(task) for task in outer.tasks}})
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines() == [str(rates)] * 2, done.stderr


def test_every_command_that_takes_tasks_reads_the_files_of_the_variable(data, tmp_path):
    path = write(tmp_path, HEAD + GOOD + "mixtures: {my_mixture: {my_reviews_was_it_good_: 3}}\n")
    env = {**os.environ, "T0REPRO_TEMPLATES": str(path)}
    listed = commands.run("t0repro", "tasks", "ls", "--mixture=my_mixture", env=env)
    assert "my_reviews_was_it_good_" in listed.stdout, listed.stderr
    code = "from t0repro.reports.prompts import load_prompts; print(*load_prompts(()))"
    reports = subprocess.run(
        [sys.executable, "-P", "-c", code], env=env, capture_output=True, text=True
    )
    assert "my_reviews_was_it_good_" in reports.stdout.split(), reports.stderr
    explained = commands.run(
        "t0repro", "explain", "--gin_file=dataset.gin", "--gin_file=demo/t5.1.1.demo.gin",
        "--gin_param=MIXTURE_NAME = 'my_mixture'", "--gin_param=run.train_steps = 1",
        "--gin_param=utils.run.mesh_shape = []",
        env=env,
    )  # fmt: skip
    assert explained.returncode == 0, explained.stderr
    sizes = [f"--gin_bindings={binding}" for binding in SIZES]
    files = [f"--gin_file={MODEL}", *sizes, "--gin.DROPOUT_RATE=0.0", "--gin.BATCH_SIZE=8"]
    named = ["--gin.MIXTURE_OR_TASK_NAME='my_mixture'", "--gin.MODEL_DIR='d'"]
    trained = commands.run(
        "t0repro", "train", *files, *named, "--gin_file=t5x/configs/runs/pretrain.gin",
        "--gin.TRAIN_STEPS=1", "--gin.USE_CACHED_TASKS=False", "--dry_run",
        "--gin.TASK_FEATURE_LENGTHS={'inputs': 64, 'targets': 16}",
        env=env, cwd=tmp_path,
    )  # fmt: skip
    assert trained.returncode == 0, trained.stderr
    assert "train: 1 task of my_mixture with the split 'train'" in trained.stdout
    static = tmp_path / "bench.html"
    browsed = commands.run("t0repro", "browse", f"--out={static}", env=env)
    assert browsed.returncode == 0 and "my_reviews_was_it_good_" in static.read_text()


def test_beside_modules_a_file_of_the_variable_without_rows_is_left_out_aloud(
    data, tmp_path, forget, monkeypatch, capsys
):
    path = write(tmp_path, HEAD + GOOD)
    monkeypatch.setenv("T0REPRO_TEMPLATES", str(path))
    monkeypatch.setenv("T0REPRO_DATA_DIR", str(tmp_path))
    for _ in range(2):  # noted once
        load_tasks(["t0repro.tasks.demo"], into_seqio=False)
    assert capsys.readouterr().err.count("is left out: There are no rows for") == 1
    with pytest.raises(UserError, match="There is no mixture or task") as error:
        find_named_tasks("my_reviews_was_it_good_", "--mixture")
    assert f"{path} is left out: There are no rows for" in error.value.fix
    with pytest.raises(UserError, match="There are no rows for"):
        load_tasks([], into_seqio=False)
    monkeypatch.setenv("T0REPRO_DATA_DIR", str(data))  # the file was not taken as read
    load_tasks(["t0repro.tasks.demo"], into_seqio=False)
    assert "my_reviews_was_it_good_" in task_descriptions()


MODULE = """import t0repro.tasks.user_templates
from t0repro.tasks.registration import add_mixture
add_mixture("of_module", {"my_reviews_was_it_good_": 3})
"""


def test_a_modules_mixture_of_the_variables_prompts_is_listed_checked_and_browsed(data, tmp_path):
    path = write(
        tmp_path, HEAD + GOOD + OPEN_ENDED + "mixtures: {of_file: {my_reviews_write_one: 2}}\n"
    )
    (tmp_path / "with_prompts.py").write_text(MODULE)
    (tmp_path / "without.py").write_text(MODULE.partition("\n")[2])
    env = {**os.environ, "T0REPRO_TEMPLATES": f"{path}:{tmp_path / 'new.yaml'}"}

    def browse(*arguments):
        (tmp_path / "bench.html").unlink(missing_ok=True)
        done = commands.run(
            "t0repro", "browse", "--out=bench.html", *arguments, env=env, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
        page = (tmp_path / "bench.html").read_text()
        return "my_reviews_was_it_good_" in page, "my_reviews_write_one" in page

    module = ("--module_import=with_prompts", "--mixture=of_module")
    assert browse(*module) == (True, False)
    assert browse("--mixture=of_file") == (False, True)
    assert browse("--dataset=my_reviews") == (True, True)
    env["T0REPRO_TEMPLATES"] = str(path)
    for name in ("ls", "check"):
        done = commands.run("t0repro", "tasks", name, *module, env=env, cwd=tmp_path)
        assert done.returncode == 0 and "1 task" in done.stdout, done.stderr
    refused = commands.run(
        "t0repro", "tasks", "ls", "--module_import=without", env=env, cwd=tmp_path
    )
    assert "by `import t0repro.tasks.user_templates`" in " ".join(refused.stderr.split())


@pytest.mark.parametrize(
    ("module", "fix"),
    [("my_module.py", "Write my_module."), ("../my/tasks.py", "tasks, with PYTHONPATH=../my.")],
)
def test_a_modules_file_is_answered_with_its_name(module, fix):
    with pytest.raises(UserError, match="is a file, and not the name of a module") as error:
        load_tasks([module], None, into_seqio=False)
    assert error.value.fix.endswith(fix)


@pytest.mark.parametrize(
    ("module", "near"), [("t0repro.task.demo", "t0repro.tasks.demo"), ("my_taks", "my_tasks")]
)
def test_a_misspelt_module_is_answered_with_the_nearest(monkeypatch, tmp_path, module, near):
    monkeypatch.chdir(tmp_path)
    Path("my_tasks.py").touch()
    with pytest.raises(UserError, match=f"There is no module '{module}'") as error:
        load_tasks([module], None, into_seqio=False)
    assert error.value.fix.endswith(f"Nearest: {near}.")
