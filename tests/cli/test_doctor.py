"""t0repro doctor: findings, fixes and the exit code."""

import dataclasses
import importlib.metadata
import json
import subprocess
import sys

import pytest

from t0repro import doctor
from t0repro.doctor import Diagnosis, Finding

from ..helpers.own_lines import foreign_lines


def diagnosis(core_state: str, data_state: str = "broken") -> Diagnosis:
    return Diagnosis(
        versions={"python": "3.11.7", "torch": None},
        core=(Finding("jax", core_state, "cpu:cpu", "" if core_state == "ok" else "fix it"),),
        extras=(Finding("hf", "missing", "no torch", "EXTRAS=hf bash scripts/setup.sh"),),
        data=(
            Finding("T0REPRO_VOCAB", data_state, "there is no file x", "export T0REPRO_VOCAB=FILE"),
        ),
    )


def test_missing_extras_and_data_do_not_break_the_core():
    assert diagnosis("ok").works
    assert not diagnosis("broken").works


def test_an_installation_without_tensorflow_works_and_says_what_it_lacks():
    found = diagnosis("missing", "ok")
    assert found.works and found.to_text().endswith("The reference tier works, without jax.")


def test_a_stack_that_is_not_installed_is_missing_and_not_broken(monkeypatch):
    monkeypatch.setattr(doctor, "_is_importable", lambda module: False)
    for look in (doctor._jax, doctor._mesh_tensorflow):
        state, _, fix = look()
        assert state == "missing" and fix


def test_the_tier_is_named_and_the_core_says_how_to_get_the_rest(monkeypatch):
    monkeypatch.setattr(doctor, "_is_importable", lambda module: module != "tensorflow")
    of_stack = doctor.check(doctor._STACK, doctor._mesh_tensorflow)
    found = dataclasses.replace(diagnosis("ok", "ok"), core=(of_stack,))
    assert found.to_json()["tier"] == "core" and diagnosis("ok").tier == "reference"
    assert "to fix mesh tensorflow: TIER=reference bash scripts/setup.sh" in found.to_text()
    assert found.to_text().endswith("The core tier works, without mesh tensorflow.")


def test_text_names_each_fix():
    text = diagnosis("broken").to_text()
    for part in ("fix it", "EXTRAS=hf bash scripts/setup.sh", "export T0REPRO_VOCAB=FILE"):
        assert part in text
    assert text.endswith("The reference tier does not work. Broken: jax, T0REPRO_VOCAB.")


def test_json_holds_all_findings():
    read = diagnosis("ok").to_json()
    assert read["works"] is True
    assert read["versions"] == {"python": "3.11.7", "torch": None}
    assert read["extras"][0]["fix"] == "EXTRAS=hf bash scripts/setup.sh"


def test_a_check_that_raises_is_broken():
    def look():
        raise ImportError("no module\nand more")

    finding = doctor.check("thing", look)
    assert (finding.state, finding.detail) == ("broken", "ImportError: no module")
    assert finding.fix == "bash scripts/setup.sh"


def test_an_extra_whose_modules_are_absent_is_missing_with_its_command():
    finding = doctor._extra("hf", ("json", "no_such_module.inner"))
    assert (finding.state, finding.detail) == ("missing", "no no_such_module.inner")
    assert finding.fix == "EXTRAS=hf bash scripts/setup.sh"
    assert doctor._extra("hf", ("json",)).state == "ok"


def test_every_extra_that_a_user_may_want_is_looked_for():
    named = importlib.metadata.metadata("t0repro").get_all("Provides-Extra") or []
    # What JAX brings is looked for in the core; four are for work on this project.
    others = {"jax", "docker", "hardlife", "mutation", "release"}
    assert set(doctor.EXTRAS) == set(named) - others


@pytest.mark.parametrize(
    ("make", "state", "part"),
    [
        (None, "missing", "not set"),
        ("absent", "broken", "not a directory"),
        ("empty", "broken", "holds no"),
        ("full", "ok", "1 split of 1 dataset"),
    ],
)
def test_data_folder(tmp_path, monkeypatch, make, state, part):
    monkeypatch.delenv("T0REPRO_DATA_DIR", raising=False)
    if make:
        folder = tmp_path / make
        monkeypatch.setenv("T0REPRO_DATA_DIR", str(folder))
        if make != "absent":
            folder.mkdir()
        if make == "full":
            (folder / "rte" / "default").mkdir(parents=True)
            (folder / "rte" / "default" / "train.jsonl").write_text("{}\n")
    found_state, detail, fix = doctor._data_dir()
    assert found_state == state
    assert part in detail
    assert (fix == "") == (state == "ok")


def test_vocabulary_that_is_absent_or_no_model_is_broken(tmp_path, monkeypatch):
    monkeypatch.setenv("T0REPRO_VOCAB", str(tmp_path / "absent.model"))
    assert doctor._vocabulary()[0] == "broken"
    (tmp_path / "text.model").write_text("not a model")
    monkeypatch.setenv("T0REPRO_VOCAB", str(tmp_path / "text.model"))
    state, detail, _ = doctor._vocabulary()
    assert state == "broken"
    assert "not a SentencePiece model" in detail


def test_t5s_vocabulary_fits(shared_vocab, monkeypatch):
    monkeypatch.setenv("T0REPRO_VOCAB", str(shared_vocab))
    state, detail, _ = doctor._vocabulary()
    assert state == "ok"
    assert detail.endswith("32000 pieces and 100 sentinels that it lacks")


@pytest.mark.mtf
def test_the_real_doctor_trains_one_mesh_tensorflow_step_and_exits_with_0():
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "t0repro.cli", "doctor", "--json"],
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0 and foreign_lines(ended.stderr) == [], ended.stderr
    assert ended.stderr.startswith("checking JAX, and Mesh TensorFlow by a training step ...")
    core = {item["name"]: item for item in json.loads(ended.stdout)["core"]}
    assert core["mesh tensorflow"]["detail"].startswith("one step took a loss from")
    assert core["jax"]["state"] == "ok"


@pytest.mark.parametrize(
    ("core", "data", "code"),
    [("broken", "ok", 1), ("missing", "ok", 0), ("ok", "broken", 1), ("ok", "missing", 0)],
)
def test_what_is_broken_exits_with_1_and_what_is_missing_does_not(
    monkeypatch, capsys, core, data, code
):
    from t0repro.cli import app

    monkeypatch.setattr("t0repro.doctor.diagnose", lambda: diagnosis(core, data))
    monkeypatch.setattr(sys, "argv", ["t0repro", "doctor"])
    with pytest.raises(SystemExit) as end:
        app.main()
    assert (end.value.code or 0) == code
    assert ("The reference tier works" in capsys.readouterr().out) == (core != "broken")
