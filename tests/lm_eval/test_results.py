"""Results that lm-evaluation-harness 0.4.13 wrote, as reports read them.

`recorded/` holds the first three examples of two tasks of docs/any_model.md's decoder-only run.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from t0repro.errors import UserError
from t0repro.evaluation.outputs import read_task_scores
from t0repro.evaluation.rank import rank_classification
from t0repro.lm_eval.results import _digest, export_results, import_results

from ..cli.commands import run

RECORDED = Path(__file__).parent / "recorded" / "decoder_only"
TASK = "super_glue_cb_GPT_3_style"


@pytest.fixture
def results(tmp_path):
    return shutil.copytree(RECORDED, tmp_path / "results")


def samples(results, task=TASK):
    return next(results.glob(f"samples_{task}_*.jsonl"))


def test_scores_and_answers_are_the_harnesss(results, tmp_path):
    folder, left_out = import_results(results, tmp_path / "out")
    assert folder.name == "validation_eval" and not left_out
    found = {scores.task: scores for scores in read_task_scores(folder)}
    assert set(found) == {f"{TASK}_score_eval", "super_glue_cb_can_we_infer_score_eval"}
    for task, scores in found.items():
        path = samples(results, task.removesuffix("_score_eval"))
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert scores.score.tolist() == [
            float(score) for line in lines for score, _ in line["filtered_resps"]
        ]
        # `acc` is the harness's own judgment of each example.
        right = rank_classification(scores).accuracy * len(lines) / 100
        assert right == pytest.approx(sum(line["acc"] for line in lines))


def test_a_report_is_made_from_the_results(results, tmp_path, monkeypatch, capsys):
    out = tmp_path / "report"
    line = ["report", "make", str(results), "--from", "lm-eval", "--out", str(out)]
    code, printed, errors = run(monkeypatch, capsys, *line, "--module_import=t0repro.tasks.t0")
    assert code == 0, errors
    assert "super_glue/cb" in printed and (out / "report.html").is_file()
    report = json.loads((out / "report.json").read_text())
    assert report["provenance"]["checkpoint"] == "runs/decoder_only"
    assert report["provenance"]["versions"]["lm-eval"] == "0.4.13"
    # The harness prints the device that it was asked for, not the one that it used.
    assert report["provenance"]["device"] is None


def cut_last_line(path):
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def cut_mid_line(path):
    path.write_text(path.read_text()[:-40])


def drop_scores(path):
    path.write_text(
        re.sub(r'"filtered_resps": \[.*?\]\]', '"filtered_resps": []', path.read_text())
    )


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut_last_line, "samples of 2 examples; 3 were evaluated"),
        (cut_mid_line, "not JSON"),
        (drop_scores, "not a sample of a multiple-choice task"),
        (Path.unlink, "are missing"),
    ],
)
def test_samples_that_are_not_whole_are_refused_with_their_file(results, tmp_path, damage, words):
    path = samples(results)
    damage(path)
    with pytest.raises(UserError, match=words) as error:
        import_results(results, tmp_path / "out")
    assert path.name in str(error.value.where)


CHOICES = (" yes", " no")


def sample(number, target="0", scores=(-3.0, -4.0), acc=1.0, choices=CHOICES, contexts=None):
    """An example as the harness logs it; it makes everything but numbers into text."""
    contexts = contexts or [f"q{number}"] * len(choices)
    arguments = {
        f"gen_args_{at}": {"arg_0": context, "arg_1": choice}
        for at, (context, choice) in enumerate(zip(contexts, choices, strict=True))
    }
    return {
        "doc_id": number, "doc": {"q": number}, "target": target, "arguments": arguments,
        "filtered_resps": [[str(score), "False"] for score in scores], "filter": "none", "acc": acc,
    }  # fmt: skip


def write_results(folder, tasks, metrics=None, split="test"):
    """The harness's files of tasks with these samples."""
    content = {
        "results": metrics or {},
        "configs": {
            task: {"output_type": "multiple_choice", "test_split": split} for task in tasks
        },
        "config": {"model": "hf", "model_args": "pretrained=x"},
    }
    folder.mkdir(parents=True)
    (folder / "results_2026.json").write_text(json.dumps(content))
    for task, found in tasks.items():
        path = folder / f"samples_{task.replace('/', '')}_2026.jsonl"
        path.write_text("".join(json.dumps(each) + "\n" for each in found))
    return folder


PLAIN = [sample(0), sample(1, "1", acc=0.0)]


def test_scores_without_context_for_mutual_information_are_not_choices(tmp_path):
    found = [
        sample(n, scores=(-3.0, -4.0, -1.0, -0.5), choices=CHOICES * 2, contexts=["q", "q", "", ""])
        for n in range(4)
    ]
    write_results(tmp_path / "results", {"mutual": found}, {"mutual": {"acc,none": 1.0}})
    folder, left_out = import_results(tmp_path / "results", tmp_path / "out")
    (scores,) = read_task_scores(folder)
    assert not left_out and len(scores) == 8 and rank_classification(scores).accuracy == 100


@pytest.mark.parametrize("odd", [sample(2**70), sample(float("inf")), sample(-1)])
def test_a_number_beyond_its_range_is_refused_with_its_line(tmp_path, odd):
    write_results(tmp_path / "results", {"task": [odd]})
    with pytest.raises(UserError, match="not a sample") as refused:
        import_results(tmp_path / "results", tmp_path / "out")
    assert "jsonl:1" in str(refused.value) or "line 1" in str(refused.value)


@pytest.mark.parametrize(
    ("targets", "acc", "right"),
    [
        (("1", "2"), (0.0, 1.0), (1, 2)),  # numbers of choices
        (("1", "2"), (1.0, 0.0), (0, 1)),  # texts of choices
        (("[0, 1]", "[2]"), (1.0, 1.0), (0, 2)),
        (("5", "-1"), (0.0, 0.0), (None, None)),  # no choice at all
    ],
)
def test_targets_are_read_so_that_they_give_the_harnesss_accuracies(tmp_path, targets, acc, right):
    best = ((-1.0, -2.0, -3.0), (-3.0, -2.0, -1.0))
    found = [sample(n, targets[n], best[n], acc[n], choices=(" 1", " 2", " 3")) for n in range(2)]
    write_results(tmp_path / "results", {"task": found})
    (scores,) = read_task_scores(import_results(tmp_path / "results", tmp_path / "out")[0])
    ranked = rank_classification(scores)
    assert (ranked.correct == acc).all()
    assert ranked.answer.tolist() == [-1 if number is None else number for number in right]


@pytest.mark.parametrize(
    ("found", "metrics", "words"),
    [
        ([sample(0, scores=(-3.0,))], {}, "doc_id 0 has 2 choices and 1 scores"),
        ([sample(0, contexts=["a", "b"], choices=(" c", " c"))], {}, "different contexts"),
        ([sample(0, target="maybe")], {}, "neither numbers nor texts"),
        ([sample(0), sample(1, acc=0.0)], {}, "doc_id 1 contradict its acc, 0.0"),
        ([sample(0), sample(1)], {"acc,none": 0.5}, r"acc,none = 1, and its results say 0.5"),
        ([sample(0, scores=("nan", -1.0))], {}, "nan, which is not a log-lik"),
        ([sample(0, scores=(-1.0, 2.0), acc=0.0)], {}, "not a log-likelihood"),
        ([sample(0), sample(0)], {}, "several samples"),
        ([sample(0)], {"acc,none": "N/A"}, "its results say N/A"),
        ([sample(0)], {"acc,none": None}, "its results say None"),
        ([sample(0, "2", choices=(" 1", " 2", " 3"), scores=(-1, -2, -3), acc=0.0)], {}, "may be"),
    ],
)
def test_a_task_that_contradicts_the_harness_is_left_out_and_no_other(
    tmp_path, monkeypatch, capsys, found, metrics, words
):
    tasks = {"odd": found, "plain": PLAIN}
    results = write_results(tmp_path / "results", tasks, {"odd": metrics})
    folder, left_out = import_results(results, tmp_path / "out")
    assert re.search(words, left_out["odd"]) and set(left_out) == {"odd"}
    assert [scores.task for scores in read_task_scores(folder)] == ["plain"]
    line = ["report", "make", str(results), "--from", "lm-eval", "--out", str(tmp_path / "report")]
    code, _, errors = run(monkeypatch, capsys, *line)
    assert code == 0, errors
    # The page says so too.
    assert f"Left out odd: {left_out['odd']}" in (tmp_path / "report" / "report.md").read_text()
    shutil.rmtree(results)
    with pytest.raises(UserError, match="No task of these results can be reported"):
        import_results(write_results(results, {"odd": found}, {"odd": metrics}), tmp_path / "out")


def test_another_import_replaces_the_first_and_no_other_evaluation(tmp_path):
    out = tmp_path / "out"
    import_results(write_results(tmp_path / "a", {"one": PLAIN, "two": PLAIN}), out)
    folder, _ = import_results(write_results(tmp_path / "b", {"one": PLAIN}), out)
    assert [scores.task for scores in read_task_scores(folder)] == ["one"]
    (folder / "provenance.json").write_text("{}")
    with pytest.raises(UserError, match="another evaluation"):
        import_results(tmp_path / "b", out)


@pytest.mark.parametrize(("task", "split"), [("a", "../../x"), ("../a", "test"), ("a", "b/../..")])
def test_a_name_in_the_results_writes_nothing_outside_the_folder(tmp_path, task, split):
    results = write_results(tmp_path / "results", {task: PLAIN}, split=split)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match="is not a name"):
        import_results(results, tmp_path / "out" / "deep")
    assert sorted(tmp_path.rglob("*")) == before


def test_results_of_two_models_are_told_apart_and_none_is_said(results, tmp_path):
    shutil.copytree(RECORDED, tmp_path / "other")
    with pytest.raises(UserError, match="2 models"):
        import_results(tmp_path, tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no results"):
        import_results(tmp_path / "empty", tmp_path / "out")
    (tmp_path / "empty" / "results.json").write_text("{}")  # as before 0.4.3
    with pytest.raises(
        UserError, match="(?s)results.json is another program's, or lm-eval's.*update it"
    ):
        import_results(tmp_path / "empty", tmp_path / "out")
    with pytest.raises(UserError, match="(?s)This is a file.*Give its folder"):
        import_results(next(results.glob("results_*.json")), tmp_path / "out")


def test_a_byte_order_mark_is_no_part_of_results_and_samples(tmp_path):
    results = write_results(tmp_path / "results", {"plain": PLAIN})
    for path in results.iterdir():
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert not import_results(results, tmp_path / "out")[1]


@pytest.mark.parametrize("key", ["results", "configs", "n-samples", "config", TASK])
def test_what_is_no_table_is_named(results, tmp_path, key):
    path = next(results.glob("results_*.json"))
    content = json.loads(path.read_text())
    holder = content["configs"] if key == TASK else content
    holder[key] = "x"
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=f"{key} is 'x', not a table") as error:
        import_results(results, tmp_path / "out")
    assert error.value.where == str(path)


@pytest.mark.parametrize("pattern", ["results_*.json", "samples_*.jsonl"])
def test_results_in_utf_16_are_named(results, tmp_path, pattern):
    for path in [*results.glob(pattern)]:
        path.write_bytes(path.read_text().encode("utf-16"))
    with pytest.raises(UserError, match="UTF-16; save it as UTF-8"):
        import_results(results, tmp_path / "out")


def test_a_count_of_samples_may_be_a_number(tmp_path):
    results = write_results(tmp_path / "results", {"plain": PLAIN})
    path = results / "results_2026.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"n-samples": {"plain": 2}}))
    assert not import_results(results, tmp_path / "out")[1]
    path.write_text(json.dumps(content | {"n-samples": {"plain": 3}}))
    with pytest.raises(UserError, match="samples of 2 examples; 3 were evaluated"):
        import_results(results, tmp_path / "out")


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """The scores of a random model of the demo's tasks, by rank-eval's own function."""
    import warnings

    from t0repro.evaluation.evaluation_folder import EvaluationSettings
    from t0repro.evaluation.opened import open_checkpoint
    from t0repro.runs.rank_eval import rank_eval

    from ..evaluation.small_model import save_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TensorFlow's and T5's own, at import
        from t0repro.reports.prompts import load_prompts

        load_prompts(["t0repro.tasks.demo"], into_seqio=True)
        folder = tmp_path_factory.mktemp("evaluated")
        checkpoint = open_checkpoint(str(save_model(folder / "model")), None, "float32")
        settings = EvaluationSettings(lengths={"inputs": 128, "targets": 32}, limit=4)
        return rank_eval(checkpoint, "demo_eval_score_eval", folder / "out", settings)


def test_scores_written_as_the_harnesss_are_read_back_equal(evaluated, tmp_path):
    path = export_results(evaluated.folder, 7, "validation", tmp_path / "lm_eval")
    folder, left_out = import_results(tmp_path / "lm_eval", tmp_path / "back")
    assert not left_out and path.name.startswith("results_")
    expected = {scores.task: scores for scores in read_task_scores(evaluated.folder)}
    found = {scores.task: scores for scores in read_task_scores(folder)}
    assert found.keys() == expected.keys() and len(found) == 9
    content = json.loads(path.read_text())
    for task, scores in found.items():
        for name in ("input_index", "choice_index", "is_correct", "score"):
            assert getattr(scores, name).tolist() == getattr(expected[task], name).tolist()
        accuracy = rank_classification(expected[task]).accuracy
        share = content["results"][task.removesuffix("_score_eval")]["acc,none"]
        assert 100 * share == pytest.approx(accuracy)


def test_a_sample_has_the_harnesss_own_fields_and_hashes(evaluated, tmp_path):
    export_results(evaluated.folder, 7, "validation", tmp_path)
    ours = json.loads(next(tmp_path.glob("samples_*.jsonl")).read_text().splitlines()[0])
    theirs = json.loads(samples(RECORDED).read_text().splitlines()[0])
    assert ours.keys() == theirs.keys() and ours["doc"].keys() == theirs["doc"].keys()
    again = _digest(json.dumps(theirs["doc"], indent=2, ensure_ascii=False))
    assert (again, _digest(theirs["target"])) == (theirs["doc_hash"], theirs["target_hash"])
    assert _digest(theirs["arguments"]["gen_args_0"]["arg_0"]) == theirs["prompt_hash"]


def test_accuracies_of_every_kind_of_target_are_the_harnesss(tmp_path):
    pytest.importorskip("lm_eval.api", reason="needs the extra lm-eval")
    numbers = range(12)
    rows = [
        {
            "text": f"q{n}", "choices": ["1", "2", "3"], "contexts": [f"a{n}", f"b{n}", f"c{n}"],
            "label": n % 3, "several": [0, n % 3], "answer": str(n % 3 + 1), "rest": "is so",
        }
        for n in numbers
    ]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    usual = {"doc_to_text": "text", "doc_to_choice": "choices", "doc_to_target": "label"}
    tasks = {
        "plain": usual,
        "mutual": {**usual, "metrics": ("acc", "acc_mutual_info")},
        "several": {**usual, "doc_to_target": "several"},
        # Texts of choices, which are numbers of other choices too.
        "numeric": {**usual, "doc_to_target": "answer"},
        # Like WinoGrande: the choices are contexts.
        "contexts": {"doc_to_text": "label", "doc_to_choice": "contexts", "doc_to_target": "rest"},
    }
    for name, fields in tasks.items():
        config = {
            "task": name, "dataset_path": "json", "output_type": "multiple_choice",
            "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}},
            "test_split": "test", "num_fewshot": 0,
            "metric_list": [
                {"metric": metric, "aggregation": "mean", "higher_is_better": True}
                for metric in fields.get("metrics", ("acc",))
            ],
            **{key: value for key, value in fields.items() if key != "metrics"},
        }  # fmt: skip
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(config))
    line = ["--include_path", tmp_path, "--output_path", tmp_path / "results", "--log_samples"]
    line = ["lm_eval", "run", "--model=dummy", "--tasks", ",".join(tasks), *line]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    subprocess.run([sys.executable, "-m", *map(str, line)], env=os.environ | offline, check=True)
    eval_dir, left_out = import_results(tmp_path / "results", tmp_path / "out")
    (path,) = (tmp_path / "results").rglob("results_*.json")
    recorded = json.loads(path.read_text())["results"]
    found = {s.task: rank_classification(s).accuracy for s in read_task_scores(eval_dir)}
    assert found == {
        task: pytest.approx(100 * recorded[task]["acc,none"])
        for task in ("plain", "mutual", "several", "numeric")
    }
    assert "different contexts" in left_out["contexts"] and len(left_out) == 1
