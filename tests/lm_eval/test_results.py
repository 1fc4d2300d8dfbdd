"""Results that lm-evaluation-harness 0.4.13 wrote, as reports read them.

`recorded/` holds the first three examples of two tasks of docs/any_model.md's decoder-only run.
"""

import json
import re
import shutil
from pathlib import Path

import pytest

from t0repro.errors import UserError
from t0repro.evaluation.outputs import read_task_scores
from t0repro.evaluation.rank import rank_classification
from t0repro.lm_eval.files import _digest, export_results, import_results

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
        # `acc` is the harness's own judgement of each example.
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


def test_results_of_two_models_are_told_apart_and_none_is_said(results, tmp_path):
    shutil.copytree(RECORDED, tmp_path / "other")
    with pytest.raises(UserError, match="2 models"):
        import_results(tmp_path, tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no results"):
        import_results(tmp_path / "empty", tmp_path / "out")


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
        from t0repro.reports.run import load_prompts

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
