"""Adapters over one loaded base: `rank-eval --adapter`, `t0repro.score` and their refusals."""

import dataclasses
import json
import sys

import numpy as np
import pytest

import t0repro
from t0repro.adapters import ia3, lora
from t0repro.cli import app
from t0repro.converters.convert import convert
from t0repro.errors import UserError
from t0repro.evaluation import opened
from t0repro.evaluation.opened import open_checkpoint
from t0repro.evaluation.outputs import read_task_scores
from t0repro.reports import load_report
from t0repro.tasks.demo.datasets import VOCABULARY

from ..cli.commands import run
from .small_model import CONFIG, STEP, save_adapter, save_model
from .small_model import VOCABULARY as ROWS

SHAPE = dataclasses.replace(CONFIG, vocab_size=ROWS).shape
TASK = "demo_synthetic_glue_mrpc_want_to_know_score_eval"
KINDS = {"lora": lora(rank=2, alpha=3.0), "ia3": ia3()}


@pytest.fixture(scope="module")
def adapters(model_dir, tmp_path_factory):
    """Name -> an adapter of the model in `model_dir`: two of ours, and a folder of PEFT's."""
    folder = tmp_path_factory.mktemp("adapters")
    for name, adapter in KINDS.items():
        save_adapter(folder / name, adapter, model_dir, SHAPE)
    found = {name: folder / name for name in KINDS}
    convert(found["lora"], folder / "peft", "peft")
    return {**found, "peft": folder / "peft"}


def rank_eval(checkpoint, out, *arguments):
    sys.argv = ["t0repro", "rank-eval", f"--checkpoint={checkpoint}", f"--mixture={TASK}"]
    sys.argv += ["--module_import=t0repro.tasks.demo", f"--out={out}", "--limit=2"]
    sys.argv += ["--inputs_length=128", "--targets_length=32", "--resamples=100", *arguments]
    with pytest.raises(SystemExit) as ended:
        app.main()
    return ended.value.code


def scores_of(folder):
    """The scores of an evaluation's one task."""
    (found,) = read_task_scores(folder / "validation_eval", STEP)
    return found.score


@pytest.fixture(scope="module")
def compared(prompts, model_dir, adapters, tmp_path_factory):
    """Three adapters evaluated over one base, and how often parameters were loaded."""
    out, loaded = tmp_path_factory.mktemp("out"), []
    load_on_devices = opened.load_on_devices
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            opened, "load_on_devices", lambda *a: loaded.append(a[3]) or load_on_devices(*a)
        )
        patch.setattr(sys, "argv", [])
        named = (f"--adapter={path}" for path in adapters.values())
        assert not rank_eval(model_dir, out, *named)
    return out, loaded


def test_several_adapters_are_compared_over_a_base_that_is_loaded_once(compared, model_dir):
    out, loaded = compared
    assert loaded == [str(model_dir)]
    reports = {name: load_report(out / name) for name in ("lora", "ia3", "peft")}
    assert {name: report.provenance.label for name, report in reports.items()} == {
        name: name for name in reports
    }
    assert len({report.provenance.checkpoint_hash for report in reports.values()}) >= 2
    page = (out / "compare.md").read_text()
    assert all(name in page for name in reports) and (out / "compare.html").is_file()


def test_scores_are_those_of_the_merged_checkpoint(compared, adapters, tmp_path):
    convert(adapters["lora"], tmp_path / "merged", "jax")
    assert not rank_eval(tmp_path / "merged", tmp_path / "out")
    expected = scores_of(tmp_path / "out")
    found = scores_of(compared[0] / "lora")
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert np.abs(found - scores_of(compared[0] / "ia3")).max() > 0.1


def test_pefts_folder_of_an_adapter_gives_its_scores(compared):
    out, _ = compared
    np.testing.assert_array_equal(scores_of(out / "peft"), scores_of(out / "lora"))


@pytest.mark.parametrize("name", KINDS)
def test_an_adapter_beside_others_has_the_bits_that_it_has_alone(
    compared, adapters, model_dir, name, tmp_path, capsys
):
    assert not rank_eval(model_dir, tmp_path, f"--adapter={adapters[name]}")
    assert scores_of(tmp_path / name).tobytes() == scores_of(compared[0] / name).tobytes()


def test_what_is_finished_is_not_scored_again(compared, model_dir, adapters, capsys):
    out, _ = compared
    before = load_report(out / "lora").provenance.scores_sha256
    assert not rank_eval(model_dir, out, f"--adapter={adapters['lora']}", "--json")
    printed = capsys.readouterr()
    assert "Finished already: 1 of 1" in printed.err
    assert json.loads(printed.out)["lora"]["provenance"]["scores_sha256"] == before
    assert load_report(out / "lora").provenance.scores_sha256 == before


def test_the_report_of_an_adapter_is_verified_from_its_checkpoint(compared, monkeypatch, capsys):
    words = ("report", "verify", str(compared[0] / "ia3"), "--sample=3")
    words += ("--module_import=t0repro.tasks.demo", "--json")
    code, out, said = run(monkeypatch, capsys, *words)
    assert not code and "agrees   checkpoint" in said and "DIFFERS" not in said
    assert all(found["agrees"] for found in json.loads(out)["findings"])


# ---- Refusals ------------------------------------------------------------------------------------


def refused(capsys, *arguments):
    assert rank_eval(*arguments) == 2
    return " ".join(capsys.readouterr().err.split())


def test_an_adapter_of_another_base_is_refused_with_both_hashes_before_any_is_scored(
    prompts, adapters, model_dir, tmp_path, capsys
):
    other = save_model(tmp_path / "other", seed=1)
    digest = open_checkpoint(str(other), None, "float32").digest
    own = save_adapter(tmp_path / "own", ia3(), other, SHAPE)
    out = tmp_path / "out"
    said = refused(capsys, model_dir, out, f"--adapter={adapters['lora']}", f"--adapter=own={own}")
    here = open_checkpoint(str(model_dir), None, "float32").digest
    assert "trained on another base" in said and digest in said and here in said
    assert not (out / "lora").exists()


def test_a_rank_above_the_matrix_is_refused(prompts, model_dir, tmp_path, capsys):
    wide = dataclasses.replace(SHAPE, d_model=32, d_kv=16)
    own = save_adapter(tmp_path / "own", lora(rank=16), model_dir, wide)
    said = refused(capsys, model_dir, tmp_path / "out", f"--adapter=own={own}")
    assert "rank = 16 is above that of" in said


def test_a_peft_option_without_meaning_is_named_before_the_base_is_read(
    prompts, adapters, tmp_path, capsys
):
    config = adapters["peft"] / "adapter_config.json"
    own = tmp_path / "own"
    own.mkdir()
    (own / "adapter_model.safetensors").write_bytes(
        (adapters["peft"] / "adapter_model.safetensors").read_bytes()
    )
    (own / config.name).write_text(json.dumps({**json.loads(config.read_text()), "use_dora": True}))
    said = refused(capsys, tmp_path / "no_such_base", tmp_path / "out", f"--adapter=own={own}")
    assert "use_dora is True" in said


@pytest.mark.parametrize("label", ["../out", "..", "twice"])
def test_a_label_is_one_folders_name(prompts, adapters, model_dir, label, tmp_path, capsys):
    given = [f"--adapter={label}={adapters['lora']}"] * (2 if label == "twice" else 1)
    said = refused(capsys, model_dir, tmp_path / "out", *given)
    assert f"the label {label!r}" in said and not (tmp_path / "out").exists()


def test_a_whole_models_checkpoint_is_no_adapter(prompts, model_dir, tmp_path, capsys):
    said = refused(capsys, model_dir, tmp_path / "out", f"--adapter=own={model_dir}")
    assert "a whole model's, not an adapter's" in said


@pytest.mark.parametrize("more", [[], ["--dry_run"]])
def test_an_adapter_is_no_base_of_another(prompts, adapters, tmp_path, more, capsys):
    given = f"--adapter=own={adapters['ia3']}"
    said = refused(capsys, adapters["lora"], tmp_path / "out", given, *more)
    assert "The checkpoint is itself an adapter" in said and "found by itself" in said


# ---- t0repro.score -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lora", "ia3", "peft"])
def test_scores_in_python_are_those_of_the_merged_checkpoint(adapters, model_dir, name, tmp_path):
    texts, choices = ["is this film good or bad ?", "what is it about"], ["good", "bad", "both"]
    convert(adapters[name], tmp_path, "jax")
    scored = t0repro.score(tmp_path, texts, choices, vocabulary=VOCABULARY)
    found = t0repro.score(model_dir, texts, choices, vocabulary=VOCABULARY, adapter=adapters[name])
    np.testing.assert_allclose(found, scored, rtol=1e-5)
    base = t0repro.score(model_dir, texts, choices, vocabulary=VOCABULARY)
    assert np.abs(found - base).max() > 0.1
    # Of a model in memory too, which stays as it is.
    held = open_checkpoint(str(model_dir), None, "float32")
    for adapter, expected in ((adapters[name], found), (None, base)):
        again = t0repro.score(held, texts, choices, vocabulary=VOCABULARY, adapter=adapter)
        np.testing.assert_array_equal(again, expected)


def test_an_adapter_of_another_base_is_not_scored(adapters, tmp_path):
    other = save_model(tmp_path, seed=1)
    with pytest.raises(UserError, match="trained on another base"):
        t0repro.score(other, ["a"], ["b"], vocabulary=VOCABULARY, adapter=adapters["ia3"])
