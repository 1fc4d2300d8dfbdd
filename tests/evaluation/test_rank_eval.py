import csv
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import types
import warnings

import jax
import numpy as np
import pytest
import seqio

from t0repro.cli.bodies.rank_eval import run
from t0repro.cli.rank_eval_options import ResultOptions
from t0repro.errors import UserError
from t0repro.evaluation import engine, evaluation_facts, evaluation_folder, reading
from t0repro.evaluation.engine import Engine
from t0repro.evaluation.evaluation_folder import EvaluationFolder, EvaluationSettings
from t0repro.evaluation.opened import open_checkpoint
from t0repro.evaluation.outputs import read_task_scores
from t0repro.evaluation.records import read_records, write_record
from t0repro.evaluation.task_output import LineFile, TruncationCounter
from t0repro.model import cpu_attention
from t0repro.progress import heard_by
from t0repro.reports import load_report
from t0repro.reports.comparison import compare_runs
from t0repro.reports.history import read_history
from t0repro.reports.make_report import ReportOptions, make_report
from t0repro.reports.ranking import rank_folder
from t0repro.reports.run import Run
from t0repro.reports.statistics import Bootstrap, Outcomes
from t0repro.runs import rank_eval
from t0repro.runs.rank_report import write_results
from t0repro.runs.verify import verify
from t0repro.storage import lock_folder
from t0repro.tasks import registry
from t0repro.tasks.demo.datasets import VOCABULARY
from t0repro.tasks.template_registration import register_templates

from ..cli.commands import run as in_process
from ..helpers import commands
from ..helpers.plain_scoring import row_scores
from ..tasks.prompt_caches import make
from .small_model import save_model

pytestmark = pytest.mark.always

MIXTURE = "demo_eval_score_eval"
SETTINGS = EvaluationSettings(lengths={"inputs": 128, "targets": 32}, limit=3)
QUICK = Bootstrap(replicates=100)
COMMAND = "from t0repro.cli.app import main; main()"


def evaluate(model_dir, out, settings=SETTINGS, mixture=MIXTURE, said=None, **options):
    checkpoint = open_checkpoint(str(model_dir), None, settings.activation)
    with heard_by((lambda text: None) if said is None else said.append), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # t5's metrics, of few examples
        return rank_eval.rank_eval(checkpoint, mixture, out, settings, **options)


@pytest.fixture(scope="module", autouse=True)
def demo_tasks(prompts):
    """Registers the demo's tasks."""


@pytest.fixture(scope="module")
def evaluated(model_dir, tmp_path_factory):
    out = tmp_path_factory.mktemp("out")
    return out, evaluate(model_dir, out)


LIGHT = """
import sys
from t0repro.cli.app import main

try:
    main()
finally:
    heavy = {"tensorflow", "seqio", "t5", "clu", "mesh_tensorflow"} & set(sys.modules)
    assert not heavy, sorted(heavy)
"""


def test_the_command_ranks_prompted_tasks_without_tensorflow_to_the_same_bits(
    evaluated, model_dir, tmp_path
):
    """`evaluated` has SeqIO's tasks with t5's metrics."""
    options = {"checkpoint": model_dir, "mixture": MIXTURE, "out": tmp_path, "limit": 3}
    options |= {"inputs_length": 128, "targets_length": 32}
    command = [sys.executable, "-P", "-c", LIGHT, "rank-eval"]
    command += ["--module_import=t0repro.tasks.demo"]
    command += [f"--{name}={value}" for name, value in options.items()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    folder, other = evaluated[1].folder, tmp_path / "validation_eval"
    files = sorted(path.name for path in folder.glob("*_score_eval_*"))
    assert len(files) == 3 * 9
    for name in files:
        assert (other / name).read_bytes() == (folder / name).read_bytes(), name
    lines = [
        (path / "metrics.jsonl").read_text().splitlines() for path in (tmp_path, folder.parent)
    ]
    assert sorted(lines[0]) == sorted(lines[1])
    records = [read_records(path, 7) for path in (folder, other)]
    for name in records[0]:
        varying = ("seconds", "checksum")
        ours, theirs = (
            {k: v for k, v in found[name].items() if k not in varying} for found in records
        )
        assert ours == theirs, name


def test_every_task_has_files_that_agree_with_plain_scoring(evaluated, model_dir, prompts):
    out, outcome = evaluated
    assert len(outcome.tasks) == 9 and outcome.finished == outcome.empty == ()
    checkpoint = open_checkpoint(str(model_dir), None, "float32")

    for scores in read_task_scores(outcome.folder):
        assert len(set(scores.input_index.tolist())) == 3
        reader = reading.TaskReader(scores.task, "validation", SETTINGS.lengths, 3)
        examples = list(reader.examples())
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
    assert "Finished already: 9 of 9 tasks." in said


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
        with pytest.raises(KeyboardInterrupt):
            evaluate(model_dir, out, settings)
    outcome = evaluate(model_dir, out, settings)
    assert 0 < outcome.scored < whole.scored
    # Not nearly: the same bits, whatever was scored before the failure.
    assert facts_of(outcome)["scores_sha256"] == facts_of(whole)["scores_sha256"]
    cores = f"cpu, {os.cpu_count()} CPU cores of another processor"
    assert facts_of(outcome)["device"].endswith(f", some scores computed by {cores}")
    assert "some scores" not in facts_of(whole)["device"]


def facts_of(outcome):
    return json.loads((outcome.folder / "provenance.json").read_text())


def test_the_mixture_around_a_task_changes_no_score(evaluated, model_dir, tmp_path):
    _, whole = evaluated
    task = whole.tasks[-1]
    alone = evaluate(model_dir, tmp_path, mixture=task)
    name = f"{task}_7_predictions"
    assert (alone.folder / name).read_bytes() == (whole.folder / name).read_bytes()


@pytest.mark.parametrize("tokens", [1, 4096])
def test_tokens_under_way_and_a_limit_change_no_bit(evaluated, model_dir, tmp_path, tokens):
    settings = dataclasses.replace(SETTINGS, tokens_per_batch=tokens, limit=2)
    outcome = evaluate(model_dir, tmp_path, settings)
    whole = {scores.task: scores_of(scores) for scores in read_task_scores(evaluated[1].folder)}
    for scores in read_task_scores(outcome.folder):
        # A smaller sample is a part of a larger one.
        assert scores_of(scores).items() < whole[scores.task].items()


def scores_of(scores):
    """Each score by its example and choice."""
    index = zip(scores.input_index.tolist(), scores.choice_index.tolist(), strict=True)
    return dict(zip(index, scores.score.tolist(), strict=True))


def test_memory_that_does_not_hold_a_batch_is_said(model_dir, prompts, tmp_path, monkeypatch):
    encode = engine.encode

    def small_device(model, params, kept, inputs, *rest):
        if inputs.shape[1] > 1:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return encode(model, params, kept, inputs, *rest)

    monkeypatch.setattr(engine, "encode", small_device)
    said = []
    outcome = evaluate(model_dir, tmp_path, said=said)
    assert any(text.startswith("Out of memory with") for text in said)
    assert outcome.scored == outcome.distinct
    monkeypatch.setattr(engine, "encode", encode)
    for _ in range(2):  # told again by who finds the scores
        facts = json.loads((outcome.folder / "provenance.json").read_text())
        assert facts["device"].endswith("rounded by batches that were split to fit the memory")
        outcome = evaluate(model_dir, tmp_path)
    assert outcome.scored == 0


def test_calibration_scores_every_choice_after_a_content_free_input(model_dir, prompts, tmp_path):
    settings = dataclasses.replace(SETTINGS, calibrated=True)
    outcome = evaluate(model_dir, tmp_path, settings, "demo_eval_score_eval")
    options = ReportOptions(extras=["calibrated", "target_length"], bootstrap=Bootstrap(100))
    report = make_report(Run("jax", outcome.folder), prompts, options)
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
    after = evaluate(folder, tmp_path / "out", mixture=task, force=True)
    assert after.finished == () and after.scored == after.distinct
    assert facts_of(after)["scores_sha256"] != before
    assert evaluate(folder, tmp_path / "out", mixture=task).finished == (task,)


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


# Samples, cuts and windows ------------------------------------------------------------------------


def test_a_limit_takes_the_same_sample_in_every_run_and_counts_the_whole(evaluated):
    _, outcome = evaluated
    taken = {
        scores.task: tuple(np.unique(scores.input_index).tolist())
        for scores in read_task_scores(outcome.folder)
    }
    records = read_records(outcome.folder, 7)
    by_size = {}
    for task, inputs in taken.items():
        record = records[task]
        assert len(inputs) == record["inputs"] == 3 < record["available"]
        assert max(inputs) < record["available"]
        by_size.setdefault(record["available"], set()).add(inputs)
    assert all(len(samples) == 1 for samples in by_size.values())  # prompts share their inputs
    assert (0, 1, 2) not in by_size.values()  # the first rows of a file are not a sample


@pytest.mark.parametrize("lengths", [{"inputs": 24, "targets": 3}, {"inputs": 24, "targets": 32}])
def test_inputs_and_choices_that_were_cut_are_counted(model_dir, prompts, tmp_path, lengths):
    task = "demo_synthetic_ag_news_which_section_choices_score_eval"
    settings = dataclasses.replace(SETTINGS, lengths=lengths, limit=None)
    outcome = evaluate(model_dir, tmp_path, settings, task)
    whole = reading.TaskReader(task, "validation", {"inputs": 1024, "targets": 256}).examples()
    expected = {"inputs": 0, "targets": 0}
    for example in whole:
        first = example["idx"][1] == 0
        expected["inputs"] += int(first and len(example["inputs"]) > lengths["inputs"])
        expected["targets"] += int(len(example["targets"]) > lengths["targets"])
    record = read_records(outcome.folder, 7)[task]
    assert (record["cut_inputs"], record["cut_targets"]) == tuple(expected.values())
    assert expected["inputs"] and bool(expected["targets"]) == (lengths["targets"] == 3)
    options = ReportOptions("Cut", Bootstrap(100))
    report, _ = write_results(outcome, [7], tmp_path, prompts, options, label="jax")
    (cost,) = report.tasks
    assert (cost.cut_inputs, cost.cut_targets) == tuple(expected.values())
    text = f"{expected['inputs']:,} of {record['inputs']:,} inputs"
    for name in ("report.md", "report.html"):
        assert text in (tmp_path / name).read_text(), name


def test_windows_give_the_scores_of_one_window(evaluated, model_dir, tmp_path, monkeypatch):
    _, whole = evaluated
    monkeypatch.setattr(rank_eval, "PAIRS_IN_MEMORY", 7)  # less than a task has
    write = LineFile.write

    def write_through(file, values):
        write(file, values)
        file._file.flush()  # as happens to all but the last 8 KB of a large task's lines

    monkeypatch.setattr(LineFile, "write", write_through)
    outcome = evaluate(model_dir, tmp_path)
    assert outcome.tasks == whole.tasks
    assert outcome.pairs == whole.pairs
    assert facts_of(outcome)["scores_sha256"] == facts_of(whole)["scores_sha256"]
    for task in whole.tasks:
        inputs = f"{task}_inputs"
        assert (outcome.folder / inputs).read_text() == (whole.folder / inputs).read_text()


# Damage ------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("harm", ["removed", "emptied", "of another vocabulary"])
def test_a_damaged_cache_of_prompted_tasks_is_refused_before_anything_is_scored(
    model_dir, prompts, tmp_path, monkeypatch, harm
):
    name = "demo_synthetic_glue_mrpc_want_to_know_score_eval"
    make(tmp_path / "cache", name, min_shards=2)
    folder = tmp_path / "cache" / name
    monkeypatch.setattr(seqio.TaskRegistry.get(name), "_cache_dir", str(folder))
    cached = dataclasses.replace(SETTINGS, use_cached=True)
    assert evaluate(model_dir, tmp_path / "whole", cached, name).pairs == 6
    shard = sorted(folder.glob("validation.tfrecord-*"))[1]
    if harm == "removed":
        shard.unlink()
    elif harm == "emptied":
        shard.write_bytes(b"")
    else:
        path = folder / "provenance.json"
        digest = json.loads(path.read_text())["vocabulary"]["sha256"]
        path.write_text(path.read_text().replace(digest, "0" * 64))
    with pytest.raises(UserError, match="is incomplete|cached with another vocabulary"):
        evaluate(model_dir, tmp_path / "out", cached, name)
    assert not (tmp_path / "out").exists()


def test_tasks_that_are_not_cached_are_named(model_dir, prompts, tmp_path):
    with pytest.raises(UserError, match=rf"of {MIXTURE!r} are not cached \(. of .\): demo_"):
        evaluate(model_dir, tmp_path / "out", dataclasses.replace(SETTINGS, use_cached=True))


THREE_CHOICES = """\
dataset: of_three_choices
templates:
  one: !Template
    name: which
    jinja: "Which is {{text}}? ||| {{answer_choices[label]}}"
    answer_choices: red ||| green ||| blue
"""


@pytest.mark.parametrize("limit", [None, 7])
def test_inputs_of_a_cache_have_all_their_choices_however_its_files_are_read(
    tmp_path, monkeypatch, limit
):
    """SeqIO reads 16 rows of one file, then of the next: five inputs and a third of one."""
    name = "of_three_choices_which_score_eval"
    file = tmp_path / "rows" / "of_three_choices" / "default" / "validation.jsonl"
    file.parent.mkdir(parents=True)
    file.write_text(
        "".join(json.dumps({"text": f"no {n}", "label": n % 3}) + "\n" for n in range(30))
    )
    (tmp_path / "prompts.yaml").write_text(THREE_CHOICES)
    monkeypatch.setenv("T0REPRO_DATA_DIR", str(tmp_path / "rows"))
    monkeypatch.setenv("T0REPRO_VOCAB", str(VOCABULARY))
    register_templates(tmp_path / "prompts.yaml")
    make(tmp_path / "cache", name, min_shards=2)
    task = seqio.TaskRegistry.get(name)
    monkeypatch.setattr(task, "_cache_dir", str(tmp_path / "cache" / name))

    def read(use_cached):
        reader = reading.TaskReader(name, "validation", SETTINGS.lengths, limit, use_cached)
        rows = [(row["idx"].tolist(), row["inputs"].tolist()) for row in reader.examples()]
        return reader.available, rows

    assert read(use_cached=True) == read(use_cached=False)
    assert read(use_cached=True)[0] == 30


def test_an_input_is_counted_once_although_its_choices_come_apart():
    counter = TruncationCounter({}, None)
    counter.add([{"idx": (0, 0)}, {"idx": (1, 0)}])
    counter.add([{"idx": (0, 1)}, {"idx": (1, 1)}])
    assert counter.as_record()["inputs"] == 2


def test_results_of_two_checkpoints_do_not_mix_in_one_folder(evaluated, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(evaluated[0], out)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    other = save_model(tmp_path / "other", seed=1)
    with pytest.raises(UserError, match="results of another checkpoint of step 7"):
        evaluate(other, out)
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"limit": 2}, "limit 3, not 2"),
        ({"limit": None}, "limit 3, not None"),
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
    with pytest.raises(UserError, match=r"step 7 \(.*\), not step 8 \(.*other"):
        evaluate(other, out)
    fewer = dataclasses.replace(SETTINGS, limit=2)
    with pytest.raises(UserError, match="another evaluation: limit 3, not 2"):
        evaluate(other, out, fewer, add_step=True)
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
    with pytest.raises(UserError, match="has 1,408 pieces, the model's embedding 256 rows"):
        evaluate(model_dir, tmp_path / "out")


def test_a_task_without_answer_choices_is_refused(model_dir, prompts, tmp_path):
    with pytest.raises(UserError, match="have no answer choices to rank: demo_"):
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
    row = {"premise": "It rained.", "choice1": "Dry.", "choice2": "Wet.", "idx": 0, "label": 1}
    # The prompt is for causes, and leaves out the one row.
    (rows / "validation.jsonl").write_text(json.dumps(row | {"question": "effect"}) + "\n")
    task = add_prompted_task(
        "super_glue",
        "copa",
        "…why? C1 or C2",
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
    with pytest.raises(UserError, match="copa") as caught:
        evaluate(model_dir, tmp_path / "out", mixture="with_a_task_without_rows")
    # Before anything is computed or written.
    assert "by --skip_missing" in str(caught.value.fix) and not (tmp_path / "out").exists()
    settings, said = dataclasses.replace(SETTINGS, skip_missing=True), []
    mixture = "with_a_task_without_rows"
    outcome = evaluate(model_dir, tmp_path / "out", settings, mixture, said)
    assert outcome.tasks == (other,)
    assert said[0] == f"Left out: 1 task ({absent}): rows not available."
    with pytest.raises(UserError, match="No task of .* has rows of split"):
        evaluate(model_dir, tmp_path / "out", settings, absent)


def test_a_mixture_that_is_not_registered_is_a_users_error(model_dir, prompts, tmp_path):
    with pytest.raises(UserError, match="There is no mixture or task 'demo_eval'"):
        evaluate(model_dir, tmp_path, mixture="demo_eval")


# Command -----------------------------------------------------------------------------------------


def words(model_dir, out, *arguments):
    return [
        *("rank-eval", f"--checkpoint={model_dir}", f"--mixture={MIXTURE}", f"--out={out}"),
        *("--module-import=t0repro.tasks.demo", "--inputs-length=128", "--targets-length=32"),
        *arguments,
    ]


def start(model_dir, out, *arguments):
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, *words(model_dir, out, *arguments)],
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
    more = ("--calibrated", "--tracker=tensorboard", *arguments)
    done = commands.run("t0repro", *words(model_dir, tmp_path, *more))
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    (tracked,) = json.loads((tmp_path / "tracking.json").read_text()).values()
    assert len(tracked["evaluated"]) == 9
    report = load_report(tmp_path)
    assert report.provenance.checkpoint_hash and report.provenance.data_revision
    # The killed run's scores, the restarted one's and those of a run in one go are the same bits.
    settings = dataclasses.replace(SETTINGS, limit=12, tokens_per_batch=512)
    whole = evaluate(model_dir, tmp_path / "in_one_go", settings)
    assert report.provenance.scores_sha256 == facts_of(whole)["scores_sha256"]
    assert f"SHA-256 of the scores: {facts_of(whole)['scores_sha256']}" in output
    assert {group.group for group in report.groups} == {"held_out_prompts", "held_out_datasets"}
    assert len(report.tasks) == 9 and all(cost.pairs for cost in report.tasks)
    rows = list(csv.DictReader((tmp_path / "scores.csv").read_text().splitlines()))
    assert len(rows) == sum(cost.pairs for cost in report.tasks)
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(tmp_path / "scores.parquet").to_pylist()
    assert [row["score"] for row in table] == [float(row["score"]) for row in rows]
    predicted = {(row["task"], row["example"]) for row in table if row["predicted"]}
    assert len(predicted) == sum(p.examples for d in report.datasets for p in d.prompts)


def test_all_steps_give_one_report_with_accuracy_by_step_after_a_kill_too(tmp_path, prompts):
    model_dir = save_model(save_model(tmp_path / "model"), seed=1, step=8)
    out, arguments = tmp_path / "out", ("--step=all", "--limit=3")
    killed = start(model_dir, out, *arguments)
    deadline = time.monotonic() + 240
    while not (out / "scores" / "step_8.json").exists():
        assert killed.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert not (out / "report.json").exists()
    done = commands.run("t0repro", *words(model_dir, out, *arguments))
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert "Finished already: 9 of 9 tasks." in output and "Mean accuracy over prompts" in output
    report = load_report(out)
    assert report.provenance.step == 8 and report.history.steps == (7, 8)
    assert report.history == read_history(out / "validation_eval", prompts)
    html, markdown = ((out / f"report.{kind}").read_text() for kind in ("html", "md"))
    assert 'aria-label="Accuracy by step"' in html
    assert "| dataset | chance | 7 | 8 |" in markdown
    with heard_by(lambda text: None):
        assert not [found for found in verify(out, prompts, sample=1) if not found.agrees]
    for steps, said in (("--step=7,8", "names 2"), ("--step=7-8", "'7-8' is not a step")):
        asked = words(model_dir, out, steps, "--adapter=x", "--dry_run")
        assert said in commands.run("t0repro", *asked).stderr


@pytest.mark.parametrize(
    ("flags", "arguments", "said"),
    [
        ("avx512f amx_bf16 amx_tile", (), True),
        ("avx512f amx_bf16 amx_tile", ("--activation=float32",), False),
        ("avx512f avx512_bf16", (), False),
    ],
)
def test_on_a_cpu_with_amx_the_start_says_what_bfloat16_saves(
    model_dir, tmp_path, monkeypatch, capsys, flags, arguments, said
):
    processors = tmp_path / "cpuinfo"
    processors.write_text(f"processor : 0\nmodel name : A Xeon\nflags : fpu {flags}\n")
    monkeypatch.setattr(cpu_attention, "_PROCESSORS", processors)
    asked = words(model_dir, tmp_path / "out", "--dry_run", *arguments)
    code, _, printed = in_process(monkeypatch, capsys, *asked)
    assert not code and ("--activation bfloat16 took half" in printed) == said


def test_a_second_run_into_the_same_folder_is_refused_at_once(model_dir, tmp_path):
    with lock_folder(tmp_path, "rank evaluation"):
        second = commands.run("t0repro", *words(model_dir, tmp_path, "--limit=1"))
    output = second.stderr
    assert second.returncode == 2, output
    assert "Another run holds this folder for rank evaluation" in output
    assert "choose another --out" in output and not (tmp_path / "metrics.jsonl").exists()


# Prompts that drop rows --------------------------------------------------------------------------

WHY, NEXT = "…why? C1 or C2", "…What could happen next, C1 or C2?"


@pytest.fixture(scope="module")
def dropping(model_dir, prompts, tmp_path_factory):
    """Rows of COPA under a prompt that keeps all of them, one for causes and one for effects."""
    from t0repro.tasks.registration import add_prompted_task

    data = tmp_path_factory.mktemp("data")
    folder = data / "super_glue/copa"
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    rows = [
        {
            "premise": "".join(random.choice(list("abcdef"), 12)), "choice1": "Dry.",
            "choice2": "Wet.", "question": "effect" if random.random() < 0.3 else "cause",
            "idx": number, "label": number % 2,
        }
        for number in range(20)
    ]  # fmt: skip
    (folder / "validation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    vocabulary = seqio.get_mixture_or_task(MIXTURE).output_features["targets"].vocabulary
    tasks = [
        add_prompted_task(
            "super_glue", "copa", template, ["validation"], root=data, vocabulary=vocabulary,
            name=f"dropping_{number}",
        ).twin()
        for number, template in enumerate(("best_option", WHY, NEXT))
    ]  # fmt: skip
    names = [task.name for task in tasks]
    register = seqio.MixtureRegistry.add
    register("dropping", names, default_rate=1.0)
    kept = [
        [at for at, row in enumerate(rows) if kind in ("any", row["question"])]
        for kind in ("any", "cause", "effect")
    ]
    return {task.name: task for task in tasks}, rows, kept


@pytest.mark.parametrize("limit", [None, 5])
def test_prompts_that_drop_rows_are_paired_by_row(dropping, model_dir, tmp_path, limit):
    prompts, rows, kept = dropping
    settings = dataclasses.replace(SETTINGS, limit=limit)
    outcome = evaluate(model_dir, tmp_path / "out", settings, "dropping")
    results = rank_folder(outcome.folder, prompts)
    right = np.full((len(rows), len(results)), np.nan)
    for column, (result, rows_of_task) in enumerate(zip(results, kept, strict=True)):
        found = np.array(rows_of_task)[result.example]
        np.testing.assert_array_equal(result.row, found)
        right[found, column] = result.correct
    # The standard error of the mean over prompts, by hand.
    has = ~np.isnan(right)
    moves = np.where(has, 100 * (right - np.nanmean(right, 0)), 0) / has.sum(0) / has.shape[1]
    moves, examples = moves.sum(1), int(has.any(1).sum())
    expected = np.sqrt((moves**2).sum() * examples / (examples - 1))
    outcomes = Outcomes.of(results)
    assert outcomes.examples == examples
    assert outcomes.standard_errors()[1] == pytest.approx(expected)
    report = make_report(Run("jax", outcome.folder), prompts, ReportOptions(bootstrap=QUICK))
    (dataset,) = report.datasets
    assert dataset.standard_error == pytest.approx(expected)
    # No row has all three prompts, so there is nothing that all of them could disagree on.
    assert not dataset.flips and not report.notes
    first_two = make_report(
        Run("jax", outcome.folder), prompts,
        ReportOptions(bootstrap=QUICK, tasks=list(prompts)[:2]),
    )  # fmt: skip
    for flip in first_two.datasets[0].flips:
        assert rows[flip.example]["premise"] in flip.first_input
        assert sorted(right[flip.example, :2]) == [0, 1]


def test_prompts_whose_rows_were_not_recorded_are_named(dropping, model_dir, tmp_path):
    prompts = dropping[0]
    outcome = evaluate(model_dir, tmp_path / "out", mixture="dropping")
    for record in read_records(outcome.folder, 7).values():
        write_record(outcome.folder, {**record, "dropped_rows": None})
    report = make_report(Run("jax", outcome.folder), prompts, ReportOptions(bootstrap=QUICK))
    assert any("super_glue/copa: prompts have different" in note for note in report.notes)


def test_force_and_add_step_contradict_each_other():
    asked = types.SimpleNamespace(adapter=None, checkpoint="c", step="1")
    options = ResultOptions(force=True, add_step=True)
    with pytest.raises(UserError, match="removes what OUT holds, and --add_step keeps it"):
        run(asked, None, options, None, None)
