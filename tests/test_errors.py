"""What an error adds to what its raiser says."""

from __future__ import annotations

import pytest

from t0repro.errors import UserError, similar_names
from t0repro.reports.report import load_report
from t0repro.reports.run import find_evaluation


def test_a_path_that_does_not_exist_is_answered_with_the_nearest_one(tmp_path, monkeypatch):
    (tmp_path / "demo" / "model").mkdir(parents=True)
    (tmp_path / "demo" / "model" / "run_state.json").touch()
    (tmp_path / "demo" / "report.json").touch()
    for wrong, near in (
        ("demo/modle", "demo/model"),
        ("--model_dir={}/dmeo/model", "demo/model"),
        ("--rows {}/dmeo/other.csv", "demo"),
        ("demo/report.jsn", "demo/report.json"),
    ):
        where = wrong.format(tmp_path) if "{}" in wrong else str(tmp_path / wrong)
        assert UserError("?", where=where, fix="Look.").fix == f"Look. Nearest: {tmp_path / near}."
    # Of a step, the nearest name is not the nearest step; the folder above has one.
    for wrong, near in (("demo/model/checkpoint_7", None), ("dmeo/model/checkpoint_7", "demo")):
        fix = f"Look. Nearest: {tmp_path / near}." if near else "Look."
        assert UserError("?", where=str(tmp_path / wrong), fix="Look.").fix == fix
    # Only locked, as by the command that failed.
    (tmp_path / "tiny2" / "inference").mkdir(parents=True)
    (tmp_path / "tiny2" / "inference" / ".t0repro.lock").touch()
    assert UserError("?", where=str(tmp_path / "tiny"), fix="Look.").fix == "Look."
    monkeypatch.chdir(tmp_path / "demo")
    assert UserError("?", where="--templates report.jsn").fix == "Nearest: report.json."
    (tmp_path / "demo" / "mine.gin").touch()
    for where in (
        "demo", "gs://b/dmeo", f"{tmp_path}/demo/model", f"{tmp_path}/demo/mine.gin:3",
        f"{tmp_path}/x/y", "a/b\0",
    ):  # fmt: skip
        assert UserError("?", where=where, fix="Look.").fix == "Look."
    with pytest.raises(UserError, match="Nearest: .*demo/report.json"):
        load_report(tmp_path / "demo" / "report.jso")


def test_what_begins_with_a_name_is_the_nearest():
    known = ["demo_train", "demo_eval_score_eval", "other"]
    assert similar_names("demo_eval", known) == ["demo_eval_score_eval", "demo_train"]


def test_a_folder_one_level_too_deep_is_answered_with_the_one_above(tmp_path):
    (tmp_path / "validation_eval" / "results").mkdir(parents=True)
    (tmp_path / "validation_eval" / "a_targets").touch()
    with pytest.raises(UserError, match="Name the folder above: .*/validation_eval"):
        find_evaluation(tmp_path / "validation_eval" / "results")
