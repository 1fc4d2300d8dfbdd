"""The command t0repro tasks, on the demo and on prompts of your own."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from t0repro.cli import app

from ..helpers.own_lines import foreign_lines

ROOT = Path(__file__).resolve().parents[2]
DEMO = "--module_import=t0repro.tasks.demo"


@pytest.fixture(scope="module", autouse=True)
def registered():
    """The demo's and T0's tasks, in SeqIO too, as a module first imported to be described is not.

    Before a test names another vocabulary: tasks keep that of their module's first import.
    """
    import seqio  # noqa: F401 - registration asks whether it has been imported

    import t0repro.tasks.demo
    import t0repro.tasks.t0  # noqa: F401 - both register


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs `t0repro tasks ...`; (exit code, stdout, stderr)."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2"))

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["t0repro", "tasks", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            app.main()
        printed = capsys.readouterr()
        return int(end.value.code or 0), printed.out, printed.err

    return call


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Writes rows and prompts of a dataset of your own; the prompts' file."""
    monkeypatch.setenv("T0REPRO_DATA_DIR", str(tmp_path / "rows"))
    monkeypatch.setenv("T0REPRO_VOCAB", str(ROOT / "tasks" / "demo" / "sentencepiece.model"))

    def write(dataset: str, rows: list[dict], **prompts: dict) -> Path:
        folder = tmp_path / "rows" / dataset / "default"
        folder.mkdir(parents=True)
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        lines = [f"dataset: {dataset}", "templates:"]
        for name, fields in prompts.items():
            fields = {"name": name, **fields}
            values = [f"    {key}: {json.dumps(value)}" for key, value in fields.items()]
            lines += [f"  id-{name}: !Template", *values]
        path = tmp_path / f"{dataset}.yaml"
        path.write_text("\n".join(lines) + "\n")
        written.append(dataset)
        return path

    written: list[str] = []
    yield write
    import seqio

    from t0repro.tasks import registry

    for task in list(registry.prompted_tasks().values()):
        if task.dataset in written:
            seqio.TaskRegistry.remove(task.name)
            registry._tasks.pop(task.name)


LIGHT = """
import contextlib, sys
from t0repro.cli import app
for arguments in (
    ["ls", "--mixture", "demo_train"],
    ["show", "demo_synthetic_imdb_Reviewer_Sentiment_Feeling"],
    ["check", "--dataset", "synthetic_imdb"],
):
    sys.argv = ["t0repro", "tasks", *arguments, "--module_import=t0repro.tasks.demo"]
    with contextlib.suppress(SystemExit):
        app.main()
assert not {"tensorflow", "seqio", "jax", "datasets"} & set(sys.modules)
"""


def test_neither_list_nor_examples_nor_checks_import_seqio_or_tensorflow():
    done = subprocess.run([sys.executable, "-P", "-c", LIGHT], capture_output=True, text=True)
    assert done.returncode == 0 and foreign_lines(done.stderr) == [], done.stderr
    assert "14 tasks of 4 datasets." in done.stdout
    assert "3 tasks: 3 ok" in done.stdout


# ls ----------------------------------------------------------------------------------------------


def test_ls_shows_every_task_with_choices_metrics_and_rate(run):
    code, out, _ = run("ls", DEMO, "--mixture", "demo_train", "--dataset", "synthetic_glue/mrpc")
    assert code == 0 and "3 tasks of 1 dataset." in out
    # It is known of none how many examples it has.
    assert "examples" not in out
    (line,) = [line for line in out.splitlines() if "demo_synthetic_glue_mrpc_replace" in line]
    cells = ["synthetic_glue/mrpc", "replace", "no | yes", "f1_score_with_invalid, accuracy", "640"]
    assert re.split(r"\s{2,}", line.strip()) == ["demo_synthetic_glue_mrpc_replace", *cells]


def test_ls_can_leave_out_what_is_not_on_this_machine(run, own):
    rows = [{"text": "a", "label": 0}]
    path = own("reviews_here", rows, one={"jinja": "{{text}} ||| {{label}}"})
    arguments = ("ls", DEMO, "--module_import=t0repro.tasks.t0", f"--templates={path}", "--json")
    everything = {task["task"] for task in json.loads(run(*arguments)[1])}
    here = {task["task"] for task in json.loads(run(*arguments, "--skip_missing")[1])}
    assert "reviews_here_one" in here and here < everything
    assert "super_glue_rte_GPT_3_style" in everything - here


def test_ls_fits_the_width_that_columns_says(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "72")
    code, out, _ = run("ls", DEMO, "--mixture", "demo_train")
    assert code == 0 and max(map(len, out.splitlines())) <= 72
    assert "demo_synthetic_openbookqa_main_which_correct" in out


def test_ls_as_json_has_a_value_for_each_column(run):
    code, out, _ = run("ls", DEMO, "--mixture", "demo_eval_score_eval", "--json")
    tasks = {task["task"]: task for task in json.loads(out)}
    assert code == 0 and len(tasks) == 9
    task = tasks["demo_synthetic_openbookqa_main_pick_answer_with_options_score_eval"]
    assert task["choices"] == "per example" and task["metrics"] == ["rank_classification"]
    assert task["rate"] == 64 and task["cached"] is None and task["original_task"]


def test_ls_says_what_is_cached_and_what_is_drawn_too_often(run, tmp_path):
    name = "demo_synthetic_glue_mrpc_paraphrase"
    (tmp_path / name).mkdir()
    (tmp_path / name / "stats.train.json").write_text('{"examples": 10}')
    arguments = ("ls", DEMO, "--mixture", "demo_train", "--cache_dir", tmp_path)
    assert "0 of them are cached." in run(*arguments)[1]
    (tmp_path / name / "COMPLETED").touch()
    code, out, _ = run(*arguments)
    assert code == 0 and "1 of them are cached." in out
    assert re.search(r"rate +examples +cached +\n", out)
    assert "640 (64x)" in out and f"{name}, 640 for 10 (64 times)" in out


def test_ls_of_t0_points_at_the_prompt_that_is_drawn_63_times_too_often(run):
    code, out, _ = run("ls", "--mixture", "t0_train", "--dataset", "trec")
    (line,) = [line for line in out.splitlines() if "trec_fine_grained_ABBR " in line]
    assert code == 0 and re.split(r"\s{2,}", line.strip())[-2:] == ["5,452 (63x)", "86"]
    assert "18 tasks of 1 dataset." in out


@pytest.mark.parametrize(
    ("option", "value", "nearest"),
    [
        ("--mixture", "demo_trian", "demo_train"),
        ("--dataset", "synthetic_glue/mprc", "synthetic_glue/mrpc"),
    ],
)
def test_ls_answers_an_unknown_name_with_the_nearest(run, option, value, nearest):
    code, _, err = run("ls", DEMO, option, value)
    assert code == 2 and nearest in err


# show --------------------------------------------------------------------------------------------


def test_show_marks_input_target_and_choices_and_counts_tokens(run):
    code, out, _ = run(
        "show", "demo_synthetic_glue_mrpc_want_to_know", DEMO, "--split", "validation"
    )
    assert code == 0 and out.count("input (") == 3 and "3 rows read, 3 examples." in out
    assert "* " in out and "target (2 tokens)" in out


def test_show_of_a_twin_says_how_many_pairs_an_input_makes(run):
    name = "demo_synthetic_ag_news_which_section_choices_score_eval"
    code, out, _ = run("show", name, DEMO, "--rows", "1")
    assert code == 0 and "(4 pairs)" in out


def test_show_as_json_holds_what_the_task_itself_yields(run):
    import seqio

    from t0repro.tasks.modules import hand_to_seqio

    name = "demo_synthetic_openbookqa_main_pick_answer_with_options"
    code, out, _ = run("show", name, DEMO, "--rows", "5", "--json")
    shown = json.loads(out)
    assert code == 0 and shown["split"] == "validation"
    hand_to_seqio()  # another file's tests may have registered the demo without it
    task = seqio.TaskRegistry.get(name)
    for mine, example in zip(shown["examples"], task.source.examples("validation"), strict=False):
        assert (mine["inputs"], mine["targets"]) == (example["inputs"], example["targets"])
        assert mine["choices"][mine["correct"]] == example["targets"]
    tokens = next(iter(task.get_dataset(None, "validation", shuffle=False).as_numpy_iterator()))
    first = shown["examples"][0]
    assert first["input_tokens"] == len(tokens["inputs"])
    assert first["target_tokens"] == len(tokens["targets"])


def test_show_tells_what_variables_and_sequences_lose(run, own):
    prompts = own(
        "long_reads",
        [{"a": "zyx " * 700, "b": "uvw " * 500, "c": "rst " * 500}],
        whole={"jinja": "{{a}} {{b}} {{c}} ||| {{b}}"},
    )
    code, out, _ = run("show", "long_reads_whole", "--templates", prompts, "--json")
    (example,) = json.loads(out)["examples"]
    # 2,800 characters become 2,045 or so and three points; the two others are short enough.
    assert 700 < example["cut_characters"][0] < 800 and example["cut_characters"][1] == 0
    assert example["long_fields"] == ["a"]
    assert example["lost_tokens"][0] == example["input_tokens"] - 1024 > 0
    assert example["lost_tokens"][1] == example["target_tokens"] - 256 > 0
    code, out, _ = run("show", "long_reads_whole", "--templates", prompts)
    assert code == 0 and "at most 2,048 (long: a)" in out
    assert f"cut: {example['lost_tokens'][0]:,} tokens beyond 1,024 of inputs" in out
    assert f"cut: {example['lost_tokens'][1]:,} tokens beyond 256 of targets" in out


def test_show_counts_dropped_rows_and_names_a_target_outside_the_choices(run, own):
    rows = [{"text": text, "label": label} for text, label in (("", 0), ("Fine.", 1), ("", 1))]
    prompts = own(
        "odd_ones",
        rows,
        odd={"jinja": "{{text}} ||| {{label}}", "answer_choices": "no ||| yes"},
    )
    code, out, _ = run("show", "odd_ones_odd", "--templates", prompts)
    assert code == 0 and "2 rows give none: its input is empty." in out
    assert "none of them: ranking counts this example as wrong" in out


def test_show_works_without_the_vocabulary(run, own, monkeypatch, tmp_path):
    prompts = own("no_words", [{"text": "Fine."}], say={"jinja": "Say it. ||| {{text}}"})
    monkeypatch.setenv("T0REPRO_VOCAB", str(tmp_path / "absent.model"))
    code, out, _ = run("show", "no_words_say", "--templates", prompts)
    assert code == 0 and "No token counts" in out and "absent.model" in out and "Fine." in out


def test_check_refuses_a_vocabulary_that_is_named_and_not_there(run, own, monkeypatch, tmp_path):
    prompts = own("no_words", [{"text": "Fine."}], say={"jinja": "Say it. ||| {{text}}"})
    monkeypatch.setenv("T0REPRO_VOCAB", str(tmp_path / "absent.model"))
    code, out, _ = run("check", "--templates", prompts, "--dataset", "no_words")
    assert code == 1 and "broken: " in out and "absent.model" in out


def test_show_answers_unknown_tasks_and_splits(run):
    code, _, err = run("show", "demo_synthetic_glue_mrpc_paraphrse", DEMO)
    assert code == 2 and "demo_synthetic_glue_mrpc_paraphrase" in err
    code, _, err = run("show", "demo_synthetic_glue_mrpc_paraphrase", DEMO, "--split", "test")
    assert code == 2 and "Its splits: train." in err


# check -------------------------------------------------------------------------------------------


def test_check_of_whole_tasks_exits_with_0(run):
    code, out, err = run("check", DEMO, "--mixture", "demo_eval_score_eval")
    assert code == 0 and "9 tasks: 9 ok, 0 suspect, 0 broken, 0 no rows." in out
    assert "checked 9 of 9 tasks" in err


@pytest.mark.parametrize("choices", ["no ||| no", "{{text[:0]}}no ||| no", "no ||| {{text[:0]}}"])
def test_choices_that_rank_alike_are_suspect(run, own, choices):
    rows = [{"text": "Fine.", "label": 0}, {"text": "Bad.", "label": 0}]
    prompt = {"jinja": "{{text}} ||| {{answer_choices[label]}}", "answer_choices": choices}
    prompts = own("alike", rows, prompt=prompt)
    _, out, _ = run("check", "--templates", prompts, "--dataset", "alike")
    assert "an answer choice is always empty or equal to another (train)" in out


@pytest.mark.parametrize("target", ["{{answer_choices[label]}}", "{{'yes' if label else 'no'}}"])
@pytest.mark.parametrize("choices", ["no, yes", "no or yes", "no || yes"])
def test_check_says_what_separates_choices_where_there_is_one(run, own, choices, target):
    rows = [{"text": "Fine.", "label": 1}, {"text": "Bad.", "label": 0}]
    prompts = own(
        "one", rows, ask={"jinja": f"{{{{text}}}} ||| {target}", "answer_choices": choices}
    )
    _, out, _ = run("check", "--templates", prompts, "--dataset", "one")
    assert "||| separates several" in out and "1 ok" not in out


@pytest.mark.parametrize(("first", "expected"), [(1, "do labels count from 1?"), (0, "1 ok")])
def test_check_suspects_labels_that_count_from_one(run, own, first, expected):
    rows = [
        {"text": f"Text {number}.", "label": number % (3 - first) + first} for number in range(24)
    ]
    template = {
        "jinja": "{{text}} ||| {{answer_choices[label]}}",
        "answer_choices": "a ||| b ||| c",
    }
    prompts = own("counted", rows, ask=template)
    _, out, _ = run("check", "--templates", prompts, "--dataset", "counted")
    assert expected in out


def test_check_lists_the_broken_ones_with_the_reason_and_exits_with_1(run, own):
    rows = [{"text": "Fine.", "label": 1}, {"text": "Bad.", "label": 0}]
    choices = {"answer_choices": "no ||| yes"}
    prompts = own(
        "some_broken",
        rows,
        good={"jinja": "{{text}} ||| {{answer_choices[label]}}", **choices},
        fails={"jinja": "{{text.nothing.there}} ||| x"},
        empty={"jinja": "{% if label == 7 %}{{text}} ||| x{% endif %}"},
        never={"jinja": "{{text}} ||| maybe", **choices},
    )
    code, out, _ = run("check", "--templates", prompts, "--dataset", "some_broken")
    assert code == 1 and "4 tasks: 1 ok, 1 suspect, 2 broken, 0 no rows." in out
    fails, empty = [line for line in out.splitlines() if line.startswith("broken: ")]
    if "fails" in empty:
        fails, empty = empty, fails
    assert "some_broken_fails" in fails and "train.jsonl, line 1" in fails
    assert "'str object' has no attribute 'nothing'" in fails
    assert "none of the first 2 rows gives an input and a target" in empty
    assert "suspect: some_broken_never: the target is never among the answer choices (train)" in out
    code, out, _ = run("check", "--templates", prompts, "--dataset", "some_broken", "--json")
    verdicts = {task["task"]: task["verdict"] for task in json.loads(out)}
    assert code == 1 and verdicts["some_broken_good"] == "ok" and len(verdicts) == 4


def test_check_names_the_line_of_a_cut_row(run, own, tmp_path):
    prompts = own("cut_rows", [{"text": "One."}] * 3, say={"jinja": "Say. ||| {{text}}"})
    file = tmp_path / "rows" / "cut_rows" / "default" / "train.jsonl"
    file.write_text(file.read_text()[:-8])
    code, out, _ = run("check", "--templates", prompts, "--dataset", "cut_rows")
    assert code == 1 and "train.jsonl, line 3" in out


def test_a_broken_template_file_exits_with_2_and_its_line(run, tmp_path):
    (tmp_path / "my.yaml").write_text("dataset: x\ntemplates:\n  one: !!python/name:os.system\n")
    for command in (("ls",), ("show", "x_one"), ("check",)):
        code, _, err = run(*command, "--templates", tmp_path / "my.yaml")
        assert code == 2 and "line 3" in err and "Traceback" not in err


def check_shared_rows(shared_data, *arguments: str) -> tuple[int, str]:
    """In a process of its own: T0's tasks keep the vocabulary of their first import."""
    environment = {name: value for name, value in os.environ.items() if name != "T0REPRO_VOCAB"}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "t0repro", "tasks", "check", *arguments],
        env=environment | {"T0REPRO_DATA_DIR": str(shared_data), "COLUMNS": "200"},
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout


def test_check_finds_one_doubtful_prompt_in_the_data_at_hand(shared_data):
    code, out = check_shared_rows(shared_data, "--mixture", "t0++_train", "--json")
    verdicts = {task["task"]: task["verdict"] for task in json.loads(out)}
    assert code == 0 and len(verdicts) == 464
    (suspect,) = [name for name, verdict in verdicts.items() if verdict == "suspect"]
    assert suspect == "imdb_Negation_template_for_positive_and_negative"
    assert "ok" in verdicts.values() and "broken" not in verdicts.values()


def test_check_of_a_mixture_to_evaluate_checks_its_prompts(shared_data):
    code, out = check_shared_rows(shared_data, "--mixture", "t0_eval_score_eval")
    assert code == 0 and "0 suspect, 0 broken" in out and out.splitlines()[-1].startswith("116 ")


# fetch-p3 ----------------------------------------------------------------------------------------


def test_fetch_p3_says_what_it_did(run, tmp_path):
    from ..tasks import p3_server
    from ..tasks.test_p3 import TASK, write_task

    write_task(tmp_path / "hub" / "data" / TASK, twin=False)
    arguments = (
        "fetch-p3",
        "--tasks",
        f"{TASK},super_glue_cb_GPT_3_style",
        "--to",
        tmp_path / "p3",
    )
    with p3_server.serving(tmp_path / "hub") as server:
        code, out, _ = run(*arguments, "--base-url", server.url)
    assert code == 0 and "Downloaded 1 task to" in out
    assert "Not in P3: super_glue_cb_GPT_3_style." in out
    assert (tmp_path / "p3" / TASK / "COMPLETED").is_file()


def test_fetch_p3_without_network_exits_with_2_and_says_what_to_do(run, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # the discard port: nobody listens
    code, _, err = run("fetch-p3", "--tasks", "super_glue_rte_*", "--to", tmp_path)
    assert code == 2 and "cannot be reached" in err and "http://127.0.0.1:9" in err
