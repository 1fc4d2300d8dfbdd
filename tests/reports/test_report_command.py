import json

import pytest
from typer.testing import CliRunner

from t0repro.cli.report import app
from t0repro.errors import UserError
from t0repro.reports.provenance import checkpoint_name, default_label
from t0repro.reports.report import load_report
from t0repro.reports.report_files import write_report

from ..helpers import commands
from ..helpers.own_lines import foreign_lines
from .suites import report_of


def test_report_make_writes_three_files_and_prints_a_summary(suite, tmp_path):
    write_metrics = "\n".join(
        json.dumps({"split": "train", "step": s, "loss": 1.0}) for s in range(3)
    )
    (tmp_path / "m.jsonl").write_text(write_metrics)
    metrics = str(tmp_path / "m.jsonl")
    arguments = ["make", str(suite.folder), "--out", str(tmp_path / "out"), "--label", "jax"]
    arguments += ["--other", f"mtf={suite.folder}", "--metrics", metrics, "--resamples", "100"]
    arguments += ["--losses", f"jax={metrics}", metrics, "--train_dataset", "ag_news_classify"]
    arguments += ["--note", "First sentence.", "--note", "Second sentence."]
    run = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert run.exit_code == 0 and foreign_lines(run.stderr) == []
    assert "Predictions differ: nowhere" in run.output
    assert str(tmp_path / "out" / "report.html") in run.output.replace("\n", "")
    report = load_report(tmp_path / "out")
    assert report.notes == ("First sentence.", "Second sentence.")
    assert [group.group for group in report.groups] == ["held_out_prompts", "held_out_datasets"]
    assert report.losses is not None
    assert (report.losses.label_a, report.losses.label_b) == ("jax", "mtf")


def test_report_make_writes_nothing_on_bad_input(suite, tmp_path):
    out = tmp_path / "out"
    for arguments in (
        [str(tmp_path), "--out", str(out)],
        [str(suite.folder), "--out", str(out), "--metrics", str(tmp_path / "absent.jsonl")],
        [str(suite.folder), "--out", str(out), "--conversion", str(tmp_path / "absent.txt")],
        [str(suite.folder), "--out", str(out), "--module_import", "no_such_module"],
    ):
        run = CliRunner().invoke(app, ["make", *arguments])
        assert isinstance(run.exception, UserError)
    assert not out.exists()
    # Rank-eval's own report knows what was trained on.
    out = suite.folder.parent
    (out / "scores").mkdir()
    (out / "scores" / "step_20.json").touch()
    run = CliRunner().invoke(app, ["make", str(suite.folder), "--out", str(out)])
    assert "rank-eval writes its own report into this folder" in str(run.exception)
    assert not (out / "report.json").exists()


def test_report_make_help_shows_an_example():
    run = CliRunner().invoke(app, ["make", "--help"])
    assert "t0repro report make runs/demo/model/validation_eval" in " ".join(run.output.split())


@pytest.mark.parametrize(
    ("checkpoint", "name"),
    [
        ("runs/t0/model", "model"),
        ("gs://bucket/t0_3b/model.ckpt-1112200", "t0_3b"),
        ("s3://user:secret@store/tuned/checkpoint_7?token=secret", "tuned"),
        ("bigscience/T0_3B", "T0_3B"),
        (".", "model"),
    ],
)
def test_a_run_without_a_label_has_its_checkpoints_name(tmp_path, checkpoint, name):
    assert checkpoint_name(checkpoint) == default_label(tmp_path, 3, checkpoint) == name
    assert default_label(tmp_path / "tuned" / "validation_eval", 3) == "tuned"


def test_datasets_come_from_the_report_beside_an_evaluation_or_are_said_to_be_unknown(
    suite, tmp_path
):
    folder, out = str(suite.folder), tmp_path / "out"

    def is_unknown(command, *arguments):
        asked = [*command.split(), *arguments, "--out", str(out)]
        done = commands.run("t0repro", *asked)
        assert done.returncode == 0 and foreign_lines(done.stderr) == [], done.stderr
        return "note: 5 tasks of unknown datasets" in done.stderr

    calls = [
        # The module knows none of the tasks.
        ("report make", folder, "--resamples=100", "--module_import=t0repro.tasks.demo"),
        ("report history", folder),
        ("compare", folder, folder, "--resamples=100"),
    ]
    assert [is_unknown(*each) for each in calls] == [True] * 3
    assert len(load_report(out).datasets) == 5
    write_report(report_of(suite), suite.folder.parent)
    assert [is_unknown(*each) for each in calls] == [False] * 3
    assert [found.dataset for found in load_report(out).datasets] == ["ag_news", "super_glue/rte"]
