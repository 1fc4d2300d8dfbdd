import json

import pytest
import typer
from typer.testing import CliRunner

from t0repro.cli.compare import compare
from t0repro.errors import UserError
from t0repro.reports.curves import read_curves

from .test_comparison import RTE, two_examples, write_eval, write_run
from .test_losses import write_metrics

app = typer.Typer()
app.command()(compare)


def invoke(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)


def test_losses_are_printed_the_table_and_fails_beyond_the_tolerance(tmp_path):
    a = write_metrics(tmp_path / "a.jsonl", {step: 4.0 for step in range(1, 200)})
    b = write_metrics(tmp_path / "b.jsonl", {step: 4.0 for step in range(1, 200)} | {77: 4.004})
    run = invoke(f"mtf={a}", f"jax={b}")
    assert run.exit_code == 0
    words = " ".join(run.output.split())
    assert "mtf and jax: loss in its own unit, 40 of 199 steps" in words
    assert "Largest relative difference: 1.00e-03 at step 77 (199 steps compared)" in run.output
    assert invoke(a, b, "--tol", "2e-3").exit_code == 0
    assert invoke(a, b, "--tol", "1e-4").exit_code == 1


def test_scores_are_printed_and_judged_by_the_tolerance(tmp_path):
    a = write_eval(tmp_path / "mtf" / "validation_eval", {RTE: two_examples()})
    b = write_eval(tmp_path / "jax" / "validation_eval", {RTE: two_examples(-1.0002)})
    run = invoke(a, b, "--tol", "1.1e-4")
    assert run.exit_code == 0
    assert "Predictions differ: nowhere" in run.output
    assert "mtf and jax" in run.output
    assert invoke(a, b, "--tol", "9e-5").exit_code == 1
    c = write_eval(tmp_path / "flip" / "validation_eval", {RTE: two_examples(-2.5)})
    run = invoke(a, c, "--tol", "10")
    assert run.exit_code == 1
    assert "on 1 example (" in run.output
    assert "Predicted differently: 1 example" in run.output


def test_a_tolerance_asks_for_the_same_pairs(tmp_path):
    a = write_eval(tmp_path / "a", {RTE: two_examples()})
    b = write_eval(tmp_path / "b", {RTE: two_examples()[:1]})
    with pytest.raises(UserError, match="scored different pairs"):
        invoke(a, b, "--tol", "1")
    assert "2 pairs of these tasks could not be compared" in invoke(a, b).output


def test_runs_are_compared_and_three_files_written(tmp_path):
    write_run(tmp_path / "mtf" / "validation_eval", 20)
    write_run(tmp_path / "jax" / "validation_eval", 10)
    out = tmp_path / "out"
    run = invoke(f"first={tmp_path}/mtf", tmp_path / "jax", "--out", out)
    assert run.exit_code == 0 and "first and jax" in run.output
    assert json.loads((out / "compare.json").read_text())[0]["flipped"] == 20
    assert "McNemar p" in (out / "compare.md").read_text()
    page = (out / "compare.html").read_text()
    assert "<table" in page and "http" not in page


def test_a_report_stands_for_its_evaluation_and_step(tmp_path):
    for step, wrong in ((10, 20), (20, 5)):
        write_run(tmp_path / "a" / "validation_eval", wrong, step=step)
    report = {"provenance": {"eval_dir": str(tmp_path / "a" / "validation_eval"), "step": 10}}
    (tmp_path / "report.json").write_text(json.dumps(report))
    run = invoke(f"early={tmp_path}/report.json", f"late={tmp_path}/a", "--out", tmp_path / "out")
    assert run.exit_code == 0
    (found,) = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert (found["step_a"], found["step_b"]) == (10, 20)


def test_two_steps_of_one_run_are_compared(tmp_path):
    for step, wrong in ((10, 20), (20, 5)):
        write_run(tmp_path, wrong, step=step)
    run = invoke(tmp_path, tmp_path, "--step", 10, "--step", 20, "--out", tmp_path / "out")
    assert run.exit_code == 0
    (found,) = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert (found["step_a"], found["step_b"], found["flipped"]) == (10, 20, 30)


def test_a_folder_with_an_equals_sign_in_its_path_is_no_label(tmp_path):
    a = write_run(tmp_path / "lr=0.1" / "validation_eval", 3)
    b = write_run(tmp_path / "lr=0.2" / "validation_eval", 3)
    assert "lr=0.1 and lr=0.2" in invoke(a, b).output


def test_what_cannot_be_compared_is_a_users_mistake(tmp_path):
    a = write_run(tmp_path / "a", 3)
    metrics = write_metrics(tmp_path / "metrics.jsonl", {1: 4.0})
    with pytest.raises(UserError, match="two runs or more"):
        invoke(a)
    for other in (a, tmp_path / "README.md"):
        with pytest.raises(UserError, match=f"cannot be compared with {other}(.|\n)*of each run"):
            invoke(metrics, other)
    with pytest.raises(UserError, match="--step is given 1 time for 2 runs"):
        invoke(a, a, "--step", 10)
    (tmp_path / "checkpoint_3").mkdir()
    with pytest.raises(UserError, match="There is no evaluation here") as caught:
        invoke(a, tmp_path / "checkpoint_3")
    assert "`t0repro checkpoint diff A B`" in caught.value.fix
    with pytest.raises(UserError, match="There is no such file or folder"):
        invoke(a, tmp_path / "absent")
    # As rank-eval leaves its folder before its first task has ended.
    (begun := tmp_path / "begun" / "scores").mkdir(parents=True)
    (begun / "step_3.json").touch(), (begun.parent / "metrics.jsonl").touch()
    for command in (lambda: invoke(a, begun.parent), lambda: read_curves([begun.parent])):
        with pytest.raises(UserError, match="finished no task yet(.|\n)*same --out: it continues"):
            command()


def test_folders_of_trainings_are_told_which_files_hold_their_losses(tmp_path):
    for name in ("mtf", "jax"):
        (tmp_path / name).mkdir()
        write_metrics(tmp_path / name / "metrics.jsonl", {1: 4.0})
    with pytest.raises(
        UserError, match=f"for losses, `t0repro compare {tmp_path}/mtf/metrics.jsonl B`"
    ):
        invoke(tmp_path / "mtf", tmp_path / "jax")
    with pytest.raises(UserError, match="no such file or folder"):
        invoke(tmp_path / "mft", tmp_path / "jax")


def test_evaluations_below_a_folder_are_named(tmp_path):
    below = [write_run(tmp_path / "run" / "validation_eval", 3)]
    (tmp_path / "run" / "metrics.jsonl").touch()
    below.append(write_run(tmp_path / "run" / "auxiliary/rte/results/validation_eval", 3))
    for folder, found in (("run/auxiliary", below[1]), ("", below[0])):
        with pytest.raises(UserError, match=f"Name one of those below: {found}"):
            invoke(tmp_path / folder, tmp_path / folder)


def test_of_several_evaluations_one_is_to_be_named(tmp_path):
    for split in ("train", "validation"):
        write_eval(tmp_path / f"{split}_eval", {RTE: two_examples()})
    with pytest.raises(
        UserError, match=r"2 evaluations here(.|\n)*: train_eval, validation_eval\."
    ):
        invoke(tmp_path, tmp_path)


def test_help_shows_an_example():
    text = " ".join(invoke("--help").output.split())
    assert "t0repro compare mtf=runs/mtf/metrics.jsonl" in text


@pytest.mark.parametrize("words", ["mtf = a jax = b", "mtf= a", "mtf =a"])
def test_spaces_around_a_labels_sign_are_answered_with_how_to_write_it(words):
    with pytest.raises(UserError, match=r"LABEL=PATH as one word, without spaces around the ="):
        invoke(*words.split())
