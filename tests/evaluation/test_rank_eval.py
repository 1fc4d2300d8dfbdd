"""The scores of a rank evaluation, and the examples that they are of."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import seqio

from t0repro.evaluation import engine, reading
from t0repro.evaluation.opened import open_checkpoint
from t0repro.evaluation.outputs import read_task_scores
from t0repro.evaluation.records import read_records, write_record
from t0repro.evaluation.task_output import LineFile, TruncationCounter
from t0repro.reports.make_report import ReportOptions, make_report
from t0repro.reports.ranking import rank_folder
from t0repro.reports.run import Run
from t0repro.reports.statistics import Bootstrap, Outcomes
from t0repro.runs import rank_eval
from t0repro.runs.rank_report import write_results
from t0repro.tasks.demo.datasets import VOCABULARY
from t0repro.tasks.template_registration import register_templates

from ..helpers.plain_scoring import row_scores
from ..tasks.prompt_caches import make
from .rank_evaluations import MIXTURE, QUICK, SETTINGS, evaluate, facts_of

pytestmark = [pytest.mark.always, pytest.mark.usefixtures("prompts")]


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
        (ranked,) = rank_folder(outcome.folder, {}, tasks=[task])
        assert record["metrics"]["accuracy"] == pytest.approx(ranked.accuracy)


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


# Prompts that drop rows ---------------------------------------------------------------------------


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
