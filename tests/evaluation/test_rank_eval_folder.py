"""What a folder of results is believed for, and which evaluations share one."""

import dataclasses
import json
import os
import shutil

import pytest

from t0repro.errors import UserError
from t0repro.evaluation import evaluation_facts, evaluation_folder, reading
from t0repro.evaluation.engine import Engine
from t0repro.evaluation.evaluation_folder import EvaluationFolder
from t0repro.evaluation.opened import open_checkpoint
from t0repro.evaluation.outputs import read_task_scores
from t0repro.evaluation.records import read_records
from t0repro.reports.comparison import compare_runs
from t0repro.reports.history import read_history
from t0repro.reports.make_report import make_report
from t0repro.reports.run import Run
from t0repro.tasks import registry

from .rank_evaluations import MIXTURE, SETTINGS, evaluate, facts_of
from .small_model import save_model

pytestmark = [pytest.mark.always, pytest.mark.usefixtures("prompts")]


def test_finished_tasks_are_not_run_again(evaluated, model_dir, prompts, monkeypatch):
    out, outcome = evaluated
    monkeypatch.setattr(Engine, "_dispatch", None)  # nothing may be scored
    said = []
    again = evaluate(model_dir, out, said=said)
    assert again.finished == outcome.tasks and again.pairs == 0
    assert f"Finished already: 9 of 9 tasks, with {outcome.pairs} pairs." in said


def test_a_task_is_finished_only_for_its_checkpoint_prompt_and_limit(
    evaluated, model_dir, prompts, tmp_path, monkeypatch
):
    out, outcome = evaluated
    name = outcome.tasks[0]
    checkpoint = open_checkpoint(str(model_dir), None, "float32")

    def finished(checkpoint=checkpoint, prompt=prompts[name], settings=SETTINGS):
        description = registry.task_descriptions()[name]
        with monkeypatch.context() as patch:
            patch.setitem(registry._tasks, name, dataclasses.replace(description, prompt=prompt))
            folder = EvaluationFolder(out / "validation_eval", checkpoint, settings)
            return folder.finished([name]) == (name,)

    assert finished()
    other = open_checkpoint(str(save_model(tmp_path, seed=1)), None, "float32")
    assert other.digest != checkpoint.digest and not finished(checkpoint=other)
    assert not finished(prompt=dataclasses.replace(prompts[name], prompt="Another text?"))
    assert not finished(settings=dataclasses.replace(SETTINGS, limit=4))
    for part in ("scoring_digest", "rendering_digest"):
        with monkeypatch.context() as patch:
            patch.setattr(evaluation_folder, part, lambda: "other code")
            assert not finished()
    with monkeypatch.context() as patch:
        patch.setattr(reading, "data_origin", lambda *arguments: {"sha256": "other rows"})
        assert not finished()
    assert finished()


def test_after_a_failure_only_what_is_missing_is_scored(
    evaluated, model_dir, prompts, tmp_path, monkeypatch
):
    settings = dataclasses.replace(SETTINGS, tokens_per_batch=256)
    whole = evaluate(model_dir, tmp_path / "whole", settings)
    dispatch, calls = Engine._dispatch, []

    def stops_at_the_second(self, batch, *rest):
        calls.append(batch)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return dispatch(self, batch, *rest)

    out = tmp_path / "restarted"
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(Engine, "_dispatch", stops_at_the_second)
        elsewhere.setattr(evaluation_facts, "_name_processor", lambda: "another processor")
        elsewhere.setenv("XLA_FLAGS", "--xla_dump_to=/x --xla_cpu_enable_fast_math=true")
        elsewhere.setenv("T0REPRO_ATTENTION", "blocks")
        with pytest.raises(KeyboardInterrupt):
            evaluate(model_dir, out, settings)
    outcome = evaluate(model_dir, out, settings)
    assert 0 < outcome.scored < whole.scored
    # Not nearly: the same bits, whatever was scored before the failure.
    assert facts_of(outcome)["scores_sha256"] == facts_of(whole)["scores_sha256"]
    cores = f"cpu, {os.cpu_count()} CPU cores of another processor, --attention blocks"
    flags = "XLA_FLAGS --xla_cpu_enable_fast_math=true"
    assert facts_of(outcome)["device"].endswith(f", some scores computed by {cores}, {flags}")
    assert "some scores" not in facts_of(whole)["device"]


def test_results_of_a_model_whose_config_was_corrected_are_not_taken_for_the_new_ones(
    evaluated, model_dir, tmp_path
):
    from t0repro.converters.convert import convert

    folder, task = tmp_path / "hf", evaluated[1].tasks[0]
    convert(str(model_dir), str(folder), "hf", slots=False)
    before = facts_of(evaluate(folder, tmp_path / "out", mixture=task))["scores_sha256"]
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"layer_norm_epsilon": 0.5}))
    with pytest.raises(UserError, match="rms_norm_epsilon was 1e-06, and .* say 0.5"):
        evaluate(folder, tmp_path / "out", mixture=task)
    # Nor are they taken if the claim is lost.
    (claim,) = (tmp_path / "out/scores").glob("step_*.json")
    claim.unlink()
    with pytest.raises(UserError, match="does not say what its report.json|validation_eval is of"):
        evaluate(folder, tmp_path / "out", mixture=task)
    # Nor is a report of another program overwritten.
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/report.html").write_text("mine")
    with pytest.raises(UserError, match="does not say what its report.html is of"):
        evaluate(folder, tmp_path / "notes", mixture=task)
    after = evaluate(folder, tmp_path / "out", mixture=task, force=True)
    assert after.finished == () and after.scored == after.distinct
    assert facts_of(after)["scores_sha256"] != before
    assert evaluate(folder, tmp_path / "out", mixture=task).finished == (task,)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:5] + chr(ord(text[5]) ^ 1) + text[6:],  # edited
        lambda text: text[: len(text) // 2],  # cut within a line
        lambda text: "-inf\n" + text.split("\n", 1)[1],
        lambda text: "",
        None,  # removed
    ],
    ids=["edited", "cut", "infinite", "empty", "removed"],
)
@pytest.mark.parametrize("kind", ["7_predictions", "targets", "inputs"])
def test_a_damaged_file_is_never_believed_and_redone(evaluated, model_dir, tmp_path, damage, kind):
    out = tmp_path / "out"
    shutil.copytree(evaluated[0], out)
    task = evaluated[1].tasks[0]
    path = out / "validation_eval" / f"{task}_{kind}"
    whole = path.read_text()
    if damage is None:
        path.unlink()
    else:
        path.write_text(damage(whole))
    if damage is not None and kind != "inputs":
        with pytest.raises(UserError, match="is not what the evaluation of step 7 wrote"):
            read_task_scores(out / "validation_eval", tasks=[task])
    again = evaluate(model_dir, out)
    assert set(again.tasks) - set(again.finished) == {task} and again.scored == 0
    assert path.read_text() == whole


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"key": {}}'])
def test_a_damaged_record_is_written_again(evaluated, model_dir, tmp_path, content):
    out = tmp_path / "out"
    shutil.copytree(evaluated[0], out)
    task = evaluated[1].tasks[0]
    path = out / "validation_eval" / "results" / f"{task}_7.json"
    path.write_text(content)
    again = evaluate(model_dir, out)
    assert set(again.tasks) - set(again.finished) == {task} and again.scored == 0
    assert task in read_records(again.folder, 7)


def test_an_edited_record_is_written_again(evaluated, model_dir, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(evaluated[0], out)
    task = evaluated[1].tasks[0]
    path = out / "validation_eval" / "results" / f"{task}_7.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "cut_inputs": 1}))
    again = evaluate(model_dir, out)
    assert task not in again.finished
    assert read_records(again.folder, 7)[task]["cut_inputs"] == record["cut_inputs"]


@pytest.mark.parametrize("killed", ["finished", "scoring", "claimed"])
def test_results_of_two_checkpoints_do_not_mix_in_one_folder(
    evaluated, model_dir, tmp_path, killed
):
    out = tmp_path / "out"
    shutil.copytree(evaluated[0], out)
    if killed != "finished":
        shutil.rmtree(out / "validation_eval")
    if killed == "claimed":
        for journal in (out / "scores").glob("*/"):
            shutil.rmtree(journal)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    other = save_model(tmp_path / "other", seed=1)
    with pytest.raises(UserError, match="results of another checkpoint of step 7"):
        evaluate(other, out)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    # The folder's own evaluation goes on; until a task is finished, settings may change.
    fewer = SETTINGS if killed == "finished" else dataclasses.replace(SETTINGS, limit=2)
    assert len(evaluate(model_dir, out, fewer).tasks) == 9


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"limit": 2}, "limit 3, not 2"),
        ({"limit": None}, "limit 3, not none"),
        ({"calibrated": True}, "calibrated False, not True"),
        ({"activation": "bfloat16"}, "activation float32, not bfloat16"),
        ({"lengths": {"inputs": 64, "targets": 32}}, "lengths .*128.*, not .*64"),
        ({"modes": ("rank", "generate")}, "modes rank, not rank, generate"),
        ({"split": "train"}, "split validation, not train"),
        ({"mixture": "ONE"}, f"mixture {MIXTURE}, not "),
        ({"step": 8}, r"step 7 \(.*\), not step 8 \("),
    ],
)
def test_a_folder_with_another_evaluation_is_refused_saying_what_differs_unless_forced(
    evaluated, model_dir, tmp_path, changes, words
):
    out, task = tmp_path / "out", evaluated[1].tasks[0]
    shutil.copytree(evaluated[0], out)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    mixture = task if "mixture" in changes else MIXTURE
    settings = {name: value for name, value in changes.items() if name not in ("mixture", "step")}
    settings = dataclasses.replace(SETTINGS, **settings)
    checkpoint = open_checkpoint(str(model_dir), None, "float32")
    checkpoint = dataclasses.replace(checkpoint, step=changes.get("step", 7))
    with pytest.raises(UserError, match=f"another evaluation: .*{words}"):
        evaluation_folder.claim_step(out, checkpoint, mixture, settings)
    evaluation_folder.check_settings(out, mixture, settings, force=True)  # a dry run's
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    evaluation_folder.claim_step(out, checkpoint, mixture, settings, force=True)
    # Nothing of the other evaluation is left to be reported with the new one.
    assert not list((out / "validation_eval").glob("*_targets"))
    assert [path.name for path in (out / "scores").glob("*.json")] == [
        f"step_{checkpoint.step}.json"
    ]


def test_steps_share_a_folder_only_if_told_to_and_only_with_the_same_settings(
    evaluated, model_dir, tmp_path
):
    out = tmp_path / "out"
    shutil.copytree(evaluated[0], out)
    other = save_model(tmp_path / "other", seed=1, step=8)
    with pytest.raises(UserError, match=r"step 7 \(.*\), not step 8 \(.*other") as refused:
        evaluate(other, out)
    assert "--add_step" not in refused.value.fix  # of another run
    (claim,) = (out / "scores").glob("step_7.json")
    as_of_it = json.loads(claim.read_text()) | {"path": str(tmp_path / "other" / "checkpoint_7")}
    claim.write_text(json.dumps(as_of_it))
    with pytest.raises(UserError, match=r"step 7 \(.*\), not step 8 \(.*other") as refused:
        evaluate(other, out)
    assert "--add_step keeps the other steps" in refused.value.fix
    fewer, all_inputs = (dataclasses.replace(SETTINGS, limit=limit) for limit in (2, None))
    for settings, said in ((fewer, "2"), (all_inputs, "none")):
        for add_step in (False, True):
            with pytest.raises(
                UserError, match=f"another evaluation: .*limit 3, not {said}"
            ) as refused:
                evaluate(other, out, settings, add_step=add_step)
            assert "--add_step" not in refused.value.fix
    outcome = evaluate(other, out, add_step=True)
    assert len(outcome.tasks) == 9 and not outcome.finished
    for step in (7, 8):
        assert make_report(Run("one", outcome.folder, step), {}).provenance.step == step
    assert compare_runs(Run("a", outcome.folder, 7), Run("b", outcome.folder, 8)).pairs > 0
    assert read_history(outcome.folder, {}).steps == (7, 8)


def test_a_report_of_another_command_is_not_overwritten(model_dir, tmp_path):
    (tmp_path / "report.json").write_text("{}")
    with pytest.raises(UserError, match=r"what its report\.json is of"):
        evaluate(model_dir, tmp_path)


def test_a_folder_of_checkpoints_is_not_evaluated_into(model_dir, tmp_path):
    (tmp_path / "model.safetensors").touch()  # as transformers names one
    for folder in (model_dir, next(model_dir.glob("checkpoint_*")), tmp_path):
        before = sorted(folder.rglob("*"))
        with pytest.raises(UserError, match="This folder holds checkpoints"):
            evaluate(model_dir, folder)
        assert sorted(folder.rglob("*")) == before
