import csv
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
import warnings

import jax
import numpy as np
import pytest

from t0repro.errors import UserError
from t0repro.evaluation import code_version, engine, rank_eval, rank_tasks
from t0repro.evaluation.engine import Engine
from t0repro.evaluation.opened import open_checkpoint
from t0repro.evaluation.outputs import read_task_scores
from t0repro.evaluation.rank_eval import Settings
from t0repro.evaluation.records import read_records
from t0repro.reports import load_report
from t0repro.tasks import task as registry

from ..plain_scoring import row_scores
from .small_model import save_model

MIXTURE = "demo_eval_score_eval"
SETTINGS = Settings(lengths={"inputs": 128, "targets": 32}, limit=3)
COMMAND = "from t0repro.cli.app import main; main()"


def evaluate(model_dir, out, settings=SETTINGS, mixture=MIXTURE, said=None):
    checkpoint = open_checkpoint(str(model_dir), None, settings.activation)
    say = (lambda text: None) if said is None else said.append
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # t5's metrics, of few examples
        return rank_eval.rank_eval(checkpoint, mixture, out, settings, say)


@pytest.fixture(scope="module", autouse=True)
def demo_tasks(prompts):
    """Registers the demo's tasks."""


@pytest.fixture(scope="module")
def evaluated(model_dir, tmp_path_factory):
    out = tmp_path_factory.mktemp("out")
    return out, evaluate(model_dir, out)


def test_every_task_has_files_that_agree_with_plain_scoring(evaluated, model_dir, prompts):
    out, outcome = evaluated
    assert len(outcome.tasks) == 9 and outcome.finished == outcome.empty == ()
    checkpoint = open_checkpoint(str(model_dir), None, "float32")
    from t0repro.evaluation.rank_tasks import read_task

    for scores in read_task_scores(outcome.folder):
        assert set(scores.input_index.tolist()) == {0, 1, 2}
        examples = read_task(scores.task, "validation", SETTINGS.lengths, 3).examples
        batch = {
            name: np.array([np.pad(e[name], (0, n - len(e[name]))) for e in examples])
            for name, n in SETTINGS.lengths.items()
        }
        plain = row_scores(checkpoint.params, checkpoint.model, batch)
        assert (np.abs(plain - scores.score) / scores.target_length).max() <= 1e-5


def test_pairs_that_prompts_share_are_scored_once(evaluated):
    _, outcome = evaluated
    assert outcome.scored == outcome.distinct <= outcome.pairs
    assert 0 <= outcome.padding < 1


def test_metrics_are_t5s_under_t5s_names(evaluated):
    out, outcome = evaluated
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    names = {name for line in lines for name in line if "/" in name}
    assert {f"{task}/accuracy" for task in outcome.tasks} <= names
    assert {line["split"] for line in lines} == {"eval"} and {x["step"] for x in lines} == {7}
    (events,) = out.glob("events.out.tfevents.*")
    assert f"eval/{outcome.tasks[0]}/accuracy".encode() in events.read_bytes()
    for task, record in read_records(outcome.folder, 7).items():
        (ranked,) = rank_results(outcome.folder, task)
        assert record["metrics"]["accuracy"] == pytest.approx(ranked.accuracy)


def rank_results(folder, task):
    from t0repro.reports.ranking import rank_folder

    return rank_folder(folder, {}, tasks=[task])


def test_finished_tasks_are_not_run_again(evaluated, model_dir, prompts, monkeypatch):
    out, outcome = evaluated
    monkeypatch.setattr(Engine, "_dispatch", None)  # nothing may be scored
    said = []
    again = evaluate(model_dir, out, said=said)
    assert again.finished == outcome.tasks and again.pairs == 0
    assert "9 of 9 tasks are finished already." in said


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
            evaluation = rank_eval._Evaluation(checkpoint, out, settings, ())
            return evaluation.finished([name]) == (name,)

    assert finished()
    other = open_checkpoint(str(save_model(tmp_path, seed=1)), None, "float32")
    assert other.digest != checkpoint.digest and not finished(checkpoint=other)
    assert not finished(prompt=dataclasses.replace(prompts[name], prompt="Another text?"))
    assert not finished(settings=dataclasses.replace(SETTINGS, limit=4))
    for part in ("scoring_digest", "rendering_digest"):
        with monkeypatch.context() as patch:
            patch.setattr(code_version, part, lambda: "other code")
            assert not finished()
    with monkeypatch.context() as patch:
        patch.setattr(rank_tasks, "data_origin", lambda *arguments: {"sha256": "other rows"})
        assert not finished()
    assert finished()


def test_after_a_failure_only_what_is_missing_is_scored(
    evaluated, model_dir, prompts, tmp_path, monkeypatch
):
    _, whole = evaluated
    settings = dataclasses.replace(SETTINGS, tokens_per_batch=192)
    dispatch, calls = Engine._dispatch, []

    def stops_at_the_third(self, batch, pairs):
        calls.append(batch)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return dispatch(self, batch, pairs)

    monkeypatch.setattr(Engine, "_dispatch", stops_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        evaluate(model_dir, tmp_path, settings)
    monkeypatch.setattr(Engine, "_dispatch", dispatch)
    outcome = evaluate(model_dir, tmp_path, settings)
    assert 0 < outcome.scored < outcome.distinct
    for a, b in zip(read_task_scores(whole.folder), read_task_scores(outcome.folder), strict=True):
        assert (np.abs(a.score - b.score) / a.target_length).max() <= 1e-5


def test_memory_that_does_not_hold_a_batch_is_said(model_dir, prompts, tmp_path, monkeypatch):
    encode = engine.encode

    def small_device(model, params, inputs, segments):
        if len(inputs) > 8:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return encode(model, params, inputs, segments)

    monkeypatch.setattr(engine, "encode", small_device)
    said = []
    outcome = evaluate(model_dir, tmp_path, said=said)
    assert any(text.startswith("Out of memory with") for text in said)
    assert outcome.scored == outcome.distinct


def test_calibration_scores_every_choice_after_a_content_free_input(model_dir, prompts, tmp_path):
    settings = dataclasses.replace(SETTINGS, calibrated=True)
    outcome = evaluate(model_dir, tmp_path, settings, "demo_eval_score_eval")
    from t0repro.reports.make_report import make_report

    report = make_report(
        outcome.folder, prompts, label="jax", extras=["calibrated", "target_length"]
    )
    extras = [prompt.extras for dataset in report.datasets for prompt in dataset.prompts]
    assert all(set(found) == {"calibrated", "target_length"} for found in extras)
    (scores,) = read_task_scores(outcome.folder, tasks=outcome.tasks[:1])
    free = read_records(outcome.folder, 7)[outcome.tasks[0]]["content_free"]
    assert len(free) == len(scores)
    # The same choice has the same score after the content-free input, whatever the example
    by_choice = {}
    for choice, value in zip(scores.choice_index.tolist(), free, strict=True):
        by_choice.setdefault(choice, set()).add(value)
    assert all(len(values) == 1 for values in by_choice.values())


def test_a_transformers_directory_gives_the_scores_of_the_checkpoint_it_was_made_from(
    evaluated, model_dir, prompts, tmp_path
):
    from t0repro.converters.convert import convert

    convert(str(model_dir), str(tmp_path / "hf"), "hf", slots=False)
    assert (tmp_path / "hf/model.safetensors").is_file() and (tmp_path / "hf/config.json").is_file()
    _, whole = evaluated
    task = whole.tasks[0]
    outcome = evaluate(tmp_path / "hf", tmp_path / "out", mixture=task)
    (expected,), (found,) = (
        read_task_scores(folder, tasks=[task]) for folder in (whole.folder, outcome.folder)
    )
    # Packed with other inputs there, so to rounding
    assert (np.abs(expected.score - found.score) / found.target_length).max() <= 1e-5
    assert found.step == 7  # kept in the conversion's manifest


def test_the_operative_config_and_the_datas_version_are_recorded(evaluated, prompts):
    out, outcome = evaluated
    config = (outcome.folder / "operative_config.gin").read_text()
    assert f"rank_eval.mixture = '{MIXTURE}'" in config and "rank_eval.limit = 3" in config
    assert "model.d_model = 8" in config
    facts = json.loads((outcome.folder / "provenance.json").read_text())
    assert set(facts["data"]) == {p.dataset + (f"/{p.subset}" if p.subset else "") for p in
                                  (prompts[task] for task in outcome.tasks)}  # fmt: skip
    assert all("sha256" in origin for origin in facts["data"].values())
    record = read_records(outcome.folder, 7)[outcome.tasks[0]]
    assert record["key"]["vocabulary"] and record["key"]["rendering"]


# Bad input ---------------------------------------------------------------------------------------


def test_a_nan_score_stops_the_run_naming_task_example_and_step(prompts, tmp_path):
    def spoil(tree):
        tree["target/decoder/decoder_norm/scale"][:] = np.nan

    model_dir = save_model(tmp_path / "model", step=9, spoil=spoil)
    with pytest.raises(UserError, match=r"demo_\w+_score_eval: the score of example \d+ at step 9"):
        evaluate(model_dir, tmp_path / "out")
    assert not list((tmp_path / "out").rglob("*_predictions"))


def test_a_checkpoint_of_another_vocabulary_is_refused(prompts, tmp_path):
    model_dir = save_model(tmp_path, vocabulary=256)
    with pytest.raises(UserError, match="a vocabulary of 256 and demo_synthetic_ag_news"):
        evaluate(model_dir, tmp_path / "out")


def test_a_task_without_answer_choices_is_refused(model_dir, prompts, tmp_path):
    with pytest.raises(UserError, match="No answer choices to rank: demo_"):
        evaluate(model_dir, tmp_path, mixture="demo_train")


def test_a_split_that_is_not_there_is_refused(model_dir, prompts, tmp_path):
    settings = dataclasses.replace(SETTINGS, split="test")
    with pytest.raises(UserError, match=r"has a split 'test'"):
        evaluate(model_dir, tmp_path, settings)


def test_a_split_without_examples_is_refused_and_one_among_others_is_named(
    model_dir, prompts, tmp_path
):
    import seqio

    from t0repro.tasks.registration import add_prompted_task

    rows = tmp_path / "data/super_glue/copa"
    rows.mkdir(parents=True)
    (rows / "validation.jsonl").write_text("")
    task = add_prompted_task(
        "super_glue",
        "copa",
        "more likely",
        ["validation"],
        root=tmp_path / "data",
        vocabulary=seqio.get_mixture_or_task(MIXTURE).output_features["targets"].vocabulary,
        name="copa_without_rows",
    )
    empty = task.twin().name
    with pytest.raises(UserError, match=rf"The split 'validation' of '{empty}' has no examples"):
        evaluate(model_dir, tmp_path / "out", mixture=empty)
    other = "demo_synthetic_ag_news_which_section_choices_score_eval"
    seqio.MixtureRegistry.add("with_an_empty_task", [empty, other], default_rate=1)
    outcome = evaluate(model_dir, tmp_path / "out", mixture="with_an_empty_task")
    assert outcome.empty == (empty,) and outcome.scored


def test_tasks_without_rows_here_are_an_error_or_left_out_and_named(model_dir, prompts, tmp_path):
    import seqio

    from t0repro.tasks.registration import add_prompted_task

    task = add_prompted_task(
        "super_glue",
        "copa",
        "best_option",
        ["validation"],
        root=tmp_path,
        vocabulary=seqio.get_mixture_or_task(MIXTURE).output_features["targets"].vocabulary,
        name="copa_of_nowhere",
    )
    absent, other = task.twin().name, "demo_synthetic_ag_news_which_section_choices_score_eval"
    seqio.MixtureRegistry.add("with_a_task_without_rows", [absent, other], default_rate=1)
    with pytest.raises(UserError, match="copa"):
        evaluate(model_dir, tmp_path / "out", mixture="with_a_task_without_rows")
    settings, said = dataclasses.replace(SETTINGS, at_hand=True), []
    mixture = "with_a_task_without_rows"
    outcome = evaluate(model_dir, tmp_path / "out", settings, mixture, said)
    assert outcome.tasks == (other,)
    assert said[0] == f"Left out: 1 tasks ({absent}): rows not at hand."
    with pytest.raises(UserError, match="the rows of split 'validation' are at hand"):
        evaluate(model_dir, tmp_path / "out", settings, absent)


def test_a_mixture_that_is_not_registered_is_a_users_error(model_dir, prompts, tmp_path):
    with pytest.raises(UserError, match="There is no mixture or task 'demo_eval'"):
        evaluate(model_dir, tmp_path, mixture="demo_eval")


# Command -----------------------------------------------------------------------------------------


def start(model_dir, out, *arguments):
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, "rank-eval", f"--checkpoint={model_dir}"]
        + [f"--mixture={MIXTURE}", "--module-import=t0repro.tasks.demo", f"--out={out}"]
        + ["--inputs-length=128", "--targets-length=32", *arguments],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_the_command_goes_on_after_a_kill_and_writes_a_report(model_dir, tmp_path):
    arguments = ("--limit=12", "--tokens-per-batch=512", "--train-mixture=demo_train")
    killed = start(model_dir, tmp_path, *arguments)
    deadline = time.monotonic() + 120
    while not any(p.stat().st_size for p in tmp_path.glob("scores/*/pairs.bin")):
        assert killed.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    done = start(model_dir, tmp_path, "--also=calibrated", *arguments)
    output, _ = done.communicate(timeout=300)
    assert done.returncode == 0, output
    report = load_report(tmp_path)
    assert report.provenance.checkpoint_hash and report.provenance.data_revision
    assert {group.group for group in report.groups} == {"held_out_prompts", "held_out_datasets"}
    assert len(report.tasks) == 9 and all(cost.pairs for cost in report.tasks)
    rows = list(csv.DictReader((tmp_path / "scores.csv").read_text().splitlines()))
    assert len(rows) == sum(cost.pairs for cost in report.tasks)
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(tmp_path / "scores.parquet").to_pylist()
    assert [row["score"] for row in table] == [float(row["score"]) for row in rows]
    predicted = {(row["task"], row["example"]) for row in table if row["predicted"]}
    assert len(predicted) == sum(p.examples for d in report.datasets for p in d.prompts)
