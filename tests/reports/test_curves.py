"""Curves are read from metrics.jsonl, or else from TensorBoard's files, and drawn on one scale."""

import itertools
import json
import re

import pytest

from t0repro.errors import UserError
from t0repro.event_files import event_writer
from t0repro.progress import heard_by
from t0repro.reports import curves
from t0repro.reports.curves import TOKEN_ACCURACY, curves_in_words, curves_page, read_curves
from t0repro.reports.drawing import spread_out
from t0repro.reports.losses import LOSS


def write_lines(folder, *rows):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_panels(folders, metric):
    named, panels = read_curves(folders, metric)
    assert named == metric
    return panels


def train(step, loss, **more):
    return {"split": "train", "step": step, "loss": loss, **more}


def test_a_metric_of_several_runs_by_split_the_last_value_of_a_step_counting(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    evaluation = {"split": "validation", "step": 2, "z_loss": 5.0}
    write_lines(a, *(train(step, 0.0, z_loss=x) for step, x in ((1, 4.0), (2, 9.0), (2, 3.0))))
    with open(a / "metrics.jsonl", "a") as file:
        file.write(json.dumps(evaluation) + "\n")
    write_lines(b, train(3, 1.0, z_loss=float("nan")), train(1, 2.0, z_loss=2.0, accuracy=0.5))
    assert read_panels([a, b], "z_loss") == {
        "z_loss": {"a": [(1, 4.0), (2, 3.0)], "a: validation": [(2, 5.0)], "b": [(1, 2.0)]}
    }
    assert read_panels([a, b], "accuracy") == {TOKEN_ACCURACY: {"b": [(1, 0.5)]}}
    assert list(read_panels([a], "z_loss")["z_loss"]) == ["a", "validation"]


def test_the_loss_is_per_target_token_and_other_units_have_panels_of_their_own(tmp_path):
    mesh, t5x, older = (tmp_path / name for name in ("mesh", "t5x", "older"))
    perplexity = {"split": "validation", "task": "t", "step": 1, "neg_log_perplexity": -2.0}
    write_lines(mesh, train(1, 0.21, loss_per_target_token=1.26), perplexity | {"loss": 0.5})
    write_lines(t5x, train(1, 5095.0, loss_per_target_token=1.5))
    write_lines(older, train(1, 0.2), train(2, 0.1, loss_per_target_token=0.6))
    panels = read_panels([mesh, t5x, older], "loss")
    assert panels == {
        LOSS: {"mesh": [(1, 1.26)], "mesh: t": [(1, 2.0)], "t5x": [(1, 1.5)]},
        f"loss of {older} in its own unit": {"older": [(1, 0.2), (2, 0.1)]},
    }
    assert [section.title for section in curves_page(panels).sections] == [
        f"{LOSS}, by step",
        f"loss of {older} in its own unit, by step",
    ]


def test_each_task_of_an_evaluation_is_a_curve(tmp_path):
    tasks = {"trec": 65.0, "mrpc": 71.0}
    rows = [
        {"split": "validation", "task": task, "step": step, "accuracy": value + step}
        for step in (1, 2)
        for task, value in tasks.items()
    ]
    write_lines(tmp_path, train(1, 4.0), *rows)
    assert read_panels([tmp_path], "accuracy")["accuracy"] == {
        task: [(1, value + 1), (2, value + 2)] for task, value in tasks.items()
    }


def test_an_evaluation_of_t0repro_eval_is_drawn_from_its_json_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(curves, "read_scalars", lambda _: pytest.fail("took TensorBoard"))
    for task, accuracy in (("trec", 65.0), ("mrpc", 71.0)):
        path = tmp_path / "inference_eval" / f"{task}-metrics.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"step": 20, "accuracy": accuracy, "note": "text"}) + "\n")
    (path.parent / "events.out.tfevents.1").touch()
    expected = {"trec": [(20, 65.0)], "mrpc": [(20, 71.0)]}
    assert read_curves([tmp_path]) == ("eval/accuracy", {"eval/accuracy": expected})
    assert read_curves([path.parent], "accuracy")[1] == {"eval/accuracy": expected}


def test_runs_of_one_name_are_told_apart(tmp_path):
    for parent in ("x", "y"):
        write_lines(tmp_path / parent / "run", train(1, 1.0, accuracy=0.5))
    panels = read_panels([tmp_path / "x" / "run", tmp_path / "y" / "run"], "accuracy")
    assert list(panels[TOKEN_ACCURACY]) == [str(tmp_path / parent / "run") for parent in ("x", "y")]


def test_a_folder_of_runs_stands_for_the_runs_below_it(tmp_path):
    for run in ("runs/a", "runs/deep/b", "other"):
        write_lines(tmp_path / run, train(1, 1.0, loss_per_target_token=2.0))
    # A copy of a run's metrics inside a checkpoint is not a run.
    write_lines(tmp_path / "runs" / "a" / "checkpoint_1" / "c", train(1, 1.0))
    runs, other = tmp_path / "runs", tmp_path / "other"
    assert list(read_panels([runs], "loss")[LOSS]) == ["a", "b"]
    assert list(read_panels([runs, other], "loss")[LOSS]) == ["a", "b", "other"]


def test_what_the_lines_lack_is_read_from_tensorboards_files(tmp_path):
    write_lines(tmp_path, train(1, 1.0))
    for task, value in (("one", 0.25), ("two", 0.75)):
        writer = event_writer(tmp_path / "inference_eval" / task)
        for step in (3, 6):
            writer.write_scalars(step, {"eval/accuracy": value + step / 100})
        writer.close()
    assert read_panels([tmp_path], "eval/accuracy")["eval/accuracy"] == {
        "one": [(3, pytest.approx(0.28)), (6, pytest.approx(0.31))],
        "two": [(3, pytest.approx(0.78)), (6, pytest.approx(0.81))],
    }


def test_tags_that_name_a_task_are_a_curve_of_each_task(tmp_path):
    writer = event_writer(tmp_path / "validation_eval")
    writer.write_scalars(5, {"eval/one/accuracy": 25.0, "eval/two/accuracy": 75.0, "eval/loss": 2})
    writer.close()
    expected = {"one": [(5, 25.0)], "two": [(5, 75.0)]}
    assert read_panels([tmp_path], "eval/accuracy") == {"eval/accuracy": expected}
    of_one = read_panels([tmp_path], "eval/one/accuracy")["eval/one/accuracy"]
    assert of_one == {"validation_eval": [(5, 25.0)]}


def test_unless_a_metric_is_named_the_loss_is_drawn_or_the_accuracy_of_evaluations(tmp_path):
    run, evaluation, events = (tmp_path / name for name in ("run", "evaluation", "events"))
    write_lines(run, train(1, 1.0), {"split": "validation", "step": 1, "accuracy": 5.0})
    write_lines(evaluation, {"split": "validation", "task": "t", "step": 1, "accuracy": 5.0})
    writer = event_writer(events)
    writer.write_scalars(5, {"eval/one/accuracy": 25.0})
    writer.close()
    ranked = tmp_path / "ranked"
    write_lines(ranked, {"split": "eval", "step": 5, "one/accuracy": 25.0, "one/f1": 30.0})
    said = []
    with heard_by(said.append):
        assert read_curves([run])[0] == "loss" and not said
        assert read_curves([evaluation, run])[0] == "loss"
    (line,) = said
    assert f"left out {evaluation}, without a finite value of 'loss'" in line
    assert read_curves([evaluation])[0] == "accuracy"
    expected = ("eval/accuracy", {"eval/accuracy": {"one": [(5, 25.0)]}})
    assert read_curves([events]) == read_curves([ranked]) == expected
    assert read_panels([ranked], "eval/f1") == {"eval/f1": {"one": [(5, 30.0)]}}


def test_each_metrics_file_is_read_once(tmp_path, monkeypatch):
    write_lines(tmp_path / "a", train(1, 1.0))
    write_lines(tmp_path / "b", train(1, 2.0))
    paths = []
    read = curves.metric_rows
    monkeypatch.setattr(curves, "metric_rows", lambda path: paths.append(path) or read(path))
    read_curves([tmp_path])
    assert len(paths) == len(set(paths)) == 2


def test_what_lies_in_the_runs_own_folder_has_the_runs_name(tmp_path):
    for run in ("a", "b"):
        writer = event_writer(tmp_path / run)
        writer.write_scalars(1, {"global_step/sec": 2.0})
        writer.close()
    tag = "global_step/sec"
    assert list(read_panels([tmp_path / "a"], tag)[tag]) == ["a"]
    assert list(read_panels([tmp_path / "a", tmp_path / "b"], tag)[tag]) == ["a", "b"]


def test_faults_are_named(tmp_path):
    with pytest.raises(UserError, match="no metrics here"):
        read_panels([tmp_path], "loss")
    with pytest.raises(UserError, match="no such folder"):
        read_curves([tmp_path / "missing"])
    write_lines(tmp_path / "a", train(1, 4.0, accuracy=0.5))
    with pytest.raises(UserError, match="a file, not a folder"):
        read_panels([tmp_path / "a" / "metrics.jsonl"], "loss")
    with pytest.raises(UserError, match="Nearest: 'accuracy'"):
        read_panels([tmp_path / "a"], "acuracy")


def test_the_terminal_and_the_page_show_the_same_extremes():
    curves = {"falls": [(1, 8.0), (2, 4.0), (3, 0.0)], "flat": [(3, 4.0), (5, 4.0)]}
    assert list(curves_in_words({LOSS: curves})) == [
        "loss per target token:",
        "  falls  █▅▁  8 to 0, steps 1 to 3",
        "  flat   ▅▅  4 to 4, steps 3 to 5",
    ]
    (section,) = curves_page({LOSS: curves}).sections
    assert section.rows == (
        ("falls", "3", "8", "0", "8", "0", "3"),
        ("flat", "2", "4", "4", "4", "4", "5"),
    )
    # A curve's name has the color of its line.
    for name, color in (("falls", "accent"), ("flat", "chance")):
        label = re.search(rf"<text([^>]*)>{name}</text>", section.plot).group(1)
        assert f"var(--{color})" in label and f"stroke: var(--{color})" in section.plot


def test_curves_whose_names_differ_only_at_the_end_all_have_their_names_in_the_plot():
    tasks = ("which_section", "classify_question_first", "classify_question_last")
    curves = {f"news_{task}_score_eval": [(1, 1.0), (2, 2.0)] for task in tasks}
    (section,) = curves_page({"accuracy": curves}).sections
    wide, narrow = section.plot.split('<div class="narrow">')
    assert len(set(re.findall(r">(news_[^<]*)</text>", wide))) == 3
    assert ">which_section</text>" in narrow
    assert len(set(re.findall(r">(classi[^<]*)</text>", narrow))) == 2


def test_a_name_of_a_run_and_a_task_keeps_the_run_and_what_distinguishes_the_task():
    tasks = ("demo_synthetic_ag_news_which_eval", "demo_synthetic_ag_news_first_eval")
    curves = {f"{run}: {task}": [(1, 1.0)] for run in ("a", "model") for task in tasks}
    (section,) = curves_page({"accuracy": curves}).sections
    assert all(section.plot.count(f">{run}: {own}</text>") == 2
               for run in ("a", "model") for own in ("which", "first"))  # fmt: skip


def test_names_of_curves_that_end_close_together_stay_inside_the_plot():
    # Nine at the top and one at the bottom, which the nine must not push out.
    ends = {**{number: 99.0 for number in range(9)}, "low": 1.0}
    places = spread_out(ends, 10)
    assert min(places.values()) == places["low"] >= 0 and max(places.values()) <= 100
    assert min(b - a for a, b in itertools.pairwise(sorted(places.values()))) >= 9.99


def test_an_empty_metrics_file_is_called_that(tmp_path):
    write_lines(tmp_path)
    with pytest.raises(UserError, match="metrics.jsonl is empty"):
        read_panels([tmp_path], "loss")
    (tmp_path / "metrics.jsonl").write_text('{"epoch": 1, "loss": 3.0}\n')
    with pytest.raises(UserError, match="metrics.jsonl has no number with a step"):
        read_panels([tmp_path], "loss")


def test_steps_that_another_program_wrote_as_floats_are_read(tmp_path):
    lines = '{"step": 1.0, "lr": 3.0}\n{"step": 2.0, "lr": 2.0}\n{"step": 2.5, "lr": 9.0}\n'
    (tmp_path / "metrics.jsonl").write_text(lines)
    assert [*read_panels([tmp_path], "lr")["lr"].values()] == [[(1, 3.0), (2, 2.0)]]


def test_what_is_no_number_is_not_drawn(tmp_path):
    lines = ['"neg_log_perplexity": null', '"neg_log_perplexity": -2.5, "note": "x"']
    rows = [f'{{"split": "a", "step": {at}, {line}}}' for at, line in enumerate(lines)]
    huge = f'{{"split": "a", "step": 2, "neg_log_perplexity": {"9" * 400}}}'
    (tmp_path / "metrics.jsonl").write_text("\n".join([*rows, huge]) + "\n")
    panels = read_panels([tmp_path], "neg_log_perplexity")
    assert [*panels["neg_log_perplexity"].values()] == [[(1, -2.5)]]
