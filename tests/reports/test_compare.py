import json

import pytest
from typer.testing import CliRunner

from t0repro.cli.compare import app
from t0repro.errors import UserError
from t0repro.reports.compare import compare_losses, compare_scores, read_losses

RTE = "super_glue_rte_GPT_3_style_score_eval"
CB = "super_glue_cb_GPT_3_style_score_eval"


def write_eval(folder, tasks, step=10):
    """Outputs of tasks: name -> list of examples, each a list of (is_correct, length, score)."""
    folder.mkdir(parents=True, exist_ok=True)
    for task, examples in tasks.items():
        pairs = [
            (f"(({i}, {j}), {correct}, 1.0, {length})", score)
            for i, example in enumerate(examples)
            for j, (correct, length, score) in enumerate(example)
        ]
        (folder / f"{task}_targets").write_text("".join(f"{target}\n" for target, _ in pairs))
        scores = "".join(f"{score}\n" for _, score in pairs)
        (folder / f"{task}_{step}_predictions").write_text(scores)
    return folder


def two_examples(first=-1.0, second=-2.0):
    return [
        [(True, 2, first), (False, 4, second)],
        [(False, 2, -5.0), (True, 4, -3.0)],
    ]


def write_metrics(path, losses, split="train"):
    lines = [json.dumps({"split": split, "step": s, "loss": x}) for s, x in losses.items()]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_equal_evaluations_differ_nowhere(tmp_path):
    a = write_eval(tmp_path / "a", {RTE: two_examples(), CB: two_examples()})
    b = write_eval(tmp_path / "b", {RTE: two_examples(), CB: two_examples()})
    compared = compare_scores(a, b)
    assert (compared.pairs, compared.flipped, compared.max_difference) == (8, 0, 0.0)
    assert compared.max_metric_difference == 0
    assert compared.within(0.0)


def test_the_largest_difference_is_found_per_pair_and_per_token(tmp_path):
    a = write_eval(tmp_path / "a", {RTE: two_examples(-1.0, -2.0)})
    b = write_eval(tmp_path / "b", {RTE: two_examples(-1.3, -2.4)})
    compared = compare_scores(a, b)
    assert compared.max_difference == pytest.approx(0.4)  # over four tokens: 0.1 a token
    assert compared.worst.max_difference_per_token == pytest.approx(0.15)
    assert compared.worst.at == (0, 0)
    assert compared.flipped == 0
    assert compared.within(0.151) and not compared.within(0.149)


def test_flipped_predictions_are_listed_with_both_choices(tmp_path):
    a = write_eval(tmp_path / "a", {RTE: two_examples(-1.0, -1.25)})
    b = write_eval(tmp_path / "b", {RTE: two_examples(-1.0, -0.5)})
    compared = compare_scores(a, b, label_a="mtf", label_b="jax", num_classes={RTE: 2})
    assert compared.flipped == 1
    (flip,) = compared.flips
    assert (flip.task, flip.example, flip.predicted_a, flip.predicted_b) == (RTE, 0, 0, 1)
    assert (flip.margin_a, flip.margin_b) == (0.25, 0.5)
    assert compared.max_metric_difference == 50
    assert not compared.within(1e9)


def test_tasks_of_one_run_only_are_named(tmp_path):
    a = write_eval(tmp_path / "a", {RTE: two_examples(), CB: two_examples()})
    b = write_eval(tmp_path / "b", {RTE: two_examples()})
    assert compare_scores(a, b).only_a == (CB,)
    assert compare_scores(b, a).only_b == (CB,)
    c = write_eval(tmp_path / "c", {CB: two_examples()})
    with pytest.raises(UserError, match="no task in common"):
        compare_scores(b, c)


def test_different_pairs_are_refused(tmp_path):
    a = write_eval(tmp_path / "a", {RTE: two_examples()})
    b = write_eval(tmp_path / "b", {RTE: two_examples()[:1]})
    with pytest.raises(UserError, match=r"scored different pairs \(4 and 2"):
        compare_scores(a, b)


def test_losses_are_aligned_by_step(tmp_path):
    a = write_metrics(tmp_path / "a.jsonl", {1: 4.0, 2: 2.0, 3: 1.0})
    b = write_metrics(tmp_path / "b.jsonl", {2: 2.002, 3: 1.0, 4: 0.5})
    compared = compare_losses(a, b)
    assert [row.step for row in compared.rows] == [2, 3]
    assert compared.worst.step == 2
    assert compared.worst.relative_difference == pytest.approx(1e-3)
    assert (compared.only_a, compared.only_b) == (1, 1)


def test_a_step_done_again_after_a_restart_has_its_last_loss(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [
        {"split": "train", "step": 2, "loss": 2.0},
        {"split": "train", "step": 1, "loss": 3.0},
        {"split": "train", "step": 2, "loss": 2.5},
        {"split": "validation", "step": 2, "loss": 9.0},
        {"split": "train", "step": 3, "learning_rate": 0.1},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"split": "tr')
    assert read_losses(path) == {1: 3.0, 2: 2.5}
    assert list(read_losses(path)) == [1, 2]


def test_unusable_losses_are_a_users_mistake(tmp_path):
    a = write_metrics(tmp_path / "a.jsonl", {1: 4.0})
    with pytest.raises(UserError, match="no metrics file"):
        compare_losses(a, tmp_path / "absent.jsonl")
    with pytest.raises(UserError, match=r"no training step in common \(steps 1 to 1 and no steps"):
        compare_losses(a, write_metrics(tmp_path / "b.jsonl", {1: 4.0}, split="validation"))
    with pytest.raises(UserError, match="loss at step 1 is nan"):
        compare_losses(a, write_metrics(tmp_path / "c.jsonl", {1: float("nan")}))
    broken = tmp_path / "d.jsonl"
    broken.write_text('{"split"\n{"split": "train", "step": 1, "loss": 1.0}\n')
    with pytest.raises(UserError, match="d.jsonl:1"):
        compare_losses(a, broken)


def test_compare_losses_prints_the_table_and_fails_beyond_the_tolerance(tmp_path):
    a = write_metrics(tmp_path / "a.jsonl", {step: 4.0 for step in range(1, 200)})
    b = write_metrics(tmp_path / "b.jsonl", {step: 4.0 for step in range(1, 200)} | {77: 4.004})
    run = CliRunner().invoke(app, ["losses", str(a), str(b), "--label-a", "mtf"])
    assert run.exit_code == 0
    assert "mtf" in run.output
    assert "Largest relative difference: 1.00e-03 at step 77 (199 steps compared)" in run.output
    within = ["losses", str(a), str(b), "--tol", "2e-3"]
    assert CliRunner().invoke(app, within).exit_code == 0
    beyond = ["losses", str(a), str(b), "--tol", "1e-4"]
    assert CliRunner().invoke(app, beyond).exit_code == 1


def test_compare_scores_says_nowhere_and_fails_beyond_the_tolerance(tmp_path):
    a = write_eval(tmp_path / "mtf" / "eval", {RTE: two_examples()})
    b = write_eval(tmp_path / "jax" / "eval", {RTE: two_examples(-1.0002)})
    run = CliRunner().invoke(app, ["scores", str(a), str(b), "--tol", "1.1e-4"])
    assert run.exit_code == 0
    assert "Predictions differ: nowhere" in run.output
    assert "accuracy" in run.output
    assert CliRunner().invoke(app, ["scores", str(a), str(b), "--tol", "9e-5"]).exit_code == 1
    c = write_eval(tmp_path / "flip" / "eval", {RTE: two_examples(-2.5)})
    run = CliRunner().invoke(app, ["scores", str(a), str(c), "--tol", "10"])
    assert run.exit_code == 1
    assert "on 1 examples" in run.output
    assert f"{RTE} example 0: choice 0 and 1" in " ".join(run.output.split())


def test_help_shows_an_example():
    for command in ("losses", "scores"):
        run = CliRunner().invoke(app, [command, "--help"])
        assert f"t0repro compare {command}" in " ".join(run.output.split())
