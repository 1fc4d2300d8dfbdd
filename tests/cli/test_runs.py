"""`t0repro runs` and `t0repro plot` on a real training, whose two records of metrics agree."""

import json

import pytest

from t0repro.event_files import read_scalars

from .test_train import call, train


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "small"
    code, _, said = train(folder, 3, "--gin_bindings=train_script.train.stats_period = 1")
    assert code == 0, said
    return folder


def test_event_files_and_metrics_agree(trained):
    rows = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    logged = {}
    for row in rows:
        split, step = row.pop("split"), row.pop("step")
        row.pop("loss_per_target_token", None)  # T5X has no such tag
        for name, value in row.items():
            if isinstance(value, int | float):
                logged.setdefault((split, name), []).append((step, value))
    splits = {split for split, _ in logged}
    assert "train" in splits and len(splits) == 2 and len(logged) > 20
    # Times of the run as a whole belong to no summary, so no line of metrics.jsonl has them.
    events_alone = {
        "timing/compilation_seconds",
        "timing/train_iter_warmup",
        "timing/checkpoint_seconds",
        "timing/init_or_restore_seconds",
    }
    # SeqIO's logger has its metrics below eval/.
    found = {
        (split, tag.removeprefix("eval/")): points
        for split in splits
        for tag, points in read_scalars(trained / split).items()
        if tag != "time" and tag not in events_alone
    }
    assert found.keys() == logged.keys()
    for key, points in logged.items():
        assert [step for step, _ in points] == [step for step, _ in found[key]]
        # An event holds a float32.
        expected = [value for _, value in points]
        assert [value for _, value in found[key]] == pytest.approx(expected, rel=1e-6), key


def test_the_list_and_the_curves_come_from_the_command_line(trained, tmp_path):
    code, shown, said = call("t0repro.cli", "runs", str(trained.parent), "--json")
    (run,) = json.loads(shown)
    assert code == 0 and run["folder"] == str(trained), said
    assert (run["state"], run["step"], run["last_step"]) == ("finished", 3, 3)
    code, shown, _ = call("t0repro.cli", "runs", str(trained.parent))
    assert code == 0 and "finished" in shown and "3 of 3" in shown
    code, shown, said = call("t0repro.cli", "plot", str(trained), "--out", str(tmp_path))
    assert code == 0 and "small" in shown and "steps 1 to 3" in shown, said
    page = (tmp_path / "curves.html").read_text()
    assert "<svg" in page and "http" not in page.replace("http://www.w3.org/", "")
    curves = json.loads((tmp_path / "curves.json").read_text())["curves"]
    assert [step for step, _ in curves["small"]] == [1, 2, 3]
    code, shown, _ = call("t0repro.cli", "plot", str(trained), "--json")
    assert code == 0 and json.loads(shown)["curves"] == curves


def test_a_runs_folder_is_explained_by_the_configuration_that_it_holds(trained):
    code, shown, said = call("t0repro.cli", "explain", "--model_dir", str(trained))
    assert code == 0 and f"{trained}/config.gin:" in shown, said
    assert "train_script.train.total_steps" in shown


def test_a_folder_that_holds_nothing_is_exit_code_2(tmp_path):
    for command in ("runs", "plot"):
        code, _, said = call("t0repro.cli", command, str(tmp_path))
        assert code == 2 and "Traceback" not in said and str(tmp_path) in said
