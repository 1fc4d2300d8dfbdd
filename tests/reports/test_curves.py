"""Curves are read from metrics.jsonl, or else from TensorBoard's files, and drawn on one scale."""

import json
import re

import pytest

from t0repro.errors import UserError
from t0repro.event_files import event_writer
from t0repro.reports.curves import curves_in_words, curves_page, read_curves


def write_lines(folder, *rows):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def train(step, loss, **more):
    return {"split": "train", "step": step, "loss": loss, **more}


def test_a_metric_of_several_runs_by_split_the_last_value_of_a_step_counting(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    evaluation = {"split": "validation", "step": 2, "loss": 5.0}
    write_lines(a, train(1, 4.0), train(2, 9.0), train(2, 3.0), evaluation)
    write_lines(b, train(3, float("nan")), train(1, 2.0, accuracy=0.5))
    assert read_curves([a, b], "loss") == {
        "a": [(1, 4.0), (2, 3.0)],
        "a: validation": [(2, 5.0)],
        "b": [(1, 2.0)],
    }
    assert read_curves([a, b], "accuracy") == {"b": [(1, 0.5)]}
    assert list(read_curves([a], "loss")) == ["a", "validation"]


def test_each_task_of_an_evaluation_is_a_curve(tmp_path):
    tasks = {"trec": 65.0, "mrpc": 71.0}
    rows = [
        {"split": "validation", "task": task, "step": step, "accuracy": value + step}
        for step in (1, 2)
        for task, value in tasks.items()
    ]
    write_lines(tmp_path, train(1, 4.0), *rows)
    assert read_curves([tmp_path], "accuracy") == {
        task: [(1, value + 1), (2, value + 2)] for task, value in tasks.items()
    }


def test_runs_of_one_name_are_told_apart(tmp_path):
    for parent in ("x", "y"):
        write_lines(tmp_path / parent / "run", train(1, 1.0))
    curves = read_curves([tmp_path / "x" / "run", tmp_path / "y" / "run"], "loss")
    assert list(curves) == [str(tmp_path / parent / "run") for parent in ("x", "y")]


def test_a_folder_of_runs_stands_for_the_runs_below_it(tmp_path):
    for run in ("runs/a", "runs/deep/b", "other"):
        write_lines(tmp_path / run, train(1, 1.0))
    # A copy of a run's metrics inside a checkpoint is no run.
    write_lines(tmp_path / "runs" / "a" / "checkpoint_1" / "c", train(1, 1.0))
    assert list(read_curves([tmp_path / "runs"], "loss")) == ["a", "b"]
    assert list(read_curves([tmp_path / "runs", tmp_path / "other"], "loss")) == ["a", "b", "other"]


def test_what_the_lines_lack_is_read_from_tensorboards_files(tmp_path):
    write_lines(tmp_path, train(1, 1.0))
    for task, value in (("one", 0.25), ("two", 0.75)):
        writer = event_writer(tmp_path / "inference_eval" / task)
        for step in (3, 6):
            writer.write_scalars(step, {"eval/accuracy": value + step / 100})
        writer.close()
    assert read_curves([tmp_path], "eval/accuracy") == {
        "one": [(3, pytest.approx(0.28)), (6, pytest.approx(0.31))],
        "two": [(3, pytest.approx(0.78)), (6, pytest.approx(0.81))],
    }


def test_tags_that_name_a_task_are_a_curve_of_each_task(tmp_path):
    writer = event_writer(tmp_path / "validation_eval")
    writer.write_scalars(5, {"eval/one/accuracy": 25.0, "eval/two/accuracy": 75.0, "eval/loss": 2})
    writer.close()
    expected = {"one": [(5, 25.0)], "two": [(5, 75.0)]}
    assert read_curves([tmp_path], "eval/accuracy") == expected
    assert read_curves([tmp_path], "eval/one/accuracy") == {"validation_eval": [(5, 25.0)]}


def test_what_lies_in_the_runs_own_folder_has_the_runs_name(tmp_path):
    for run in ("a", "b"):
        writer = event_writer(tmp_path / run)
        writer.write_scalars(1, {"global_step/sec": 2.0})
        writer.close()
    assert list(read_curves([tmp_path / "a"], "global_step/sec")) == ["a"]
    assert list(read_curves([tmp_path / "a", tmp_path / "b"], "global_step/sec")) == ["a", "b"]


def test_faults_are_named(tmp_path):
    with pytest.raises(UserError, match="no metrics here"):
        read_curves([tmp_path], "loss")
    write_lines(tmp_path / "a", train(1, 4.0, accuracy=0.5))
    with pytest.raises(UserError, match="Nearest: 'accuracy'"):
        read_curves([tmp_path / "a"], "acuracy")


def test_the_terminal_and_the_page_show_the_same_extremes():
    curves = {"falls": [(1, 8.0), (2, 4.0), (3, 0.0)], "flat": [(3, 4.0), (5, 4.0)]}
    assert list(curves_in_words(curves)) == [
        "falls  █▅▁  steps 1 to 3",
        "flat   ▅▅  steps 3 to 5",
    ]
    (section,) = curves_page(curves, "loss").sections
    assert section.rows == (
        ("falls", "3", "8", "0", "8", "0", "3"),
        ("flat", "2", "4", "4", "4", "4", "5"),
    )
    assert "<svg" in section.plot


def test_curves_whose_names_differ_only_at_the_end_all_have_their_names_in_the_plot():
    tasks = ("news_which_section", "news_classify_question_first", "news_classify_question_last")
    curves = {f"{task}_score_eval": [(1, 1.0), (2, 2.0)] for task in tasks}
    (section,) = curves_page(curves, "accuracy").sections
    wide, narrow = section.plot.split('<div class="narrow">')
    for drawing, names in ((wide, 3), (narrow, 3)):
        assert len(set(re.findall(r">(news_[^<]*)</text>", drawing))) == names


def test_an_empty_metrics_file_is_called_that(tmp_path):
    write_lines(tmp_path)
    with pytest.raises(UserError, match="metrics.jsonl is empty"):
        read_curves([tmp_path], "loss")
