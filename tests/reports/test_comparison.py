import itertools
import json
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.stats
from typer.testing import CliRunner

from t0repro.cli.report import app
from t0repro.errors import UserError
from t0repro.evaluation.records import write_record
from t0repro.reports.comparison import compare_runs, read_run_facts
from t0repro.reports.comparison_page import comparison_page, history_page, settings_in_words
from t0repro.reports.history import read_history
from t0repro.reports.make_report import ReportOptions, make_report
from t0repro.reports.models import compare_models
from t0repro.reports.page_html import render_html
from t0repro.reports.prompts import read_reported_prompts
from t0repro.reports.report_files import write_report
from t0repro.reports.run import Run
from t0repro.reports.statistics import Bootstrap, mcnemar

from .scored_folder import write_scores

RTE = "super_glue_rte_GPT_3_style_score_eval"
CB = "super_glue_cb_GPT_3_style_score_eval"
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


def write_run(folder, wrong, examples=50, tasks=TASKS, step=10):
    """Two prompts that get all but the first `wrong` examples right."""
    for task in tasks:
        scores = [[-2.0, -1.0] if i < wrong else [-1.0, -2.0] for i in range(examples)]
        write_scores(folder, task, scores, [0] * examples, step)
    return folder


def compare(a, b, prompts=None, **options):
    """Two folders compared under the names a and b."""
    return compare_runs(Run("a", a), Run("b", b), prompts, BOOTSTRAP, **options)


def test_equal_evaluations_differ_nowhere(tmp_path):
    a = write_eval(tmp_path / "a", {RTE: two_examples(), CB: two_examples()})
    b = write_eval(tmp_path / "b", {RTE: two_examples(), CB: two_examples()})
    compared = compare(a, b)
    assert (compared.pairs, compared.flipped, compared.max_difference) == (8, 0, 0.0)
    assert compared.worst_metric[0] == 0
    assert compared.within(0.0)


def test_the_largest_difference_is_found_per_pair_and_per_token(tmp_path):
    a = write_eval(tmp_path / "a", {RTE: two_examples(-1.0, -2.0)})
    b = write_eval(tmp_path / "b", {RTE: two_examples(-1.3, -2.4)})
    compared = compare(a, b)
    assert compared.max_difference == pytest.approx(0.4)  # over four tokens: 0.1 a token
    assert compared.worst.max_difference_per_token == pytest.approx(0.15)
    assert compared.worst.at == (0, 0)
    assert compared.flipped == 0
    assert compared.within(0.151) and not compared.within(0.149)


def test_flipped_predictions_are_listed_with_both_choices(tmp_path):
    a = write_eval(tmp_path / "a", {RTE: two_examples(-1.0, -1.25)})
    b = write_eval(tmp_path / "b", {RTE: two_examples(-1.0, -0.5)})
    compared = compare(a, b, {RTE: PROMPTS[TASKS[0]]})
    assert compared.flipped == 1
    (flip,) = compared.flips
    assert (flip.task, flip.example, flip.predicted_a, flip.predicted_b) == (RTE, 0, 0, 1)
    assert (flip.margin_a, flip.margin_b) == (0.25, 0.5)
    assert compared.worst_metric == (50, RTE, "accuracy")
    assert not compared.within(1e9)


def test_tasks_of_one_run_only_are_named(tmp_path):
    a = write_eval(tmp_path / "a", {RTE: two_examples(), CB: two_examples()})
    b = write_eval(tmp_path / "b", {RTE: two_examples()})
    assert compare(a, b).only_a == (CB,)
    assert compare(b, a).only_b == (CB,)
    c = write_eval(tmp_path / "c", {CB: two_examples()})
    with pytest.raises(UserError, match="no task in common"):
        compare(b, c)


def test_different_pairs_are_refused_where_scores_must_agree(tmp_path):
    a = write_eval(tmp_path / "a", {RTE: two_examples()})
    b = write_eval(tmp_path / "b", {RTE: two_examples()[:1]})
    with pytest.raises(UserError, match=r"scored different pairs \(4 and 2"):
        compare(a, b, same_pairs=True)


def test_scores_are_compared_where_both_runs_have_the_pair_with_targets_of_one_length(tmp_path):
    other = [[(True, 2, -1.5), (False, 3, -2.0)], [(False, 2, -5.0), (True, 4, -3.0)]]
    a = write_eval(tmp_path / "a", {RTE: two_examples()})
    b = write_eval(tmp_path / "b", {RTE: other})
    (task,) = compare(a, b).tasks
    assert (task.pairs, task.unpaired, task.max_difference) == (3, 2, 0.5)
    b = write_eval(tmp_path / "b", {RTE: two_examples()[:1]})
    (task,) = compare(a, b).tasks
    assert (task.pairs, task.unpaired) == (2, 2)


def test_differences_are_paired_by_example_and_prompts_of_one_are_a_cluster(tmp_path):
    a = write_run(tmp_path / "a", 20)
    b = write_run(tmp_path / "b", 10)
    found = compare(a, b, PROMPTS)
    (entry,) = found.datasets
    assert (entry.dataset, entry.prompts, entry.examples) == ("super_glue/rte", 2, 50)
    assert (entry.accuracy_a, entry.accuracy_b) == (60.0, 80.0)
    assert entry.difference == pytest.approx(20)
    assert (entry.only_a, entry.only_b, entry.agreement) == (0, 20, 80.0)
    # Ten examples, not twenty outcomes: the two prompts fail on the same ones
    assert entry.p_value == pytest.approx(2 * 0.5**10)
    error = 100 * math.sqrt(0.2 * 0.8 / 50)
    # A further example moves the low end by up to 1.2 and the high end by 0.8 of 51 on average.
    assert entry.interval.low == pytest.approx(20 - 1.96 * error - 120 / 51, abs=2)
    assert entry.interval.high == pytest.approx(20 + 1.96 * error + 80 / 51, abs=2)


def test_mcnemar_of_many_examples_is_chi_squared():
    differences = np.repeat([1, -1, 0], [120, 90, 50])
    assert mcnemar(differences) == pytest.approx(math.erfc(math.sqrt(30**2 / 210 / 2)))


@pytest.mark.parametrize(("better", "worse"), [(2, 0), (12, 4), (60, 40), (1, 1)])
def test_mcnemar_of_few_examples_and_one_prompt_is_the_binomial_test(better, worse):
    differences = np.repeat([1, -1, 0], [better, worse, 5])
    expected = scipy.stats.binomtest(better, better + worse).pvalue
    assert mcnemar(differences) == pytest.approx(expected)
    assert mcnemar(np.zeros(5)) == 1.0


def test_mcnemar_of_few_clusters_counts_all_ways_to_swap_the_runs():
    differences = np.array([3, -1, 2, 2, 0, -4, 1, 5])
    sums = [abs(np.dot(signs, differences)) for signs in itertools.product([1, -1], repeat=8)]
    assert mcnemar(differences) == pytest.approx(np.mean(np.array(sums) >= 8))


def test_accuracies_of_equal_runs_differ_nowhere(tmp_path):
    found = compare(*(write_run(tmp_path / name, 5) for name in "ab"), PROMPTS)
    (entry,) = found.datasets
    assert (entry.difference, entry.p_value, entry.agreement) == (0.0, 1.0, 100.0)
    # None of 50 examples differs, so that 7% of all of them may, either way (Clopper and Pearson).
    assert entry.interval.low == pytest.approx(-7.1, abs=0.7)
    assert entry.interval.high == pytest.approx(7.1, abs=0.7)
    assert found.flips == ()


def test_flipped_examples_say_who_is_right(tmp_path):
    a, b = write_run(tmp_path / "a", 2), write_run(tmp_path / "b", 1)
    found = compare(a, b, PROMPTS)
    assert found.flipped == 2
    flip = found.flips[0]
    assert (flip.task, flip.example, flip.predicted_a, flip.predicted_b) == (TASKS[0], 1, 1, 0)
    assert (flip.right_a, flip.right_b) == (False, True)


def test_runs_that_share_nothing_or_have_other_answers_are_refused(tmp_path):
    a = write_run(tmp_path / "a", 1, tasks=TASKS[:1])
    b = write_run(tmp_path / "b", 1, tasks=TASKS[1:])
    with pytest.raises(UserError, match="no task in common"):
        compare(a, b)
    c = tmp_path / "c"
    write_scores(c, TASKS[0], [[-1.0, -2.0]] * 50, [1] * 50)
    with pytest.raises(UserError, match="other answers"):
        compare(a, c)
    targets = c / f"{TASKS[0]}_targets"
    targets.write_text(targets.read_text().replace("((", "((9"))
    with pytest.raises(UserError, match="no example was scored by both"):
        compare(a, c)


def write_records(folder, step=10, tasks=TASKS, **changes):
    """A record of each task, with the parts of it that say what was scored."""
    key = {"prompt": "p", "split": "validation", "data": {"dataset": "d", "sha256": "1"}}
    for task in tasks:
        record = {"files": {}, "rows": "r", "dropped_rows": [], **changes}
        record["key"] = {"task": task, "step": step, **key, **changes.get("key", {})}
        write_record(folder, record)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"key": {"prompt": "q"}}, "other prompts"),
        ({"key": {"data": {"dataset": "d", "sha256": "2"}}}, "other rows"),
        ({"key": {"split": "test"}}, "other rows"),
    ],
)
def test_tasks_of_other_prompts_or_rows_are_named_and_not_compared(tmp_path, changes, what):
    a, b = (write_run(tmp_path / name, wrong) for name, wrong in (("a", 3), ("b", 9)))
    write_records(a)
    write_records(b)
    assert compare(a, b).left_out == {} and len(compare(a, b).tasks) == 2
    write_records(b, tasks=TASKS[:1], **changes)
    found = compare(a, b, PROMPTS)
    assert found.left_out == {"super_glue/rte": f"{what} ({TASKS[0]})"}
    assert [task.task for task in found.tasks] == [TASKS[1]]
    assert found.datasets[0].prompts == 1
    assert f"Not compared, super_glue/rte: the runs have {what}" in render_html(
        comparison_page([found])
    )
    models = compare_models([Run("a", a), Run("b", b)], PROMPTS, BOOTSTRAP)
    assert models.datasets[0].accuracy == {"a": 94.0, "b": 82.0}
    with pytest.raises(UserError, match=f"different data: super_glue/rte: {what}"):
        compare(a, b, PROMPTS, same_pairs=True)
    write_records(b, **changes)
    with pytest.raises(UserError, match=f"different data: super_glue/rte: {what}"):
        compare(a, b, PROMPTS)


def test_settings_in_which_two_evaluations_differ_are_named(tmp_path):
    a, b = (write_run(tmp_path / name, 3) for name in "ab")
    key = {"activation": "float32", "lengths": {"inputs": 1024}, "vocabulary": "1", "code": "2"}
    write_records(a, key=key)
    write_records(b, key=key)
    assert compare(a, b).settings == {} and settings_in_words(compare(a, b)) == []
    other = {"activation": "bfloat16", "lengths": {"inputs": 512}, "vocabulary": "3"}
    # As in records of two steps, of which provenance.json describes one.
    write_records(a, key=key | {"checkpoint": "4"})
    write_records(b, tasks=TASKS[1:], key=key | other | {"calibrated": True, "checkpoint": "5"})
    assert (compare(a, b).checkpoint_a, compare(a, b).checkpoint_b) == ("4", "5")
    (line,) = settings_in_words(compare(a, b))
    assert line in render_html(comparison_page([compare(a, b)])).replace("&#39;", "'")
    assert line.startswith(
        "The two evaluations differ in dtype of activations (float32 and bfloat16), lengths"
        " ({'inputs': 1024} and {'inputs': 512}), vocabulary: differences between"
    )


def test_without_records_other_inputs_are_noticed_and_caches_of_the_same_are_not(tmp_path):
    a, b = (write_run(tmp_path / name, 3) for name in "ab")
    inputs = b / f"{TASKS[0]}_inputs"
    inputs.write_text(inputs.read_text().replace("input 7\n", "input 8\n"))
    assert compare(a, b).left_out == {
        TASKS[0].removesuffix("_score_eval"): f"other inputs ({TASKS[0]})"
    }
    inputs.write_text((a / inputs.name).read_text())
    write_records(a)
    write_records(b, rows="packed otherwise", key={"data": {"cache": "1"}})
    assert compare(a, b).left_out == {}


def test_a_history_has_a_value_for_each_step(tmp_path):
    for step, wrong in ((10, 25), (20, 5)):
        write_run(tmp_path, wrong, step=step)
    write_scores(tmp_path, "other_score_eval", [[-1.0, -2.0]], [0], 20)
    history = read_history(tmp_path, PROMPTS)
    assert history.steps == (10, 20)
    assert history.curves == {"super_glue/rte": (50.0, 90.0)}
    assert history.chance == {"super_glue/rte": 50.0}
    assert history.skipped == ("other_score_eval",)
    page = render_html(history_page(history))
    assert (
        page.count("data-tip=") == 2 * 2
    )  # in both sizes of the plot and "other_score_eval" in page


def test_the_command_shows_a_history(tmp_path):
    for step in (10, 20, 30):
        write_run(tmp_path / "validation_eval", 40 - step, step=step)
    out = tmp_path / "out"
    run = CliRunner().invoke(
        app, ["history", str(tmp_path), "--out", str(out)], catch_exceptions=False
    )
    assert run.exit_code == 0
    found = json.loads((out / "history.json").read_text())
    assert found["steps"] == [10, 20, 30]
    assert list(found["curves"]) == ["rte_one", "rte_two"]
    assert (out / "history.html").read_text().count("<svg") == 2
    run_here = Run("a", tmp_path / "validation_eval")
    write_report(make_report(run_here, PROMPTS, ReportOptions(bootstrap=BOOTSTRAP)), tmp_path)
    run = CliRunner().invoke(app, ["history", str(tmp_path), "--json", "--out", str(out)])
    assert run.exit_code == 0
    assert list(json.loads(run.stdout)["curves"]) == ["super_glue/rte"]
    # What was written is said elsewhere, so that standard output is JSON alone.
    assert json.loads(run.stdout) == json.loads((out / "history.json").read_text())
    assert "wrote " in run.stderr


def test_the_page_says_how_the_test_was_made(tmp_path):
    a, b = (write_run(tmp_path / name, n) for n, name in enumerate("ab"))
    compared = compare_runs(Run("a", a), Run("b", b), PROMPTS, Bootstrap(50, confidence=0.9))
    page = comparison_page([compared])
    assert "one cluster" in page.sections[-1].note and "90% interval" in page.sections[0].header


def test_pages_about_generated_rows_say_so_first(tmp_path):
    task = "demo_synthetic_imdb_score_eval"
    a, b = (write_run(tmp_path / name, 3, tasks=[task]) for name in "ab")
    history = history_page(read_history(a, {}))
    for page in (comparison_page([compare(a, b)]), history):
        assert page.warning.startswith("Synthetic data: all rows were generated by a program.")
    real = write_run(tmp_path / "real", 3)
    assert comparison_page([compare(real, real, PROMPTS)]).warning == ""


def test_the_page_says_where_each_run_is_from_and_takes_datasets_from_reports(tmp_path):
    runs = [Run(name, write_run(tmp_path / name / "validation_eval", 3)) for name in ("a", "b")]
    facts = [read_run_facts(run) for run in runs]
    page = comparison_page([compare_runs(*runs, None, BOOTSTRAP)], runs=facts)
    (section,) = (section for section in page.sections if section.title == "Runs")
    for run, row in zip(runs, section.rows, strict=True):
        assert row[:2] == (run.label, "10") and row[3] == str(run.eval_dir)
        assert re.fullmatch(r"20\d\d-\d\d-\d\d \d\d:\d\d", row[2])
    eval_dir = runs[0].eval_dir
    assert read_reported_prompts(eval_dir) == {}
    report = make_report(runs[0], PROMPTS, ReportOptions(bootstrap=BOOTSTRAP))
    for place in (tmp_path / "a", tmp_path / "a" / "report"):
        write_report(report, place)
        compared = compare_runs(*runs, read_reported_prompts(eval_dir), BOOTSTRAP)
        assert [entry.dataset for entry in compared.datasets] == ["super_glue/rte"]
        (place / "report.json").unlink()
