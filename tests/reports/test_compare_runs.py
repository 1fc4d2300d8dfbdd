import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from t0repro.cli.report import app
from t0repro.errors import UserError
from t0repro.reports.compare_runs import compare_runs, evaluation_of, mcnemar
from t0repro.reports.history import read_history
from t0repro.reports.pages import comparison_sections, history_sections, render_page
from t0repro.reports.report import Bootstrap

from .scored_folder import write_scores

BOOTSTRAP = Bootstrap(replicates=400)
TASKS = ("rte_one_score_eval", "rte_two_score_eval")
PROMPTS = {
    task: SimpleNamespace(
        dataset="super_glue",
        subset="rte",
        template_name=task,
        fixed_choices=("Yes", "No"),
        prompt="{{premise}}",
    )
    for task in TASKS
}


def write_run(folder, wrong, examples=50, tasks=TASKS, step=10):
    """Two prompts that get all but the first `wrong` examples right."""
    for task in tasks:
        scores = [[-2.0, -1.0] if i < wrong else [-1.0, -2.0] for i in range(examples)]
        write_scores(folder, task, scores, [0] * examples, step)
    return folder


def test_differences_are_paired_by_example_and_prompts_of_one_are_a_cluster(tmp_path):
    a = write_run(tmp_path / "a", 20)
    b = write_run(tmp_path / "b", 10)
    (found,) = compare_runs([("a", a), ("b", b)], PROMPTS, BOOTSTRAP)
    (entry,) = found.datasets
    assert (entry.dataset, entry.prompts, entry.examples) == ("super_glue/rte", 2, 50)
    assert (entry.accuracy_a, entry.accuracy_b) == (60.0, 80.0)
    assert entry.difference == pytest.approx(20)
    assert (entry.only_a, entry.only_b, entry.agreement) == (0, 20, 80.0)
    # Ten examples, not twenty outcomes: the two prompts fail on the same ones
    assert entry.p_value == pytest.approx(math.erfc(math.sqrt(10 / 2)))
    error = 100 * math.sqrt(0.2 * 0.8 / 50)
    assert entry.interval.low == pytest.approx(20 - 1.96 * error, abs=2.5)
    assert entry.interval.high == pytest.approx(20 + 1.96 * error, abs=2.5)


def test_mcnemar_of_one_prompt_is_mcnemars_chi_squared():
    differences = np.array([1] * 12 + [-1] * 4 + [0] * 30)
    assert mcnemar(differences) == pytest.approx(math.erfc(math.sqrt((12 - 4) ** 2 / 16 / 2)))
    assert mcnemar(np.zeros(5)) == 1.0


def test_equal_runs_differ_nowhere_and_three_runs_give_two_comparisons(tmp_path):
    runs = [(name, write_run(tmp_path / name, 5)) for name in "abc"]
    found = compare_runs(runs, PROMPTS, BOOTSTRAP)
    assert [entry.label_b for entry in found] == ["b", "c"]
    (entry,) = found[0].datasets
    assert (entry.difference, entry.p_value, entry.agreement) == (0.0, 1.0, 100.0)
    assert (entry.interval.low, entry.interval.high) == (0.0, 0.0)
    assert found[0].flips == ()


def test_flipped_examples_say_who_is_right(tmp_path):
    a, b = write_run(tmp_path / "a", 2), write_run(tmp_path / "b", 1)
    (found,) = compare_runs([("a", a), ("b", b)], PROMPTS, BOOTSTRAP)
    assert found.flipped == 2
    flip = found.flips[0]
    assert (flip.task, flip.example, flip.predicted_a, flip.predicted_b) == (TASKS[0], 1, 1, 0)
    assert (flip.right_a, flip.right_b) == (False, True)


def test_runs_that_share_nothing_or_have_other_answers_are_refused(tmp_path):
    a = write_run(tmp_path / "a", 1, tasks=TASKS[:1])
    b = write_run(tmp_path / "b", 1, tasks=TASKS[1:])
    with pytest.raises(UserError, match="no task in common"):
        compare_runs([("a", a), ("b", b)], {}, BOOTSTRAP)
    c = tmp_path / "c"
    write_scores(c, TASKS[0], [[-1.0, -2.0]] * 50, [1] * 50)
    with pytest.raises(UserError, match="other answers"):
        compare_runs([("a", a), ("c", c)], {}, BOOTSTRAP)


def test_a_history_has_a_value_for_each_step(tmp_path):
    for step, wrong in ((10, 25), (20, 5)):
        write_run(tmp_path, wrong, step=step)
    write_scores(tmp_path, "other_score_eval", [[-1.0, -2.0]], [0], 20)
    history = read_history(tmp_path, PROMPTS)
    assert history.steps == (10, 20)
    assert history.curves == {"super_glue/rte": (50.0, 90.0)}
    assert history.chance == {"super_glue/rte": 50.0}
    assert history.skipped == ("other_score_eval",)
    page = render_page("History", history_sections(history))
    assert page.count("data-tip=") == 2 and "other_score_eval" in page


def test_the_command_compares_and_writes_three_files(tmp_path):
    write_run(tmp_path / "mtf" / "validation_eval", 20)
    write_run(tmp_path / "jax" / "validation_eval", 10)
    out = tmp_path / "out"
    arguments = ["compare", f"first={tmp_path}/mtf", str(tmp_path / "jax"), "--out", str(out)]
    run = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert run.exit_code == 0 and "first and jax" in run.output
    assert json.loads((out / "compare.json").read_text())[0]["flipped"] == 20
    assert "McNemar p" in (out / "compare.md").read_text()
    page = (out / "compare.html").read_text()
    assert "<table>" in page and "http" not in page
    with pytest.raises(UserError, match="alone"):
        CliRunner().invoke(app, ["compare", str(tmp_path / "mtf")], catch_exceptions=False)


def test_the_command_shows_a_history(tmp_path):
    for step in (10, 20, 30):
        write_run(tmp_path / "validation_eval", 40 - step, step=step)
    out = tmp_path / "out"
    run = CliRunner().invoke(
        app, ["history", str(tmp_path), "--out", str(out)], catch_exceptions=False
    )
    assert run.exit_code == 0
    assert json.loads((out / "history.json").read_text())["steps"] == [10, 20, 30]
    assert (out / "history.html").read_text().count("<svg") == 1


def test_a_folder_without_evaluations_is_a_users_error(tmp_path):
    with pytest.raises(UserError, match="There are 0 evaluations here"):
        evaluation_of(tmp_path)


def test_sections_say_how_the_test_was_made(tmp_path):
    runs = [(name, write_run(tmp_path / name, n)) for n, name in enumerate("ab")]
    sections = comparison_sections(compare_runs(runs, PROMPTS, BOOTSTRAP))
    assert "one cluster" in sections[-1].lines[0]
